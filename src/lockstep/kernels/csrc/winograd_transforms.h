// Winograd's F(4x4, 3x3): 4x4 outputs from 6x6 inputs with 36 products instead of 144. With the interpolation points 0, ±1, ±2 and infinity,
//   y = A' [(G w G') ∘ (B' x B)] A,
// and every step is linear, so the gradients go through the transposes of the same matrices.
#pragma once
#include "simd.h"

namespace lockstep::winograd {

constexpr int kOut = 4, kIn = 6, kTaps = 3, kPoints = kIn * kIn;

// Each function multiplies a column of vectors by the matrix that it is named after (t: transposed).
struct Bt {
  static constexpr int from = 6, to = 6;
  static INLINE void apply(const Vec (&d)[6], Vec (&r)[6]) {
    const Real four = 4, five = 5, two = 2;
    Vec even = d[4] - four * d[2], odd = d[3] - four * d[1];
    Vec outer = d[4] - d[2], inner = two * (d[3] - d[1]);
    r[0] = four * d[0] + (d[4] - five * d[2]);
    r[1] = even + odd;
    r[2] = even - odd;
    r[3] = outer + inner;
    r[4] = outer - inner;
    r[5] = four * d[1] + (d[5] - five * d[3]);
  }
};

struct B {
  static constexpr int from = 6, to = 6;
  static INLINE void apply(const Vec (&v)[6], Vec (&r)[6]) {
    const Real four = 4, five = 5, two = 2;
    Vec s12 = v[1] + v[2], d12 = v[1] - v[2], s34 = v[3] + v[4], d34 = v[3] - v[4];
    r[0] = four * v[0];
    r[1] = four * (v[5] - d12) - two * d34;
    r[2] = -five * v[0] - four * s12 - s34;
    r[3] = d12 + two * d34 - five * v[5];
    r[4] = v[0] + s12 + s34;
    r[5] = v[5];
  }
};

struct At {
  static constexpr int from = 6, to = 4;
  static INLINE void apply(const Vec (&m)[6], Vec (&r)[4]) {
    const Real four = 4, two = 2, eight = 8;
    Vec s12 = m[1] + m[2], d12 = m[1] - m[2], s34 = m[3] + m[4], d34 = m[3] - m[4];
    r[0] = m[0] + s12 + s34;
    r[1] = d12 + two * d34;
    r[2] = s12 + four * s34;
    r[3] = d12 + eight * d34 + m[5];
  }
};

struct A {
  static constexpr int from = 4, to = 6;
  static INLINE void apply(const Vec (&y)[4], Vec (&r)[6]) {
    const Real four = 4, two = 2, eight = 8;
    Vec even = y[0] + y[2], odd = y[1] + y[3], even2 = y[0] + four * y[2], odd2 = two * y[1] + eight * y[3];
    r[0] = y[0];
    r[1] = even + odd;
    r[2] = even - odd;
    r[3] = even2 + odd2;
    r[4] = even2 - odd2;
    r[5] = y[3];
  }
};

struct G {
  static constexpr int from = 3, to = 6;
  static INLINE void apply(const Vec (&w)[3], Vec (&r)[6]) {
    const Real quarter = Real(1) / 4, sixth = Real(1) / 6, twelfth = Real(1) / 12, last = Real(1) / 24;
    Vec ends = -sixth * (w[0] + w[2]), wide = last * w[0] + sixth * w[2];
    r[0] = quarter * w[0];
    r[1] = ends - sixth * w[1];
    r[2] = ends + sixth * w[1];
    r[3] = wide + twelfth * w[1];
    r[4] = wide - twelfth * w[1];
    r[5] = w[2];
  }
};

struct Gt {
  static constexpr int from = 6, to = 3;
  static INLINE void apply(const Vec (&u)[6], Vec (&r)[3]) {
    const Real quarter = Real(1) / 4, sixth = Real(1) / 6, twelfth = Real(1) / 12, last = Real(1) / 24;
    Vec s12 = u[1] + u[2], d12 = u[1] - u[2], s34 = u[3] + u[4], d34 = u[3] - u[4];
    r[0] = quarter * u[0] - sixth * s12 + last * s34;
    r[1] = twelfth * d34 - sixth * d12;
    r[2] = sixth * (s34 - s12) + u[5];
  }
};

// A square of vectors, multiplied by a matrix from the left and by its transpose from the right. `read(i, j)` gives an element and
// `write(i, j, value)` takes one.
template <class M, class Read, class Write>
INLINE void both_sides(const Read& read, const Write& write) {
  Vec between[M::to][M::from];
  UNROLL for (int j = 0; j < M::from; j++) {
    Vec column[M::from], result[M::to];
    UNROLL for (int i = 0; i < M::from; i++) column[i] = read(i, j);
    M::apply(column, result);
    UNROLL for (int i = 0; i < M::to; i++) between[i][j] = result[i];
  }
  UNROLL for (int i = 0; i < M::to; i++) {
    Vec result[M::to];
    M::apply(between[i], result);
    UNROLL for (int j = 0; j < M::to; j++) write(i, j, result[j]);
  }
}

}  // namespace lockstep::winograd
