// Forward and backward by Winograd's method, for 16 channels and more. A vector is LANES channels of one pixel. Tiles of 4x4 outputs go
// through in chunks that stay in the cache: transform, 36 matrix products, transform back. The gradients never leave the
// transformed domain in between, so x and the gradient are transformed once each for both of their products.
#pragma once
#include "winograd_tiles.h"

namespace lockstep::winograd {

inline bool in_range(const Real* numbers, int64_t count) {
  Sizes sizes;
  for (int64_t i = 0; i < count; i += kLanes) sizes.add(load(numbers + i));
  return sizes.in_range();
}

inline int64_t forward_scratch(const Problem& p) {
  Shape s(p, kFewestForward);
  return piece(s.x_size) + piece(kPoints * s.v_plane) + piece(kPoints * s.m_plane) + piece(s.out) +
         2 * piece(s.y_rows * p.y_width() * s.out);
}

template <class T>
bool forward_images(const Problem& p, const Forward& a, int64_t first, int64_t last, Scratch scratch) {
  Shape s(p, kFewestForward);
  Real *x = scratch.take(s.x_size), *v = scratch.take(kPoints * s.v_plane), *m = scratch.take(kPoints * s.m_plane);
  int64_t row = p.y_width() * s.out;
  Real *bias = scratch.take(s.out), *y_pixels = scratch.take(s.y_rows * row), *codes = scratch.take(s.y_rows * row);
  const Real* weights = static_cast<const Real*>(a.weights);
  int64_t plane = weights_plane(p.in_channels, p.out_channels), y_count = p.y_height() * p.y_width() * p.out_channels;
  clear(x, s.x_size);
  clear(bias, s.out);
  if (a.bias) __builtin_memcpy(bias, a.bias, static_cast<size_t>(p.out_channels) * sizeof(Real));
  bool straight = p.channels_last && s.out == p.out_channels;
  int64_t held = -1;
  for (int64_t begin = first * s.tiles; begin < last * s.tiles; begin += s.chunk) {
    int64_t end = smaller(begin + s.chunk, last * s.tiles);
    for (int64_t t = begin; t < end; t++) {
      int64_t n = t / s.tiles, tile = t % s.tiles;
      if (n != held) {
        const T* image = static_cast<const T*>(a.x) + n * p.in_channels * p.height * p.width;
        into_pixels(Plain<T>{image}, p.channels_last, p.in_channels, p.height, p.width,
                    x + p.padding * (s.x_row + s.in), s.x_row, s.in);
        if (!in_range(x, s.x_size)) return false;
        held = n;
      }
      input_tile(x + kOut * (tile / s.columns * s.x_row + tile % s.columns * s.in), s.x_row, s.in, v + (t - begin) * s.v_row,
                 s.v_plane);
    }
    for (int k = 0; k < kPoints; k++) {
      multiply<false>(end - begin, s.out, p.in_channels, Left{v + k * s.v_plane, s.v_row, 1}, weights + k * plane, 0,
                      m + k * s.m_plane, s.m_row);
    }
    for (int64_t t = begin; t < end; t++) {
      int64_t n = t / s.tiles, tile = t % s.tiles;
      int64_t tile_row = tile / s.columns, tile_column = tile % s.columns, top = s.y_rows * tile_row;
      int64_t place = n * y_count + top * p.y_width() * (p.channels_last ? p.out_channels : 1);
      T* y = static_cast<T*>(a.y) + place;
      uint8_t* code = a.code ? a.code + place : nullptr;
      const Real* from = m + (t - begin) * s.m_row;
      if (straight) {
        output_tile(p, from, s.m_plane, s.out, bias, tile_row, tile_column, y, code, s.out);
        continue;
      }
      output_tile(p, from, s.m_plane, s.out, bias, tile_row, tile_column, y_pixels, codes, s.out);
      if (tile_column + 1 < s.columns) continue;
      // A row of tiles is whole, and still in the nearest cache.
      int64_t rows = smaller(s.y_rows, p.y_height() - top), pixels = p.y_height() * p.y_width();
      out_of_pixels(y_pixels, row, s.out, p.channels_last, p.out_channels, rows, p.y_width(), y, pixels);
      if (code) out_of_pixels(codes, row, s.out, p.channels_last, p.out_channels, rows, p.y_width(), code, pixels);
    }
  }
  return true;
}

inline int64_t backward_scratch(const Problem& p) {
  Shape s(p, kFewestBackward);
  return 2 * piece(s.x_size) + piece(s.g_size) + piece(kPoints * s.v_plane) + piece(kPoints * s.m_plane) + 2 * piece(s.y_size);
}

inline int64_t sums_size(const Problem& p) {
  Shape s(p, kFewestBackward);
  return piece(kPoints * s.sum_plane) + piece(s.out);
}

// The gradient of the convolution's output, as channels-last scratch; `pooled` and `codes` are room for a planar one's transpose.
template <class T>
void gradient_into_pixels(const Problem& p, const Shape& s, const Backward& a, int64_t n, Real* g, Real* pooled, Real* codes) {
  int64_t offset = n * p.out_channels * p.y_height() * p.y_width(), channels = p.out_channels;
  const T* grad = static_cast<const T*>(a.grad) + offset;
  if (!p.relu) {
    into_pixels(Plain<T>{grad}, p.channels_last, channels, p.out_height(), p.out_width(), g, s.g_row, s.out);
  } else if (!p.pool) {
    into_pixels(Masked<T>{grad, static_cast<const T*>(a.y) + offset}, p.channels_last, channels, p.out_height(), p.out_width(),
                g, s.g_row, s.out);
  } else if (p.channels_last) {
    unpool_pixels(grad, a.code + offset, channels, p.y_height(), p.y_width(), g, s.g_row, s.out);
  } else {
    int64_t row = p.y_width() * channels;
    into_pixels(Plain<T>{grad}, false, channels, p.y_height(), p.y_width(), pooled, row, channels);
    into_pixels(Plain<uint8_t>{a.code + offset}, false, channels, p.y_height(), p.y_width(), codes, row, channels);
    unpool_pixels(pooled, codes, channels, p.y_height(), p.y_width(), g, s.g_row, s.out);
  }
}

// Adds up all pixels; whether they are of a usual size. Image by image: a long sum that is one of short sums loses fewer digits.
inline bool add_pixels(const Real* g, int64_t size, int64_t channels, Real* sums) {
  Sizes sizes;
  int64_t c = 0;
  auto add = [&](auto vectors) {
    constexpr int kCount = decltype(vectors)::value;
    Vec sum[kCount] = {};
    for (int64_t i = c; i < size; i += channels) {
      UNROLL for (int j = 0; j < kCount; j++) {
        Vec value = load(g + i + j * kLanes);
        sizes.add(value);
        sum[j] += value;
      }
    }
    UNROLL for (int j = 0; j < kCount; j++) store(sums + c + j * kLanes, load(sums + c + j * kLanes) + sum[j]);
    c += kCount * kLanes;
  };
  while (c + 4 * kLanes <= channels) add(std::integral_constant<int, 4>{});
  while (c < channels) add(std::integral_constant<int, 1>{});
  return sizes.in_range();
}

template <class T>
bool backward_images(const Problem& p, const Backward& a, int64_t first, int64_t last, Scratch scratch, Real* sums) {
  Shape s(p, kFewestBackward);
  Real *x = scratch.take(s.x_size), *grad_x = scratch.take(s.x_size), *g = scratch.take(s.g_size);
  Real *v = scratch.take(kPoints * s.v_plane), *m = scratch.take(kPoints * s.m_plane);
  Real *pooled = scratch.take(s.y_size), *codes = scratch.take(s.y_size), *bias_sums = sums + piece(kPoints * s.sum_plane);
  const Real* weights = static_cast<const Real*>(a.weights);
  int64_t plane = weights_plane(p.out_channels, p.in_channels), x_count = p.in_channels * p.height * p.width;
  clear(x, s.x_size);
  clear(grad_x, s.x_size);
  clear(g, s.g_size);
  clear(bias_sums, s.out);
  int64_t held_x = -1, held_g = -1;
  for (int64_t begin = first * s.tiles; begin < last * s.tiles; begin += s.chunk) {
    int64_t end = smaller(begin + s.chunk, last * s.tiles), count = end - begin;
    for (int64_t t = begin; t < end; t++) {
      int64_t n = t / s.tiles, tile = t % s.tiles;
      if (n != held_x) {
        into_pixels(Plain<T>{static_cast<const T*>(a.x) + n * x_count}, p.channels_last, p.in_channels, p.height, p.width,
                    x + p.padding * (s.x_row + s.in), s.x_row, s.in);
        if (!in_range(x, s.x_size)) return false;
        held_x = n;
      }
      input_tile(x + kOut * (tile / s.columns * s.x_row + tile % s.columns * s.in), s.x_row, s.in, v + (t - begin) * s.v_row,
                 s.v_plane);
    }
    for (int64_t t = begin; t < end; t++) {
      int64_t n = t / s.tiles, tile = t % s.tiles;
      if (n != held_g) {
        gradient_into_pixels<T>(p, s, a, n, g, pooled, codes);
        if (!add_pixels(g, s.g_size, s.out, bias_sums)) return false;
        held_g = n;
      }
      gradient_tile(g + kOut * (tile / s.columns * s.g_row + tile % s.columns * s.out), s.g_row, s.out,
                    m + (t - begin) * s.m_row, s.m_plane);
    }
    auto add = begin == first * s.tiles ? multiply<false> : multiply<true>;
    for (int k = 0; k < kPoints; k++) {
      add(p.in_channels, s.out, count, Left{v + k * s.v_plane, 1, s.v_row}, m + k * s.m_plane, s.m_row, sums + k * s.sum_plane,
          s.out);
    }
    if (!weights) continue;
    for (int k = 0; k < kPoints; k++) {
      multiply<false>(count, s.in, p.out_channels, Left{m + k * s.m_plane, s.m_row, 1}, weights + k * plane, 0,
                      v + k * s.v_plane, s.v_row);
    }
    for (int64_t t = begin; t < end; t++) {
      int64_t n = t / s.tiles, tile = t % s.tiles;
      add_tile(v + (t - begin) * s.v_row, s.v_plane, s.in,
               grad_x + kOut * (tile / s.columns * s.x_row + tile % s.columns * s.in), s.x_row);
      if (tile + 1 < s.tiles) continue;
      out_of_pixels(grad_x + p.padding * (s.x_row + s.in), s.x_row, s.in, p.channels_last, p.in_channels, p.height, p.width,
                    static_cast<T*>(a.grad_x) + n * x_count, p.height * p.width);
      clear(grad_x, s.x_size);
    }
  }
  return true;
}

inline void finish(const Problem& p, const void* sums, int64_t parts, int64_t first, int64_t last, const Strided& grad_weight,
                   void* grad_bias) {
  Shape s(p, kFewestBackward);
  const Real* from = static_cast<const Real*>(sums);
  int64_t part = sums_size(p);
  WeightsBlock block;
  for (int64_t i = first, rows; i < last; i += rows) {
    rows = WeightsBlock::fits(grad_weight, grad_weight.in, last - i, p.out_channels) ? kLanes : 1;
    for (int64_t o = 0; o < s.out; o += kLanes) {
      for (int64_t r = 0; r < rows; r++) {
        both_sides<Gt>(
            [&](int a, int b) INLINED {
              const Real* at = from + (a * kIn + b) * s.sum_plane + (i + r) * s.out + o;
              Vec sum = load(at);
              for (int64_t n = 1; n < parts; n++) sum += load(at + n * part);
              return sum;
            },
            [&](int a, int b, Vec value) INLINED { store(block.taps[9 * r + a * kTaps + b], value); });
      }
      Real* to = static_cast<Real*>(grad_weight.data) + i * grad_weight.in + o * grad_weight.out;
      int64_t lanes = smaller(kLanes, p.out_channels - o);
      if (rows > 1 && lanes == kLanes) {
        block.write(to, grad_weight, grad_weight.in, grad_weight.out);
        continue;
      }
      for (int64_t lane = 0; lane < lanes; lane++) {
        for (int64_t r = 0; r < rows; r++) {
          UNROLL for (int tap = 0; tap < 9; tap++) {
            to[lane * grad_weight.out + r * grad_weight.in + tap / 3 * grad_weight.row + tap % 3 * grad_weight.column] =
                block.taps[9 * r + tap][lane];
          }
        }
      }
    }
  }
  if (first > 0) return;
  for (int64_t o = 0; o < p.out_channels; o++) {
    Real sum = 0;
    for (int64_t n = 0; n < parts; n++) sum += from[n * part + piece(kPoints * s.sum_plane) + o];
    static_cast<Real*>(grad_bias)[o] = sum;
  }
}

inline bool forward(const Problem& p, const Forward& a, int64_t first, int64_t last, void* scratch) {
  if constexpr (sizeof(Real) == 4) {
    if (p.type == Type::bfloat16) return forward_images<Bfloat16>(p, a, first, last, Scratch{static_cast<Real*>(scratch)});
  }
  return forward_images<Real>(p, a, first, last, Scratch{static_cast<Real*>(scratch)});
}

inline bool backward(const Problem& p, const Backward& a, int64_t first, int64_t last, void* scratch, void* sums) {
  Scratch room{static_cast<Real*>(scratch)};
  if constexpr (sizeof(Real) == 4) {
    if (p.type == Type::bfloat16) return backward_images<Bfloat16>(p, a, first, last, room, static_cast<Real*>(sums));
  }
  return backward_images<Real>(p, a, first, last, room, static_cast<Real*>(sums));
}

}  // namespace lockstep::winograd
