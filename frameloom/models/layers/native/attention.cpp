// Softmax attention in float32 on the processor: forward and backward, block by block, without a matrix of all scores.
//
// A head is packed once for `multiply_tile`: reading it costs one pass, and the products then run at the processor's own
// rate.
// Scores are those of powers of two: exp(x) is 2^(x / ln 2), and queries are multiplied by the scale over ln 2.
//
// Each head is computed by one thread, in an order that depends on its own sizes alone: its bits do not depend on the
// batch or on the number of threads.
//
// Shape letters: B batch, H heads, N queries, M keys, D head width, E = D filled up to whole vectors.

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>

#include "heads.h"
#include "tiles.h"

// Scores at a time: BLOCK queries and as many keys in the backward pass, SPAN keys in the forward pass.
constexpr long BLOCK = 96, SPAN = 384;
// Rows that are a multiple of all that `ROWS` says.
static inline long fill_rows(long count) { return fill_up(count, 24); }

// Products of rows with rows, [rows, columns], of two operands that `pack_columns` made.
template <long C_ROW>
static __attribute__((noinline)) void score(long width, const float *left, const float *right, float *c, long rows,
                                            long columns) {
  for (long column = 0; column < columns; column += TILE_COLUMNS)
    for (long row = 0; row < rows; row += TILE_ROWS)
      multiply_tile<TILE_VECTORS, 1, TILE_ROWS, false>(width, left + row * width, right + column * width,
                                                       c + row * C_ROW + column, C_ROW);
}

// How many of the vectors that are left make the next panel: as `ROWS` says, wide ones are the fastest.
static inline int choose_panel(long left) { return left == 5 ? 3 : left > 4 ? 4 : left; }

template <int vectors, long A_ROW, long A_STEP>
static inline void add_panel(long rows, long depth, const float *a, const float *b, float *c, long c_row) {
  for (long row = 0; row < rows; row += ROWS[vectors])
    multiply_tile<vectors, A_ROW, A_STEP, true>(depth, a + row * A_ROW, b, c + row * c_row, c_row);
}

// C [rows, E] += A B, where B are `depth` rows from `first` on of the `total` ones that `pack_rows` made.
template <long A_ROW, long A_STEP>
static __attribute__((noinline)) void add_product(long width, long rows, long depth, const float *a, const float *b,
                                                  long total, long first, float *c) {
  for (long vectors = width / LANES, done = 0, panel; done < vectors; done += panel) {
    panel = choose_panel(vectors - done);
    const float *from = b + (done * total + panel * first) * LANES;
    float *to = c + done * LANES;
    switch (panel) {
      case 4: add_panel<4, A_ROW, A_STEP>(rows, depth, a, from, to, width); break;
      case 3: add_panel<3, A_ROW, A_STEP>(rows, depth, a, from, to, width); break;
      case 2: add_panel<2, A_ROW, A_STEP>(rows, depth, a, from, to, width); break;
      default: add_panel<1, A_ROW, A_STEP>(rows, depth, a, from, to, width);
    }
  }
}

// [count, D] -> [total / group, D, group], times `factor`; zeros behind `count`.
template <long group>
static void pack_columns(Matrix x, long count, long total, long width, float factor, float *to) {
  for (long first = 0; first < total; first += group, to += group * width) {
    if (first + group > count) std::fill_n(to, group * width, 0.0f);
    for (long i = 0; i < std::min(count - first, group); i++) {
      const float *row = x.at + (first + i) * x.row;
      fetch(row + AHEAD * x.row, width);
      for (long d = 0; d < width; d++) to[d * group + i] = row[d] * factor;
    }
  }
}

