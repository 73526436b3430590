// Kernels of a decode step on CPUs, called through XLA's foreign function interface; cpu_kernels.py builds and wraps them.
//
// Shapes: B slots, `in` and `out` sizes of a matrix, P pages of S positions, K key/value heads, G queries of each, h head
// size. Activations are feature-major [in, B], as in forward.py, so a vector holds one feature of many slots: each weight
// is broadcast once and multiplied with all of them. Everything is float32. Vectors are those of GCC and Clang, which
// compile to AVX-512, AVX2 or NEON alike.

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

typedef float Float16 __attribute__((vector_size(64)));
typedef float Float8 __attribute__((vector_size(32)));

#ifdef __AVX512F__
typedef Float16 Wide;
typedef int32_t WideInt __attribute__((vector_size(64)));
#else
typedef Float8 Wide;
typedef int32_t WideInt __attribute__((vector_size(32)));
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRowsOfTwo = 12;  // 32 registers hold 12 rows of two vectors
#else
constexpr int kRowsOfTwo = 6;
#endif
constexpr int kRows = 12;  // rows of a block, a multiple of kRowsOfTwo

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

inline float Sum(Wide x) {
  float total = 0;
  for (int lane = 0; lane < kLanes<Wide>; ++lane) total += x[lane];
  return total;
}

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

// Runs work(0) ... work(count - 1) on the caller and the pool. The caller waits for what others began, never for a task
// to start, so a busy pool costs time but cannot block.
template <typename Work>
void Parallel(ffi::ThreadPool& pool, int64_t count, Work work) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto state = std::make_shared<State>();
  auto run = [state, count, work] {
    for (int64_t i; (i = state->next.fetch_add(1)) < count;) {
      work(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t helpers = std::min(pool.num_threads(), count) - 1; helpers > 0; --helpers) pool.Schedule(decltype(run)(run));
  run();
  for (int spins = 0; state->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 1000) std::this_thread::yield();
  }
}

// --- products ---------------------------------------------------------------------------------------------------------

// out[r, :] = rows[r, :] . x for R rows and N vectors of columns. While it computes, it fetches the R rows that follow.
template <typename V, int R, int N>
inline void Block(const float* rows, const float* x, int64_t in, int64_t x_stride, float* out, int64_t out_stride) {
  V sum[R][N] = {};
  int64_t k = 0;
  auto step = [&](int64_t k) __attribute__((always_inline)) {
    V column[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) column[n] = Load<V>(x + k * x_stride + n * kLanes<V>);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const float weight = rows[r * in + k];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[r][n] += weight * column[n];
    }
  };
  for (; k + 16 <= in; k += 16) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) __builtin_prefetch(rows + (R + r) * in + k);
#pragma GCC unroll 4
    for (int j = 0; j < 16; ++j) step(k + j);
  }
  for (; k < in; ++k) step(k);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) Store(out + r * out_stride + n * kLanes<V>, sum[r][n]);
}

template <typename V, int R, int N>
inline void Blocks(const float* rows, int count, const float* x, int64_t in, int64_t stride, float* out) {
  int r = 0;
  for (; r + R <= count; r += R) Block<V, R, N>(rows + r * in, x, in, stride, out + r * stride, stride);
  for (; r < count; ++r) Block<V, 1, N>(rows + r * in, x, in, stride, out + r * stride, stride);
}

// out[r, :stride] = rows[r, :] . x[:, :stride] for up to kRows rows; stride is a multiple of V's lanes.
template <typename V>
void RowsByColumns(const float* rows, int count, const float* x, int64_t in, int64_t stride, float* out) {
  int64_t column = 0;
  for (; column + 2 * kLanes<V> <= stride; column += 2 * kLanes<V>)
    Blocks<V, kRowsOfTwo, 2>(rows, count, x + column, in, stride, out + column);
  if (column < stride) Blocks<V, kRows, 1>(rows, count, x + column, in, stride, out + column);
}

