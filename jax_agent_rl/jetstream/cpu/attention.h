// Attention of one token per slot.
//
// P pages of S positions, K key/value heads, G queries of each, h head size.

#pragma once

#include "vectors.h"

namespace {

struct Attention {
  int64_t slots;
  int64_t kv_heads;
  int64_t group;  // queries of a head
  int64_t size;   // of a head
  int64_t page;   // positions
  int64_t row_pages;
  int64_t rotated;  // pairs of a head's numbers
  int64_t window;   // 0: none
  bool writes;      // the tokens' keys and values, before it reads
  float scale;
  bool interleaved;
  const float* qkv;
  const float* cos;
  const float* sin;
  const float* sinks;  // null: none
  const int32_t* pages;
  const int32_t* positions;
  float* keys;
  float* values;
  float* mixed;
};

// Vectors per query in a tile of G queries: each addition waits for the last, so there are as many
// sums as registers hold.
template <int G>
constexpr int kTileVectors = kTileRows == 6 && G == 4 ? 2 : 4;

// Prefetches what N vectors cover.
template <int N>
inline void Prefetch(const float* x) {
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    if (n * kLanes<Wide> % 16 == 0) __builtin_prefetch(x + n * kLanes<Wide>);
  }
}

// Scores of G queries at N vectors of positions; prefetches the same positions of `next`.
template <int G, int N>
inline void ScoreTile(const float* queries, int64_t size, const float* keys, int64_t page,
                      const float* next, float* scores, int64_t span) {
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
  for (; d + kSets <= size; d += kSets) {
#pragma GCC unroll 2
    for (int set = 0; set < kSets; ++set) step(d + set, set);
  }
  if (d < size) step(d, 0);

  for (int g = 0; g < G; ++g) {
    for (int n = 0; n < N; ++n) {
      if (kSets == 2) sum[0][g][n] += sum[kSets - 1][g][n];
      Store(scores + g * span + n * kLanes<Wide>, sum[0][g][n]);
    }
  }
}

// Adds `count` positions' values, weighted, to the mixes of G queries, for N vectors of a head's
// numbers.
template <int G, int N>
inline void MixTile(const float* weights, int64_t span, const float* values, int64_t size,
                    int64_t count, const float* next, float* mixed) {
  Wide sum[G][N];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[g][n] = Load<Wide>(mixed + g * size + n * kLanes<Wide>);
  }

  for (int64_t s = 0; s < count; ++s) {
    Prefetch<N>(next + s * size);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Wide value = Load<Wide>(values + s * size + n * kLanes<Wide>);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sum[g][n] += weights[g * span + s] * value;
    }
  }

  for (int g = 0; g < G; ++g) {
    for (int n = 0; n < N; ++n) Store(mixed + g * size + n * kLanes<Wide>, sum[g][n]);
  }
}

// Scores of G queries at `count` positions of a page.
template <int G>
void ScoreRange(const float* queries, int64_t size, const float* keys, int64_t page,
                const float* next, int64_t count, float* scores, int64_t span) {
  // A page may have as few as 32 positions.
  constexpr int kVectors = kTileVectors<G> * kLanes<Wide> > 32 ? 2 : kTileVectors<G>;
  constexpr int64_t kStep = kVectors * kLanes<Wide>;
  int64_t s = 0;
  for (; s + kStep <= count; s += kStep) {
    ScoreTile<G, kVectors>(queries, size, keys + s, page, next + s, scores + s, span);
  }
  for (; s < count; s += kLanes<Wide>) {
    ScoreTile<G, 1>(queries, size, keys + s, page, next + s, scores + s, span);
  }
}

// Adds `count` positions' values, weighted, to the mixes of G queries.
template <int G>
void MixRange(const float* weights, int64_t span, const float* values, int64_t size, int64_t count,
              const float* next, float* mixed) {
  constexpr int kVectors = kTileVectors<G>;
  constexpr int64_t kStep = kVectors * kLanes<Wide>;
  int64_t d = 0;
  for (; d + kStep <= size; d += kStep) {
    MixTile<G, kVectors>(weights, span, values + d, size, count, next + d, mixed + d);
  }
  for (; d + kLanes<Wide> <= size; d += kLanes<Wide>) {
    MixTile<G, 1>(weights, span, values + d, size, count, next + d, mixed + d);
  }
  for (; d < size; ++d) {
    for (int64_t s = 0; s < count; ++s) {
      for (int g = 0; g < G; ++g) {
        mixed[g * size + d] += weights[g * span + s] * values[s * size + d];
      }
    }
  }
}

