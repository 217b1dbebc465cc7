// Volumes in files without a name, for tests.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "volume.h"

namespace stepwell::testing {

inline int nameless_file(const char* directory, uint64_t bytes) {
  const int fd = ::open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) throw std::runtime_error("no file for the test");
  return fd;
}

inline PageShape shape_of(std::vector<uint64_t> layer_bytes) {
  std::array<uint8_t, 32> fingerprint{};
  fingerprint.fill(7);
  return PageShape(std::move(layer_bytes), fingerprint);
}

inline Label label_of(const std::string& key, uint64_t epoch = 0) {
  Label label;
  label.key.length = static_cast<uint8_t>(key.size());
  std::memcpy(label.key.bytes.data(), key.data(), key.size());
  label.epoch = epoch;
  return label;
}

// The bytes that the page of this key has, and no other page: a wrong byte shows.
inline std::vector<std::byte> stamped(const PageShape& shape, const std::string& key) {
  std::seed_seq seed(key.begin(), key.end());
  std::mt19937 random(seed);
  std::vector<std::byte> page(shape.page_bytes());
  for (std::byte& byte : page) byte = static_cast<std::byte>(random());
  return page;
}

// The files of one volume, kept open beside the Volume under test, so that a test can look and damage behind its back.
class VolumeFiles {
 public:
  VolumeFiles(VolumeMedium medium, const PageShape& shape, uint64_t volume_bytes, uint32_t ring_entries = 64)
      : shape_(shape),
        header_(
            VolumeHeader::plan(medium, shape, volume_bytes, medium == VolumeMedium::kShared ? 64 : 512, ring_entries)) {
    const bool shared = medium == VolumeMedium::kShared;
    metadata_ = nameless_file(shared ? "/dev/shm" : "/tmp", header_.metadata_bytes);
    if (!shared) pages_ = nameless_file("/tmp", header_.pages_bytes);
    std::array<std::byte, kHeaderBytes> bytes;
    header_.encode(bytes.data());
    if (::pwrite(metadata_, bytes.data(), bytes.size(), 0) != kHeaderBytes) throw std::runtime_error("header");
  }
  ~VolumeFiles() {
    ::close(metadata_);
    if (pages_ >= 0) ::close(pages_);
  }
  VolumeFiles(const VolumeFiles&) = delete;
  VolumeFiles& operator=(const VolumeFiles&) = delete;

  // What a process does that takes the volume.
  std::unique_ptr<Volume> open(Durability durability = Durability::kProcess) {
    VolumeHeader found;
    std::array<std::byte, kHeaderBytes> bytes;
    if (::pread(metadata_, bytes.data(), bytes.size(), 0) != kHeaderBytes) throw std::runtime_error("header");
    const std::string reason = VolumeHeader::decode(bytes.data(), header_.metadata_bytes, header_.pages_bytes, &found);
    if (!reason.empty()) throw std::runtime_error(reason);
    return std::make_unique<Volume>(shape_, found, Descriptor(::dup(metadata_)),
                                    pages_ >= 0 ? Descriptor(::dup(pages_)) : Descriptor(), false, durability);
  }
  const VolumeHeader& header() const { return header_; }
  const PageShape& shape() const { return shape_; }
  int metadata() const { return metadata_; }
  int pages() const { return pages_ >= 0 ? pages_ : metadata_; }

  uint64_t record_at(uint32_t slot) const { return header_.records_offset + uint64_t{kRecordBytes} * slot; }
  uint64_t checksums_at(uint32_t slot) const { return header_.checksums_offset + uint64_t{4} * header_.layers * slot; }
  uint64_t page_at(uint32_t slot) const { return header_.pages_offset + header_.slot_bytes * slot; }
  uint64_t generation(uint32_t slot) const { return word(record_at(slot)); }
  uint64_t word(uint64_t offset) const {
    uint64_t value = 0;
    if (::pread(metadata_, &value, sizeof(value), static_cast<off_t>(offset)) != sizeof(value))
      throw std::runtime_error("short file");
    return value;
  }
  void set_word(uint64_t offset, uint64_t value) {
    if (::pwrite(metadata_, &value, sizeof(value), static_cast<off_t>(offset)) != sizeof(value))
      throw std::runtime_error("short file");
  }
  static void flip(int fd, uint64_t offset) {
    uint8_t byte = 0;
    if (::pread(fd, &byte, 1, static_cast<off_t>(offset)) != 1) throw std::runtime_error("short file");
    byte ^= 0x10;
    if (::pwrite(fd, &byte, 1, static_cast<off_t>(offset)) != 1) throw std::runtime_error("short file");
  }

 private:
  PageShape shape_;
  VolumeHeader header_;
  int metadata_ = -1, pages_ = -1;
};

}  // namespace stepwell::testing