// out[r] = rows[r, :] . x for one column, along rows.
void RowsByVector(const float* rows, int count, const float* x, int64_t in, float* out) {
  constexpr int kStep = kLanes<Wide>;
  for (int r = 0; r < count; ++r) {
    const float* row = rows + r * in;
    Wide sum[4] = {};
    int64_t k = 0;
    for (; k + 4 * kStep <= in; k += 4 * kStep)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        __builtin_prefetch(row + k + j * kStep + 2048, 0, 2);
        sum[j] += Load<Wide>(row + k + j * kStep) * Load<Wide>(x + k + j * kStep);
      }
    for (; k + kStep <= in; k += kStep) sum[0] += Load<Wide>(row + k) * Load<Wide>(x + k);
    const Wide all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    float total = Sum(all);
    for (; k < in; ++k) total += row[k] * x[k];
    out[r] = total;
  }
}

#ifdef __AVX512F__
typedef double Double8 __attribute__((vector_size(64)));

// As Block, for 8 columns of x in pairs of rows [in / 2, 8, 2]: a vector holds two numbers of each column, and two weights
// are broadcast at once.
template <int R>
inline void PairBlock(const float* rows, const float* x, int64_t in, float* out) {
  Wide sum[R] = {};
  auto step = [&](int64_t k, size_t bytes) __attribute__((always_inline)) {
    const Wide column = Load<Wide>(x + k * 8);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      double two = 0;
      std::memcpy(&two, rows + r * in + k, bytes);
      sum[r] += (Wide)Double8{two, two, two, two, two, two, two, two} * column;
    }
  };
  int64_t k = 0;
  for (; k + 16 <= in; k += 16) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) __builtin_prefetch(rows + (R + r) * in + k);
#pragma GCC unroll 8
    for (int j = 0; j < 16; j += 2) step(k + j, 8);
  }
  for (; k + 2 <= in; k += 2) step(k, 8);
  if (k < in) step(k, 4);
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < 8; ++b) out[r * 8 + b] = sum[r][2 * b] + sum[r][2 * b + 1];
}

void RowsByPairs(const float* rows, int count, const float* x, int64_t in, float* out) {
  int r = 0;
  for (; r + kRows <= count; r += kRows) PairBlock<kRows>(rows + r * in, x, in, out + r * 8);
  for (; r < count; ++r) PairBlock<1>(rows + r * in, x, in, out + r * 8);
}

constexpr bool kPairs = true;
#else
void RowsByPairs(const float* rows, int count, const float* x, int64_t in, float* out) {
  RowsByColumns<Float8>(rows, count, x, in, 8, out);
}

constexpr bool kPairs = false;
#endif

int64_t PaddedColumns(int64_t columns) {
  if (columns == 1) return 1;
  return RoundUp(columns, columns <= 8 ? 8 : kLanes<Wide>);
}

void RowsByInput(const float* rows, int count, const float* x, int64_t in, int64_t stride, float* out) {
  if (stride == 1) return RowsByVector(rows, count, x, in, out);
  if (stride == 8) return RowsByPairs(rows, count, x, in, out);
  RowsByColumns<Wide>(rows, count, x, in, stride, out);
}

// Returns x [in, B] as RowsByInput wants it, with columns padded to `stride`, after an RMS norm over `in` unless `norm`
// [in] is null.
const float* Input(const float* x, int64_t in, int64_t columns, int64_t stride, const float* norm, float eps,
                   float offset) {
  const bool pairs = kPairs && stride == 8;
  if (columns == stride && norm == nullptr && !pairs) return x;
  thread_local std::vector<float> scratch, scale;
  scratch.assign((in + 1) * stride, 0);
  scale.assign(stride, norm == nullptr ? 1.0f : 0.0f);
  float* scales = scale.data();
  if (norm != nullptr) {
    for (int64_t k = 0; k < in; ++k)
      for (int64_t b = 0; b < columns; ++b) scales[b] += x[k * columns + b] * x[k * columns + b];
    for (int64_t b = 0; b < columns; ++b) scales[b] = 1.0f / std::sqrt(scales[b] / in + eps);
  }
  const int64_t step = pairs ? 2 : 1;
  for (int64_t k = 0; k < in; ++k) {
    const float weight = norm == nullptr ? 1.0f : norm[k] + offset;
    float* target = scratch.data() + (pairs ? k / 2 * 16 + k % 2 : k * stride);
    for (int64_t b = 0; b < columns; ++b) target[b * step] = x[k * columns + b] * scales[b] * weight;
  }
  return scratch.data();
}

