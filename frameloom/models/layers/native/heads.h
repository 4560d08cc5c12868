// Heads as torch's strides tell of them, and memory for the work on one.

#pragma once

#include "vectors.h"

// Rows of one head, `row` numbers apart.
struct Matrix {
  float *at;
  long row;
};
// All heads of a batch, as torch's strides tell.
struct Heads {
  float *at;
  int64_t batch, head, row;
  Matrix of(long b, long h) const { return {at + b * batch + h * head, row}; }
};
struct Sizes {
  int64_t batch, heads, queries, keys, width;
};
// What is added to the scores of each key, the same for all queries and heads of a sample; `at` may be null.
struct Bias {
  const float *at;
  int64_t batch;
  const float *of(long b) const { return at ? at + b * batch : nullptr; }
};

// Memory that is dealt out piece by piece, each at the start of a vector.
struct Room {
  float *next;
  float *take(long count) {
    float *taken = next;
    next += fill_up(count, LANES);
    return taken;
  }
};

// Heads of at most so many queries and keys have a way of their own.
constexpr long FEW = 8;
static inline bool has_few(const Sizes &sizes) { return sizes.queries <= FEW && sizes.keys <= FEW; }

void attend_few(const Sizes &sizes, Matrix q, Matrix k, Matrix v, const float *bias, Matrix made, float *levels,
                float scale, Room room);
void go_back_few(const Sizes &sizes, Matrix q, Matrix k, Matrix v, const float *bias, Matrix grad, const float *levels,
                 float scale, Matrix grad_q, Matrix grad_k, Matrix grad_v, Room room);
