// The 2x2 max-pool behind the ReLU, and its way back. Which of four numbers was the largest is kept as a code of one byte.
#pragma once
#include "layout.h"

namespace lockstep {

// V is a vector or a single number.
template <class V>
struct Largest {
  V value, code;

  // The first of equal ones wins, and NaN wins over numbers, as in PyTorch.
  INLINE void consider(V other, int number) {
    auto wins = (other > value) | (other != other);
    value = wins ? other : value;
    code = wins ? V{} + static_cast<Real>(number) : code;
  }
};

template <class V>
INLINE Largest<V> pool_four(V a, V b, V c, V d) {
  Largest<V> found{a, V{}};
  found.consider(b, 1);
  found.consider(c, 2);
  found.consider(d, 3);
  auto cut = found.value <= V{};
  found.code = cut ? V{} + static_cast<Real>(kCutOff) : found.code;
  found.value = cut ? V{} : found.value;
  return found;
}

// Into a plane without gaps. `height` and `width` are those of the result. Rows are written in whole vectors, each over the end of the row
// before, so up to LANES numbers behind the plane are written too. `code` may be nullptr.
inline void pool_plane(const Real* from, int64_t row, int64_t height, int64_t width, Real* to, uint8_t* code) {
  for (int64_t y = 0; y < height; y++) {
    const Real *upper = from + 2 * y * row, *lower = upper + row;
    for (int64_t x = 0; x < width; x += kLanes) {
      Vec a = load(upper + 2 * x), b = load(upper + 2 * x + kLanes);
      Vec c = load(lower + 2 * x), d = load(lower + 2 * x + kLanes);
      auto found = pool_four(evens(a, b, Lanes{}), odds(a, b, Lanes{}), evens(c, d, Lanes{}), odds(c, d, Lanes{}));
      store(to + y * width + x, found.value);
      if (code) store(code + y * width + x, found.code);
    }
  }
}

// Back from a pooled plane without gaps, behind which LANES numbers can be read, to the plane before it, whose rows are `row` apart. Behind
// each row up to 2 LANES zeros are written, so rows have to come in their order.
inline void unpool_plane(const Real* grad, const uint8_t* code, int64_t height, int64_t width, Real* to, int64_t row) {
  for (int64_t y = 0; y < height; y++) {
    for (int half = 0; half < 2; half++) {
      Real* out = to + (2 * y + half) * row;
      for (int64_t x = 0; x < width; x += kLanes) {
        Vec g = load(grad + y * width + x), k = load(code + y * width + x);
        IntVec inside = lane_numbers(Lanes{}) < fill(static_cast<Real>(width - x));
        Vec left = (k == fill(static_cast<Real>(2 * half))) & inside ? g : Vec{};
        Vec right = (k == fill(static_cast<Real>(2 * half + 1))) & inside ? g : Vec{};
        store(out + 2 * x, interleaved<0>(left, right, Lanes{}));
        store(out + 2 * x + kLanes, interleaved<LANES / 2>(left, right, Lanes{}));
      }
    }
  }
}

// The same into channels-last scratch. `channels` is at least LANES.
template <class T, class C>
inline void unpool_pixels(const T* grad, const C* code, int64_t channels, int64_t height, int64_t width, Real* to, int64_t row,
                          int64_t pixel) {
  for (int64_t y = 0; y < height; y++) {
    for (int64_t x = 0; x < width; x++, grad += channels, code += channels) {
      Real* corner = to + 2 * y * row + 2 * x * pixel;
      for (int64_t i = 0; i < channels; i += kLanes) {
        int64_t c = within(i, channels);
        Vec g = load(grad + c), k = load(code + c);
        UNROLL for (int q = 0; q < 4; q++) {
          store(corner + q / 2 * row + q % 2 * pixel + c, k == fill(static_cast<Real>(q)) ? g : Vec{});
        }
      }
    }
  }
}

}  // namespace lockstep