// Calls finish(row, count, block, stride) for blocks of rows of weight [rows, in] . x [in, stride]; with `second` the
// same rows of that matrix follow in `block`, RoundUp(kRows * stride) floats later.
template <typename Finish>
void ByBlocks(ffi::ThreadPool& pool, const float* first, const float* second, int64_t rows, const float* x, int64_t in,
              int64_t stride, Finish finish) {
  constexpr int64_t kChunk = 2 * kRows;
  Parallel(pool, (rows + kChunk - 1) / kChunk, [=](int64_t i) {
    thread_local std::vector<float> scratch;
    const int64_t size = RoundUp(kRows * stride, kLanes<Wide>);
    scratch.resize(2 * size);
    float* block = scratch.data();
    for (int64_t row = i * kChunk; row < std::min((i + 1) * kChunk, rows); row += kRows) {
      const int count = std::min<int64_t>(kRows, rows - row);
      RowsByInput(first + row * in, count, x, in, stride, block);
      if (second != nullptr) RowsByInput(second + row * in, count, x, in, stride, block + size);
      finish(row, count, block, size);
    }
  });
}

const float* DataOrNull(const ffi::Buffer<ffi::F32>& x) { return x.element_count() ? x.typed_data() : nullptr; }

// weight [..., in] . norm(x) [in, B]; an empty norm is left out.
ffi::Error Product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> weight, ffi::Buffer<ffi::F32> x,
                   ffi::Buffer<ffi::F32> norm, float eps, float offset, ffi::ResultBuffer<ffi::F32> result) {
  const int64_t in = x.dimensions()[0], columns = x.dimensions()[1], stride = PaddedColumns(columns);
  const float* input = Input(x.typed_data(), in, columns, stride, DataOrNull(norm), eps, offset);
  float* out = result->typed_data();
  ByBlocks(pool, weight.typed_data(), nullptr, weight.element_count() / in, input, in, stride,
           [=](int64_t row, int count, const float* block, int64_t) {
             for (int r = 0; r < count; ++r) std::copy_n(block + r * stride, columns, out + (row + r) * columns);
           });
  return ffi::Error::Success();
}

enum Activation : int64_t { kSilu, kGeluTanh, kClampedSwiglu };  // in the order of cpu_kernels.ACTIVATIONS

inline Wide Gate(int64_t activation, Wide gate, Wide up) {
  Wide steep = gate;
  if (activation == kGeluTanh) {
    steep = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);  // 2 sqrt(2 / pi)
  } else if (activation == kClampedSwiglu) {
    gate = gate > Broadcast(7.0f) ? Broadcast(7.0f) : gate;
    up = up > Broadcast(7.0f) ? Broadcast(7.0f) : up;
    up = (up < Broadcast(-7.0f) ? Broadcast(-7.0f) : up) + 1.0f;
    steep = 1.702f * gate;
  }
  return gate / (1.0f + Exp(-steep)) * up;
}