// [count, D] -> panels [count of `total`, panel], one behind the other; zeros beside D.
static void pack_rows(Matrix x, long count, long total, long width, float *to) {
  const long vectors = fill_up(width, LANES) / LANES;
  for (long done = 0, panel; done < vectors; done += panel) {
    panel = choose_panel(vectors - done);
    const long size = panel * LANES, filled = std::min(width - done * LANES, size);
    for (long i = 0; i < count; i++) {
      const float *row = x.at + i * x.row + done * LANES;
      fetch(row + AHEAD * x.row, filled);
      memcpy(to + i * size, row, filled * sizeof(float));
      memset(to + i * size + filled, 0, (size - filled) * sizeof(float));
    }
    to += total * size;
  }
}

static void pack_left(Matrix x, long count, long total, long width, float factor, float *to) {
  pack_columns<TILE_ROWS>(x, count, total, width, factor, to);
}
static void pack_right(Matrix x, long count, long total, long width, float *to) {
  pack_columns<TILE_COLUMNS>(x, count, total, width, 1, to);
}

static inline void add_bias(float *row, const float *bias, long keys) {
  for (long j = 0; j < keys; j++) row[j] += bias[j] * LOG2_E;
}

// Scores -> powers of two below the highest score so far; what was made with a lower one is made smaller.
static void weigh_rows(float *scores, const float *bias, long rows, long keys, float *tops, float *sums, float *made,
                       long width) {
  const long columns = fill_up(keys, LANES);
  for (long i = 0; i < rows; i++) {
    float *row = scores + i * SPAN, top = tops[i], sum = 0;
    if (bias) add_bias(row, bias, keys);
    for (long j = keys; j < columns; j++) row[j] = -INFINITY;
    Vector most = load(row), weights = {};
    for (long j = LANES; j < columns; j += LANES) most = load(row + j) > most ? load(row + j) : most;
    for (int lane = 0; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top;
    if (top == -INFINITY) top = LOWEST;  // nothing may be seen yet
    for (long j = 0; j < columns; j += LANES) {
      const Vector weight = power_of_two(load(row + j) - top);
      store(row + j, weight);
      weights += weight;
    }
    for (int lane = 0; lane < LANES; lane++) sum += weights[lane];
    if (top != tops[i]) {
      const float kept = exp2f(tops[i] - top);
      for (long d = 0; d < width; d += LANES) store(made + i * width + d, load(made + i * width + d) * kept);
      sums[i] *= kept, tops[i] = top;
    }
    sums[i] += sum;
  }
}

extern "C" int64_t count_forward_room(Sizes sizes) {
  const long wide = fill_up(sizes.width, LANES), keys = fill_up(sizes.keys, TILE_COLUMNS);
  return keys * (sizes.width + wide) + BLOCK * (sizes.width + SPAN + wide + 2) + 8 * LANES;
}

// Queries from `first` to `last` of one head. `levels` [N] are the logarithms of the sums of all weights.
static void attend_head(const Sizes &sizes, Matrix q, Matrix k, Matrix v, const float *bias, Matrix made,
                        float *levels, float scale, long first, long last, Room room) {
  const long width = sizes.width, wide = fill_up(width, LANES), total = fill_up(sizes.keys, TILE_COLUMNS);
  float *keys = room.take(total * width), *values = room.take(total * wide), *queries = room.take(BLOCK * width);
  float *scores = room.take(BLOCK * SPAN), *sum_NE = room.take(BLOCK * wide);
  float *tops = room.take(BLOCK), *sums = room.take(BLOCK);
  pack_right(k, sizes.keys, total, width, keys);
  pack_rows(v, sizes.keys, total, width, values);
  for (; first < last; first += BLOCK) {
    const long rows = std::min(last - first, BLOCK);
    pack_left({q.at + first * q.row, q.row}, rows, fill_rows(rows), width, scale * LOG2_E, queries);
    std::fill_n(sum_NE, fill_rows(rows) * wide, 0.0f);
    std::fill_n(tops, rows, -INFINITY);
    std::fill_n(sums, rows, 0.0f);
    for (long at = 0; at < sizes.keys; at += SPAN) {
      const long columns = std::min(sizes.keys - at, SPAN);
      score<SPAN>(width, queries, keys + at * width, scores, rows, columns);
      weigh_rows(scores, bias ? bias + at : nullptr, rows, columns, tops, sums, sum_NE, wide);
      add_product<SPAN, 1>(wide, rows, columns, scores, values, total, at, sum_NE);
    }
    for (long i = 0; i < rows; i++) {
      const float share = tops[i] == LOWEST ? 0 : 1 / sums[i];
      float *to = made.at + (first + i) * made.row;
      for (long d = 0; d < width; d++) to[d] = sum_NE[i * wide + d] * share;
      levels[first + i] = tops[i] == LOWEST ? INFINITY : tops[i] + log2f(sums[i]);
    }
  }
}

// `levels` [B, H, N] are for the backward pass. `room` is as large as `count_forward_room` says, for each thread.
extern "C" void attend(Sizes sizes, Heads q, Heads k, Heads v, Bias bias, Heads made, float *levels, float scale,
                       float *room, int threads) {
  const long heads = sizes.batch * sizes.heads, each = count_forward_room(sizes);
  // Where there are fewer heads than threads, several share one, each with queries of its own.
  const long parts = heads < threads ? (threads + heads - 1) / heads : 1;
  const long size = fill_up((sizes.queries + parts - 1) / parts, BLOCK);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long i = 0; i < heads * parts; i++) {
    const long head = i / parts, b = head / sizes.heads, h = head % sizes.heads, first = i % parts * size;
    const long last = std::min(first + size, (long)sizes.queries);
    float *own_levels = levels + head * sizes.queries;
    const Room own = {room + omp_get_thread_num() * each};
    if (!has_few(sizes))
      attend_head(sizes, q.of(b, h), k.of(b, h), v.of(b, h), bias.of(b), made.of(b, h), own_levels, scale, first, last,
                  own);
    else if (first < last)
      attend_few(sizes, q.of(b, h), k.of(b, h), v.of(b, h), bias.of(b), made.of(b, h), own_levels, scale, own);
  }
}

