// Products of a matrix [out, in] with the activations of B slots.
//
// A tile is a few rows times a few columns, over `size` of their `in` numbers: the sums stay in registers. Up to 8
// columns, 16 with AVX-512, are copied one behind the other, [B, in], and vectors run along rows and columns, so that one
// load of weights serves all columns. More go into panels of two vectors, [B / 2 lanes, in, 2 lanes], and each weight is
// broadcast. Each weight is read from memory once: while a tile computes, it fetches the next one's rows, into the second
// cache, which can wait for more of them at a time than the first one.

#pragma once

#include "vectors.h"

namespace {

constexpr int kRows = 24;  // rows a thread takes at once, a multiple of every tile's

struct Tile {
  const float *rows, *x, *next;
  int64_t in, size, x_stride;
  float* out;
  int64_t stride;
  bool first;  // or a panel's sums are added to `out`
};

constexpr int64_t kPanelDepth = 256;  // numbers of a panel that stay in the first cache with the rows of a tile
constexpr int64_t kPanel = 2 * kLanes<Wide>;
constexpr int64_t kVectorColumns = kLanes<Wide>;  // as many lie one behind the other; more are a panel

// R rows times C columns that lie one behind the other; pass p of P fetches that part of the next rows, from the first
// byte to the last: the order that hardware recognizes.
template <int R, int C, int P>
inline void VectorTile(const Tile& t, int p) {
  constexpr int kStep = kLanes<Wide>;
  const float* ahead = t.next + p * t.size * R / P;
  Wide sum[(R * C + 3) / 4 * 4] = {};
  int64_t k = 0;
  auto step = [&](auto row) __attribute__((always_inline)) {
    Wide weight[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) weight[r] = row(r);
#pragma GCC unroll 12
    for (int c = 0; c < C; ++c) {
      const Wide column = Load<Wide>(t.x + c * t.x_stride + k);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) sum[r * C + c] += weight[r] * column;
    }
  };
  for (; k + 16 <= t.size;) {
    if (C > 1)  // one column is so little work that the hardware's own prefetches suffice
#pragma GCC unroll 12
      for (int r = 0; r < (R + P - 1) / P; ++r) __builtin_prefetch(ahead + k * R / P + 16 * r, 0, 2);
#pragma GCC unroll 4
    for (int j = 0; j < 16; j += kStep, k += kStep) step([&](int r) { return Load<Wide>(t.rows + r * t.in + k); });
  }
  for (; k + kStep <= t.size; k += kStep) step([&](int r) { return Load<Wide>(t.rows + r * t.in + k); });
  if (k < t.size)  // the columns are padded with zeros, rows are not
    step([&](int r) {
      Wide rest = {};
      std::memcpy(&rest, t.rows + r * t.in + k, (t.size - k) * sizeof(float));
      return rest;
    });
#pragma GCC unroll 12
  for (int i = 0; i < R * C; i += 4) {
    float* out = t.out + (C == 1 ? i : i / C * t.stride + i % C);
    const Float4 all = Sums(sum + i);
    std::memcpy(out, &all, std::min(R * C, 4) * sizeof(float));
  }
}

// R rows times N vectors of columns.
template <int R, int N>
inline void PanelTile(const Tile& t) {
  Wide sum[R][N] = {};
  auto step = [&](int64_t k) __attribute__((always_inline)) {
    Wide column[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) column[n] = Load<Wide>(t.x + k * N * kLanes<Wide> + n * kLanes<Wide>);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const float weight = t.rows[r * t.in + k];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[r][n] += weight * column[n];
    }
  };
  int64_t k = 0;
  for (; k + 16 <= t.size; k += 16) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) __builtin_prefetch(t.next + r * t.in + k, 0, 2);
#pragma GCC unroll 4
    for (int j = 0; j < 16; ++j) step(k + j);
  }
  for (; k < t.size; ++k) step(k);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* out = t.out + r * t.stride + n * kLanes<Wide>;
      Store(out, t.first ? sum[r][n] : sum[r][n] + Load<Wide>(out));
    }
}

// Calls tile(rows of it, tile) for tiles of R rows, over `depth` numbers at a time.
template <int R, typename Run>
inline void ByTiles(const float* rows, int count, const float* x, int64_t x_step, int64_t depth, int64_t in, float* out,
                    int64_t stride, Run run) {
  for (int64_t k = 0; k < in; k += depth) {
    const int64_t size = std::min(depth, in - k);
    for (int r = 0; r < count;) {
      const int height = r + R <= count ? R : 1, after = r + height;
      const float* next = after < count ? rows + after * in + k : k + depth < in ? rows + k + depth : rows + count * in;
      run(height, Tile{rows + r * in + k, x + k * x_step, next, in, size, 0, out + r * stride, stride, k == 0});
      r = after;
    }
  }
}

int64_t PaddedColumns(int64_t columns) {
  if (columns == 1) return 1;
  return RoundUp(columns, columns <= 4 ? 4 : columns <= 8 ? 8 : kLanes<Wide>);
}

