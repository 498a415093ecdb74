// Vector types and the few functions that every kernel shares. Only gcc vector extensions, so any CPU will do.
#ifndef SPECWIRE_VEC_H
#define SPECWIRE_VEC_H
#include <stdint.h>
#include <string.h>

typedef float f8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));

#define SPLAT(s) ((f8){s, s, s, s, s, s, s, s})
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i8){__VA_ARGS__})
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE f8 load(const float *p) { f8 v; memcpy(&v, p, 32); return v; }
INLINE void store(float *p, f8 v) { memcpy(p, &v, 32); }
INLINE f8 load_bf16(const uint16_t *p) {
  h8 h; memcpy(&h, p, 16);
  return (f8)(__builtin_convertvector(h, u8) << 16);
}
// Round to nearest even, as torch does; a NaN stays a NaN.
INLINE uint16_t to_bf16(float x) {
  uint32_t b; memcpy(&b, &x, 4);
  if (x != x) return (uint16_t)((b >> 16) | 0x40);
  return (uint16_t)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}
// One fixed order, so that a sum does not depend on how the compiler would like to do it.
INLINE float sum8(f8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
INLINE f8 pick(i8 mask, f8 yes, f8 no) { return (f8)(((i8)yes & mask) | ((i8)no & ~mask)); }

// exp for x <= 88, relative error below 2e-7; 0 below -87.
INLINE f8 exp8(f8 x) {
  i8 live = x > SPLAT(-87.0f);
  x = pick(live, x, SPLAT(-87.0f));
  const f8 magic = SPLAT(12582912.0f);
  f8 t = x * 1.44269504088896341f + magic, n = t - magic;
  f8 r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  f8 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  f8 scale = (f8)((__builtin_convertvector(n, i8) + 127) << 23);
  return (f8)((i8)(p * scale) & live);
}

// log for positive normal x, relative error about 1e-7 (also near 1).
INLINE f8 log8(f8 x) {
  i8 b = (i8)x;
  i8 e = ((b >> 23) & 255) - 126;
  f8 m = (f8)((b & 0x007fffff) | 0x3f000000);
  i8 low = m < SPLAT(0.707106781186547524f);
  e += low;
  m = m + (f8)((i8)m & low) - 1.0f;
  f8 n = __builtin_convertvector(e, f8), z = m * m;
  f8 y = m * 7.0376836292e-2f - 1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m - 1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m - 1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m - 2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  y = y * m * z;
  y = y + n * -2.12194440e-4f;
  y = y - 0.5f * z;
  return m + y + n * 0.693359375f;
}
#endif