extern "C" int64_t count_backward_room(Sizes sizes) {
  const long wide = fill_up(sizes.width, LANES), keys = fill_up(sizes.keys, TILE_COLUMNS);
  const long queries = fill_rows(sizes.queries);
  return keys * (2 * sizes.width + wide) + queries * (2 * sizes.width + 3 * wide + 1) + 2 * BLOCK * (BLOCK + wide) +
         16 * LANES;
}

// The mean gain of each query's shares, which its scores do not share in: what was made times its gradient.
static void find_means(Matrix made, Matrix grad, long count, long width, float *means) {
  for (long i = 0; i < count; i++) {
    const float *left = made.at + i * made.row, *right = grad.at + i * grad.row;
    fetch(left + AHEAD * made.row, width);
    float sum = 0;
    for (long d = 0; d < width; d++) sum += left[d] * right[d];
    means[i] = sum;
  }
}

// Scores -> shares, and gradients of shares -> gradients of scores.
static void turn_back(float *shares, float *grads, const float *bias, long rows, long keys, const float *levels,
                      const float *means) {
  for (long i = 0; i < rows; i++) {
    if (bias) add_bias(shares + i * BLOCK, bias, keys);
    for (long j = i * BLOCK; j < i * BLOCK + keys; j += LANES) {
      const Vector share = power_of_two(load(shares + j) - levels[i]);
      store(shares + j, share);
      store(grads + j, share * (load(grads + j) - means[i]));
    }
  }
}

static void write_rows(const float *from, long wide, long count, long width, float factor, Matrix to) {
  for (long i = 0; i < count; i++)
    for (long d = 0; d < width; d++) to.at[i * to.row + d] = from[i * wide + d] * factor;
}