int64_t ColumnStride(int64_t in) { return RoundUp(in, kLanes<Wide>) + 16; }  // not a multiple of 4 KiB

template <int R, int C, int P>
void RowsByVectors(const float* rows, int count, const float* x, int64_t in, int64_t stride, float* out) {
  ByTiles<R>(rows, count, x, 1, in, in, out, stride, [&](int height, Tile tile) {
    tile.x_stride = ColumnStride(in);
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      if (height == R) VectorTile<R, C, P>(tile, p);
      else VectorTile<1, C, 1>(tile, p);
      tile.x += C * tile.x_stride;
      tile.out += C;
    }
  });
}

template <int N>
void RowsByPanel(const float* rows, int count, const float* x, int64_t in, int64_t stride, float* out) {
  constexpr int R = N == 2 ? kTileRows : 12;
  ByTiles<R>(rows, count, x, N * kLanes<Wide>, kPanelDepth, in, out, stride, [&](int height, const Tile& tile) {
    if (height == R) PanelTile<R, N>(tile);
    else PanelTile<1, N>(tile);
  });
}

// out[r, :stride] = rows[r, :] . x for up to kRows rows and what Input made of the columns.
void RowsByInput(const float* rows, int count, const float* x, int64_t in, int64_t stride, float* out) {
  if (stride == 1) return RowsByVectors<4, 1, 1>(rows, count, x, in, stride, out);
  if (stride == 4) return RowsByVectors<3, 4, 1>(rows, count, x, in, stride, out);
  if (stride == 8) return RowsByVectors<3, kTileColumns, 8 / kTileColumns>(rows, count, x, in, stride, out);
  if (stride == kVectorColumns)
    return RowsByVectors<3, kTileColumns, kVectorColumns / kTileColumns>(rows, count, x, in, stride, out);
  int64_t column = 0;
  for (; column + kPanel <= stride; column += kPanel)
    RowsByPanel<2>(rows, count, x + column * in, in, stride, out + column);
  if (column < stride) RowsByPanel<1>(rows, count, x + column * in, in, stride, out + column);
}

struct Columns {
  const float *x, *norm;
  int64_t in, count, stride;  // as PaddedColumns wants it
  float eps, offset;
};

// Input for B columns, or for any number of them if B is 0.
template <int B>
const float* InputOf(const Columns& c) {
  thread_local std::vector<float> scratch, scale;
  const int64_t in = c.in, count = B ? B : c.count, column_stride = ColumnStride(in);
  scratch.resize(c.stride * column_stride);
  if (count < c.stride || in % kLanes<Wide> != 0) std::fill(scratch.begin(), scratch.end(), 0.0f);
  float* __restrict to = scratch.data();
  float few[B ? B : 1] = {};
  scale.assign(B ? 0 : count, 0.0f);
  float* scales = B ? few : scale.data();
  for (int64_t k = 0; c.norm != nullptr && k < in; ++k)
    for (int64_t b = 0; b < count; ++b) scales[b] += c.x[k * count + b] * c.x[k * count + b];
  for (int64_t b = 0; b < count; ++b) scales[b] = c.norm == nullptr ? 1.0f : 1.0f / std::sqrt(scales[b] / in + c.eps);
  for (int64_t k = 0; k < in; ++k) {
    const float weight = c.norm == nullptr ? 1.0f : c.norm[k] + c.offset;
    const float* from = c.x + k * count;
    if (c.stride <= kVectorColumns) {
      for (int64_t b = 0; b < count; ++b) to[b * column_stride + k] = from[b] * (scales[b] * weight);
    } else {
      for (int64_t panel = 0; panel < count; panel += kPanel) {
        const int64_t width = std::min(kPanel, c.stride - panel), used = std::min(width, count - panel);
        float* target = to + panel * in + k * width;
        for (int64_t b = 0; b < used; ++b) target[b] = from[panel + b] * (scales[panel + b] * weight);
      }
    }
  }
  return to;
}

// Returns x [in, B] as RowsByInput wants it, after an RMS norm over `in` unless `norm` [in] is null.
const float* Input(const Columns& c) {
  if (c.count == 1 && c.norm == nullptr && c.in % kLanes<Wide> == 0) return c.x;
  switch (c.count) {  // those of the engine's programs: their loops over columns become vectors
    case 1: return InputOf<1>(c);
    case 2: return InputOf<2>(c);
    case 8: return InputOf<8>(c);
    case 16: return InputOf<16>(c);
    case 32: return InputOf<32>(c);
    default: return InputOf<0>(c);
  }
}

