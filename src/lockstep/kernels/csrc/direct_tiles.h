// The direct kernel, for few channels. An image lies in planes with borders of zeros, so that every tap of every output is a plain
// load; a vector is LANES neighbouring pixels of a row. A tile of several vectors and several output channels stays in registers.
#pragma once
#include "pool.h"

namespace lockstep::direct {

constexpr int kChannels = kManyRegisters ? 8 : 6;    // of a tile, at most
constexpr int kGradTaps = kManyRegisters ? 24 : 12;  // sums that a tile of the weights' gradient holds

// Vectors of a tile: as many as the registers hold, so that enough sums are under way at a time.
constexpr int vectors_of(int channels) {
  if (kManyRegisters) return channels >= 4 ? 3 : 6;
  return channels >= 4 ? 2 : channels == 3 ? 4 : channels == 2 ? 4 : 8;
}

// Both kinds of planes have rows of the same length, so that one position is the same pixel in both.
struct Planes {
  int64_t border;             // of the gradient: as much as puts x back in its place
  int64_t row;                // from a row to the next
  int64_t x_plane, g_plane;   // from a plane to the next; with room for a vector beyond the last pixel
  int64_t origin, first;      // of the gradient's border and of its pixels in its plane
  int64_t positions;          // of all outputs, with those between two rows, in whole vectors

  explicit Planes(const Problem& p) {
    border = p.kernel - 1 - p.padding;
    row = larger(p.width + 2 * p.padding, p.out_width() + 2 * border);
    // A load that crosses a cache line takes twice as long. So pixels of the gradient begin on a boundary, and rows where that is almost free.
    if (up_to_multiple(row, kLanes) * 14 <= row * 15) row = up_to_multiple(row, kLanes);
    first = up_to_multiple(border * row + border, kLanes);
    origin = first - (border * row + border);
    int64_t beyond = 2 * kLanes + p.kernel;
    x_plane = up_to_multiple((p.height + 2 * p.padding) * row + beyond, 16);
    g_plane = up_to_multiple(origin + (p.out_height() + 2 * border) * row + beyond, 16);
    positions = up_to_multiple((p.out_height() - 1) * row + p.out_width(), kLanes);
  }
};

// One vector of outputs: where its first tap is read, and where it is written.
struct Span {
  int64_t in, out;
};

// All vectors of an image of height x width outputs. A row that is no multiple of LANES ends in a vector that overlaps the one
// before. Images narrower than a vector are computed with the gaps between their rows.
struct Spans {
  Span* list;
  int64_t count = 0, out_row;
  bool narrow;

  static int64_t most(int64_t height, int64_t row) { return height * (row / kLanes + 1); }

  Spans(Span* memory, int64_t height, int64_t width, int64_t row) : list(memory), narrow(width < kLanes) {
    out_row = narrow ? row : width;
    if (narrow) {
      for (int64_t at = 0; at < (height - 1) * row + width; at += kLanes) list[count++] = {at, at};
    } else {
      for (int64_t y = 0; y < height; y++) {
        for (int64_t i = 0; i < width; i += kLanes) {
          int64_t x = within(i, width);
          list[count++] = {y * row + x, y * width + x};
        }
      }
    }
  }
  // Those of some rows; not of a narrow image, whose vectors do not end with rows.
  Spans of_rows(int64_t first, int64_t rows, int64_t height) const {
    Spans part = *this;
    part.count = count / height * rows;
    part.list = list + count / height * first;
    return part;
  }