// activation(gate . norm(x), up . norm(x)) for weight [2, out, in].
ffi::Error GatedProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> weight, ffi::Buffer<ffi::F32> x,
                        ffi::Buffer<ffi::F32> norm, float eps, float offset, int64_t activation,
                        ffi::ResultBuffer<ffi::F32> result) {
  const int64_t in = x.dimensions()[0], columns = x.dimensions()[1], stride = PaddedColumns(columns);
  const float* input = Input(x.typed_data(), in, columns, stride, DataOrNull(norm), eps, offset);
  float* out = result->typed_data();
  const float* gates = weight.typed_data();
  const int64_t rows = weight.element_count() / in / 2;
  ByBlocks(pool, gates, gates + rows * in, rows, input, in, stride,
           [=](int64_t row, int count, float* gate, int64_t size) {
             for (int64_t i = 0; i < size; i += kLanes<Wide>)
               Store(gate + i, Gate(activation, Load<Wide>(gate + i), Load<Wide>(gate + size + i)));
             for (int r = 0; r < count; ++r) std::copy_n(gate + r * stride, columns, out + (row + r) * columns);
           });
  return ffi::Error::Success();
}

// --- attention --------------------------------------------------------------------------------------------------------

struct Attention {
  int64_t slots, kv_heads, group, size, page, row_pages, rotated, window;
  float scale;
  bool interleaved;
  const float *qkv, *cos, *sin, *sinks;
  const int32_t *pages, *positions;
  float *keys, *values, *mixed;
};

// Scores of G queries at N vectors of positions; fetches the same positions of `next` meanwhile.
template <int G, int N>
inline void ScoreTile(const float* queries, int64_t size, const float* keys, int64_t page, const float* next,
                      float* scores, int64_t span) {
  Wide sum[G][N] = {};
  for (int64_t d = 0; d < size; ++d) {
    Wide key[N];
    for (int n = 0; n < N; ++n) {
      key[n] = Load<Wide>(keys + d * page + n * kLanes<Wide>);
      __builtin_prefetch(next + d * page + n * kLanes<Wide>);
    }
    for (int g = 0; g < G; ++g)
      for (int n = 0; n < N; ++n) sum[g][n] += queries[g * size + d] * key[n];
  }
  for (int g = 0; g < G; ++g)
    for (int n = 0; n < N; ++n) Store(scores + g * span + n * kLanes<Wide>, sum[g][n]);
}

// Adds `count` positions' values, weighted, to the mixes of G queries, for N vectors of a head's numbers.
template <int G, int N>
inline void MixTile(const float* weights, int64_t span, const float* values, int64_t size, int64_t count,
                    const float* next, float* mixed) {
  Wide sum[G][N];
  for (int g = 0; g < G; ++g)
    for (int n = 0; n < N; ++n) sum[g][n] = Load<Wide>(mixed + g * size + n * kLanes<Wide>);
  for (int64_t s = 0; s < count; ++s)
    for (int n = 0; n < N; ++n) {
      const Wide value = Load<Wide>(values + s * size + n * kLanes<Wide>);
      __builtin_prefetch(next + s * size + n * kLanes<Wide>);
      for (int g = 0; g < G; ++g) sum[g][n] += weights[g * span + s] * value;
    }
  for (int g = 0; g < G; ++g)
    for (int n = 0; n < N; ++n) Store(mixed + g * size + n * kLanes<Wide>, sum[g][n]);
}

template <int G>
void ScoreRange(const float* queries, int64_t size, const float* keys, int64_t page, const float* next, int64_t count,
                float* scores, int64_t span) {
  int64_t s = 0;
  for (; s + 2 * kLanes<Wide> <= count; s += 2 * kLanes<Wide>)
    ScoreTile<G, 2>(queries, size, keys + s, page, next + s, scores + s, span);
  if (s < count) ScoreTile<G, 1>(queries, size, keys + s, page, next + s, scores + s, span);
}

template <int G>
void MixRange(const float* weights, int64_t span, const float* values, int64_t size, int64_t count, const float* next,
              float* mixed) {
  constexpr int kVectors = kRowsOfTwo == kRows ? 4 : 2;  // as many as registers hold for 4 queries
  int64_t d = 0;
  for (; d + kVectors * kLanes<Wide> <= size; d += kVectors * kLanes<Wide>)
    MixTile<G, kVectors>(weights, span, values + d, size, count, next + d, mixed + d);
  for (; d + kLanes<Wide> <= size; d += kLanes<Wide>)
    MixTile<G, 1>(weights, span, values + d, size, count, next + d, mixed + d);
  for (; d < size; ++d)
    for (int64_t s = 0; s < count; ++s)
      for (int g = 0; g < G; ++g) mixed[g * size + d] += weights[g * span + s] * values[s * size + d];
}

