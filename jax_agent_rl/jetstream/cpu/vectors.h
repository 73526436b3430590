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

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

typedef float Float4 __attribute__((vector_size(16)));
typedef float Float8 __attribute__((vector_size(32)));
typedef float Float16 __attribute__((vector_size(64)));

#ifdef __AVX512F__
typedef Float16 Wide;
typedef int32_t WideInt __attribute__((vector_size(64)));
typedef int64_t WideLong __attribute__((vector_size(64)));
#else
typedef Float8 Wide;
typedef int32_t WideInt __attribute__((vector_size(32)));
typedef int64_t WideLong __attribute__((vector_size(32)));
#endif

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, WideInt{__VA_ARGS__})
#endif

// Rows of a tile of two vectors of columns, whose sums stay in registers: AVX-512 has 32, AVX2 has
// 16, and NEON has 32 of half the size.
#ifdef __AVX512F__
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif

template <typename V>
constexpr int kLanes = sizeof(V) / sizeof(float);

template <typename V, typename Number>
inline V Load(const Number* from) {
  V x;
  std::memcpy(&x, from, sizeof(V));
  return x;
}

template <typename V>
inline void Store(float* to, V x) {
  std::memcpy(to, &x, sizeof(V));
}

// A vector of weights; those of 8 bits become floats.
inline Wide LoadWeights(const float* from) { return Load<Wide>(from); }

inline Wide LoadWeights(const int8_t* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Wide)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (Wide)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes<Wide>)));
  return __builtin_convertvector(Load<Bytes>(from), Wide);
#endif
}

inline Wide Broadcast(float x) { return Wide{} + x; }

// Two neighbouring numbers, repeated.
inline Wide BroadcastPair(const float* from) {
  int64_t pair;
  std::memcpy(&pair, from, sizeof(pair));
  return (Wide)(WideLong{} + pair);
}

// The sums of neighbouring lanes: in each 16 bytes, two sums of `a`, then two of `b`.
inline Wide PairSums(Wide a, Wide b) {
#ifdef __AVX512F__
  return SHUFFLE(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
         SHUFFLE(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
#else
  return SHUFFLE(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
         SHUFFLE(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
#endif
}

// The sums of neighbouring lanes, first those of `a`, then those of `b`.
inline Wide SumsOfNeighbours(Wide a, Wide b) {
#ifdef __AVX512F__
  return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else
  return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#endif
}

// The sum over lanes of each of four vectors.
inline Float4 Sums(const Wide* x) {
  const Wide sums = PairSums(PairSums(x[0], x[1]), PairSums(x[2], x[3]));
  Float4 part[kLanes<Wide> / 4];
  std::memcpy(part, &sums, sizeof(Wide));
  if (sizeof(Wide) == 32) return part[0] + part[1];
  return (part[0] + part[1]) + (part[2] + part[3]);
}

inline float Sum(Wide x) {
  float total = 0;
  for (int lane = 0; lane < kLanes<Wide>; ++lane) total += x[lane];
  return total;
}

const float* DataOrNull(const ffi::Buffer<ffi::F32>& x) {
  return x.element_count() ? x.typed_data() : nullptr;
}

int64_t DivideUp(int64_t x, int64_t unit) { return (x + unit - 1) / unit; }

int64_t RoundUp(int64_t x, int64_t unit) { return DivideUp(x, unit) * unit; }

// exp(x), with x limited to where float32 can hold the result. The polynomial is the one of
// Cephes' expf (S. Moshier), exact to 2 ulp.
inline Wide Exp(Wide x) {
  x = x < Broadcast(-87.3f) ? Broadcast(-87.3f) : x;
  x = x > Broadcast(88.0f) ? Broadcast(88.0f) : x;

  // exp(x) = 2^n exp(r) with an integer n. Adding 1.5 * 2^23 leaves n in the low bits.
  constexpr float kRounder = 12582912.0f;
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

// Runs work(take) on the caller and on threads of the pool. take() returns a number from 0 to
// count - 1, each of them once, and -1 when there is none left.
//
// The numbers are divided into as many parts as there are threads. A thread first takes those of
// one part in order, so that what it reads lies in a row, then helps with the other parts. The
// caller waits until the numbers that others took are done, never for a thread to start: a busy
// pool costs time, but cannot block.
template <typename Work>
void Parallel(ffi::ThreadPool& pool, int64_t count, Work work) {
  constexpr int64_t kMaxParts = 64;
  struct alignas(64) Part {  // a cache line of its own
    std::atomic<int64_t> next{0};
  };
  struct State {
    std::atomic<int64_t> threads{0};
    std::atomic<int64_t> done{0};
    Part parts[kMaxParts];
  };
  auto state = std::make_shared<State>();  // shared: a thread may start when all is done
  const int64_t parts = std::min({pool.num_threads(), count, kMaxParts});

  auto run = [=] {
    const int64_t thread = state->threads.fetch_add(1);
    int64_t num_taken = 0;
    int64_t num_finished_parts = 0;
    auto take = [&]() -> int64_t {
      for (; num_finished_parts < parts; ++num_finished_parts) {
        const int64_t part = (thread + num_finished_parts) % parts;
        const int64_t begin = count * part / parts;
        const int64_t end = count * (part + 1) / parts;
        const int64_t number = begin + state->parts[part].next.fetch_add(1);
        if (number < end) {
          ++num_taken;
          return number;
        }
      }
      return -1;
    };
    work(take);
    state->done.fetch_add(num_taken, std::memory_order_release);
  };

  for (int64_t helpers = parts - 1; helpers > 0; --helpers) {
    pool.Schedule(decltype(run)(run));
  }
  run();
  for (int spins = 0; state->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 1000) std::this_thread::yield();
  }
}

}  // namespace
