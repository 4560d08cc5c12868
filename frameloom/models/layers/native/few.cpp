// Attention of a head with few queries and keys, as along the frames of a short clip: the numbers of a row lie side by
// side in vectors, and all scores of a query in one.
//
// Shape letters: N queries, M keys, E = head width filled up to whole vectors.

#include <math.h>
#include <string.h>

#include <algorithm>

#include "heads.h"

static_assert(FEW <= LANES, "all scores of a query fit a vector");

// Rows -> [count, E], with zeros beside the width.
static float *copy_rows(Matrix x, long count, long width, long wide, Room &room) {
  float *to = room.take(count * wide);
  for (long i = 0; i < count; i++) {
    const float *row = x.at + i * x.row;
    long d = 0;
    for (; d + LANES <= width; d += LANES) store(to + i * wide + d, load(row + d));
    for (; d < wide; d++) to[i * wide + d] = d < width ? row[d] : 0;
  }
  return to;
}

static void write_row(const float *from, long width, float factor, float *to) {
  long d = 0;
  for (; d + LANES <= width; d += LANES) store(to + d, load(from + d) * factor);
  for (; d < width; d++) to[d] = from[d] * factor;
}

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

static inline float add_lanes(Vector x) {
  const float *at = (const float *)&x;
  Four sum = *(const Four *)at;
  for (int lane = 4; lane < LANES; lane += 4) sum += *(const Four *)(at + lane);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Products of one row with each of `count` others.
static inline void score_row(const float *row, const float *others, long count, long wide, float factor, float *to) {
  for (long j = 0; j < count; j++) {
    Vector sum = {};
    for (long d = 0; d < wide; d += LANES) sum += load(row + d) * load(others + j * wide + d);
    to[j] = add_lanes(sum) * factor;
  }
}

// to += factor * row
static inline void add_row(const float *row, float factor, long wide, float *to) {
  for (long d = 0; d < wide; d += LANES) store(to + d, load(to + d) + load(row + d) * factor);
}

static inline void add_bias(float *scores, const float *bias, long count) {
  for (long j = 0; bias && j < count; j++) scores[j] += bias[j] * LOG2_E;
}

// Scores -> their powers of two below `level`.
static inline void weigh(float *scores, float level) {
  store(scores, power_of_two(load(scores) - level));
}

void attend_few(const Sizes &sizes, Matrix q, Matrix k, Matrix v, const float *bias, Matrix made, float *levels,
                float scale, Room room) {
  const long N = sizes.queries, M = sizes.keys, width = sizes.width, wide = fill_up(width, LANES);
  const float *queries = copy_rows(q, N, width, wide, room), *keys = copy_rows(k, M, width, wide, room);
  const float *values = copy_rows(v, M, width, wide, room);
  float *sum_E = room.take(wide), weights[LANES];
  for (long i = 0; i < N; i++) {
    std::fill_n(weights, LANES, -INFINITY);
    score_row(queries + i * wide, keys, M, wide, scale * LOG2_E, weights);
    add_bias(weights, bias, M);
    float top = weights[0];
    for (long j = 1; j < M; j++) top = weights[j] > top ? weights[j] : top;
    if (top == -INFINITY) top = LOWEST;
    weigh(weights, top);
    const float sum = add_lanes(load(weights));
    std::fill_n(sum_E, wide, 0.0f);
    for (long j = 0; j < M; j++) add_row(values + j * wide, weights[j], wide, sum_E);
    write_row(sum_E, width, top == LOWEST ? 0 : 1 / sum, made.at + i * made.row);
    levels[i] = top == LOWEST ? INFINITY : top + log2f(sum);
  }
}

void go_back_few(const Sizes &sizes, Matrix q, Matrix k, Matrix v, const float *bias, Matrix grad, const float *levels,
                 float scale, Matrix grad_q, Matrix grad_k, Matrix grad_v, Room room) {
  const long N = sizes.queries, M = sizes.keys, width = sizes.width, wide = fill_up(width, LANES);
  const float *queries = copy_rows(q, N, width, wide, room), *keys = copy_rows(k, M, width, wide, room);
  const float *values = copy_rows(v, M, width, wide, room), *grads = copy_rows(grad, N, width, wide, room);
  float *key_sums = room.take(M * wide), *value_sums = room.take(M * wide), *sum_E = room.take(wide);
  float shares[LANES], gains[FEW];
  std::fill_n(key_sums, M * wide, 0.0f);
  std::fill_n(value_sums, M * wide, 0.0f);
  for (long i = 0; i < N; i++) {
    std::fill_n(shares, LANES, -INFINITY);
    score_row(queries + i * wide, keys, M, wide, scale * LOG2_E, shares);
    add_bias(shares, bias, M);
    weigh(shares, levels[i]);
    score_row(grads + i * wide, values, M, wide, 1, gains);
    float mean = 0;
    for (long j = 0; j < M; j++) mean += shares[j] * gains[j];
    std::fill_n(sum_E, wide, 0.0f);
    for (long j = 0; j < M; j++) {
      const float gain = shares[j] * (gains[j] - mean);
      add_row(keys + j * wide, gain, wide, sum_E);
      add_row(queries + i * wide, gain, wide, key_sums + j * wide);
      add_row(grads + i * wide, shares[j], wide, value_sums + j * wide);
    }
    write_row(sum_E, width, scale, grad_q.at + i * grad_q.row);
  }
  for (long j = 0; j < M; j++) {
    write_row(key_sums + j * wide, width, scale, grad_k.at + j * grad_k.row);
    write_row(value_sums + j * wide, width, 1, grad_v.at + j * grad_v.row);
  }
}
