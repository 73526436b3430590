// The delta rule of one token per slot: the state of a delta net is read from memory once.
//
// B slots, H heads, k and v the sizes of a head's keys and values.

#pragma once

#include "vectors.h"

namespace {

// One head of one slot.
struct DeltaHead {
  int64_t key_size;
  int64_t value_size;
  float decay;
  float beta;
  float overlap;  // of query and key
  const float* query;
  const float* key;
  const float* value;
  float* state;  // [k, v]
  float* out;
};

// Vectors of columns that are computed at once: each has two sums, and reads one vector.
constexpr int kDeltaVectors = kTileRows == 6 ? 4 : 8;

// Columns of a head's values do not depend on each other. The first pass over a block of them adds
// up what the old state answers to the key and to the query, the second changes the state, which
// is in the processor's cache by then. See delta_net.delta_step for the formulas.
template <typename V, int N>
inline void DeltaColumns(const DeltaHead& head, int64_t column) {
  constexpr int64_t kStep = sizeof(V) / sizeof(float);
  float* state = head.state + column;
  V answer[N] = {};
  V read[N] = {};
  for (int64_t i = 0; i < head.key_size; ++i) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const V x = Load<V>(state + i * head.value_size + n * kStep);
      answer[n] += head.key[i] * x;
      read[n] += head.query[i] * x;
    }
  }

  V correction[N];
  for (int n = 0; n < N; ++n) {
    const V value = Load<V>(head.value + column + n * kStep);
    correction[n] = (value - head.decay * answer[n]) * head.beta;
    Store(head.out + column + n * kStep, head.decay * read[n] + head.overlap * correction[n]);
  }

  for (int64_t i = 0; i < head.key_size; ++i) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      float* at = state + i * head.value_size + n * kStep;
      Store(at, head.decay * Load<V>(at) + head.key[i] * correction[n]);
    }
  }
}

void ApplyDelta(const DeltaHead& head) {
  constexpr int64_t kStep = kDeltaVectors * kLanes<Wide>;
  int64_t column = 0;
  for (; column + kStep <= head.value_size; column += kStep) {
    DeltaColumns<Wide, kDeltaVectors>(head, column);
  }
  for (; column + kLanes<Wide> <= head.value_size; column += kLanes<Wide>) {
    DeltaColumns<Wide, 1>(head, column);
  }
  for (; column < head.value_size; ++column) DeltaColumns<float, 1>(head, column);
}

// Queries and keys [B, H, k], values [B, H, v], decays and betas [B, H], states [B, H, k, v], which
// are changed where they lie, and running [B]: slots that are not keep their state, and have zeros
// for outputs [B, H, v].
ffi::Error DeltaStep(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> queries,
                     ffi::Buffer<ffi::F32> keys, ffi::Buffer<ffi::F32> values,
                     ffi::Buffer<ffi::F32> decays, ffi::Buffer<ffi::F32> betas,
                     ffi::Buffer<ffi::F32>, ffi::Buffer<ffi::S32> running,
                     ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> states) {
  const int64_t heads = keys.dimensions()[1];
  const int64_t key_size = keys.dimensions()[2];
  const int64_t value_size = values.dimensions()[2];
  const int64_t count = keys.dimensions()[0] * heads;
  const float* all_queries = queries.typed_data();
  const float* all_keys = keys.typed_data();
  const float* all_values = values.typed_data();
  const float* all_decays = decays.typed_data();
  const float* all_betas = betas.typed_data();
  const int32_t* is_running = running.typed_data();
  float* all_out = out->typed_data();
  float* all_states = states->typed_data();

  Parallel(pool, count, [=](auto take) {
    for (int64_t number = take(); number >= 0; number = take()) {
      DeltaHead head;
      head.out = all_out + number * value_size;
      if (!is_running[number / heads]) {
        std::fill_n(head.out, value_size, 0.0f);
        continue;
      }
      head.key_size = key_size;
      head.value_size = value_size;
      head.decay = all_decays[number];
      head.beta = all_betas[number];
      head.query = all_queries + number * key_size;
      head.key = all_keys + number * key_size;
      head.value = all_values + number * value_size;
      head.state = all_states + number * key_size * value_size;
      head.overlap = 0;
      for (int64_t i = 0; i < key_size; ++i) head.overlap += head.query[i] * head.key[i];
      ApplyDelta(head);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
