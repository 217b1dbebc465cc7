#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "implementations.h"
#include "sha256.h"

using namespace stepwell;

namespace {

using Digest = std::array<uint8_t, kDigestBytes>;

std::string hex(const Digest& digest) {
  std::string out;
  for (const uint8_t byte : digest) {
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

Digest hash(const std::string& text) {
  Digest digest;
  sha256(text.data(), text.size(), digest.data());
  return digest;
}

std::vector<uint8_t> random_bytes(size_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> out(bytes);
  for (uint8_t& byte : out) byte = static_cast<uint8_t>(random());
  return out;
}

}  // namespace

TEST_CASE("sha256 has the values of FIPS 180-4") {
  by_each_sha256([] {
    CHECK(hex(hash("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(hex(hash("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(hex(hash("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK(hex(hash(std::string(1000000, 'a'))) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  });
}

TEST_CASE("an implementation that the machine has not, or that nobody knows, is refused and changes nothing") {
  const std::string before = sha256_implementation();
  CHECK(before == sha256_implementations().front());
  CHECK(!use_sha256("abacus"));
  CHECK(sha256_implementation() == before);
  CHECK(sha256_implementations().back() == "portable");
}

TEST_CASE("all implementations of sha256 agree at every length and alignment") {
  const auto data = random_bytes(2048, 1);
  for (size_t n = 0; n <= 700; ++n) {
    std::vector<Digest> digests;
    by_each_sha256([&] { sha256(data.data() + n % 67, n, digests.emplace_back().data()); });
    CAPTURE(n);
    for (const Digest& digest : digests) REQUIRE(digest == digests.front());
  }
}

TEST_CASE("hash_chain hashes each page after the hash of the one before") {
  by_each_sha256([] {
    const auto bytes = random_bytes(1 << 16, 2);
    std::vector<int32_t> tokens(bytes.size() / 4);
    std::memcpy(tokens.data(), bytes.data(), bytes.size());
    for (int32_t& token : tokens) token &= INT32_MAX;
    for (const size_t page_tokens : {1, 2, 7, 8, 9, 15, 16, 17, 24, 64, 100}) {
      for (const bool seeded : {false, true}) {
        CAPTURE(page_tokens);
        CAPTURE(seeded);
        const size_t pages = 20;
        Digest prior{};
        prior.fill(0x5a);
        std::vector<uint8_t> out(pages * kDigestBytes);
        hash_chain(seeded ? prior.data() : nullptr, tokens.data(), pages, page_tokens, out.data());
        std::vector<uint8_t> message;
        if (seeded) message.assign(prior.begin(), prior.end());
        for (size_t page = 0; page < pages; ++page) {
          const auto* first = reinterpret_cast<const uint8_t*>(tokens.data() + page * page_tokens);
          message.insert(message.end(), first, first + 4 * page_tokens);
          Digest expected;
          sha256(message.data(), message.size(), expected.data());
          REQUIRE(std::memcmp(expected.data(), out.data() + page * kDigestBytes, kDigestBytes) == 0);
          message.assign(expected.begin(), expected.end());
        }
      }
    }
  });
}

TEST_CASE("a chain that is continued equals one made at once") {
  std::vector<int32_t> tokens(160);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 7919);
  std::vector<uint8_t> whole(10 * kDigestBytes), parts(10 * kDigestBytes);
  hash_chain(nullptr, tokens.data(), 10, 16, whole.data());
  hash_chain(nullptr, tokens.data(), 4, 16, parts.data());
  hash_chain(parts.data() + 3 * kDigestBytes, tokens.data() + 64, 6, 16, parts.data() + 4 * kDigestBytes);
  CHECK(whole == parts);
}