// Calls run.template operator()<G>(first query) for tiles of at most 4 queries.
template <typename Run>
void ByQueries(int64_t group, Run run) {
  for (int64_t g = 0; g < group; g += 4) switch (std::min<int64_t>(4, group - g)) {
      case 4: run(std::integral_constant<int, 4>(), g); break;
      case 3: run(std::integral_constant<int, 3>(), g); break;
      case 2: run(std::integral_constant<int, 2>(), g); break;
      default: run(std::integral_constant<int, 1>(), g);
    }
}

// Rotates the first numbers of a head by the slot's angles.
void Rotate(const Attention& a, int64_t slot, float* head) {
  for (int64_t i = 0; i < a.rotated; ++i) {
    float& first = head[a.interleaved ? 2 * i : i];
    float& second = head[a.interleaved ? 2 * i + 1 : a.rotated + i];
    const float cos = a.cos[i * a.slots + slot], sin = a.sin[i * a.slots + slot], x = first, y = second;
    first = x * cos - y * sin;
    second = y * cos + x * sin;
  }
}

// Turns scores[first, end) into softmax weights; the other scores of their vectors do not count.
void Softmax(float* scores, int64_t first, int64_t end, const float* sink) {
  constexpr int64_t kStep = kLanes<Wide>;
  const int64_t begin = first / kStep * kStep, stop = RoundUp(end, kStep);
  std::fill(scores + begin, scores + first, -std::numeric_limits<float>::infinity());
  std::fill(scores + end, scores + stop, -std::numeric_limits<float>::infinity());
  Wide most = Load<Wide>(scores + begin);
  for (int64_t s = begin; s < stop; s += kStep) {
    const Wide x = Load<Wide>(scores + s);
    most = x > most ? x : most;
  }
  float peak = sink == nullptr ? most[0] : *sink;
  for (int lane = 0; lane < kStep; ++lane) peak = std::max(peak, most[lane]);
  Wide sum = {};
  for (int64_t s = begin; s < stop; s += kStep) {
    const Wide x = Load<Wide>(scores + s) - peak;
    const Wide weight = x < Broadcast(-87.0f) ? Wide{} : Exp(x);
    sum += weight;
    Store(scores + s, weight);
  }
  const float scale = 1.0f / (Sum(sum) + (sink == nullptr ? 0.0f : std::exp(*sink - peak)));
  for (int64_t s = begin; s < stop; s += kStep) Store(scores + s, Load<Wide>(scores + s) * scale);
}

