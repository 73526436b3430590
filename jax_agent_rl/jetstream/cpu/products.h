// Products of a matrix [out, in] with the activations of B slots.
//
// A tile is a few rows times a few columns, over `size` of their `in` numbers; its sums stay in
// registers. How the columns are laid out depends on their number:
//
//   up to 8, 16 with AVX-512   one behind the other, [B, in]. Vectors run along rows and columns,
//                              so that one load of weights serves all columns.
//   more                       panels of two vectors, [B / 2 lanes, in, 2 lanes]. Each weight is
//                              broadcast.
//
// Each weight is read from memory once. While a tile computes, it prefetches the next tile's rows
// into the second cache, which can wait for more of them at a time than the first one.

#pragma once

#include "vectors.h"

namespace {

constexpr int kRows = 24;  // rows a thread takes at once, a multiple of every tile's

// Numbers of a panel that stay in the first cache with the rows of a tile.
constexpr int64_t kPanelDepth = 256;
constexpr int64_t kPanel = 2 * kLanes<Wide>;
// As many columns lie one behind the other; more are a panel.
constexpr int64_t kVectorColumns = kLanes<Wide>;
constexpr int kCacheLine = 16;  // in numbers

struct Tile {
  const float* rows;
  const float* x;
  const float* next;  // rows of the next tile
  int64_t in;
  int64_t size;
  int64_t x_stride;
  float* out;
  int64_t stride;
  bool first;  // or a panel's sums are added to `out`
};

// The last, shorter vector of a row, with zeros behind its `count` numbers.
inline Wide LoadPart(const float* from, int64_t count) {
  Wide x = {};
  std::memcpy(&x, from, count * sizeof(float));
  return x;
}

// R rows times C columns that lie one behind the other. It is pass `p` of P over the same rows and
// prefetches that part of the next rows, from the first byte to the last: hardware recognizes this
// order.
template <int R, int C, int P>
inline void VectorTile(const Tile& t, int p) {
  constexpr int kStep = kLanes<Wide>;
  const float* next = t.next + p * t.size * R / P;
  Wide sum[(R * C + 3) / 4 * 4] = {};
  int64_t k = 0;

  // Adds the products of a vector of each row; load(r) returns the one of row r.
  auto step = [&](auto load) __attribute__((always_inline)) {
    Wide weight[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) weight[r] = load(r);
#pragma GCC unroll 12
    for (int c = 0; c < C; ++c) {
      const Wide column = Load<Wide>(t.x + c * t.x_stride + k);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) sum[r * C + c] += weight[r] * column;
    }
  };
  auto load_vector = [&](int r) { return Load<Wide>(t.rows + r * t.in + k); };
  auto load_last = [&](int r) { return LoadPart(t.rows + r * t.in + k, t.size - k); };

  while (k + kCacheLine <= t.size) {
    if (C > 1) {  // one column is so little work that the hardware's own prefetches suffice
#pragma GCC unroll 12
      for (int r = 0; r < (R + P - 1) / P; ++r) {
        __builtin_prefetch(next + k * R / P + kCacheLine * r, 0, 2);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < kCacheLine; j += kStep) {
      step(load_vector);
      k += kStep;
    }
  }
  for (; k + kStep <= t.size; k += kStep) step(load_vector);
  if (k < t.size) step(load_last);  // columns are padded with zeros, rows are not

#pragma GCC unroll 12
  for (int i = 0; i < R * C; i += 4) {
    float* out = t.out + (C == 1 ? i : i / C * t.stride + i % C);
    const Float4 sums = Sums(sum + i);
    std::memcpy(out, &sums, std::min(R * C, 4) * sizeof(float));
  }
}

// R rows times N vectors of columns.
template <int R, int N>
inline void PanelTile(const Tile& t) {
  Wide sum[R][N] = {};
  auto step = [&](int64_t k) __attribute__((always_inline)) {
    Wide column[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      column[n] = Load<Wide>(t.x + k * N * kLanes<Wide> + n * kLanes<Wide>);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const float weight = t.rows[r * t.in + k];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[r][n] += weight * column[n];
    }
  };

  int64_t k = 0;
  for (; k + kCacheLine <= t.size; k += kCacheLine) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) __builtin_prefetch(t.next + r * t.in + k, 0, 2);
#pragma GCC unroll 4
    for (int j = 0; j < kCacheLine; ++j) step(k + j);
  }
  for (; k < t.size; ++k) step(k);