// Calls run(number of queries, first query) for tiles of at most 4 queries; the number is a type.
template <typename Run>
void ByQueries(int64_t group, Run run) {
  for (int64_t g = 0; g < group; g += 4) {
    switch (std::min<int64_t>(4, group - g)) {
      case 4: run(std::integral_constant<int, 4>(), g); break;
      case 3: run(std::integral_constant<int, 3>(), g); break;
      case 2: run(std::integral_constant<int, 2>(), g); break;
      default: run(std::integral_constant<int, 1>(), g);
    }
  }
}

// Rotates the first numbers of a head by the slot's angles.
void Rotate(const Attention& a, int64_t slot, float* head) {
  for (int64_t i = 0; i < a.rotated; ++i) {
    float& first = head[a.interleaved ? 2 * i : i];
    float& second = head[a.interleaved ? 2 * i + 1 : a.rotated + i];
    const float cos = a.cos[i * a.slots + slot];
    const float sin = a.sin[i * a.slots + slot];
    const float x = first;
    const float y = second;
    first = x * cos - y * sin;
    second = y * cos + x * sin;
  }
}

// Turns scores[first, end) into softmax weights; the other scores of their vectors do not count.
void Softmax(float* scores, int64_t first, int64_t end, const float* sink) {
  constexpr int64_t kStep = kLanes<Wide>;
  const int64_t begin = first / kStep * kStep;
  const int64_t stop = RoundUp(end, kStep);
  std::fill(scores + begin, scores + first, -std::numeric_limits<float>::infinity());
  std::fill(scores + end, scores + stop, -std::numeric_limits<float>::infinity());

  Wide largest = Load<Wide>(scores + begin);
  for (int64_t s = begin; s < stop; s += kStep) {
    const Wide x = Load<Wide>(scores + s);
    largest = x > largest ? x : largest;
  }
  float peak = sink == nullptr ? largest[0] : *sink;
  for (int lane = 0; lane < kStep; ++lane) peak = std::max(peak, largest[lane]);

  Wide sum = {};
  for (int64_t s = begin; s < stop; s += kStep) {
    const Wide x = Load<Wide>(scores + s) - peak;
    const Wide weight = x < Broadcast(-87.0f) ? Wide{} : Exp(x);
    sum += weight;
    Store(scores + s, weight);
  }

  const float sink_weight = sink == nullptr ? 0.0f : std::exp(*sink - peak);
  const float scale = 1.0f / (Sum(sum) + sink_weight);
  for (int64_t s = begin; s < stop; s += kStep) Store(scores + s, Load<Wide>(scores + s) * scale);
}

