// Between PyTorch's images (planar: a plane per channel, or channels-last; float or bfloat16) and the kernels' own scratch memory,
// whose images have borders of zeros. Planar scratch serves the direct kernel, channels-last scratch Winograd's.
#pragma once
#include "simd.h"

namespace lockstep {

// Where numbers are read from: as they are, ...
template <class T>
struct Plain {
  const T* from;
  INLINE Vec at(int64_t i) const { return load(from + i); }
  INLINE Real one(int64_t i) const { return load_one(from + i); }
  INLINE Plain operator+(int64_t by) const { return {from + by}; }
};

// ... or a gradient through the ReLU, whose result was y. Where y is NaN the gradient passes, as in PyTorch.
template <class T>
struct Masked {
  const T *grad, *y;
  INLINE Vec at(int64_t i) const { return load(y + i) <= Vec{} ? Vec{} : load(grad + i); }
  INLINE Real one(int64_t i) const { return load_one(y + i) <= 0 ? 0 : load_one(grad + i); }
  INLINE Masked operator+(int64_t by) const { return {grad + by, y + by}; }
};

// The beginning of the vector at or after `i` that still lies within `count`: the last one overlaps the one before.
INLINE int64_t within(int64_t i, int64_t count) { return smaller(i, count - kLanes); }

// Fewer numbers than a vector has, as two overlapping pieces: the rows of small images are that short.
template <int64_t N, class T>
INLINE void copy_short(const T* from, T* to, int64_t count) {
  if (count >= N) {
    __builtin_memcpy(to, from, N * sizeof(T));
    __builtin_memcpy(to + count - N, from + count - N, N * sizeof(T));
  } else if constexpr (N > 1) {
    copy_short<N / 2>(from, to, count);
  }
}

template <class From, class T>
INLINE void copy(const From& from, T* to, int64_t count) {
  if (count < kLanes) {
    if constexpr (std::is_same_v<From, Plain<T>>) {
      copy_short<kLanes / 2>(from.from, to, count);
    } else {
      for (int64_t i = 0; i < count; i++) store_one(to + i, from.one(i));
    }
    return;
  }
  for (int64_t i = 0; i < count; i += kLanes) {
    int64_t at = within(i, count);
    store(to + at, from.at(at));
  }
}

// The same for a whole image without gaps.
template <class From, class T>
INLINE void copy_all(const From& from, T* to, int64_t count) {
  if constexpr (std::is_same_v<From, Plain<T>>) __builtin_memcpy(to, from.from, static_cast<size_t>(count) * sizeof(T));
  else copy(from, to, count);
}

// to[place(column) + row] = from[row * stride + column]
template <class From, class T, class Place>
INLINE void transposed(const From& from, int64_t stride, int64_t rows, int64_t columns, T* to, const Place& place) {
  if (rows < kLanes || columns < kLanes) {
    for (int64_t row = 0; row < rows; row++) {
      for (int64_t column = 0; column < columns; column++) {
        store_one(to + place(column) + row, from.one(row * stride + column));
      }
    }
    return;
  }
  // A whole cache line of each row at once: rows are often a power of two apart, and then crowd each other out of the cache.
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Real));
  for (int64_t begin = 0; begin < columns; begin += kLine) {
    int64_t end = smaller(begin + kLine, columns);
    int64_t places[kLine + kLanes];
    int64_t first = within(begin, columns);
    for (int64_t column = first; column < end; column++) places[column - first] = place(column);
    for (int64_t j = 0; j < rows; j += kLanes) {
      int64_t row = within(j, rows);
      for (int64_t i = begin; i < end; i += kLanes) {
        int64_t column = within(i, columns);
        Vec block[LANES];
        UNROLL for (int r = 0; r < LANES; r++) block[r] = from.at((row + r) * stride + column);
        transpose(block);
        UNROLL for (int c = 0; c < LANES; c++) store(to + places[column + c - first] + row, block[c]);
      }
    }
  }
}

