// The ring of a neighbour's volume that changes as anybody likes: what is learnt from it, looked for and read.
#include <vector>

#include "fault.h"
#include "foreign.h"
#include "image.h"
#include "targets.h"

namespace stepwell::fuzz {

namespace {

constexpr uint32_t kMostSteps = 64, kMostPages = 6;
constexpr TierMask kUsable = mask(Tier::kShared) | mask(Tier::kDisk);

struct NoFaults {
  ~NoFaults() { fault::clear(); }
};

Descriptor copy_of(int fd) {
  const int copy = ::dup(fd);
  STEPWELL_FUZZ_CHECK(copy >= 0);
  return Descriptor(copy);
}

}  // namespace

void fuzz_ring(const uint8_t* data, size_t bytes) {
  const NoFaults no_faults;
  Script script(data, bytes);
  Image image(script.flag() ? VolumeMedium::kShared : VolumeMedium::kDisk);
  VolumeHeader header = image.base();
  Foreign foreign(base_shape(), kMostPages);
  const Index index(1);
  const auto attach = [&] {
    try {
      return foreign.attach(header, copy_of(image.metadata()),
                            image.has_pages_file() ? copy_of(image.pages()) : Descriptor());
    } catch (const std::invalid_argument&) {  // of another shape
      return ForeignPlace::kNoVolume;
    }
  };
  uint32_t volume = attach();
  std::vector<std::byte> page(base_shape().page_bytes());
  ForeignDetail detail;
  for (uint32_t step = 0; step < kMostSteps && !script.is_over(); ++step) {
    switch (script.take<uint8_t>() % 8) {
      case 0:
      case 1:
        for (uint32_t i = script.take<uint8_t>() % 4; i > 0; --i) image.edit(script);
        break;
      case 2: {  // an entry of the ring, and a counter that says there is one more, or any
        const uint64_t ring = image.base().ring_offset;
        uint64_t counter = 0;
        if (::pread(image.metadata(), &counter, sizeof(counter), static_cast<off_t>(ring)) != sizeof(counter)) break;
        const std::array<uint64_t, 2> entry{script.flag() ? script.below(16) : script.value(3), script.value(4)};
        const uint64_t at = ring + kRingHeadBytes + kRingEntryBytes * (counter % 64);
        counter = script.take<uint8_t>() % 4 != 0 ? counter + 1 : script.value(counter);
        if (at + sizeof(entry) > image.metadata_bytes()) break;
        if (::pwrite(image.metadata(), entry.data(), sizeof(entry), static_cast<off_t>(at)) < 0) break;
        if (::pwrite(image.metadata(), &counter, sizeof(counter), static_cast<off_t>(ring)) < 0) break;
        break;
      }
      case 3:
      case 4: foreign.poll(); break;
      case 5: {
        if (script.take<uint8_t>() % 4 != 0) break;
        foreign.detach(volume);
        VolumeHeader found;
        if (image.decode(&found).empty() && found.slots < 1u << 14 && found.page_bytes < 1u << 20) header = found;
        volume = attach();
        break;
      }
      case 6:
        fault::arm("file.pread", script.flag() ? fault::Action::kShort : fault::Action::kErrno,
                   1 + script.take<uint8_t>() % 8, 5);
        break;
      default: {
        std::array<Key, kKeys> keys;
        for (uint32_t i = 0; i < kKeys; ++i) keys[i] = label_of_key(i).key;
        const uint64_t epoch = script.below(2);
        std::array<ForeignPlace, kKeys> places;
        foreign.find(keys.data(), kKeys, 1, epoch, kUsable, places.data());
        const ForeignRun run = foreign.find_keys(index, keys.data(), kKeys, 1, epoch, kUsable);
        STEPWELL_FUZZ_CHECK(run.keys.size() == run.places.size() && run.foreign <= run.keys.size());
        for (uint32_t i = 0; i < kKeys; ++i) {
          if (!places[i].is_known()) continue;
          const Label wanted = label_of_key(i, epoch);
          if (foreign.read(places[i], wanted, kUsable, page.data(), &detail) != Status::kOk || image.is_forged())
            continue;
          STEPWELL_FUZZ_CHECK(*bytes_of(wanted) == page);
        }
      }
    }
    STEPWELL_FUZZ_CHECK(foreign.pages() <= kMostPages);
  }
}

}  // namespace stepwell::fuzz
