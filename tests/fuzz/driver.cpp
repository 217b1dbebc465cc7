// Runs the fuzz targets with inputs from a seed, for compilers without libFuzzer and for CI: the same seed, the same inputs.
//
//     stepwell_fuzz [--seconds S] [--executions N] [--seed N] [--target NAME]
//
// Each target gets S seconds (2), or N inputs. An input is random bytes, or an earlier one with a few changes. What fails is
// printed with the line that runs that input alone: inputs follow from (seed, number) only.
#include <signal.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "targets.h"

namespace {

using stepwell::fuzz::fuzz_foreign;
using stepwell::fuzz::fuzz_header;
using stepwell::fuzz::fuzz_index;
using stepwell::fuzz::fuzz_reader;
using stepwell::fuzz::fuzz_record;
using stepwell::fuzz::fuzz_ring;
using stepwell::fuzz::fuzz_volume;

constexpr unsigned kHangSeconds = 60;  // an input takes a millisecond

struct Target {
  const char* name;
  void (*run)(const uint8_t*, size_t);
};
constexpr std::array<Target, 7> kTargets{{{"header", fuzz_header},
                                          {"record", fuzz_record},
                                          {"volume", fuzz_volume},
                                          {"foreign", fuzz_foreign},
                                          {"reader", fuzz_reader},
                                          {"index", fuzz_index},
                                          {"ring", fuzz_ring}}};

struct Options {
  double seconds = 2;
  uint64_t executions = 0, seed = 1, first = 0;
  std::string target;
};

std::array<char, 256> now{};  // what runs, for the handler below

void say_what_runs(int signal) {
  const auto written = ::write(2, now.data(), std::strlen(now.data()));
  static_cast<void>(written);
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

std::vector<uint8_t> input_of(uint64_t seed, uint64_t number) {
  std::seed_seq sequence{seed, number / 8};  // eight inputs in a row are changes of one
  std::mt19937_64 random(sequence);
  std::vector<uint8_t> input(16 + random() % 240);
  for (uint8_t& byte : input) byte = static_cast<uint8_t>(random());
  std::seed_seq changes{seed, number, uint64_t{1}};
  std::mt19937_64 change(changes);
  for (uint64_t i = number % 8; i > 0; --i) input[change() % input.size()] = static_cast<uint8_t>(change());
  return input;
}

uint64_t run(const Target& target, const Options& options) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(options.seconds);
  uint64_t number = options.first;
  for (; options.executions > 0 ? number < options.first + options.executions : Clock::now() < until; ++number) {
    std::snprintf(now.data(), now.size(), "stepwell_fuzz --target %s --seed %llu --first %llu --executions 1 failed\n",
                  target.name, static_cast<unsigned long long>(options.seed), static_cast<unsigned long long>(number));
    ::alarm(kHangSeconds);
    const std::vector<uint8_t> input = input_of(options.seed, number);
    target.run(input.data(), input.size());
  }
  ::alarm(0);
  return number - options.first;
}

bool read(int count, char** arguments, Options* options) {
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = arguments[i], value = arguments[i + 1];
    if (name == "--seconds")
      options->seconds = std::stod(value);
    else if (name == "--executions")
      options->executions = std::stoull(value);
    else if (name == "--seed")
      options->seed = std::stoull(value);
    else if (name == "--first")
      options->first = std::stoull(value);
    else if (name == "--target")
      options->target = value;
    else
      return false;
  }
  return count % 2 == 1;
}

}  // namespace

int main(int count, char** arguments) {
  Options options;
  if (!read(count, arguments, &options)) {
    std::fprintf(stderr,
                 "usage: stepwell_fuzz [--seconds S] [--executions N] [--seed N] [--first N] [--target NAME]\n");
    return 2;
  }
  for (const int signal : {SIGABRT, SIGALRM}) ::signal(signal, say_what_runs);
  bool found = false;
  for (const Target& target : kTargets) {
    if (!options.target.empty() && options.target != target.name) continue;
    found = true;
    std::printf("%-8s %llu inputs\n", target.name, static_cast<unsigned long long>(run(target, options)));
    std::fflush(stdout);
  }
  if (!found) std::fprintf(stderr, "no target %s\n", options.target.c_str());
  return found ? 0 : 2;
}
