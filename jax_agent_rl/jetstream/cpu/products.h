// Products of a matrix [out, in] with the activations of B slots.
//
// A tile is a few rows times a few columns, over `size` of their `in` numbers; its sums stay in
// registers. How the columns are laid out depends on their number:
//
//   up to 4    one behind the other, [B, in]; up to 8 if weights have 8 bits. Vectors run along
//              rows and columns, so that one load of weights serves all columns.
//   more       panels, one behind the other: [in, width] of two vectors or one, in which each
//              weight is broadcast; last perhaps one of 8 columns, [in / 2, 8, 2], in which pairs
//              of weights are.
//
// Weights are floats, or of 8 bits with a scale for each row, which its sums are multiplied with.
//
// Each weight is read from memory once. While a tile computes, it prefetches the next tile's rows
// into the second cache, which can wait for more of them at a time than the first one.

#pragma once

#include "vectors.h"

namespace {

constexpr int kRows = 24;  // rows a thread takes at once, a multiple of every tile's

// Numbers of a panel's columns that are multiplied with all rows of a block while the first cache has
// most of them.
constexpr int64_t kPanelDepth = kLanes<Wide> == 16 ? 256 : 640;
constexpr int64_t kNarrowDepth = 1024;
// As many columns lie one behind the other; more are panels. Weights of 8 bits are made floats once
// for all columns.
template <typename Weight>
constexpr int64_t kVectorColumns = sizeof(Weight) == 1 ? 8 : 4;
constexpr int64_t kNarrowPanel = 8;
constexpr int64_t kMaxPanel = 2 * kLanes<Wide>;
constexpr int kNarrowRows = kLanes<Wide> == 2 * kNarrowPanel ? 12 : 6;

// Weights of a cache line.
template <typename Weight>
constexpr int kLine = 64 / sizeof(Weight);

template <typename Weight>
struct Tile {
  const Weight* rows;
  const float* x;
  const Weight* next;  // rows of the next tile
  int64_t in;
  int64_t size;
  int64_t x_stride;
  float* out;
  int64_t stride;
  bool first;  // or a panel's sums are added to `out`
};

// The first cache has room for the next rows of 8 bits, otherwise the second one has.
template <typename Weight>
constexpr int kCache = sizeof(Weight) == 1 ? 3 : 2;

// Prefetches a cache line of each of R rows of the next tile. Whole rows lie behind each other, and
// are read from the first byte to the last: hardware recognizes this order.
template <int R, typename Weight>
inline void PrefetchNext(const Tile<Weight>& t, int64_t k) {
  // No branch around the loop: GCC 12 then drops the prefetches.
  const int64_t begin = t.size == t.in ? k * R : k;
  const int64_t step = t.size == t.in ? kLine<Weight> : t.in;
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) __builtin_prefetch(t.next + begin + r * step, 0, kCache<Weight>);
}

// The last, shorter vector of a row, with zeros behind its `count` numbers.
template <typename Weight>
inline Wide LoadPart(const Weight* from, int64_t count) {
  Weight padded[kLanes<Wide>] = {};
  std::memcpy(padded, from, count * sizeof(Weight));
  return LoadWeights(padded);
}