// Writes keys and values of heads [from, to) of `count` consecutive tokens of a context, in columns from `slot` on, to its
// pages, and mixes the values that their queries see. Heads are neighbours in a page, so each page is read in one go.
void Attend(const Attention& a, int64_t slot, int64_t count, int64_t from, int64_t to) {
  const int64_t size = a.size, page = a.page, group = a.group, position = a.positions[slot];
  auto first_seen = [&](int64_t t) { return a.window ? std::max<int64_t>(0, position + t - a.window + 1) : 0; };
  const int64_t first = first_seen(0), end_seen = position + count, last = (end_seen - 1) / page;
  const int64_t span = RoundUp(end_seen, kLanes<Wide>), first_vector = first / kLanes<Wide> * kLanes<Wide>;
  const int64_t heads = to - from, queries_of_head = count * group, features = a.kv_heads * group * size;
  thread_local std::vector<float> scratch, key;
  key.resize(size);
  scratch.resize(heads * queries_of_head * (2 * size + span));
  float* all_queries = scratch.data();
  float* all_scores = all_queries + heads * queries_of_head * size;
  // Of one token this is where the result belongs; of several it is copied there.
  float* all_mixed = count == 1 ? a.mixed + slot * features + from * group * size : all_scores + heads * queries_of_head * span;
  std::fill_n(all_mixed, heads * queries_of_head * size, 0.0f);
  auto at = [&](int64_t index, int64_t head) {
    return (a.pages[slot * a.row_pages + index] * a.kv_heads + head) * size * page;
  };

  for (int64_t head = from; head < to; ++head)
    for (int64_t t = 0; t < count; ++t) {
      float* queries = all_queries + ((head - from) * count + t) * group * size;
      const float* own = a.qkv + head * (group + 2) * size * a.slots + slot + t;
      for (int64_t i = 0; i < group * size; ++i) queries[i] = own[i * a.slots];
      for (int64_t i = 0; i < size; ++i) key[i] = own[(group * size + i) * a.slots];
      for (int64_t g = 0; g < group; ++g) Rotate(a, slot + t, queries + g * size);
      Rotate(a, slot + t, key.data());
      for (int64_t i = 0; i < group * size; ++i) queries[i] *= a.scale;
      const int64_t page_of = at((position + t) / page, head), offset = (position + t) % page;
      for (int64_t d = 0; d < size; ++d) a.keys[page_of + d * page + offset] = key[d];
      for (int64_t d = 0; d < size; ++d)
        a.values[page_of + offset * size + d] = own[((group + 1) * size + d) * a.slots];
    }
  for (int64_t index = first / page; index <= last; ++index) {
    const int64_t begin = std::max(first_vector, index * page), end = std::min(span, (index + 1) * page);
    for (int64_t head = from; head < to; ++head) {
      const float* keys = a.keys + at(index, head) + begin % page;
      const float* next = head + 1 < to ? keys + size * page
                          : index < last ? a.keys + at(index + 1, from) : a.values + at(first / page, from);
      const float* queries = all_queries + (head - from) * queries_of_head * size;
      float* scores = all_scores + (head - from) * queries_of_head * span + begin;
      ByQueries(queries_of_head, [&](auto tile, int64_t g) {
        ScoreRange<tile.value>(queries + g * size, size, keys, page, next, end - begin, scores + g * span, span);
      });
    }
  }
  for (int64_t i = 0; i < heads * queries_of_head; ++i) {
    const int64_t head = from + i / queries_of_head, t = i % queries_of_head / group;
    float* scores = all_scores + i * span;
    Softmax(scores, first_seen(t), position + t + 1,
            a.sinks == nullptr ? nullptr : a.sinks + head * group + i % group);
    std::fill(scores + first_vector, scores + first_seen(t) / kLanes<Wide> * kLanes<Wide>, 0.0f);
    std::fill(scores + std::min(span, RoundUp(position + t + 1, kLanes<Wide>)), scores + span, 0.0f);
  }
  for (int64_t index = first / page; index <= last; ++index) {
    const int64_t begin = std::max(first, index * page), end = std::min(end_seen, (index + 1) * page);
    for (int64_t head = from; head < to; ++head) {
      const float* values = a.values + at(index, head) + begin % page * size;
      const float* next = head + 1 < to ? values + size * page : a.values + at(std::min(index + 1, last), from);
      const float* weights = all_scores + (head - from) * queries_of_head * span + begin;
      float* mixed = all_mixed + (head - from) * queries_of_head * size;
      ByQueries(queries_of_head, [&](auto tile, int64_t g) {
        MixRange<tile.value>(weights + g * span, span, values, size, end - begin, next, mixed + g * size);
      });
    }
  }
  if (count == 1) return;
  for (int64_t head = from; head < to; ++head)
    for (int64_t t = 0; t < count; ++t)
      std::copy_n(all_mixed + ((head - from) * count + t) * group * size, group * size,
                  a.mixed + (slot + t) * features + head * group * size);
}

