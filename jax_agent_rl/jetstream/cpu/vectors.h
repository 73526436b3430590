// Vectors, and work shared by threads, for the kernels in kernels.cc.
//
// Vectors are those of GCC and Clang, which compile to AVX-512, AVX2 or NEON alike.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

typedef float Float4 __attribute__((vector_size(16)));
typedef float Float16 __attribute__((vector_size(64)));
typedef float Float8 __attribute__((vector_size(32)));

#ifdef __AVX512F__
typedef Float16 Wide;
typedef int32_t WideInt __attribute__((vector_size(64)));
#else
typedef Float8 Wide;
typedef int32_t WideInt __attribute__((vector_size(32)));
#endif

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, WideInt{__VA_ARGS__})
#endif

// A tile of a product keeps its sums in registers: AVX-512 has 32, AVX2 16, NEON 32 of half the size.
#ifdef __AVX512F__
constexpr int kTileRows = 12, kTileColumns = 8;
#else
constexpr int kTileRows = 6, kTileColumns = 4;
#endif

template <typename V>
constexpr int kLanes = sizeof(V) / sizeof(float);

template <typename V>
inline V Load(const float* from) {
  V x;
  std::memcpy(&x, from, sizeof(V));
  return x;
}

template <typename V>
inline void Store(float* to, V x) {
  std::memcpy(to, &x, sizeof(V));
}

inline Wide Broadcast(float x) { return Wide{} + x; }

// The sums of neighbours: those of a in the first half of each 16 bytes, those of b in the second.
inline Wide PairSums(Wide a, Wide b) {
#ifdef __AVX512F__
  return SHUFFLE(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
         SHUFFLE(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
#else
  return SHUFFLE(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + SHUFFLE(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
#endif
}

// The sums of four vectors' lanes.
inline Float4 Sums(const Wide* x) {
  const Wide all = PairSums(PairSums(x[0], x[1]), PairSums(x[2], x[3]));
  Float4 part[kLanes<Wide> / 4];
  std::memcpy(part, &all, sizeof(Wide));
  if (sizeof(Wide) == 32) return part[0] + part[1];
  return (part[0] + part[1]) + (part[2] + part[3]);
}

inline float Sum(Wide x) {
  float total = 0;
  for (int lane = 0; lane < kLanes<Wide>; ++lane) total += x[lane];
  return total;
}

const float* DataOrNull(const ffi::Buffer<ffi::F32>& x) { return x.element_count() ? x.typed_data() : nullptr; }

int64_t RoundUp(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// exp(x), with x limited to where float32 can hold it; polynomial of Cephes' expf (S. Moshier), 2 ulp.
inline Wide Exp(Wide x) {
  x = x < Broadcast(-87.3f) ? Broadcast(-87.3f) : x;
  x = x > Broadcast(88.0f) ? Broadcast(88.0f) : x;
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
  const Wide shifted = x * 1.44269504088896341f + kRounder;
  const Wide n = shifted - kRounder;
  const Wide r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Wide p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const WideInt exponent = ((WideInt)shifted - (WideInt)Broadcast(kRounder) + 127) << 23;
  return (p * r * r + r + 1.0f) * (Wide)exponent;
}

// Runs work(take) on the caller and the pool; take() returns numbers from 0 to count - 1 until all are taken, then -1.
// Each thread first takes those of its own part in order, so that what it reads lies in a row. The caller waits for what
// others took, never for a thread to start, so a busy pool costs time but cannot block.
template <typename Work>
void Parallel(ffi::ThreadPool& pool, int64_t count, Work work) {
  constexpr int64_t kMost = 64;
  struct State {
    std::atomic<int64_t> threads{0}, done{0};
    struct alignas(64) { std::atomic<int64_t> next{0}; } parts[kMost];
  };
  auto state = std::make_shared<State>();
  const int64_t parts = std::min({pool.num_threads(), count, kMost});
  auto run = [=] {
    const int64_t own = state->threads.fetch_add(1);
    int64_t taken = 0, other = 0;
    work([&]() -> int64_t {
      for (; other < parts; ++other) {
        const int64_t part = (own + other) % parts, begin = count * part / parts, end = count * (part + 1) / parts;
        const int64_t i = begin + state->parts[part].next.fetch_add(1);
        if (i < end) return ++taken, i;
      }
      return -1;
    });
    state->done.fetch_add(taken, std::memory_order_release);
  };
  for (int64_t helpers = parts - 1; helpers > 0; --helpers) pool.Schedule(decltype(run)(run));
  run();
  for (int spins = 0; state->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 1000) std::this_thread::yield();
  }
}

}  // namespace
