// Matrix products of the sizes that Winograd's method needs: a tile of rows x 2 vectors stays in registers.
#pragma once
#include "simd.h"

namespace lockstep {

constexpr int kRows = kManyRegisters ? 12 : 6;
constexpr int64_t kPanel = 2 * LANES;  // columns of a panel; the last one of a matrix may have half of them

// Element (row, k) of A is a[row * row_step + k * k_step].
struct Left {
  const Real* a;
  int64_t row_step, k_step;
};

// C (+)= A B for `ROWS` rows and `VECTORS` vectors of columns.
template <int ROWS, int VECTORS, bool ADD>
INLINE void multiply_tile(int64_t depth, const Left& left, const Real* b, int64_t b_row, Real* c, int64_t c_row) {
  Vec sum[ROWS][VECTORS];
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = ADD ? load(c + r * c_row + v * kLanes) : Vec{};
  }
  const Real* a = left.a;
  for (int64_t k = 0; k < depth; k++) {
    Vec right[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) right[v] = load(b + v * kLanes);
    UNROLL for (int r = 0; r < ROWS; r++) {
      Vec one = fill(a[r * left.row_step]);
      UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] += one * right[v];
    }
    a += left.k_step;
    b += b_row;
  }
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int v = 0; v < VECTORS; v++) store(c + r * c_row + v * kLanes, sum[r][v]);
  }
}

template <int VECTORS, bool ADD>
void multiply_panel(int64_t rows, int64_t depth, Left left, const Real* b, int64_t b_row, Real* c, int64_t c_row) {
  auto go = [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    multiply_tile<kCount, VECTORS, ADD>(depth, left, b, b_row, c, c_row);
    left.a += kCount * left.row_step;
    c += kCount * c_row;
    rows -= kCount;
  };
  while (rows >= kRows) go(std::integral_constant<int, kRows>{});
  while (rows >= 4) go(std::integral_constant<int, 4>{});
  while (rows >= 2) go(std::integral_constant<int, 2>{});
  if (rows) go(std::integral_constant<int, 1>{});
}

// `columns` is a multiple of LANES. B lies in panels one behind the other (depth rows of kPanel columns each) or, if b_row is given, in
// rows of that distance.
template <bool ADD>
void multiply(int64_t rows, int64_t columns, int64_t depth, const Left& left, const Real* b, int64_t b_row, Real* c,
              int64_t c_row) {
  for (int64_t column = 0; column < columns; column += kPanel) {
    bool whole = column + kPanel <= columns;
    const Real* panel = b_row ? b + column : b + column * depth;
    int64_t step = b_row ? b_row : whole ? kPanel : kLanes;
    if (whole) multiply_panel<2, ADD>(rows, depth, left, panel, step, c + column, c_row);
    else multiply_panel<1, ADD>(rows, depth, left, panel, step, c + column, c_row);
  }
}

}  // namespace lockstep
