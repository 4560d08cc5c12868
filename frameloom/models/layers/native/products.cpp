// The product of two matrices of rows, as the gradient of a weight is one of gradients and inputs.
//
// Each number of the result is added up by one thread, in an order that depends on the number of rows alone: its bits
// do not depend on the number of threads.
//
// Shape letters: N rows of both, M and K their widths.

#include <omp.h>
#include <string.h>

#include <algorithm>

#include "tiles.h"

// Rows at a time, and columns of the left matrix: packed, both operands of a block fit the second cache of a core.
constexpr long DEPTH = 1152, PART = 96;

// One row -> its place in [columns / group, depth, group]; zeros behind the last column.
template <long group>
static inline void deal_row(const float *row, long columns, long depth, float *to) {
  for (; columns >= group; columns -= group, row += group, to += depth * group) memcpy(to, row, group * sizeof(float));
  if (columns) {
    memcpy(to, row, columns * sizeof(float));
    memset(to + columns, 0, (group - columns) * sizeof(float));
  }
}

// A tile that reaches over the edge is made beside, and what counts of it is copied.
static void multiply_edge(long depth, const float *a, const float *b, float *c, long c_row, long rows, long columns,
                          bool adds) {
  float made[TILE_ROWS * TILE_COLUMNS];
  multiply_tile<TILE_VECTORS, 1, TILE_ROWS, false>(depth, a, b, made, TILE_COLUMNS);
  for (long i = 0; i < std::min(rows, TILE_ROWS); i++)
    for (long j = 0; j < std::min(columns, TILE_COLUMNS); j++)
      c[i * c_row + j] = (adds ? c[i * c_row + j] : 0) + made[i * TILE_COLUMNS + j];
}

// C [rows, columns] of packed operands, = or += with `adds`.
static void multiply_packed(long depth, const float *left, const float *right, float *c, long c_row, long rows,
                            long columns, bool adds) {
  for (long column = 0; column < columns; column += TILE_COLUMNS)
    for (long row = 0; row < rows; row += TILE_ROWS) {
      const float *a = left + row * depth, *b = right + column * depth;
      float *to = c + row * c_row + column;
      if (row + TILE_ROWS > rows || column + TILE_COLUMNS > columns)
        multiply_edge(depth, a, b, to, c_row, rows - row, columns - column, adds);
      else if (adds)
        multiply_tile<TILE_VECTORS, 1, TILE_ROWS, true>(depth, a, b, to, c_row);
      else
        multiply_tile<TILE_VECTORS, 1, TILE_ROWS, false>(depth, a, b, to, c_row);
    }
}

extern "C" int64_t count_product_room(int64_t columns, int threads) {
  return DEPTH * (fill_up(columns, TILE_COLUMNS) + threads * PART);
}

// made [M, K] = left [N, M] turned times right [N, K]; `room` is as large as `count_product_room` says.
extern "C" void multiply_rows(const float *left, int64_t left_row, const float *right, int64_t right_row, float *made,
                              int64_t depth, int64_t rows, int64_t columns, float *room, int threads) {
  const long blocks = (depth + DEPTH - 1) / DEPTH, each = (depth + blocks - 1) / blocks;
  const long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  float *rights = room;
#pragma omp parallel num_threads(threads)
  {
    const long me = omp_get_thread_num(), count = omp_get_num_threads();
    float *lefts = room + DEPTH * (fill_up(columns, TILE_COLUMNS) + me * PART);
    const long last = std::min(tiles * (me + 1) / count * TILE_ROWS, (long)rows);
    for (long at = 0; at < depth; at += each) {
      const long size = std::min((long)depth - at, each);
#pragma omp for schedule(static)
      for (long n = 0; n < size; n++)
        deal_row<TILE_COLUMNS>(right + (at + n) * right_row, columns, size, rights + n * TILE_COLUMNS);
      for (long first = tiles * me / count * TILE_ROWS; first < last; first += PART) {
        const long part = std::min(last - first, PART);
        for (long n = 0; n < size; n++) {
          const float *row = left + (at + n) * left_row + first;
          fetch(row + AHEAD * left_row, part);
          deal_row<TILE_ROWS>(row, part, size, lefts + n * TILE_ROWS);
        }
        multiply_packed(size, lefts, rights, made + first * columns, columns, part, columns, at > 0);
      }
#pragma omp barrier
    }
  }
}
