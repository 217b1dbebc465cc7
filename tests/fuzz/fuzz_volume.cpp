// A volume whose files change, before it is taken and while it is used: its writer, a neighbour and a tool read it.
#include <algorithm>
#include <cerrno>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "fault.h"
#include "guard.h"
#include "image.h"
#include "targets.h"
#include "volume_reader.h"

namespace stepwell::fuzz {

namespace {

constexpr uint32_t kMostSlots = 1u << 14;  // above it a run takes seconds, and finds nothing else
constexpr uint64_t kMostPage = 1u << 20;
constexpr uint32_t kMostSteps = 64;

Descriptor copy_of(int fd) {
  const int copy = ::dup(fd);
  STEPWELL_FUZZ_CHECK(copy >= 0);
  return Descriptor(copy);
}

VolumeMedium medium_of(Script& script) { return script.flag() ? VolumeMedium::kShared : VolumeMedium::kDisk; }

void edit(Image& image, Script& script) {
  for (uint32_t i = script.take<uint8_t>() % 8; i > 0; --i) image.edit(script);
}

bool is_small(const VolumeHeader& header) { return header.slots <= kMostSlots && header.page_bytes <= kMostPage; }

// The layers of the base where they add up, else any that do: then the volume is another's, and its pages are not known.
PageShape shape_for(const VolumeHeader& header) {
  const PageShape base = base_shape();
  if (base.layers() == header.layers && base.page_bytes() == header.page_bytes)
    return header.fingerprint == base.fingerprint() ? base : PageShape({40, 24, 64}, header.fingerprint);
  std::vector<uint64_t> sizes(header.layers, 1);
  sizes.back() = header.page_bytes - (header.layers - 1);
  return PageShape(std::move(sizes), header.fingerprint);
}

// What was delivered as right is what was written, unless somebody made the checksums of something else.
void check_delivered(const Image& image, const Label& label, const std::vector<std::byte>& page) {
  if (image.is_forged()) return;
  const std::vector<std::byte>* expected = bytes_of(label);
  STEPWELL_FUZZ_CHECK(expected != nullptr);
  STEPWELL_FUZZ_CHECK(*expected == page);
}

// A system call that fails or comes back short, some calls from now.
void arm(Script& script) {
  static const std::array<const char*, 4> points{"file.pread", "file.pwrite", "file.*", "volume.*"};
  const char* point = points[script.take<uint8_t>() % points.size()];
  const uint64_t nth = 1 + script.take<uint8_t>() % 16;
  if (script.flag())
    fault::arm(point, fault::Action::kShort, nth, script.take<uint8_t>());
  else
    fault::arm(point, fault::Action::kErrno, nth, EIO);
}

struct NoFaults {
  ~NoFaults() { fault::clear(); }
};

void use(Volume& volume, Image& image, Script& script, std::vector<RecoveredPage>& known) {
  const PageShape& shape = volume.shape();
  const uint32_t slots = volume.header().slots;
  Scratch scratch;
  std::vector<std::byte> page(shape.page_bytes());
  for (uint32_t step = 0; step < kMostSteps && !script.is_over(); ++step) {
    const uint32_t slot = script.below(uint64_t{slots} + 1);  // one behind the last too
    switch (script.take<uint8_t>() % 10) {
      case 0:
      case 1: edit(image, script); break;
      case 2:
      case 3: {  // a page that recovery named, or any
        Label label = label_of_key(script.below(kKeys), script.below(2));
        uint32_t from = slot;
        if (!known.empty() && script.flag()) {
          const RecoveredPage& one = known[script.below(known.size())];
          label = one.label;
          from = one.slot;
        }
        if (read_page(volume, shape, from, label, page.data(), scratch) == Status::kOk)
          check_delivered(image, label, page);
        break;
      }
      case 4:
      case 5: {
        const Label label = label_of_key(script.below(kKeys));
        if (shape.page_bytes() == bytes_of(label)->size())
          write_page(volume, shape, slot, label, bytes_of(label)->data(), scratch);
        break;
      }
      case 6: volume.retire(slot); break;
      case 7: volume.rewrite_and_check(slot, scratch); break;
      case 8: {
        const std::array<uint32_t, 2> used{slot, script.below(slots)};
        const std::array<uint64_t, 2> stamps{script.value(1), script.value(2)};
        volume.write_recency(used.data(), stamps.data(), used.size());
        break;
      }
      default:
        if (script.take<uint8_t>() % 8 == 0)
          volume.leave_mapping();
        else
          arm(script);
    }
  }
}

}  // namespace

void fuzz_volume(const uint8_t* data, size_t bytes) {
  const NoFaults no_faults;
  Script script(data, bytes);
  Image image(medium_of(script));
  edit(image, script);
  for (int round = 0; round < 3 && (round == 0 || !script.is_over()); ++round) {
    VolumeHeader header;
    if (!image.decode(&header).empty() || !is_small(header)) return;
    std::unique_ptr<Volume> volume;
    try {
      volume = std::make_unique<Volume>(shape_for(header), header, copy_of(image.metadata()),
                                        image.has_pages_file() ? copy_of(image.pages()) : Descriptor(), false);
    } catch (const std::runtime_error&) {  // with the reason; std::system_error where the machine said no
      return;
    }
    std::vector<RecoveredPage> pages;
    RecoveryCounts counts;
    if (volume->recover(&pages, &counts) == Status::kOk) {
      STEPWELL_FUZZ_CHECK(pages.size() + counts.freed() + counts.worn <= header.slots);
      for (const RecoveredPage& page : pages) STEPWELL_FUZZ_CHECK(page.slot < header.slots);
    }
    use(*volume, image, script, pages);
    fault::clear();
  }
}

void fuzz_foreign(const uint8_t* data, size_t bytes) {
  const NoFaults no_faults;
  Script script(data, bytes);
  Image image(medium_of(script));
  VolumeHeader header = image.base();
  if (script.flag()) edit(image, script);
  // Learnt before the volume changed, or now.
  if (script.flag() && (!image.decode(&header).empty() || !is_small(header))) return;
  const PageShape shape = shape_for(header);
  void* mapping = nullptr;
  if (header.medium == VolumeMedium::kShared && header.metadata_bytes < (1u << 24) && script.flag()) {
    STEPWELL_FUZZ_CHECK(guard::install());
    if (file::map(image.metadata(), header.metadata_bytes, &mapping) < 0) return;
    STEPWELL_FUZZ_CHECK(guard::add_range(mapping, header.metadata_bytes));
  }
  std::vector<std::byte> page(shape.page_bytes());
  for (uint32_t step = 0; step < kMostSteps && !script.is_over(); ++step) {
    edit(image, script);
    if (script.take<uint8_t>() % 4 == 0) arm(script);
    const uint32_t slot = script.below(uint64_t{header.slots} + 1);
    Label wanted = label_of_key(script.below(kKeys), script.below(2));
    uint64_t generation = 2 + 2 * script.below(4);
    std::array<std::byte, kRecordBytes> record_bytes;
    SlotRecord record;
    const auto at = static_cast<off_t>(header.records_offset + uint64_t{kRecordBytes} * slot);
    if (script.take<uint8_t>() % 4 != 0 &&
        ::pread(image.metadata(), record_bytes.data(), record_bytes.size(), at) > 0 &&
        SlotRecord::decode(record_bytes.data(), &record)) {
      wanted = record.label;
      generation = record.generation;
    }
    ForeignDetail detail;
    const Status status =
        read_foreign_page(shape, header, image.metadata(), image.pages(), static_cast<const std::byte*>(mapping), slot,
                          generation, wanted, page.data(), script.flag() ? &detail : nullptr);
    if (status == Status::kOk) check_delivered(image, wanted, page);
    fault::clear();
  }
  if (mapping == nullptr) return;
  guard::remove_range(mapping);
  file::unmap(mapping, header.metadata_bytes);
}

void fuzz_reader(const uint8_t* data, size_t bytes) {
  const NoFaults no_faults;
  Script script(data, bytes);
  Image image(medium_of(script));
  edit(image, script);
  VolumeHeader header;
  if (!image.decode(&header).empty() || header.page_bytes > kMostPage) return;
  if ((header.medium == VolumeMedium::kDisk) != image.has_pages_file()) return;
  VolumeReader reader(header, copy_of(image.metadata()),
                      image.has_pages_file() ? copy_of(image.pages()) : Descriptor());
  if (script.flag()) {
    try {
      reader.use_layers({40, 24, script.value(64)});
    } catch (const std::invalid_argument&) {
    }
  }
  for (uint32_t step = 0; step < kMostSteps && !script.is_over(); ++step) {
    edit(image, script);
    if (script.take<uint8_t>() % 4 == 0) arm(script);
    if (script.flag()) {
      const uint32_t first = static_cast<uint32_t>(script.value(0));
      const uint32_t count =
          script.flag() ? std::min(header.slots, kMostSlots) : static_cast<uint32_t>(script.value(1));
      std::vector<RecoveredPage> pages;
      std::vector<uint32_t> damaged;
      EmptySlots empty;
      const uint32_t most = std::min(count, kMostSlots);
      if (reader.read_records(first, most, &pages, &damaged, &empty) == Status::kOk) {
        STEPWELL_FUZZ_CHECK(pages.size() + damaged.size() + empty.never_written + empty.odd + empty.worn == most);
        for (const RecoveredPage& page : pages) STEPWELL_FUZZ_CHECK(page.slot >= first && page.slot - first < most);
      }
    } else {
      const PageCheck check = reader.check_page(script.below(uint64_t{header.slots} + 1));
      STEPWELL_FUZZ_CHECK(check.layers.empty() || check.damage == PageDamage::kLayers);
      STEPWELL_FUZZ_CHECK(check.layers.empty() || check.layers.back() < header.layers);
    }
    fault::clear();
  }
}

}  // namespace stepwell::fuzz