  static int64_t size(int64_t height, int64_t row) {
    return most(height, row) * static_cast<int64_t>(sizeof(Span) / sizeof(Real));
  }
};

// `least` stays in memory until the sums are there: in a register it would push one of them out.
template <int K, int CHANNELS, int VECTORS>
INLINE void tile(const Real* x, int64_t row, int64_t plane, int64_t in_channels, const Real* weights, const Real* bias,
                 const Real* least, const Span* spans, Real* y, int64_t y_plane) {
  Vec sum[CHANNELS][VECTORS];
  UNROLL for (int c = 0; c < CHANNELS; c++) {
    UNROLL for (int v = 0; v < VECTORS; v++) sum[c][v] = fill(bias ? bias[c] : 0);
  }
  const Real* from[VECTORS];
  UNROLL for (int v = 0; v < VECTORS; v++) from[v] = x + spans[v].in;
  for (int64_t i = 0; i < in_channels; i++) {
    for (int ky = 0; ky < K; ky++) {
      UNROLL for (int kx = 0; kx < K; kx++) {
        Vec in[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) in[v] = load(from[v] + ky * row + kx);
        UNROLL for (int c = 0; c < CHANNELS; c++) {
          Vec weight = fill(weights[c]);
          UNROLL for (int v = 0; v < VECTORS; v++) sum[c][v] += weight * in[v];
        }
        weights += CHANNELS;
      }
    }
    UNROLL for (int v = 0; v < VECTORS; v++) from[v] += plane;
  }
  UNROLL for (int c = 0; c < CHANNELS; c++) {
    UNROLL for (int v = 0; v < VECTORS; v++) {
      store(y + c * y_plane + spans[v].out, at_least(sum[c][v], fill(*least)));
    }
  }
}

template <int K, int CHANNELS>
void channels_of_tile(const Real* x, int64_t row, int64_t plane, int64_t in_channels, const Real* weights, const Real* bias,
                      const Real* least, const Spans& spans, Real* y, int64_t y_plane) {
  constexpr int kVectors = vectors_of(CHANNELS);
  int64_t i = 0;
  for (; i + kVectors <= spans.count; i += kVectors) {
    tile<K, CHANNELS, kVectors>(x, row, plane, in_channels, weights, bias, least, spans.list + i, y, y_plane);
  }
  for (; i < spans.count; i++) {
    tile<K, CHANNELS, 1>(x, row, plane, in_channels, weights, bias, least, spans.list + i, y, y_plane);
  }
}

// How many output channels the next tile has, of those that are left. The last ones are shared out, so that no tile is small.
INLINE int64_t next_tile(int64_t left) {
  if (left <= kChannels) return left;
  return left < 2 * kChannels - 2 ? (left + 1) / 2 : kChannels;
}

// `out_channels` planes of outputs from `in_channels` planes. `least` is 0 for a ReLU and minus infinity for none.
template <int K>
void convolve(const Real* x, int64_t row, int64_t plane, int64_t in_channels, int64_t out_channels, const Real* weights,
              const Real* bias, Real least, const Spans& spans, Real* y, int64_t y_plane) {
  for (int64_t c = 0; c < out_channels;) {
    int64_t count = next_tile(out_channels - c);
    auto of = count == 1   ? channels_of_tile<K, 1>
              : count == 2 ? channels_of_tile<K, 2>
              : count == 3 ? channels_of_tile<K, 3>
              : count == 4 ? channels_of_tile<K, 4>
              : count == 5 ? channels_of_tile<K, 5>
                           : channels_of_tile<K, 6>;
    if constexpr (kManyRegisters) of = count == 7 ? channels_of_tile<K, 7> : count == 8 ? channels_of_tile<K, 8> : of;
    of(x, row, plane, in_channels, weights, bias ? bias + c : nullptr, &least, spans, y + c * y_plane, y_plane);
    weights += in_channels * K * K * count;
    c += count;
  }
}

// The pixels at each tap of a row.
template <int K, int... KX>
INLINE void shift_all(Vec (&in)[K], Vec behind, std::integer_sequence<int, KX...>) {
  Vec first = in[0];
  ((in[KX] = shifted<KX>(first, behind, Lanes{})), ...);
}

// The gradient of the weights between `CHANNELS` planes of g and one row of taps on one plane of x, as sums in each lane.
template <int K, int CHANNELS>
INLINE void grad_tile(const Real* g, int64_t g_plane, const Real* x, int64_t positions, Real* sums, int64_t channel) {
  Vec sum[CHANNELS][K];
  UNROLL for (int c = 0; c < CHANNELS; c++) {
    UNROLL for (int kx = 0; kx < K; kx++) sum[c][kx] = load(sums + c * channel + kx * kLanes);
  }
  Vec next = load(x);
  for (int64_t at = 0; at < positions; at += kLanes) {
    Vec in[K];
    if constexpr (kManyRegisters) {  // one instruction of AVX512 or NEON, and cheaper than a load that crosses a cache line, as all of these do
      in[0] = next;
      next = load(x + at + kLanes);
      shift_all(in, next, std::make_integer_sequence<int, K>{});
    } else {
      UNROLL for (int kx = 0; kx < K; kx++) in[kx] = load(x + at + kx);
    }
    UNROLL for (int c = 0; c < CHANNELS; c++) {
      Vec grad = load(g + c * g_plane + at);
      UNROLL for (int kx = 0; kx < K; kx++) sum[c][kx] += grad * in[kx];
    }
  }
  UNROLL for (int c = 0; c < CHANNELS; c++) {
    UNROLL for (int kx = 0; kx < K; kx++) store(sums + c * channel + kx * kLanes, sum[c][kx]);
  }
}

// Output channels whose gradients go through together, so that they stay in the nearest cache.
template <int K>
constexpr int kGradChannels = K == 1 ? 4 : kGradTaps / K;

// For `channels` planes of g. sums: output channel, input channel, row, column, lane.
template <int K>
void grad_weights(const Problem& p, const Planes& planes, const Real* g, int64_t channels, const Real* x, Real* sums) {
  constexpr int kMost = kGradChannels<K>;
  int64_t channel = p.in_channels * K * K * kLanes;
  for (int64_t c = 0; c < channels;) {
    int64_t left = smaller<int64_t>(kMost, channels - c);
    auto go = [&](auto count) {
      constexpr int kCount = decltype(count)::value;
      for (int64_t i = 0; i < p.in_channels; i++) {
        for (int ky = 0; ky < K; ky++) {
          grad_tile<K, kCount>(g + c * planes.g_plane + planes.first, planes.g_plane,
                               x + i * planes.x_plane + ky * planes.row, planes.positions,
                               sums + c * channel + (i * K + ky) * K * kLanes, channel);
        }
      }
      c += kCount;
    };
    if (left == kMost) go(std::integral_constant<int, kMost>{});
    else if (left >= 2) go(std::integral_constant<int, 2>{});
    else go(std::integral_constant<int, 1>{});
  }
}

}  // namespace lockstep::direct
