// Attention of one token per slot. P pages of S positions, K key/value heads, G queries of each, h head size.

#pragma once

#include "cpu_vectors.h"

namespace {

struct Attention {
  int64_t slots, kv_heads, group, size, page, row_pages, rotated, window;
  float scale;
  bool interleaved;
  const float *qkv, *cos, *sin, *sinks;
  const int32_t *pages, *positions;
  float *keys, *values, *mixed;
};

// Vectors per query in a tile of G queries: each addition waits for the last, so there are as many sums as registers
// hold.
template <int G>
constexpr int kTileVectors = kTileRows == 6 && G == 4 ? 2 : 4;

// Fetches what N vectors cover.
template <int N>
inline void Prefetch(const float* x) {
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
    if (n * kLanes<Wide> % 16 == 0) __builtin_prefetch(x + n * kLanes<Wide>);
}

// Scores of G queries at N vectors of positions; fetches the same positions of `next` meanwhile.
template <int G, int N>
inline void ScoreTile(const float* queries, int64_t size, const float* keys, int64_t page, const float* next,
                      float* scores, int64_t span) {
  constexpr int kSets = G * N > 6 ? 1 : 2;  // of sums: each waits for its last addition
  Wide sum[kSets][G][N] = {};
  auto step = [&](int64_t d, int set) __attribute__((always_inline)) {
    Prefetch<N>(next + d * page);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Wide key = Load<Wide>(keys + d * page + n * kLanes<Wide>);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sum[set][g][n] += queries[g * size + d] * key;
    }
  };
  int64_t d = 0;
  for (; d + kSets <= size; d += kSets)
#pragma GCC unroll 2
    for (int set = 0; set < kSets; ++set) step(d + set, set);
  if (d < size) step(d, 0);
  for (int g = 0; g < G; ++g)
    for (int n = 0; n < N; ++n) {
      if (kSets == 2) sum[0][g][n] += sum[kSets - 1][g][n];
      Store(scores + g * span + n * kLanes<Wide>, sum[0][g][n]);
    }
}

// Adds `count` positions' values, weighted, to the mixes of G queries, for N vectors of a head's numbers.
template <int G, int N>
inline void MixTile(const float* weights, int64_t span, const float* values, int64_t size, int64_t count,
                    const float* next, float* mixed) {
  Wide sum[G][N];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[g][n] = Load<Wide>(mixed + g * size + n * kLanes<Wide>);
  for (int64_t s = 0; s < count; ++s) {
    Prefetch<N>(next + s * size);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Wide value = Load<Wide>(values + s * size + n * kLanes<Wide>);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sum[g][n] += weights[g * span + s] * value;
    }
  }
  for (int g = 0; g < G; ++g)
    for (int n = 0; n < N; ++n) Store(mixed + g * size + n * kLanes<Wide>, sum[g][n]);
}

template <int G>
void ScoreRange(const float* queries, int64_t size, const float* keys, int64_t page, const float* next, int64_t count,
                float* scores, int64_t span) {
  constexpr int kVectors = kTileVectors<G> * kLanes<Wide> > 32 ? 2 : kTileVectors<G>;  // in a page of 32
  int64_t s = 0;
  for (; s + kVectors * kLanes<Wide> <= count; s += kVectors * kLanes<Wide>)
    ScoreTile<G, kVectors>(queries, size, keys + s, page, next + s, scores + s, span);
  for (; s < count; s += kLanes<Wide>)
    ScoreTile<G, 1>(queries, size, keys + s, page, next + s, scores + s, span);
}

