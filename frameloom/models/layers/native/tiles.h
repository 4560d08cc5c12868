// The one loop through which all products go. It keeps its sums in registers while it walks through two packed
// operands.

#pragma once

#include "vectors.h"

// Rows of a tile by its width in vectors: as many sums as fit the registers, beside the operands.
#ifdef __AVX512F__
constexpr int ROWS[] = {0, 12, 12, 8, 6};
#else
constexpr int ROWS[] = {0, 12, 6, 4, 3};
#endif
// A tile of two vectors is nearest to a square, and reads least.
constexpr int TILE_VECTORS = 2;
constexpr long TILE_ROWS = ROWS[TILE_VECTORS], TILE_COLUMNS = TILE_VECTORS * LANES;

// C [rows, vectors * LANES] = A B, or += with `adds`. B [depth, vectors * LANES] lies in one piece; from a number of A
// to the one below are A_ROW numbers, to the one beside it A_STEP.
template <int vectors, long A_ROW, long A_STEP, bool adds>
static inline void multiply_tile(long depth, const float *__restrict__ a, const float *__restrict__ b,
                                 float *__restrict__ c, long c_row) {
  constexpr int rows = ROWS[vectors];
  Vector sums[rows][vectors];
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sums[r][v] = Vector{};
  for (long k = 0; k < depth; k++, a += A_STEP, b += vectors * LANES) {
    Vector right[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) right[v] = load(b + v * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) sums[r][v] += a[r * A_ROW] * right[v];
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
      float *to = c + r * c_row + v * LANES;
      store(to, adds ? load(to) + sums[r][v] : sums[r][v]);
    }
}
