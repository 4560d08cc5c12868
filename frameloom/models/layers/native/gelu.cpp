// GELU by its approximation with a hyperbolic tangent, and its slope, in one pass.

#include <string.h>

#include <algorithm>

#include "vectors.h"

// 0.5 * (1 + tanh(u)) = sigmoid(2u), with 2u = OUTER * (x + CUBIC * x^3)
constexpr float OUTER = 1.5957691216057308f, CUBIC = 0.044715f;

static inline void activate_vector(Vector x, Vector &value, Vector &slope) {
  const Vector square = x * x, most = Vector{} + 126.0f;
  Vector power = x * (square * CUBIC + 1.0f) * (-OUTER * LOG2_E);
  power = power > most ? most : power;
  const Vector gate = 1.0f / (power_of_two(power) + 1.0f);
  value = x * gate;
  slope = gate + value * (1.0f - gate) * (square * (3 * CUBIC * OUTER) + OUTER);
}

// value = GELU(hidden + bias), and hidden = its slope there, unless both are the same.
extern "C" void activate(float *hidden, const float *bias, float *value, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long row = 0; row < rows; row++)
    for (long i = 0; i < width; i += LANES) {
      const long count = std::min((long)width - i, (long)LANES), at = row * width + i;
      Vector x = {}, shift = {}, made, slope;
      if (count == LANES) {
        activate_vector(load(hidden + at) + load(bias + i), made, slope);
        if (hidden != value) store(hidden + at, slope);
        store(value + at, made);
      } else {
        memcpy(&x, hidden + at, count * sizeof(float));
        memcpy(&shift, bias + i, count * sizeof(float));
        activate_vector(x + shift, made, slope);
        if (hidden != value) memcpy(hidden + at, &slope, count * sizeof(float));
        memcpy(value + at, &made, count * sizeof(float));
      }
    }
}
