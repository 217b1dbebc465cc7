// The legal moves of a page's residency in one tier: the one table that C++ obeys, Python shows and the model checks.
#pragma once

#include <array>
#include <cstdint>

namespace stepwell {

enum class Tier : uint8_t { kDevice = 0, kHost = 1, kShared = 2, kDisk = 3 };
constexpr int kTiers = 4;

enum class Residency : uint8_t { kAbsent = 0, kArriving = 1, kResident = 2, kLeaving = 3, kQuarantined = 4 };
constexpr int kResidencies = 5;

enum class Move : uint8_t {
  kClaim = 0,        // ABSENT -> ARRIVING        a slot is taken, bytes are on their way
  kCommit = 1,       // ARRIVING -> RESIDENT
  kAbort = 2,        // ARRIVING -> ABSENT
  kClaimVictim = 3,  // RESIDENT -> LEAVING       pins 0
  kFinish = 4,       // LEAVING -> ABSENT         pins 0
  kKeep = 5,         // LEAVING -> RESIDENT       copy failed, cancelled, or wanted again by a match
  kQuarantine = 6,   // RESIDENT -> QUARANTINED   bad checksum
  kMend = 7,         // QUARANTINED -> ABSENT     pins 0, rewritten and read back
};
constexpr int kMoves = 8;

constexpr Residency kIllegal = static_cast<Residency>(0xff);

// kMoveTable[move][from] = to, or kIllegal.
constexpr std::array<std::array<Residency, kResidencies>, kMoves> kMoveTable = [] {
  std::array<std::array<Residency, kResidencies>, kMoves> table{};
  for (auto& row : table) row.fill(kIllegal);
  auto allow = [&](Move move, Residency from, Residency to) {
    table[static_cast<size_t>(move)][static_cast<size_t>(from)] = to;
  };
  allow(Move::kClaim, Residency::kAbsent, Residency::kArriving);
  allow(Move::kCommit, Residency::kArriving, Residency::kResident);
  allow(Move::kAbort, Residency::kArriving, Residency::kAbsent);
  allow(Move::kClaimVictim, Residency::kResident, Residency::kLeaving);
  allow(Move::kFinish, Residency::kLeaving, Residency::kAbsent);
  allow(Move::kKeep, Residency::kLeaving, Residency::kResident);
  allow(Move::kQuarantine, Residency::kResident, Residency::kQuarantined);
  allow(Move::kMend, Residency::kQuarantined, Residency::kAbsent);
  return table;
}();

constexpr Residency after(Move move, Residency from) {
  return kMoveTable[static_cast<size_t>(move)][static_cast<size_t>(from)];
}

}  // namespace stepwell