static void go_back(const Sizes &sizes, Matrix q, Matrix k, Matrix v, const float *bias, Matrix made, Matrix grad,
                    const float *levels, float scale, Matrix grad_q, Matrix grad_k, Matrix grad_v, Room room) {
  const long width = sizes.width, wide = fill_up(width, LANES), count = sizes.queries;
  const long N = fill_rows(count), M = fill_up(sizes.keys, TILE_COLUMNS);
  float *keys = room.take(M * width), *values = room.take(M * width), *key_rows = room.take(M * wide);
  float *queries = room.take(N * width), *grads = room.take(N * width), *query_rows = room.take(N * wide);
  float *grad_rows = room.take(N * wide), *sum_NE = room.take(N * wide), *means = room.take(N);
  float *shares = room.take(BLOCK * BLOCK), *score_grads = room.take(BLOCK * BLOCK);
  float *key_sum = room.take(BLOCK * wide), *value_sum = room.take(BLOCK * wide);
  pack_right(k, sizes.keys, M, width, keys);
  pack_right(v, sizes.keys, M, width, values);
  pack_rows(k, sizes.keys, M, width, key_rows);
  pack_left(q, count, N, width, scale * LOG2_E, queries);
  pack_left(grad, count, N, width, 1, grads);
  pack_rows(q, count, N, width, query_rows);
  pack_rows(grad, count, N, width, grad_rows);
  find_means(made, grad, count, width, means);
  std::fill_n(sum_NE, N * wide, 0.0f);
  for (long at = 0; at < sizes.keys; at += BLOCK) {
    const long columns = std::min(sizes.keys - at, BLOCK);
    std::fill_n(key_sum, fill_rows(columns) * wide, 0.0f);
    std::fill_n(value_sum, fill_rows(columns) * wide, 0.0f);
    for (long first = 0; first < count; first += BLOCK) {
      const long rows = std::min(count - first, BLOCK);
      score<BLOCK>(width, queries + first * width, keys + at * width, shares, rows, columns);
      score<BLOCK>(width, grads + first * width, values + at * width, score_grads, rows, columns);
      turn_back(shares, score_grads, bias ? bias + at : nullptr, rows, columns, levels + first, means + first);
      add_product<1, BLOCK>(wide, columns, rows, shares, grad_rows, N, first, value_sum);
      add_product<1, BLOCK>(wide, columns, rows, score_grads, query_rows, N, first, key_sum);
      add_product<BLOCK, 1>(wide, rows, columns, score_grads, key_rows, M, at, sum_NE + first * wide);
    }
    write_rows(key_sum, wide, columns, width, scale, {grad_k.at + at * grad_k.row, grad_k.row});
    write_rows(value_sum, wide, columns, width, 1, {grad_v.at + at * grad_v.row, grad_v.row});
  }
  write_rows(sum_NE, wide, count, width, scale, grad_q);
}

// `room` is as large as `count_backward_room` says, for each thread.
extern "C" void attend_backward(Sizes sizes, Heads q, Heads k, Heads v, Bias bias, Heads made, Heads grad,
                                const float *levels, float scale, Heads grad_q, Heads grad_k, Heads grad_v, float *room, int threads) {
  const long each = count_backward_room(sizes);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long i = 0; i < sizes.batch * sizes.heads; i++) {
    const long b = i / sizes.heads, h = i % sizes.heads;
    const float *own_levels = levels + i * sizes.queries;
    const Room own = {room + omp_get_thread_num() * each};
    if (has_few(sizes))
      go_back_few(sizes, q.of(b, h), k.of(b, h), v.of(b, h), bias.of(b), grad.of(b, h), own_levels, scale,
                  grad_q.of(b, h), grad_k.of(b, h), grad_v.of(b, h), own);
    else
      go_back(sizes, q.of(b, h), k.of(b, h), v.of(b, h), bias.of(b), made.of(b, h), grad.of(b, h), own_levels, scale,
              grad_q.of(b, h), grad_k.of(b, h), grad_v.of(b, h), own);
  }
}
