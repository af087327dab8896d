// A small linear layer by one thread: for products that take less time than finding the library that would divide them.
#pragma once
#include "simd.h"

namespace lockstep::linear {

struct Shape {
  int64_t rows, inputs, outputs;
};

// `COUNT` outputs of one row.
template <int COUNT>
INLINE void outputs_of(int64_t inputs, const Real* x, const Real* weight, const Real* bias, Real* y) {
  Vec sums[COUNT] = {};
  int64_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) {
    Vec from = load(x + i);
    UNROLL for (int o = 0; o < COUNT; o++) sums[o] += from * load(weight + o * inputs + i);
  }
  UNROLL for (int o = 0; o < COUNT; o++) {
    Real sum = total(sums[o]);
    for (int64_t rest = i; rest < inputs; rest++) sum += x[rest] * weight[o * inputs + rest];
    y[o] = sum + bias[o];
  }
}

// x: rows x inputs; weight: outputs x inputs; y: rows x outputs.
inline void forward(const Shape& n, const Real* x, const Real* weight, const Real* bias, Real* y) {
  for (int64_t row = 0; row < n.rows; row++, x += n.inputs, y += n.outputs) {
    int64_t o = 0;
    for (; o + 5 <= n.outputs; o += 5) outputs_of<5>(n.inputs, x, weight + o * n.inputs, bias + o, y + o);
    for (; o < n.outputs; o++) outputs_of<1>(n.inputs, x, weight + o * n.inputs, bias + o, y + o);
  }
}

// For each of `COUNT` rows of `to`: the sum over k of a factor times row k of `from`. Factor (k, row) is factors[k * k_step + row * row_step].
// A row of `from` is read once for all of them.
template <int COUNT>
INLINE void mix(int64_t inputs, int64_t count, const Real* factors, int64_t k_step, int64_t row_step, const Real* from, Real* to) {
  auto columns = [&](auto vectors, int64_t i) INLINED {
    constexpr int kVectors = decltype(vectors)::value;
    Vec sums[COUNT][kVectors] = {};
    for (int64_t k = 0; k < count; k++) {
      Vec of[kVectors];
      UNROLL for (int v = 0; v < kVectors; v++) of[v] = load(from + k * inputs + i + v * kLanes);
      UNROLL for (int c = 0; c < COUNT; c++) {
        Vec factor = fill(factors[k * k_step + c * row_step]);
        UNROLL for (int v = 0; v < kVectors; v++) sums[c][v] += factor * of[v];
      }
    }
    UNROLL for (int c = 0; c < COUNT; c++) {
      UNROLL for (int v = 0; v < kVectors; v++) store(to + c * inputs + i + v * kLanes, sums[c][v]);
    }
  };
  int64_t i = 0;
  for (; i + 2 * kLanes <= inputs; i += 2 * kLanes) columns(std::integral_constant<int, 2>{}, i);
  for (; i + kLanes <= inputs; i += kLanes) columns(std::integral_constant<int, 1>{}, i);
  for (; i < inputs; i++) {
    UNROLL for (int c = 0; c < COUNT; c++) {
      Real sum = 0;
      for (int64_t k = 0; k < count; k++) sum += factors[k * k_step + c * row_step] * from[k * inputs + i];
      to[c * inputs + i] = sum;
    }
  }
}

// All rows of `to`.
inline void mix_all(int64_t rows, int64_t inputs, int64_t count, const Real* factors, int64_t k_step, int64_t row_step, const Real* from,
                    Real* to) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) mix<4>(inputs, count, factors + row * row_step, k_step, row_step, from, to + row * inputs);
  for (; row < rows; row++) mix<1>(inputs, count, factors + row * row_step, k_step, row_step, from, to + row * inputs);
}

inline void backward(const Shape& n, const Real* grad, const Real* x, const Real* weight, Real* grad_x, Real* grad_weight,
                     Real* grad_bias) {
  mix_all(n.rows, n.inputs, n.outputs, grad, 1, n.outputs, weight, grad_x);
  mix_all(n.outputs, n.inputs, n.rows, grad, n.outputs, 1, x, grad_weight);
  for (int64_t o = 0; o < n.outputs; o++) {
    grad_bias[o] = 0;
    for (int64_t row = 0; row < n.rows; row++) grad_bias[o] += grad[row * n.outputs + o];
  }
}

}  // namespace lockstep::linear
