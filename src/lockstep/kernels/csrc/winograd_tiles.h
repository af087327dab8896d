// Tiles of Winograd's method: between scratch images and the 36 planes of the transformed domain, for weights, x, outputs and gradients.
#pragma once
#include "gemm.h"
#include "pool.h"
#include "winograd_transforms.h"

namespace lockstep::winograd {

constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Real));
// Of planes that are a power of two apart all lines would fall on the same places of the cache.
constexpr int64_t kApart = 5 * kLine;

struct Shape {
  int64_t in, out;                         // channels, in whole vectors
  int64_t rows, columns, tiles;            // of an image
  int64_t x_row, x_size, g_row, g_size;    // of the scratch images: x has a border of zeros, the gradient ends at whole tiles
  int64_t y_size, y_rows;                  // of a result, and how many of its rows a row of tiles has
  int64_t chunk;                           // tiles that go through together
  int64_t v_row, m_row, v_plane, m_plane;  // of the transformed x and outputs: planes of tiles x channels
  int64_t sum_plane;                       // of the transformed gradient of the weights

  Shape(const Problem& p, int64_t fewest) {
    in = up_to_multiple(p.in_channels, kLanes);
    out = up_to_multiple(p.out_channels, kLanes);
    rows = (p.out_height() + kOut - 1) / kOut;
    columns = (p.out_width() + kOut - 1) / kOut;
    tiles = rows * columns;
    x_row = (kOut * columns + 2) * in;
    x_size = (kOut * rows + 2) * x_row;
    g_row = kOut * columns * out;
    g_size = kOut * rows * g_row;
    y_size = p.y_height() * p.y_width() * out;
    y_rows = p.pool ? kOut / 2 : kOut;
    v_row = in + kLine;
    m_row = out + kLine;
    constexpr int64_t kCache = (256 << 10) / static_cast<int64_t>(sizeof(Real));
    chunk = smaller<int64_t>(96, larger(fewest, kCache / (kPoints * (v_row + m_row)))) / 12 * 12;
    v_plane = chunk * v_row + kApart;
    m_plane = chunk * m_row + kApart;
    sum_plane = p.in_channels * out + kApart;
  }
};

constexpr int64_t kFewestForward = 24, kFewestBackward = 72;

// The transformed weights of one point: a matrix of `depth` rows in panels of columns, each column padded to whole vectors.
INLINE int64_t weights_plane(int64_t depth, int64_t columns) { return depth * up_to_multiple(columns, kLanes) + kApart; }

inline int64_t weights_size(const Problem& p) {
  return kPoints * larger(weights_plane(p.in_channels, p.out_channels), weights_plane(p.out_channels, p.in_channels));
}

// LANES channels of one side of the weights, each with nine taps, and of each the LANES channels of the other side that make a vector. They are
// read and written in nine square blocks that are transposed: number by number each would come from another line of the cache.
struct WeightsBlock {
  static constexpr int kTapCount = kTaps * kTaps;
  alignas(64) Real taps[LANES * kTapCount][LANES];  // channel * kTapCount + tap

  // Whether channels of this side follow each other in memory: one by one (channels-last), or each with its taps (contiguous).
  static bool fits(const Strided& w, int64_t step, int64_t channels, int64_t others) {
    bool in_a_row = step == kTapCount && w.row == kTaps && w.column == 1;
    return (step == 1 || in_a_row) && channels >= kLanes && others >= kLanes;
  }

  // Calls `move(place, first, apart)` for each block: its row n begins at `place` + n * across, and its column n belongs into
  // taps[first + n * apart].
  template <class Move>
  INLINE static void each(const Strided& w, int64_t step, const Move& move) {
    if (step == 1) {
      for (int i = 0; i < kTapCount; i++) move(i / kTaps * w.row + i % kTaps * w.column, i, std::integral_constant<int, kTapCount>{});
    } else {
      for (int i = 0; i < kTapCount; i++) move(i * kLanes, i * LANES, std::integral_constant<int, 1>{});
    }
  }

  INLINE void read(const Real* from, const Strided& w, int64_t step, int64_t across) {
    each(w, step, [&](int64_t place, int first, auto apart) INLINED {
      Vec block[LANES];
      UNROLL for (int n = 0; n < LANES; n++) block[n] = load(from + place + n * across);
      transpose(block);
      UNROLL for (int n = 0; n < LANES; n++) store(taps[first + n * apart], block[n]);
    });
  }

  INLINE void write(Real* to, const Strided& w, int64_t step, int64_t across) const {
    each(w, step, [&](int64_t place, int first, auto apart) INLINED {
      Vec block[LANES];
      UNROLL for (int n = 0; n < LANES; n++) block[n] = load(taps[first + n * apart]);
      transpose(block);
      UNROLL for (int n = 0; n < LANES; n++) store(to + place + n * across, block[n]);
    });
  }
};