// Attention of heads [from, to) of `count` consecutive tokens of a context, in columns from `slot`
// on: writes their keys and values to its pages, unless they are there already, and mixes the
// values that their queries see. Heads are neighbours in a page, so each page is read in one go.
void Attend(const Attention& a, int64_t slot, int64_t count, int64_t from, int64_t to) {
  const int64_t size = a.size;
  const int64_t page = a.page;
  const int64_t group = a.group;
  const int64_t position = a.positions[slot];
  const int64_t heads = to - from;
  const int64_t queries_of_head = count * group;
  const int64_t features = a.kv_heads * group * size;

  // Positions [first, end) are seen by some token, by token t those from first_seen(t) on.
  auto first_seen = [&](int64_t t) {
    return a.window ? std::max<int64_t>(0, position + t - a.window + 1) : 0;
  };
  const int64_t first = first_seen(0);
  const int64_t end_seen = position + count;
  const int64_t first_page = first / page;
  const int64_t last_page = (end_seen - 1) / page;
  const int64_t first_vector = first / kLanes<Wide> * kLanes<Wide>;
  const int64_t span = RoundUp(end_seen, kLanes<Wide>);

  thread_local std::vector<float> scratch;
  thread_local std::vector<float> key;
  key.resize(size);
  scratch.resize(heads * queries_of_head * (2 * size + span));
  float* all_queries = scratch.data();
  float* all_scores = all_queries + heads * queries_of_head * size;
  // Of one token, this is where the result belongs; of several, it is copied there.
  float* all_mixed = count == 1 ? a.mixed + slot * features + from * group * size
                                : all_scores + heads * queries_of_head * span;
  std::fill_n(all_mixed, heads * queries_of_head * size, 0.0f);

  // Where a head's keys or values begin, in the page of that index of the context.
  auto at = [&](int64_t index, int64_t head) {
    return (a.pages[slot * a.row_pages + index] * a.kv_heads + head) * size * page;
  };

  // Queries, keys and values of the tokens.
  for (int64_t head = from; head < to; ++head) {
    for (int64_t t = 0; t < count; ++t) {
      float* queries = all_queries + ((head - from) * count + t) * group * size;
      const int64_t rows = a.writes ? group + 2 : group;
      const float* qkv = a.qkv + head * rows * size * a.slots + slot + t;
      for (int64_t i = 0; i < group * size; ++i) queries[i] = qkv[i * a.slots];
      for (int64_t g = 0; g < group; ++g) Rotate(a, slot + t, queries + g * size);
      for (int64_t i = 0; i < group * size; ++i) queries[i] *= a.scale;
      if (!a.writes) continue;

      for (int64_t i = 0; i < size; ++i) key[i] = qkv[(group * size + i) * a.slots];
      Rotate(a, slot + t, key.data());
      const int64_t begin = at((position + t) / page, head);
      const int64_t offset = (position + t) % page;
      for (int64_t d = 0; d < size; ++d) a.keys[begin + d * page + offset] = key[d];
      for (int64_t d = 0; d < size; ++d) {
        a.values[begin + offset * size + d] = qkv[((group + 1) * size + d) * a.slots];
      }
    }
  }

  // Scores, page by page.
  for (int64_t index = first_page; index <= last_page; ++index) {
    const int64_t begin = std::max(first_vector, index * page);
    const int64_t end = std::min(span, (index + 1) * page);
    for (int64_t head = from; head < to; ++head) {
      const float* keys = a.keys + at(index, head) + begin % page;
      const float* next;
      if (head + 1 < to) {
        next = keys + size * page;
      } else if (index < last_page) {
        next = a.keys + at(index + 1, from);
      } else {
        next = a.values + at(first_page, from);
      }
      const float* queries = all_queries + (head - from) * queries_of_head * size;
      float* scores = all_scores + (head - from) * queries_of_head * span + begin;
      ByQueries(queries_of_head, [&](auto tile, int64_t g) {
        ScoreRange<tile.value>(queries + g * size, size, keys, page, next, end - begin,
                               scores + g * span, span);
      });
    }
  }

  // Weights; 0 at positions that only other tokens see.
  for (int64_t i = 0; i < heads * queries_of_head; ++i) {
    const int64_t head = from + i / queries_of_head;
    const int64_t t = i % queries_of_head / group;
    const int64_t end = position + t + 1;
    float* scores = all_scores + i * span;
    const float* sink = a.sinks == nullptr ? nullptr : a.sinks + head * group + i % group;
    Softmax(scores, first_seen(t), end, sink);
    std::fill(scores + first_vector, scores + first_seen(t) / kLanes<Wide> * kLanes<Wide>, 0.0f);
    std::fill(scores + std::min(span, RoundUp(end, kLanes<Wide>)), scores + span, 0.0f);
  }

  // Values, page by page.
  for (int64_t index = first_page; index <= last_page; ++index) {
    const int64_t begin = std::max(first, index * page);
    const int64_t end = std::min(end_seen, (index + 1) * page);
    for (int64_t head = from; head < to; ++head) {
      const float* values = a.values + at(index, head) + begin % page * size;
      const float* next = head + 1 < to ? values + size * page
                                        : a.values + at(std::min(index + 1, last_page), from);
      const float* weights = all_scores + (head - from) * queries_of_head * span + begin;
      float* mixed = all_mixed + (head - from) * queries_of_head * size;
      ByQueries(queries_of_head, [&](auto tile, int64_t g) {
        MixRange<tile.value>(weights + g * span, span, values, size, end - begin, next,
                             mixed + g * size);
      });
    }
  }

  if (count == 1) return;
  for (int64_t head = from; head < to; ++head) {
    for (int64_t t = 0; t < count; ++t) {
      const float* mixed = all_mixed + ((head - from) * count + t) * group * size;
      std::copy_n(mixed, group * size, a.mixed + (slot + t) * features + head * group * size);
    }
  }
}

// Returns the first slot of each context, and the number of slots.
//
// Neighbouring slots with the same pages at consecutive positions are tokens of one context.
const std::vector<int64_t>& ContextBegins(const Attention& a) {
  thread_local std::vector<int64_t> begins;
  begins.clear();
  for (int64_t slot = 0; slot < a.slots; ++slot) {
    const int32_t* pages = a.pages + slot * a.row_pages;
    const bool follows = slot > 0 && a.positions[slot] == a.positions[slot - 1] + 1 &&
                         std::equal(pages, pages + a.row_pages, pages - a.row_pages);
    if (!follows) begins.push_back(slot);
  }
  begins.push_back(a.slots);
  return begins;
}

