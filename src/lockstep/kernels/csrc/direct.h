// Forward and backward through the direct kernel, image by image.
#pragma once
#include "direct_tiles.h"

namespace lockstep::direct {

// For each tile: input channel, row, column, output channel. For the way back the kernel is turned round. The border's zeros are
// multiplied with weights, so these must not be infinite.
inline bool pack_weights(const Problem& p, const Strided& w, bool backward, int64_t first, int64_t last, void* packed) {
  if (first > 0) return true;  // few weights: the first part does all
  (void)last;
  const Real* from = static_cast<const Real*>(w.data);
  Real* to = static_cast<Real*>(packed);
  bool usual = true;
  int64_t outs = backward ? p.in_channels : p.out_channels, ins = backward ? p.out_channels : p.in_channels;
  for (int64_t o = 0; o < outs;) {
    int64_t tile = next_tile(outs - o);
    for (int64_t i = 0; i < ins; i++) {
      for (int64_t tap = 0; tap < p.kernel * p.kernel; tap++) {
        int64_t at = backward ? p.kernel * p.kernel - 1 - tap : tap;
        int64_t place = at / p.kernel * w.row + at % p.kernel * w.column;
        for (int64_t c = o; c < o + tile; c++) {
          Real weight = from[place + (backward ? i * w.out + c * w.in : c * w.out + i * w.in)];
          usual = usual && weight < kLargest && weight > -kLargest;
          *to++ = weight;
        }
      }
    }
    o += tile;
  }
  return usual;
}

inline int64_t weights_size(const Problem& p) { return p.in_channels * p.out_channels * p.kernel * p.kernel; }

// Pooled numbers of an image, and their codes, in bytes, with room for a vector behind each.
INLINE int64_t pooled_size(const Problem& p) { return p.pool ? p.out_channels * p.y_height() * p.y_width() + kLanes : 0; }

inline int64_t forward_scratch(const Problem& p) {
  Planes planes(p);
  return piece(p.in_channels * planes.x_plane) + piece(p.out_channels * planes.g_plane) + 2 * piece(pooled_size(p)) +
         piece(Spans::size(p.out_height(), planes.row));
}

template <int K, class T>
void forward_images(const Problem& p, const Forward& a, int64_t first, int64_t last, Scratch scratch) {
  Planes planes(p);
  Real* x = scratch.take(p.in_channels * planes.x_plane);
  Real* outputs = scratch.take(p.out_channels * planes.g_plane);
  Real* pooled = scratch.take(pooled_size(p));
  uint8_t* codes = reinterpret_cast<uint8_t*>(scratch.take(pooled_size(p)));
  Spans spans(reinterpret_cast<Span*>(scratch.take(Spans::size(p.out_height(), planes.row))), p.out_height(), p.out_width(),
              planes.row);
  int64_t height = p.y_height(), width = p.y_width(), size = height * width, channels = p.out_channels;
  clear(x, p.in_channels * planes.x_plane);
  bool straight = std::is_same_v<T, Real> && !p.pool && !p.channels_last && !spans.narrow;
  // What is still to be put into channels-last order goes by strips of rows, which stay in the nearest cache in between.
  bool whole = !p.channels_last || p.pool || spans.narrow;
  int64_t strip = whole ? p.out_height() : larger<int64_t>(1, (16 << 10) / (static_cast<int64_t>(sizeof(Real)) * channels * width));
  for (int64_t n = first; n < last; n++) {
    T* y = static_cast<T*>(a.y) + n * channels * size;
    into_planes(Plain<T>{static_cast<const T*>(a.x) + n * p.in_channels * p.height * p.width}, p.channels_last, p.in_channels,
                p.height, p.width, x + p.padding * planes.row + p.padding, planes.row, planes.x_plane);
    for (int64_t top = 0; top < p.out_height(); top += strip) {
      int64_t rows = smaller(strip, p.out_height() - top);
      convolve<K>(x, planes.row, planes.x_plane, p.in_channels, channels, static_cast<const Real*>(a.weights),
                  static_cast<const Real*>(a.bias), p.relu ? 0 : kLowest, whole ? spans : spans.of_rows(top, rows, p.out_height()),
                  straight ? reinterpret_cast<Real*>(y) : outputs, straight ? size : planes.g_plane);
      if (!straight && !p.pool) {
        out_of_planes(outputs + top * spans.out_row, spans.out_row, planes.g_plane, p.channels_last, channels, rows, width,
                      y + top * width * channels);
      }
    }
    if (!p.pool) continue;
    for (int64_t c = 0; c < channels; c++) {
      pool_plane(outputs + c * planes.g_plane, spans.out_row, height, width, pooled + c * size, a.code ? codes + c * size : nullptr);
    }
    out_of_planes(pooled, width, size, p.channels_last, channels, height, width, y);
    if (a.code) {
      out_of_planes(codes, width, size, p.channels_last, channels, height, width, a.code + n * channels * size);
    }
  }
}

inline int64_t backward_scratch(const Problem& p) {
  Planes planes(p);
  return piece(p.in_channels * planes.x_plane) + piece(p.out_channels * planes.g_plane) +
         piece(p.in_channels * planes.x_plane) + 2 * piece(pooled_size(p)) + piece(Spans::size(p.height, planes.row));
}

// For each weight a vector of sums, and a sum for each bias.
inline int64_t sums_size(const Problem& p) { return piece(weights_size(p) * kLanes + p.out_channels); }

// The gradient of the convolution's output, of `channels` channels from `first` on (channels-last: of all of them); `pooled` and `codes` are
// room for what comes from behind a pool.
template <class T>
void gradient_into_planes(const Problem& p, const Planes& planes, const Backward& a, int64_t n, int64_t first, int64_t channels,
                          Real* g, Real* pooled, uint8_t* codes) {
  int64_t height = p.y_height(), width = p.y_width(), size = height * width, offset = (n * p.out_channels + first) * size;
  const T* grad = static_cast<const T*>(a.grad) + offset;
  Real* to = g + planes.first;
  if (!p.relu) {
    into_planes(Plain<T>{grad}, p.channels_last, channels, height, width, to, planes.row, planes.g_plane);
    return;
  }
  if (!p.pool) {
    into_planes(Masked<T>{grad, static_cast<const T*>(a.y) + offset}, p.channels_last, channels, height, width, to, planes.row,
                planes.g_plane);
    return;
  }
  into_planes(Plain<T>{grad}, p.channels_last, channels, height, width, pooled, width, size);
  into_planes(Plain<uint8_t>{a.code + offset}, p.channels_last, channels, height, width, codes, width, size);
  for (int64_t c = 0; c < channels; c++) {
    unpool_plane(pooled + c * size, codes + c * size, height, width, to + c * planes.g_plane, planes.row);
  }
}

template <int K, class T>
bool backward_images(const Problem& p, const Backward& a, int64_t first, int64_t last, Scratch scratch, Real* sums) {
  Planes planes(p);
  Real* x = scratch.take(p.in_channels * planes.x_plane);
  Real* g = scratch.take(p.out_channels * planes.g_plane);
  Real* outputs = scratch.take(p.in_channels * planes.x_plane);
  Real* pooled = scratch.take(pooled_size(p));
  uint8_t* codes = reinterpret_cast<uint8_t*>(scratch.take(pooled_size(p)));
  Spans spans(reinterpret_cast<Span*>(scratch.take(Spans::size(p.height, planes.row))), p.height, p.width, planes.row);
  Real* bias_sums = sums + weights_size(p) * kLanes;
  clear(x, p.in_channels * planes.x_plane);
  clear(g, p.out_channels * planes.g_plane);
  clear(sums, sums_size(p));
  bool straight = std::is_same_v<T, Real> && !p.channels_last && !spans.narrow;
  int64_t group = p.channels_last ? p.out_channels : kGradChannels<K>;
  for (int64_t n = first; n < last; n++) {
    int64_t offset = n * p.in_channels * p.height * p.width;
    into_planes(Plain<T>{static_cast<const T*>(a.x) + offset}, p.channels_last, p.in_channels, p.height, p.width,
                x + p.padding * planes.row + p.padding, planes.row, planes.x_plane);
    // Between two rows zeros are multiplied with pixels that the plain sum does not touch: they must not be infinite.
    if (!finite(sum_of(x, p.in_channels * planes.x_plane))) return false;
    for (int64_t begin = 0; begin < p.out_channels; begin += group) {
      int64_t channels = smaller(group, p.out_channels - begin);
      Real* part = a.weights ? g + begin * planes.g_plane : g;  // only the gradient of x needs them again
      gradient_into_planes<T>(p, planes, a, n, begin, channels, part, pooled, codes);
      for (int64_t c = 0; c < channels; c++) {
        Real sum = sum_of(part + c * planes.g_plane, planes.g_plane);
        if (!finite(sum)) return false;
        bias_sums[begin + c] += sum;
      }
      grad_weights<K>(p, planes, part, channels, x, sums + begin * p.in_channels * K * K * kLanes);
    }
    if (!a.weights) continue;
    Real* image = static_cast<Real*>(a.grad_x) + (straight ? offset : 0);
    convolve<K>(g + planes.origin, planes.row, planes.g_plane, p.out_channels, p.in_channels, static_cast<const Real*>(a.weights), nullptr,
                kLowest, spans, straight ? image : outputs,
                straight ? p.height * p.width : planes.x_plane);
    if (!straight) {
      out_of_planes(outputs, spans.out_row, planes.x_plane, p.channels_last, p.in_channels, p.height, p.width,
                    static_cast<T*>(a.grad_x) + offset);
    }
  }
  return true;
}

inline void finish(const Problem& p, const void* sums, int64_t parts, int64_t first, int64_t last, const Strided& grad_weight,
                   void* grad_bias) {
  const Real* from = static_cast<const Real*>(sums);
  Real* to = static_cast<Real*>(grad_weight.data);
  int64_t part = sums_size(p), biases = weights_size(p) * kLanes;
  for (int64_t o = 0; o < p.out_channels; o++) {
    for (int64_t i = first; i < last; i++) {
      for (int64_t tap = 0; tap < p.kernel * p.kernel; tap++) {
        int64_t at = ((o * p.in_channels + i) * p.kernel * p.kernel + tap) * kLanes;
        Vec sum = load(from + at);
        for (int64_t n = 1; n < parts; n++) sum += load(from + n * part + at);
        to[o * grad_weight.out + i * grad_weight.in + tap / p.kernel * grad_weight.row + tap % p.kernel * grad_weight.column] =
            total(sum);
      }
    }
    if (first == 0) {
      Real sum = 0;
      for (int64_t n = 0; n < parts; n++) sum += from[n * part + biases + o];
      static_cast<Real*>(grad_bias)[o] = sum;
    }
  }
}

template <int K>
bool forward_of(const Problem& p, const Forward& a, int64_t first, int64_t last, Scratch scratch) {
  if constexpr (sizeof(Real) == 4) {
    if (p.type == Type::bfloat16) {
      forward_images<K, Bfloat16>(p, a, first, last, scratch);
      return true;
    }
  }
  forward_images<K, Real>(p, a, first, last, scratch);
  return true;
}

template <int K>
bool backward_of(const Problem& p, const Backward& a, int64_t first, int64_t last, Scratch scratch, Real* sums) {
  if constexpr (sizeof(Real) == 4) {
    if (p.type == Type::bfloat16) return backward_images<K, Bfloat16>(p, a, first, last, scratch, sums);
  }
  return backward_images<K, Real>(p, a, first, last, scratch, sums);
}

inline bool forward(const Problem& p, const Forward& a, int64_t first, int64_t last, void* scratch) {
  auto of = p.kernel == 1 ? forward_of<1> : p.kernel == 3 ? forward_of<3> : forward_of<5>;
  return of(p, a, first, last, Scratch{static_cast<Real*>(scratch)});
}

inline bool backward(const Problem& p, const Backward& a, int64_t first, int64_t last, void* scratch, void* sums) {
  auto of = p.kernel == 1 ? backward_of<1> : p.kernel == 3 ? backward_of<3> : backward_of<5>;
  return of(p, a, first, last, Scratch{static_cast<Real*>(scratch)}, static_cast<Real*>(sums));
}

}  // namespace lockstep::direct