#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* out = t.out + r * t.stride + n * kLanes<Wide>;
      Store(out, t.first ? sum[r][n] : sum[r][n] + Load<Wide>(out));
    }
  }
}

// Rows of a matrix and the columns they are multiplied with.
struct RowBlock {
  const float* rows;
  int count;
  const float* x;
  int64_t in;
  float* out;
  int64_t stride;  // of `out`
};

// Calls run(height, tile) for tiles of R rows, and of one row at the end, over `depth` numbers at a
// time; those of number k + 1 of the columns lie `x_step` behind those of number k.
template <int R, typename Run>
inline void ByTiles(const RowBlock& block, int64_t x_step, int64_t depth, Run run) {
  const int64_t in = block.in;
  for (int64_t k = 0; k < in; k += depth) {
    const int64_t size = std::min(depth, in - k);
    int height;
    for (int r = 0; r < block.count; r += height) {
      height = r + R <= block.count ? R : 1;
      const float* next;
      if (r + height < block.count) {
        next = block.rows + (r + height) * in + k;
      } else if (k + depth < in) {
        next = block.rows + k + depth;
      } else {
        next = block.rows + block.count * in;  // the next block
      }
      Tile tile;
      tile.rows = block.rows + r * in + k;
      tile.x = block.x + k * x_step;
      tile.next = next;
      tile.in = in;
      tile.size = size;
      tile.x_stride = 0;
      tile.out = block.out + r * block.stride;
      tile.stride = block.stride;
      tile.first = k == 0;
      run(height, tile);
    }
  }
}

int64_t PaddedColumns(int64_t columns) {
  if (columns == 1) return 1;
  if (columns <= 4) return 4;
  if (columns <= 8) return 8;
  return RoundUp(columns, kLanes<Wide>);
}

// Numbers from one column to the next: not a multiple of 4 KiB, at which they would take each
// other's place in the cache.
int64_t ColumnStride(int64_t in) { return RoundUp(in, kLanes<Wide>) + 16; }

template <int R, int C, int P>
void RowsByVectors(const RowBlock& block) {
  const int64_t x_stride = ColumnStride(block.in);
  ByTiles<R>(block, 1, block.in, [&](int height, Tile tile) {
    tile.x_stride = x_stride;
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      if (height == R) {
        VectorTile<R, C, P>(tile, p);
      } else {
        VectorTile<1, C, 1>(tile, p);
      }
      tile.x += C * tile.x_stride;
      tile.out += C;
    }
  });
}

template <int N>
void RowsByPanel(const RowBlock& block) {
  constexpr int R = N == 2 ? kTileRows : 12;
  ByTiles<R>(block, N * kLanes<Wide>, kPanelDepth, [&](int height, const Tile& tile) {
    if (height == R) {
      PanelTile<R, N>(tile);
    } else {
      PanelTile<1, N>(tile);
    }
  });
}

// out[r, :stride] = rows[r, :] . x for up to kRows rows and what Input made of the columns.
void RowsByInput(const RowBlock& block) {
  const int64_t stride = block.stride;
  if (stride == 1) return RowsByVectors<4, 1, 1>(block);
  if (stride == 4) return RowsByVectors<3, 4, 1>(block);
  if (stride == 8) return RowsByVectors<3, kTileColumns, 8 / kTileColumns>(block);
  if (stride == kVectorColumns) {
    return RowsByVectors<3, kTileColumns, kVectorColumns / kTileColumns>(block);
  }

  RowBlock panel = block;
  int64_t column = 0;
  for (; column + kPanel <= stride; column += kPanel) {
    panel.x = block.x + column * block.in;
    panel.out = block.out + column;
    RowsByPanel<2>(panel);
  }
  if (column < stride) {
    panel.x = block.x + column * block.in;
    panel.out = block.out + column;
    RowsByPanel<1>(panel);
  }
}

struct Columns {
  const float* x;
  const float* norm;  // null: none
  int64_t in;
  int64_t count;
  int64_t stride;  // PaddedColumns(count)
  float eps;
  float offset;
};