// For forward: input x output channels; for backward the other way round. The range is one of rows.
inline bool pack_weights(const Problem& p, const Strided& w, bool backward, int64_t first, int64_t last, void* packed) {
  int64_t depth = backward ? p.out_channels : p.in_channels, count = backward ? p.in_channels : p.out_channels;
  int64_t row_step = backward ? w.out : w.in, column_step = backward ? w.in : w.out;
  int64_t columns = up_to_multiple(count, kLanes), plane = weights_plane(depth, count);
  const Real* from = static_cast<const Real*>(w.data);
  IntVec found{};
  WeightsBlock block;
  for (int64_t row = first, rows; row < last; row += rows) {
    rows = WeightsBlock::fits(w, row_step, last - row, count) ? kLanes : 1;
    for (int64_t column = 0; column < columns; column += kLanes) {
      const Real* corner = from + row * row_step + column * column_step;
      int64_t lanes = smaller(kLanes, count - column);
      if (rows > 1 && lanes == kLanes) {
        block.read(corner, w, row_step, column_step);
      } else {
        for (int64_t r = 0; r < rows; r++) {
          UNROLL for (int tap = 0; tap < 9; tap++) {
            Real* to = block.taps[9 * r + tap];
            const Real* one = corner + r * row_step + tap / 3 * w.row + tap % 3 * w.column;
            if (column_step == 1 && lanes == kLanes) {
              store(to, load(one));
              continue;
            }
            store(to, Vec{});
            for (int64_t lane = 0; lane < lanes; lane++) to[lane] = one[lane * column_step];
          }
        }
      }
      int64_t panel = column / kPanel * kPanel;
      int64_t step = panel + kPanel <= columns ? kPanel : kLanes;
      for (int64_t r = 0; r < rows; r++) {
        const auto* taps = block.taps + 9 * r;
        UNROLL for (int tap = 0; tap < 9; tap++) found |= out_of_range(load(taps[tap]));
        Real* to = static_cast<Real*>(packed) + panel * depth + (row + r) * step + (column - panel);
        both_sides<G>([&](int i, int j) INLINED { return load(taps[i * kTaps + j]); },
                      [&](int i, int j, Vec value) INLINED { store(to + (i * kIn + j) * plane, value); });
      }
    }
  }
  return !any(found);
}

INLINE void input_tile(const Real* x, int64_t row, int64_t channels, Real* to, int64_t plane) {
  for (int64_t c = 0; c < channels; c += kLanes) {
    both_sides<Bt>([&](int i, int j) INLINED { return load(x + i * row + j * channels + c); },
                   [&](int i, int j, Vec value) INLINED { store(to + (i * kIn + j) * plane + c, value); });
  }
}

// The outputs of the tile in row `a`, column `b`, with bias, and perhaps ReLU and pool. `y` and `code` are where the results of that row of tiles
// begin; pixels are `pixel` apart.
template <class T, class C>
INLINE void output_tile(const Problem& p, const Real* from, int64_t plane, int64_t channels, const Real* bias, int64_t a,
                        int64_t b, T* y, C* code, int64_t pixel) {
  int64_t height = p.out_height() - kOut * a, width = p.out_width() - kOut * b;
  for (int64_t c = 0; c < channels; c += kLanes) {
    Vec result[kOut][kOut], shift = load(bias + c), least = p.relu ? Vec{} : fill(kLowest);
    both_sides<At>([&](int i, int j) INLINED { return load(from + (i * kIn + j) * plane + c); },
                   [&](int i, int j, Vec value) INLINED { result[i][j] = value + shift; });
    if (!p.pool) {
      T* to = y + kOut * b * pixel + c;
      UNROLL for (int i = 0; i < kOut; i++) {
        UNROLL for (int j = 0; j < kOut; j++) {
          if (i < height && j < width) store(to + (i * p.out_width() + j) * pixel, at_least(result[i][j], least));
        }
      }
      continue;
    }
    UNROLL for (int i = 0; i < kOut; i += 2) {
      UNROLL for (int j = 0; j < kOut; j += 2) {
        if (i + 1 >= height || j + 1 >= width) continue;
        auto found = pool_four(result[i][j], result[i][j + 1], result[i + 1][j], result[i + 1][j + 1]);
        int64_t at = (i / 2 * p.y_width() + 2 * b + j / 2) * pixel + c;
        store(y + at, found.value);
        if (code) store(code + at, found.code);
      }
    }
  }
}

INLINE void gradient_tile(const Real* g, int64_t row, int64_t channels, Real* to, int64_t plane) {
  for (int64_t c = 0; c < channels; c += kLanes) {
    both_sides<A>([&](int i, int j) INLINED { return load(g + i * row + j * channels + c); },
                  [&](int i, int j, Vec value) INLINED { store(to + (i * kIn + j) * plane + c, value); });
  }
}

// Neighbouring tiles overlap in x, so their gradients are added.
INLINE void add_tile(const Real* from, int64_t plane, int64_t channels, Real* grad_x, int64_t row) {
  for (int64_t c = 0; c < channels; c += kLanes) {
    both_sides<B>([&](int i, int j) INLINED { return load(from + (i * kIn + j) * plane + c); },
                  [&](int i, int j, Vec value) INLINED {
                    Real* to = grad_x + i * row + j * channels + c;
                    store(to, load(to) + value);
                  });
  }
}

}  // namespace lockstep::winograd