// Queries, keys and values [K, G + 2, h, B] before their rotation; cos and sin [r/2, B]; sinks [K, G] or empty. The cache
// (keys [P, K, h, S], values [P, K, S, h]) is changed where it lies. Neighbouring columns with the same pages at consecutive
// positions are tokens of one context: each sees those before it.
ffi::Error DecodeAttention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> qkv, ffi::Buffer<ffi::F32>,
                           ffi::Buffer<ffi::F32>, ffi::Buffer<ffi::S32> pages, ffi::Buffer<ffi::S32> positions,
                           ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin, ffi::Buffer<ffi::F32> sinks,
                           float scale, int64_t window, bool interleaved, ffi::ResultBuffer<ffi::F32> mixed,
                           ffi::ResultBuffer<ffi::F32> keys, ffi::ResultBuffer<ffi::F32> values) {
  Attention a;
  a.slots = qkv.dimensions()[3], a.kv_heads = qkv.dimensions()[0], a.group = qkv.dimensions()[1] - 2;
  a.size = qkv.dimensions()[2], a.page = keys->dimensions()[3], a.row_pages = pages.dimensions()[1];
  a.rotated = cos.dimensions()[0], a.window = window, a.scale = scale, a.interleaved = interleaved;
  a.qkv = qkv.typed_data(), a.cos = cos.typed_data(), a.sin = sin.typed_data(), a.sinks = DataOrNull(sinks);
  a.pages = pages.typed_data(), a.positions = positions.typed_data();
  a.keys = keys->typed_data(), a.values = values->typed_data();
  // By slot first: cores that wrote neighbouring slots of one feature would take its cache line from each other.
  thread_local std::vector<float> by_slot;
  by_slot.resize(mixed->element_count());
  a.mixed = by_slot.data();
  thread_local std::vector<int64_t> begins;  // of each context
  begins.clear();
  for (int64_t slot = 0; slot < a.slots; ++slot) {
    const int32_t* pages_of = a.pages + slot * a.row_pages;
    const bool follows = slot && a.positions[slot] == a.positions[slot - 1] + 1 &&
                         std::equal(pages_of, pages_of + a.row_pages, pages_of - a.row_pages);
    if (!follows) begins.push_back(slot);
  }
  const int64_t contexts = begins.size(), heads = contexts == 1 ? 1 : a.kv_heads, parts = a.kv_heads / heads;
  begins.push_back(a.slots);
  const int64_t* begin = begins.data();
  Parallel(pool, contexts * parts, [=](int64_t i) {
    const int64_t slot = begin[i / parts];
    Attend(a, slot, begin[i / parts + 1] - slot, i % parts * heads, (i % parts + 1) * heads);
  });
  const int64_t features = mixed->element_count() / a.slots;
  float* out = mixed->typed_data();
  for (int64_t d = 0; d < features; ++d)
    for (int64_t slot = 0; slot < a.slots; ++slot) out[d * a.slots + slot] = a.mixed[slot * features + d];
  return ffi::Error::Success();
}

}  // namespace

#define BIND ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()
#define FLOATS Arg<ffi::Buffer<ffi::F32>>()
#define INTS Arg<ffi::Buffer<ffi::S32>>()
#define RESULT Ret<ffi::Buffer<ffi::F32>>()
#define NORM Attr<float>("eps").Attr<float>("offset")

XLA_FFI_DEFINE_HANDLER_SYMBOL(product, Product, BIND.FLOATS.FLOATS.FLOATS.NORM.RESULT);
XLA_FFI_DEFINE_HANDLER_SYMBOL(gated_product, GatedProduct,
                              BIND.FLOATS.FLOATS.FLOATS.NORM.Attr<int64_t>("activation").RESULT);
XLA_FFI_DEFINE_HANDLER_SYMBOL(decode_attention, DecodeAttention,
                              BIND.FLOATS.FLOATS.FLOATS.INTS.INTS.FLOATS.FLOATS.FLOATS.Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<bool>("interleaved")
                                  .RESULT.RESULT.RESULT);