// Calls finish(row, count, block, stride) for blocks of rows of weight [rows, in] . columns; with `second` the same rows
// of that matrix follow in `block`, RoundUp(kRows * stride) floats later.
template <typename Finish>
void ByBlocks(ffi::ThreadPool& pool, const float* first, const float* second, int64_t rows, const Columns& columns,
              Finish finish) {
  Parallel(pool, (rows + kRows - 1) / kRows, [=](auto take) {
    thread_local std::vector<float> scratch;
    const int64_t in = columns.in, stride = columns.stride, size = RoundUp(kRows * stride, kLanes<Wide>);
    const float* x = nullptr;
    scratch.resize(2 * size);
    float* block = scratch.data();
    for (int64_t i; (i = take()) >= 0;) {
      if (x == nullptr) x = Input(columns);  // its own, in its own cache
      const int64_t row = i * kRows;
      const int count = std::min<int64_t>(kRows, rows - row);
      RowsByInput(first + row * in, count, x, in, stride, block);
      if (second != nullptr) RowsByInput(second + row * in, count, x, in, stride, block + size);
      finish(row, count, block, size);
    }
  });
}

Columns MakeColumns(const ffi::Buffer<ffi::F32>& x, const ffi::Buffer<ffi::F32>& norm, float eps, float offset) {
  const int64_t in = x.dimensions()[0], count = x.dimensions()[1];
  return {x.typed_data(), DataOrNull(norm), in, count, PaddedColumns(count), eps, offset};
}

void CopyRows(const float* block, int count, const Columns& columns, float* out) {
  for (int r = 0; r < count; ++r) std::copy_n(block + r * columns.stride, columns.count, out + r * columns.count);
}

// weight [..., in] . norm(x) [in, B]; an empty norm is left out.
ffi::Error Product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> weight, ffi::Buffer<ffi::F32> x,
                   ffi::Buffer<ffi::F32> norm, float eps, float offset, ffi::ResultBuffer<ffi::F32> result) {
  const Columns columns = MakeColumns(x, norm, eps, offset);
  float* out = result->typed_data();
  ByBlocks(pool, weight.typed_data(), nullptr, weight.element_count() / columns.in, columns,
           [=](int64_t row, int count, const float* block, int64_t) {
             CopyRows(block, count, columns, out + row * columns.count);
           });
  return ffi::Error::Success();
}

// Each column times the matrix of its group: out[:, b] = weight[group[b] - 1] . x[:, b], and 0 where group[b] is 0. Only
// matrices of groups that have columns are read.
ffi::Error GroupedProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> weight, ffi::Buffer<ffi::F32> x,
                          ffi::Buffer<ffi::S32> group, ffi::ResultBuffer<ffi::F32> result) {
  struct Group {
    const float* weight;
    std::vector<int64_t> members;
    std::vector<float> x;  // their columns
  };
  const int64_t in = x.dimensions()[0], count = x.dimensions()[1];
  const int64_t most = weight.dimensions()[0], rows = weight.element_count() / most / in;
  auto groups = std::make_shared<std::vector<Group>>();  // shared: a thread may start when all is done
  for (int64_t g = 0; g < most; ++g) {
    Group made{weight.typed_data() + g * rows * in, {}, {}};
    for (int64_t b = 0; b < count; ++b)
      if (group.typed_data()[b] == g + 1) made.members.push_back(b);
    if (made.members.empty()) continue;
    made.x.resize(in * made.members.size());
    float* to = made.x.data();
    for (int64_t k = 0; k < in; ++k)
      for (int64_t b : made.members) *to++ = x.typed_data()[k * count + b];
    groups->push_back(std::move(made));
  }
  float* out = result->typed_data();
  std::fill_n(out, rows * count, 0.0f);
  const int64_t blocks = (rows + kRows - 1) / kRows;
  Parallel(pool, groups->size() * blocks, [=](auto take) {
    thread_local std::vector<float> block;
    const float* columns_of_group = nullptr;
    int64_t current = -1;
    for (int64_t i; (i = take()) >= 0;) {
      const Group& own = (*groups)[i / blocks];
      const int64_t row = i % blocks * kRows, width = own.members.size(), stride = PaddedColumns(width);
      const int height = std::min<int64_t>(kRows, rows - row);
      if (current != i / blocks) columns_of_group = Input({own.x.data(), nullptr, in, width, stride, 0.0f, 0.0f});
      current = i / blocks;
      block.resize(kRows * stride);
      RowsByInput(own.weight + row * in, height, columns_of_group, in, stride, block.data());
      for (int r = 0; r < height; ++r)
        for (int64_t c = 0; c < width; ++c) out[(row + r) * count + own.members[c]] = block[r * stride + c];
    }
  });
  return ffi::Error::Success();
}

enum Activation : int64_t { kSilu, kGeluTanh, kClampedSwiglu };  // in the order of ACTIVATIONS in kernels.py

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
  const Columns columns = MakeColumns(x, norm, eps, offset);
  float* out = result->typed_data();
  const float* gates = weight.typed_data();
  const int64_t rows = weight.element_count() / columns.in / 2;
  ByBlocks(pool, gates, gates + rows * columns.in, rows, columns,
           [=](int64_t row, int count, float* gate, int64_t size) {
             for (int64_t i = 0; i < size; i += kLanes<Wide>)
               Store(gate + i, Gate(activation, Load<Wide>(gate + i), Load<Wide>(gate + size + i)));
             CopyRows(gate, count, columns, out + row * columns.count);
           });
  return ffi::Error::Success();
}

}  // namespace