// R rows times C columns that lie one behind the other.
template <int R, int C, typename Weight>
inline void VectorTile(const Tile<Weight>& t) {
  constexpr int kStep = kLanes<Wide>;
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
  auto load_vector = [&](int r) { return LoadWeights(t.rows + r * t.in + k); };
  auto load_last = [&](int r) { return LoadPart(t.rows + r * t.in + k, t.size - k); };

  while (k + kLine<Weight> <= t.size) {
    PrefetchNext<R>(t, k);
#pragma GCC unroll 4
    for (int j = 0; j < kLine<Weight>; j += kStep) {
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
inline void PanelTile(const Tile<float>& t) {
  Wide sum[R][N] = {};
  auto step = [&](int64_t k) __attribute__((always_inline)) {
    Wide column[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) column[n] = Load<Wide>(t.x + (k * N + n) * kLanes<Wide>);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const float weight = t.rows[r * t.in + k];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[r][n] += weight * column[n];
    }
  };

  int64_t k = 0;
  for (; k + kLine<float> <= t.size; k += kLine<float>) {
    PrefetchNext<R>(t, k);
#pragma GCC unroll 4
    for (int j = 0; j < kLine<float>; ++j) step(k + j);
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

// R rows times the 8 columns of a narrow panel, two numbers of each at a time.
template <int R>
inline void NarrowTile(const Tile<float>& t) {
  constexpr int N = 2 * kNarrowPanel / kLanes<Wide>;
  Wide sum[R + 1][N] = {};  // one more, as two rows may be a vector of results
  auto step = [&](int64_t k, auto load) __attribute__((always_inline)) {
    Wide column[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      column[n] = Load<Wide>(t.x + k * kNarrowPanel + n * kLanes<Wide>);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Wide weights = load(t.rows + r * t.in + k);
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) sum[r][n] += weights * column[n];
    }
  };
  auto load_one = [](const float* from) {
    const float pair[2] = {*from, 0.0f};
    return BroadcastPair(pair);
  };

  int64_t k = 0;
  for (; k + kLine<float> <= t.size; k += kLine<float>) {
    PrefetchNext<R>(t, k);
#pragma GCC unroll 8
    for (int j = 0; j < kLine<float>; j += 2) step(k + j, BroadcastPair);
  }
  for (; k + 2 <= t.size; k += 2) step(k, BroadcastPair);
  if (k < t.size) step(k, load_one);

  constexpr int kRowsOfVector = kLanes<Wide> / kNarrowPanel;
#pragma GCC unroll 12
  for (int r = 0; r < R; r += kRowsOfVector) {
    const Wide sums = SumsOfNeighbours(sum[r][0], kRowsOfVector == 1 ? sum[r][N - 1] : sum[r + 1][0]);
    Float8 rows[kRowsOfVector];
    std::memcpy(rows, &sums, sizeof(sums));
#pragma GCC unroll 2
    for (int i = 0; i < std::min(kRowsOfVector, R); ++i) {
      float* out = t.out + (r + i) * t.stride;
      Store(out, t.first ? rows[i] : rows[i] + Load<Float8>(out));
    }
  }
}

// Rows of a matrix and the columns they are multiplied with.
template <typename Weight>
struct RowBlock {
  const Weight* rows;
  int count;
  const float* x;
  int64_t in;
  float* out;
  int64_t stride;  // of `out`
};

// Calls run(height, tile) for tiles of R rows, and of one row at the end, over `depth` numbers at a
// time; those of number k + 1 of the columns lie `x_step` behind those of number k.
template <int R, typename Weight, typename Run>
inline void ByTiles(const RowBlock<Weight>& block, int64_t x_step, int64_t depth, Run run) {
  const int64_t in = block.in;
  for (int64_t k = 0; k < in; k += depth) {
    const int64_t size = std::min(depth, in - k);
    int height;
    for (int r = 0; r < block.count; r += height) {
      height = r + R <= block.count ? R : 1;
      const Weight* next;
      if (r + height < block.count) {
        next = block.rows + (r + height) * in + k;
      } else if (k + depth < in) {
        next = block.rows + k + depth;
      } else {
        next = block.rows + block.count * in;  // the next block
      }
      Tile<Weight> tile;
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
  return RoundUp(columns, kNarrowPanel);
}

// Columns of the first panel of `columns`, which are padded.
int64_t PanelWidth(int64_t columns) {
  if (columns >= kMaxPanel) return kMaxPanel;
  if (columns >= kLanes<Wide> && kLanes<Wide> > kNarrowPanel) return kLanes<Wide>;
  return kNarrowPanel;
}

// Numbers from one column to the next: not a multiple of 4 KiB, at which they would take each
// other's place in the cache.
int64_t ColumnStride(int64_t in) { return RoundUp(in, kLanes<Wide>) + 16; }

// A block's rows by P times C columns.
template <int R, int C, int P, typename Weight>
void RowsByVectors(const RowBlock<Weight>& block) {
  const int64_t x_stride = ColumnStride(block.in);
  ByTiles<R>(block, 1, block.in, [&](int height, Tile<Weight> tile) {
    tile.x_stride = x_stride;
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      if (height == R) {
        VectorTile<R, C>(tile);
      } else {
        VectorTile<1, C>(tile);
      }
      tile.x += C * x_stride;
      tile.out += C;
    }
  });
}

// A block's rows by a panel of `width` columns, of which run(height, tile) multiplies one tile.
template <int R, typename RunTile>
void RowsByPanel(const RowBlock<float>& block, int64_t width, int64_t depth, RunTile run) {
  ByTiles<R>(block, width, depth, [&](int height, const Tile<float>& tile) {
    if (height == R) {
      run(std::integral_constant<int, R>(), tile);
    } else {
      run(std::integral_constant<int, 1>(), tile);
    }
  });
}

// A block's rows by all panels.
void RowsByPanels(RowBlock<float> block) {
  auto two_vectors = [](auto height, const Tile<float>& tile) { PanelTile<height.value, 2>(tile); };
  auto one_vector = [](auto height, const Tile<float>& tile) { PanelTile<height.value, 1>(tile); };
  auto narrow = [](auto height, const Tile<float>& tile) { NarrowTile<height.value>(tile); };

  int64_t remaining = block.stride;
  while (remaining > 0) {
    const int64_t width = PanelWidth(remaining);
    if (width == kMaxPanel) {
      RowsByPanel<kTileRows>(block, width, kPanelDepth, two_vectors);
    } else if (width > kNarrowPanel) {
      RowsByPanel<12>(block, width, kPanelDepth, one_vector);
    } else {
      RowsByPanel<kNarrowRows>(block, width, kNarrowDepth, narrow);
    }
    block.x += width * block.in;
    block.out += width;
    remaining -= width;
  }
}

// Weights of 8 bits are made floats in the second cache: here each is loaded alone.
void RowsByPanels(const RowBlock<int8_t>& block) {
  constexpr int64_t kStep = kLanes<Wide>;
  thread_local std::vector<float> floats;
  const int64_t size = block.count * block.in;
  floats.resize(RoundUp(size, kStep));
  int64_t i = 0;
  for (; i + kStep <= size; i += kStep) {
    __builtin_prefetch(block.rows + size + i, 0, 2);
    Store(floats.data() + i, LoadWeights(block.rows + i));
  }
  if (i < size) Store(floats.data() + i, LoadPart(block.rows + i, size - i));
  RowsByPanels({floats.data(), block.count, block.x, block.in, block.out, block.stride});
}

// out[r, :stride] = rows[r, :] . x for up to kRows rows and what Input made of the columns.
template <typename Weight>
void RowsByInput(const RowBlock<Weight>& block) {
  const int64_t stride = block.stride;
  if (stride == 1) return RowsByVectors<4, 1, 1>(block);
  if (stride == 4) return RowsByVectors<3, 4, 1>(block);
  if (stride <= kVectorColumns<Weight>) return RowsByVectors<3, 4, 2>(block);
  RowsByPanels(block);
}

struct Columns {
  const float* x;
  const float* norm;  // null: none
  int64_t in;
  int64_t count;
  int64_t stride;  // PaddedColumns(count)
  int64_t max_vectors;  // as many lie one behind the other
  float eps;
  float offset;
};

// Writes columns [first, first + width), after the norm, to where at(k, b) says that number k of
// column b of them belongs.
template <typename Width, typename At>
inline void FillColumns(const Columns& c, int64_t first, Width width, float* __restrict to, At at) {
  const float* x = c.x + first;
  // The factor of each column: 1 / sqrt(mean of squares + eps).
  float scales[kMaxPanel] = {};
  if (c.norm != nullptr) {
    for (int64_t k = 0; k < c.in; ++k) {
      for (int64_t b = 0; b < width; ++b) scales[b] += x[k * c.count + b] * x[k * c.count + b];
    }
  }
  for (int64_t b = 0; b < width; ++b) {
    scales[b] = c.norm == nullptr ? 1.0f : 1.0f / std::sqrt(scales[b] / c.in + c.eps);
  }

  for (int64_t k = 0; k < c.in; ++k) {
    const float weight = c.norm == nullptr ? 1.0f : c.norm[k] + c.offset;
    for (int64_t b = 0; b < width; ++b) to[at(k, b)] = x[k * c.count + b] * (scales[b] * weight);
  }
}

// Fills a panel of W columns, whose loops become vectors where all of them are used.
template <int W, typename At>
void FillPanel(const Columns& c, int64_t first, float* to, At at) {
  const int64_t used_width = c.count - first;
  if (used_width >= W) {
    FillColumns(c, first, std::integral_constant<int64_t, W>(), to, at);
  } else {
    FillColumns(c, first, used_width, to, at);
  }
}

// Returns x [in, B] as RowsByInput wants it, after an RMS norm over `in` unless `norm` [in] is
// null.
const float* Input(const Columns& c) {
  if (c.count == 1 && c.norm == nullptr && c.in % kLanes<Wide> == 0) return c.x;

  // Other cores have just written most of it: ask for all of it at once.
  for (int64_t i = 0; i < c.in * c.count; i += kLine<float>) __builtin_prefetch(c.x + i, 0, 2);

  thread_local std::vector<float> scratch;
  const int64_t column_stride = ColumnStride(c.in);
  scratch.resize(c.stride * column_stride);
  // Columns of padding, and numbers behind a column's last, are zeros.
  if (c.count < c.stride || c.in % kLanes<Wide> != 0) {
    std::fill(scratch.begin(), scratch.end(), 0.0f);
  }

  float* to = scratch.data();
  if (c.stride <= c.max_vectors) {
    auto by_column = [=](int64_t k, int64_t b) { return b * column_stride + k; };
    if (c.count == 1) {
      Columns one = c;
      one.count = 1;  // known to the compiler
      FillColumns(one, 0, std::integral_constant<int64_t, 1>(), to, by_column);
    } else {
      FillColumns(c, 0, c.count, to, by_column);
    }
    return to;
  }

  int64_t first = 0;
  while (first < c.stride) {
    const int64_t width = PanelWidth(c.stride - first);
    auto by_number = [=](int64_t k, int64_t b) { return k * width + b; };
    auto by_pairs = [](int64_t k, int64_t b) { return k / 2 * 2 * kNarrowPanel + 2 * b + k % 2; };
    if (width == kMaxPanel) {
      FillPanel<kMaxPanel>(c, first, to, by_number);
    } else if (width > kNarrowPanel) {
      FillPanel<kLanes<Wide>>(c, first, to, by_number);
    } else {
      FillPanel<kNarrowPanel>(c, first, to, by_pairs);
    }
    to += width * c.in;
    first += width;
  }
  return scratch.data();
}

// A matrix [rows, in].
template <typename Weight>
struct Matrix {
  const Weight* weights;
  const float* scales;  // of each row; null: none
};

template <typename Weight>
void MultiplyRows(const Matrix<Weight>& matrix, int64_t row, int count, const float* x,
                  const Columns& columns, float* out) {
  const int64_t stride = columns.stride;
  RowsByInput<Weight>({matrix.weights + row * columns.in, count, x, columns.in, out, stride});
  if (matrix.scales == nullptr) return;
  for (int r = 0; r < count; ++r) {
    const float scale = matrix.scales[row + r];
    for (int64_t c = 0; c < stride; ++c) out[r * stride + c] *= scale;
  }
}

// Calls finish(row, count, block, size) for blocks of rows of a matrix times columns. With
// `second`, the products of the same rows of that matrix follow `size` floats behind `block`.
template <typename Weight, typename Finish>
void ByBlocks(ffi::ThreadPool& pool, const Matrix<Weight>& first, const Matrix<Weight>& second,
              int64_t rows, const Columns& columns, Finish finish) {
  Parallel(pool, DivideUp(rows, kRows), [=](auto take) {
    thread_local std::vector<float> scratch;
    const int64_t size = RoundUp(kRows * columns.stride, kLanes<Wide>);
    scratch.resize(2 * size);
    float* block = scratch.data();
    const float* x = nullptr;  // each thread makes it, in its own cache

    for (int64_t number = take(); number >= 0; number = take()) {
      if (x == nullptr) x = Input(columns);
      const int64_t row = number * kRows;
      const int count = std::min<int64_t>(kRows, rows - row);
      MultiplyRows(first, row, count, x, columns, block);
      if (second.weights != nullptr) MultiplyRows(second, row, count, x, columns, block + size);
      finish(row, count, block, size);
    }
  });
}

template <typename Weight>
Columns MakeColumns(const ffi::Buffer<ffi::F32>& x, const ffi::Buffer<ffi::F32>& norm, float eps,
                    float offset) {
  Columns columns;
  columns.x = x.typed_data();
  columns.norm = DataOrNull(norm);
  columns.in = x.dimensions()[0];
  columns.count = x.dimensions()[1];
  columns.stride = PaddedColumns(columns.count);
  columns.max_vectors = kVectorColumns<Weight>;
  columns.eps = eps;
  columns.offset = offset;
  return columns;
}

void CopyRows(const float* block, int count, const Columns& columns, float* out) {
  for (int r = 0; r < count; ++r) {
    std::copy_n(block + r * columns.stride, columns.count, out + r * columns.count);
  }
}

template <typename Weight>
void Multiply(ffi::ThreadPool& pool, const Matrix<Weight>& matrix, int64_t rows,
              const Columns& columns, float* out) {
  ByBlocks(pool, matrix, {}, rows, columns,
           [=](int64_t row, int count, const float* block, int64_t) {
             CopyRows(block, count, columns, out + row * columns.count);
           });
}

// weight [..., in] . norm(x) [in, B]; an empty norm is left out.
ffi::Error Product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> weight, ffi::Buffer<ffi::F32> x,
                   ffi::Buffer<ffi::F32> norm, float eps, float offset,
                   ffi::ResultBuffer<ffi::F32> result) {
  const Columns columns = MakeColumns<float>(x, norm, eps, offset);
  const int64_t rows = weight.element_count() / columns.in;
  const Matrix<float> matrix{weight.typed_data(), nullptr};
  Multiply(pool, matrix, rows, columns, result->typed_data());
  return ffi::Error::Success();
}

// The same for weights of 8 bits and scales [..., 1].
ffi::Error QuantizedProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::S8> weight,
                            ffi::Buffer<ffi::F32> scales, ffi::Buffer<ffi::F32> x,
                            ffi::Buffer<ffi::F32> norm, float eps, float offset,
                            ffi::ResultBuffer<ffi::F32> result) {
  const Columns columns = MakeColumns<int8_t>(x, norm, eps, offset);
  const Matrix<int8_t> matrix{weight.typed_data(), scales.typed_data()};
  Multiply(pool, matrix, scales.element_count(), columns, result->typed_data());
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
        input = Input({g.x.data(), nullptr, in, width, stride, kVectorColumns<float>, 0.0f, 0.0f});
        current = number / blocks;
      }
      block.resize(kRows * stride);
      RowsByInput<float>({g.weight + row * in, height, input, in, block.data(), stride});
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

template <typename Weight>
void MultiplyGated(ffi::ThreadPool& pool, const Matrix<Weight>& gates, const Matrix<Weight>& ups,
                   int64_t rows, const Columns& columns, int64_t activation, float* out) {
  ByBlocks(pool, gates, ups, rows, columns, [=](int64_t row, int count, float* gate, int64_t size) {
    const float* up = gate + size;
    for (int64_t i = 0; i < size; i += kLanes<Wide>) {
      Store(gate + i, Gate(activation, Load<Wide>(gate + i), Load<Wide>(up + i)));
    }
    CopyRows(gate, count, columns, out + row * columns.count);
  });
}

// activation(gate . norm(x), up . norm(x)) for weight [2, out, in].
ffi::Error GatedProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> weight,
                        ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> norm, float eps,
                        float offset, int64_t activation, ffi::ResultBuffer<ffi::F32> result) {
  const Columns columns = MakeColumns<float>(x, norm, eps, offset);
  const int64_t rows = weight.element_count() / columns.in / 2;
  const Matrix<float> gates{weight.typed_data(), nullptr};
  const Matrix<float> ups{weight.typed_data() + rows * columns.in, nullptr};
  MultiplyGated(pool, gates, ups, rows, columns, activation, result->typed_data());
  return ffi::Error::Success();
}

// The same for weights of 8 bits and scales [2, out, 1].
ffi::Error QuantizedGatedProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::S8> weight,
                                 ffi::Buffer<ffi::F32> scales, ffi::Buffer<ffi::F32> x,
                                 ffi::Buffer<ffi::F32> norm, float eps, float offset,
                                 int64_t activation, ffi::ResultBuffer<ffi::F32> result) {
  const Columns columns = MakeColumns<int8_t>(x, norm, eps, offset);
  const int64_t rows = scales.element_count() / 2;
  const Matrix<int8_t> gates{weight.typed_data(), scales.typed_data()};
  const Matrix<int8_t> ups{weight.typed_data() + rows * columns.in, scales.typed_data() + rows};
  MultiplyGated(pool, gates, ups, rows, columns, activation, result->typed_data());
  return ffi::Error::Success();
}

}  // namespace
