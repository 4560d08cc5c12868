// Vectors of the processor's own width, and what attention, products and GELU do with them.

#pragma once

#include <stdint.h>

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int LINE = 16;  // numbers that a cache holds together
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LOWEST = -1e30f;  // for the highest of scores that are all -infinity

typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Whole __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

static inline long fill_up(long count, long step) { return (count + step - 1) / step * step; }
static inline Vector load(const float *from) { return *(const Vector *)from; }
static inline void store(float *to, Vector x) { *(Vector *)to = x; }

// Rows of a head or of a slice are short, and each lies far from the one before: ask for them some rows ahead.
constexpr long AHEAD = 16;
static inline void fetch(const float *from, long count) {
  for (long i = 0; i < count; i += LINE) __builtin_prefetch(from + i);
}

// 2^x within 1e-7 of it, for x up to 127, and 2^-126 for all below -126; what is no number stays so.
static inline Vector power_of_two(Vector x) {
  const float ROUNDER = 12582912.0f;  // 1.5 * 2^23: the last bits of a sum with it are the whole part
  const Vector least = Vector{} - 126.0f;
  x = x < least ? least : x;
  const Vector whole = x + ROUNDER, rest = x - (whole - ROUNDER);
  Vector made = rest * 1.546144469e-04f + 1.340042818e-03f;
  made = made * rest + 9.618056679e-03f;
  made = made * rest + 5.550327227e-02f;
  made = made * rest + 2.402265092e-01f;
  made = made * rest + 6.931472067e-01f;
  made = made * rest + 1.0f;
  return (Vector)((Whole)made + ((Whole)whole << 23));
}