// Planar scratch: rows `row` apart and planes `plane` apart; `to` is where the first pixel goes.
template <class From, class T>
inline void into_planes(const From& image, bool channels_last, int64_t channels, int64_t height, int64_t width, T* to, int64_t row,
                        int64_t plane) {
  if (!channels_last && row == width && plane == height * width) {
    copy_all(image, to, channels * plane);
    return;
  }
  for (int64_t y = 0; y < height; y++) {
    if (channels_last) {
      transposed(image + y * width * channels, channels, width, channels, to + y * row,
                 [plane](int64_t channel) { return channel * plane; });
    } else {
      for (int64_t c = 0; c < channels; c++) {
        int64_t at = (c * height + y) * width;
        if constexpr (std::is_same_v<T, Real>) {
          // A short row is read as a whole vector, with what follows it in the image, and written with zeros there: on the border, or where the
          // next row comes.
          if (width < kLanes && at + kLanes <= channels * height * width) {
            IntVec inside = lane_numbers(Lanes{}) < fill(static_cast<Real>(width));
            store(to + c * plane + y * row, inside ? image.at(at) : Vec{});
            continue;
          }
        }
        copy(image + at, to + c * plane + y * row, width);
      }
    }
  }
}

template <class S, class T>
inline void out_of_planes(const S* from, int64_t row, int64_t plane, bool channels_last, int64_t channels, int64_t height,
                          int64_t width, T* image) {
  if (!channels_last && row == width && plane == height * width) {
    copy_all(Plain<S>{from}, image, channels * plane);
    return;
  }
  for (int64_t y = 0; y < height; y++) {
    if (channels_last) {
      transposed(Plain<S>{from + y * row}, plane, channels, width, image + y * width * channels,
                 [channels](int64_t x) { return x * channels; });
    } else {
      for (int64_t c = 0; c < channels; c++) {
        copy(Plain<S>{from + c * plane + y * row}, image + (c * height + y) * width, width);
      }
    }
  }
}

// Channels-last scratch: rows `row` apart and pixels `pixel` apart (which may be more than there are channels).
template <class From>
inline void into_pixels(const From& image, bool channels_last, int64_t channels, int64_t height, int64_t width, Real* to,
                        int64_t row, int64_t pixel) {
  if (!channels_last) {
    // All rows at once, since they lie behind each other: rows are often shorter than a vector.
    transposed(image, height * width, channels, height * width, to,
               [=](int64_t at) {
                 uint32_t y = static_cast<uint32_t>(at) / static_cast<uint32_t>(width);
                 return y * row + (at - y * width) * pixel;
               });
    return;
  }
  for (int64_t y = 0; y < height; y++) {
    if (pixel == channels) {
      copy(image + y * width * channels, to + y * row, width * channels);
    } else {
      for (int64_t x = 0; x < width; x++) copy(image + (y * width + x) * channels, to + y * row + x * pixel, channels);
    }
  }
}

// Some rows of an image, whose planes, if it is planar, are `plane` apart.
template <class T>
inline void out_of_pixels(const Real* from, int64_t row, int64_t pixel, bool channels_last, int64_t channels, int64_t height,
                          int64_t width, T* image, int64_t plane) {
  auto place = [=](int64_t channel) { return channel * plane; };
  if (!channels_last && row == width * pixel) {
    transposed(Plain<Real>{from}, pixel, height * width, channels, image, place);
    return;
  }
  for (int64_t y = 0; y < height; y++) {
    if (!channels_last) {
      transposed(Plain<Real>{from + y * row}, pixel, width, channels, image + y * width, place);
    } else {
      for (int64_t x = 0; x < width; x++) {
        copy(Plain<Real>{from + y * row + x * pixel}, image + (y * width + x) * channels, channels);
      }
    }
  }
}

}  // namespace lockstep