// Attends with all heads and slots, and writes the mixture [K, G, h, B] to `out`. `a` lacks nothing
// but where mixtures are collected.
void AttendAll(ffi::ThreadPool& pool, Attention a, int64_t count_mixed, float* out) {
  // By slot first: cores that wrote neighbouring slots of one feature would take its cache line
  // from each other.
  thread_local std::vector<float> by_slot;
  by_slot.resize(count_mixed);
  a.mixed = by_slot.data();

  // The heads of a context are divided only if there is a single context.
  const std::vector<int64_t>& begins = ContextBegins(a);
  const int64_t contexts = begins.size() - 1;
  const int64_t heads = contexts == 1 ? 1 : a.kv_heads;
  const int64_t parts = a.kv_heads / heads;
  const int64_t* begin = begins.data();
  Parallel(pool, contexts * parts, [=](auto take) {
    for (int64_t number = take(); number >= 0; number = take()) {
      const int64_t context = number / parts;
      const int64_t part = number % parts;
      const int64_t slot = begin[context];
      const int64_t count = begin[context + 1] - slot;
      Attend(a, slot, count, part * heads, (part + 1) * heads);
    }
  });

  const int64_t features = count_mixed / a.slots;
  for (int64_t d = 0; d < features; ++d) {
    for (int64_t slot = 0; slot < a.slots; ++slot) {
      out[d * a.slots + slot] = a.mixed[slot * features + d];
    }
  }
}

// What DecodeAttention and ReadAttention have in common.
Attention MakeAttention(const ffi::Buffer<ffi::F32>& qkv, const ffi::Buffer<ffi::S32>& pages,
                        const ffi::Buffer<ffi::S32>& positions, const ffi::Buffer<ffi::F32>& cos,
                        const ffi::Buffer<ffi::F32>& sin, const ffi::Buffer<ffi::F32>& sinks,
                        float scale, int64_t window, bool interleaved, bool writes) {
  Attention a;
  a.slots = qkv.dimensions()[3];
  a.kv_heads = qkv.dimensions()[0];
  a.group = qkv.dimensions()[1] - (writes ? 2 : 0);
  a.size = qkv.dimensions()[2];
  a.row_pages = pages.dimensions()[1];
  a.rotated = cos.dimensions()[0];
  a.window = window;
  a.writes = writes;
  a.scale = scale;
  a.interleaved = interleaved;
  a.qkv = qkv.typed_data();
  a.cos = cos.typed_data();
  a.sin = sin.typed_data();
  a.sinks = DataOrNull(sinks);
  a.pages = pages.typed_data();
  a.positions = positions.typed_data();
  return a;
}

// Queries, keys and values [K, G + 2, h, B] before their rotation; cos and sin [r/2, B]; sinks
// [K, G] or empty. The cache (keys [P, K, h, S], values [P, K, S, h]) is changed where it lies.
// Tokens of one context see those before them, see ContextBegins.
ffi::Error DecodeAttention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> qkv, ffi::Buffer<ffi::F32>,
                           ffi::Buffer<ffi::F32>, ffi::Buffer<ffi::S32> pages,
                           ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::F32> cos,
                           ffi::Buffer<ffi::F32> sin, ffi::Buffer<ffi::F32> sinks, float scale,
                           int64_t window, bool interleaved, ffi::ResultBuffer<ffi::F32> mixed,
                           ffi::ResultBuffer<ffi::F32> keys, ffi::ResultBuffer<ffi::F32> values) {
  Attention a =
      MakeAttention(qkv, pages, positions, cos, sin, sinks, scale, window, interleaved, true);
  a.page = keys->dimensions()[3];
  a.keys = keys->typed_data();
  a.values = values->typed_data();
  AttendAll(pool, a, mixed->element_count(), mixed->typed_data());
  return ffi::Error::Success();
}

// The same for queries alone, [K, G, h, B], of tokens whose keys and values the cache has already.
ffi::Error ReadAttention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> queries,
                         ffi::Buffer<ffi::F32> keys, ffi::Buffer<ffi::F32> values,
                         ffi::Buffer<ffi::S32> pages, ffi::Buffer<ffi::S32> positions,
                         ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                         ffi::Buffer<ffi::F32> sinks, float scale, int64_t window,
                         bool interleaved, ffi::ResultBuffer<ffi::F32> mixed) {
  Attention a =
      MakeAttention(queries, pages, positions, cos, sin, sinks, scale, window, interleaved, false);
  a.page = keys.dimensions()[3];
  a.keys = keys.typed_data();
  a.values = values.typed_data();
  AttendAll(pool, a, mixed->element_count(), mixed->typed_data());
  return ffi::Error::Success();
}

}  // namespace