template <int G>
void MixRange(const float* weights, int64_t span, const float* values, int64_t size, int64_t count, const float* next,
              float* mixed) {
  constexpr int kVectors = kTileVectors<G>;
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

// Writes a slot's keys and values of heads [from, to) to its page and mixes the values that their queries see. Heads are
// neighbours in a page, so each page is read in one go.
void Attend(const Attention& a, int64_t slot, int64_t from, int64_t to) {
  const int64_t size = a.size, page = a.page, group = a.group, position = a.positions[slot];
  const int64_t first = a.window ? std::max<int64_t>(0, position - a.window + 1) : 0;
  const int64_t span = RoundUp(position + 1, kLanes<Wide>), last = position / page;
  const int64_t heads = to - from, head_queries = (group + 1) * size;  // the key is the last of them
  thread_local std::vector<float> scratch;
  scratch.resize(heads * (head_queries + group * span));
  float* all_queries = scratch.data();
  float* all_scores = all_queries + heads * head_queries;
  float* all_mixed = a.mixed + slot * a.kv_heads * group * size;
  std::fill(all_mixed + from * group * size, all_mixed + to * group * size, 0.0f);
  auto at = [&](int64_t index, int64_t head) {
    return (a.pages[slot * a.row_pages + index] * a.kv_heads + head) * size * page;
  };

  for (int64_t head = from; head < to; ++head) {
    float* queries = all_queries + (head - from) * head_queries;
    const float* own = a.qkv + head * (group + 2) * size * a.slots + slot;
    for (int64_t i = 0; i < head_queries; ++i) queries[i] = own[i * a.slots];
    for (int64_t g = 0; g <= group; ++g) Rotate(a, slot, queries + g * size);
    for (int64_t i = 0; i < group * size; ++i) queries[i] *= a.scale;
    float* key = a.keys + at(last, head) + position % page;
    float* value = a.values + at(last, head) + position % page * size;
    for (int64_t d = 0; d < size; ++d) key[d * page] = queries[group * size + d];
    for (int64_t d = 0; d < size; ++d) value[d] = own[(head_queries + d) * a.slots];
  }
  for (int64_t index = first / page; index <= last; ++index) {
    const int64_t begin = std::max(first / kLanes<Wide> * kLanes<Wide>, index * page);
    const int64_t end = std::min(span, (index + 1) * page);
    for (int64_t head = from; head < to; ++head) {
      const float* keys = a.keys + at(index, head) + begin % page;
      const float* next = head + 1 < to ? keys + size * page
                          : index < last ? a.keys + at(index + 1, from) : a.values + at(first / page, from);
      const float* queries = all_queries + (head - from) * head_queries;
      float* scores = all_scores + (head - from) * group * span + begin;
      ByQueries(group, [&](auto tile, int64_t g) {
        ScoreRange<tile.value>(queries + g * size, size, keys, page, next, end - begin, scores + g * span, span);
      });
    }
  }
  for (int64_t query = from * group; query < to * group; ++query)
    Softmax(all_scores + (query - from * group) * span, first, position + 1,
            a.sinks == nullptr ? nullptr : a.sinks + query);
  for (int64_t index = first / page; index <= last; ++index) {
    const int64_t begin = std::max(first, index * page), end = std::min(position + 1, (index + 1) * page);
    for (int64_t head = from; head < to; ++head) {
      const float* values = a.values + at(index, head) + begin % page * size;
      const float* next = head + 1 < to ? values + size * page : a.values + at(std::min(index + 1, last), from);
      const float* weights = all_scores + (head - from) * group * span + begin;
      ByQueries(group, [&](auto tile, int64_t g) {
        MixRange<tile.value>(weights + g * span, span, values, size, end - begin, next,
                             all_mixed + (head * group + g) * size);
      });
    }
  }
}

// Queries, keys and values [K, G + 2, h, B] before their rotation; cos and sin [r/2, B]; sinks [K, G] or empty. The cache
// (keys [P, K, h, S], values [P, K, S, h]) is changed where it lies.
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
  const int64_t heads = a.slots == 1 ? 1 : a.kv_heads, parts = a.kv_heads / heads;
  Parallel(pool, a.slots * parts, [=](auto take) {
    for (int64_t i; (i = take()) >= 0;) Attend(a, i / parts, i % parts * heads, (i % parts + 1) * heads);
  });
  const int64_t features = mixed->element_count() / a.slots;
  float* out = mixed->typed_data();
  for (int64_t d = 0; d < features; ++d)
    for (int64_t slot = 0; slot < a.slots; ++slot) out[d * a.slots + slot] = a.mixed[slot * features + d];
  return ffi::Error::Success();
}

}  // namespace
