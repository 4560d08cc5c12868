// Sums of squares of many tensors, piece by piece, as the norm of gradients asks for them.

#include <omp.h>

#include "vectors.h"

// Sums in float32 stay short: each lane of a piece adds up 16384 / (WAYS * LANES) squares.
constexpr long PIECE = 16384, WAYS = 8;

static double add_squares(const float *at, long count) {
  Vector sums[WAYS] = {};
  const long part = count / WAYS / LANES * LANES;
  // Memory is read in several places at once.
  for (long i = 0; i < part; i += LANES)
    for (int way = 0; way < WAYS; way++) {
      const Vector x = load(at + way * part + i);
      sums[way] += x * x;
    }
  double sum = 0;
  for (long i = WAYS * part; i < count; i++) sum += (double)at[i] * at[i];
  for (int way = 0; way < WAYS; way++)
    for (int lane = 0; lane < LANES; lane++) sum += sums[way][lane];
  return sum;
}

extern "C" int64_t count_pieces(const int64_t *counts, int64_t tensors) {
  long pieces = 0;
  for (long i = 0; i < tensors; i++) pieces += (counts[i] + PIECE - 1) / PIECE;
  return pieces;
}

// `sums` has a place for each piece, so that its bits do not depend on the number of threads.
extern "C" void sum_squares(const float *const *at, const int64_t *counts, int64_t tensors, double *sums, int threads) {
#pragma omp parallel num_threads(threads)
  {
    // Each thread takes pieces that follow each other.
    const long me = omp_get_thread_num(), team = omp_get_num_threads(), all = count_pieces(counts, tensors);
    const long begin = all * me / team, end = all * (me + 1) / team;
    for (long i = 0, piece = 0; i < tensors && piece < end; i++)
      for (long first = 0; first < counts[i]; first += PIECE, piece++)
        if (begin <= piece && piece < end) {
          const long left = counts[i] - first;
          sums[piece] = add_squares(at[i] + first, left < PIECE ? left : PIECE);
        }
  }
}
