// Tests that hold for each way to compute that this machine has, not only for the one it would choose.
#pragma once

#include <doctest/doctest.h>

#include <string>

#include "crc32c.h"
#include "sha256.h"

namespace stepwell {

template <typename Test>
void by_each_crc32c(Test test) {
  for (const std::string_view name : crc32c_implementations()) {
    CAPTURE(std::string(name));
    REQUIRE(use_crc32c(name));
    test();
  }
  REQUIRE(use_crc32c(crc32c_implementations().front()));
}

template <typename Test>
void by_each_sha256(Test test) {
  for (const std::string_view name : sha256_implementations()) {
    CAPTURE(std::string(name));
    REQUIRE(use_sha256(name));
    test();
  }
  REQUIRE(use_sha256(sha256_implementations().front()));
}

}  // namespace stepwell