// Input for B columns, or for any number of them if B is 0.
template <int B>
const float* InputOf(const Columns& c) {
  thread_local std::vector<float> scratch;
  thread_local std::vector<float> many_scales;
  const int64_t in = c.in;
  const int64_t count = B ? B : c.count;
  const int64_t column_stride = ColumnStride(in);
  scratch.resize(c.stride * column_stride);
  if (count < c.stride || in % kLanes<Wide> != 0) {
    std::fill(scratch.begin(), scratch.end(), 0.0f);
  }
  float* __restrict to = scratch.data();

  // The factor of each column: 1 / sqrt(mean of squares + eps).
  float few_scales[B ? B : 1] = {};
  many_scales.assign(B ? 0 : count, 0.0f);
  float* scales = B ? few_scales : many_scales.data();
  if (c.norm != nullptr) {
    for (int64_t k = 0; k < in; ++k) {
      for (int64_t b = 0; b < count; ++b) {
        scales[b] += c.x[k * count + b] * c.x[k * count + b];
      }
    }
  }
  for (int64_t b = 0; b < count; ++b) {
    scales[b] = c.norm == nullptr ? 1.0f : 1.0f / std::sqrt(scales[b] / in + c.eps);
  }

  for (int64_t k = 0; k < in; ++k) {
    const float weight = c.norm == nullptr ? 1.0f : c.norm[k] + c.offset;
    const float* from = c.x + k * count;
    if (c.stride <= kVectorColumns) {
      for (int64_t b = 0; b < count; ++b) {
        to[b * column_stride + k] = from[b] * (scales[b] * weight);
      }
    } else {
      for (int64_t panel = 0; panel < count; panel += kPanel) {
        const int64_t width = std::min(kPanel, c.stride - panel);
        const int64_t used_width = std::min(width, count - panel);
        float* target = to + panel * in + k * width;
        for (int64_t b = 0; b < used_width; ++b) {
          target[b] = from[panel + b] * (scales[panel + b] * weight);
        }
      }
    }
  }
  return to;
}

// Returns x [in, B] as RowsByInput wants it, after an RMS norm over `in` unless `norm` [in] is
// null.
const float* Input(const Columns& c) {
  if (c.count == 1 && c.norm == nullptr && c.in % kLanes<Wide> == 0) return c.x;
  switch (c.count) {  // the engine's numbers of slots: their loops over columns become vectors
    case 1: return InputOf<1>(c);
    case 2: return InputOf<2>(c);
    case 8: return InputOf<8>(c);
    case 16: return InputOf<16>(c);
    case 32: return InputOf<32>(c);
    default: return InputOf<0>(c);
  }
}

// Calls finish(row, count, block, size) for blocks of rows of weight [rows, in] . columns. With
// `second`, the products of the same rows of that matrix follow `size` floats behind `block`.
template <typename Finish>
void ByBlocks(ffi::ThreadPool& pool, const float* first, const float* second, int64_t rows,
              const Columns& columns, Finish finish) {
  Parallel(pool, DivideUp(rows, kRows), [=](auto take) {
    thread_local std::vector<float> scratch;
    const int64_t in = columns.in;
    const int64_t stride = columns.stride;
    const int64_t size = RoundUp(kRows * stride, kLanes<Wide>);
    scratch.resize(2 * size);
    float* block = scratch.data();
    const float* x = nullptr;  // each thread makes it, in its own cache

    for (int64_t number = take(); number >= 0; number = take()) {
      if (x == nullptr) x = Input(columns);
      const int64_t row = number * kRows;
      const int count = std::min<int64_t>(kRows, rows - row);
      RowsByInput({first + row * in, count, x, in, block, stride});
      if (second != nullptr) {
        RowsByInput({second + row * in, count, x, in, block + size, stride});
      }
      finish(row, count, block, size);
    }
  });
}

Columns MakeColumns(const ffi::Buffer<ffi::F32>& x, const ffi::Buffer<ffi::F32>& norm, float eps,
                    float offset) {
  Columns columns;
  columns.x = x.typed_data();
  columns.norm = DataOrNull(norm);
  columns.in = x.dimensions()[0];
  columns.count = x.dimensions()[1];
  columns.stride = PaddedColumns(columns.count);
  columns.eps = eps;
  columns.offset = offset;
  return columns;
}

void CopyRows(const float* block, int count, const Columns& columns, float* out) {
  for (int r = 0; r < count; ++r) {
    std::copy_n(block + r * columns.stride, columns.count, out + r * columns.count);
  }
}

// weight [..., in] . norm(x) [in, B]; an empty norm is left out.
ffi::Error Product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> weight, ffi::Buffer<ffi::F32> x,
                   ffi::Buffer<ffi::F32> norm, float eps, float offset,
                   ffi::ResultBuffer<ffi::F32> result) {
  const Columns columns = MakeColumns(x, norm, eps, offset);
  const int64_t rows = weight.element_count() / columns.in;
  float* out = result->typed_data();
  ByBlocks(pool, weight.typed_data(), nullptr, rows, columns,
           [=](int64_t row, int count, const float* block, int64_t) {
             CopyRows(block, count, columns, out + row * columns.count);
           });
  return ffi::Error::Success();
}

// The columns of one group, and its matrix.
struct Group {
  const float* weight;
  std::vector<int64_t> members;
  std::vector<float> x;
};

// Each column times the matrix of its group: out[:, b] = weight[group[b] - 1] . x[:, b], and 0
// where group[b] is 0. Only matrices of groups that have columns are read.
ffi::Error GroupedProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> weight,
                          ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> group,
                          ffi::ResultBuffer<ffi::F32> result) {
  const int64_t in = x.dimensions()[0];
  const int64_t count = x.dimensions()[1];
  const int64_t num_groups = weight.dimensions()[0];
  const int64_t rows = weight.element_count() / num_groups / in;

  auto groups = std::make_shared<std::vector<Group>>();  // shared: see Parallel
  for (int64_t g = 0; g < num_groups; ++g) {
    std::vector<int64_t> members;
    for (int64_t b = 0; b < count; ++b) {
      if (group.typed_data()[b] == g + 1) members.push_back(b);
    }
    if (members.empty()) continue;

    std::vector<float> columns(in * members.size());
    float* to = columns.data();
    for (int64_t k = 0; k < in; ++k) {
      for (int64_t b : members) *to++ = x.typed_data()[k * count + b];
    }
    const float* weight_of_group = weight.typed_data() + g * rows * in;
    groups->push_back({weight_of_group, std::move(members), std::move(columns)});
  }

  float* out = result->typed_data();
  std::fill_n(out, rows * count, 0.0f);
  const int64_t blocks = DivideUp(rows, kRows);
  Parallel(pool, groups->size() * blocks, [=](auto take) {
    thread_local std::vector<float> block;
    const float* input = nullptr;  // of group number `current`
    int64_t current = -1;
    for (int64_t number = take(); number >= 0; number = take()) {
      const Group& g = (*groups)[number / blocks];
      const int64_t row = number % blocks * kRows;
      const int height = std::min<int64_t>(kRows, rows - row);
      const int64_t width = g.members.size();
      const int64_t stride = PaddedColumns(width);
      if (current != number / blocks) {
        input = Input({g.x.data(), nullptr, in, width, stride, 0.0f, 0.0f});
        current = number / blocks;
      }
      block.resize(kRows * stride);
      RowsByInput({g.weight + row * in, height, input, in, block.data(), stride});
      for (int r = 0; r < height; ++r) {
        for (int64_t c = 0; c < width; ++c) {
          out[(row + r) * count + g.members[c]] = block[r * stride + c];
        }
      }
    }
  });
  return ffi::Error::Success();
}

// In the order of ACTIVATIONS in models/layers.py.
enum Activation : int64_t { kSilu, kGeluTanh, kClampedSwiglu };

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
ffi::Error GatedProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> weight,
                        ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> norm, float eps,
                        float offset, int64_t activation, ffi::ResultBuffer<ffi::F32> result) {
  const Columns columns = MakeColumns(x, norm, eps, offset);
  const int64_t rows = weight.element_count() / columns.in / 2;
  const float* gates = weight.typed_data();
  const float* ups = gates + rows * columns.in;
  float* out = result->typed_data();
  ByBlocks(pool, gates, ups, rows, columns, [=](int64_t row, int count, float* gate, int64_t size) {
    const float* up = gate + size;
    for (int64_t i = 0; i < size; i += kLanes<Wide>) {
      Store(gate + i, Gate(activation, Load<Wide>(gate + i), Load<Wide>(up + i)));
    }
    CopyRows(gate, count, columns, out + row * columns.count);
  });
  return ffi::Error::Success();
}

}  // namespace
