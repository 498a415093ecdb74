// The small operators of a Llama layer and the sampler's noise. Rows are independent and reduced in one fixed order.
#include "vec.h"

// Fewer elements than this are not worth waking the other threads.
#define PARALLEL_FROM 16384
#define PRAGMA(text) _Pragma(#text)
#define ROWS_LOOP(rows, width) \
  PRAGMA(omp parallel for schedule(static) num_threads(threads) if ((rows) * (width) >= PARALLEL_FROM))

INLINE float square_sum(const float *x, long n) {
  f8 total = SPLAT(0);
  long i = 0;
  for (; i + 8 <= n; i += 8) { const f8 v = load(x + i); total += v * v; }
  float sum = sum8(total);
  for (; i < n; i++) sum += x[i] * x[i];
  return sum;
}

static void scale_row(const float *x, const float *w, float *y, long n, float eps) {
  const float scale = 1.0f / __builtin_sqrtf(square_sum(x, n) / (float)n + eps);
  for (long i = 0; i < n; i++) y[i] = x[i] * scale * w[i];
}

void sw_rms_norm(const float *x, const float *w, float *y, long rows, long n, float eps, int threads) {
  ROWS_LOOP(rows, n)
  for (long r = 0; r < rows; r++) scale_row(x + r * n, w, y + r * n, n, eps);
}

// residual += x, then the norm of it.
void sw_add_rms_norm(const float *x, float *residual, const float *w, float *y, long rows, long n, float eps, int threads) {
  ROWS_LOOP(rows, n)
  for (long r = 0; r < rows; r++) {
    float *sum = residual + r * n;
    for (long i = 0; i < n; i++) sum[i] += x[r * n + i];
    scale_row(sum, w, y + r * n, n, eps);
  }
}

// x [rows, 2n] = gate then up; y = gate * sigmoid(gate) * up.
void sw_silu_mul(const float *x, float *y, long rows, long n, int threads) {
  ROWS_LOOP(rows, n)
  for (long r = 0; r < rows; r++) {
    const float *gate = x + r * 2 * n, *up = gate + n;
    float *out = y + r * n;
    for (long i = 0; i < n; i += 8) {
      float g[8] = {0}, u[8] = {0}, o[8];
      const long live = n - i < 8 ? n - i : 8;
      memcpy(g, gate + i, live * 4); memcpy(u, up + i, live * 4);
      f8 a = load(g), limited = pick(a < SPLAT(-88.0f), SPLAT(-88.0f), a);
      // exp8 gives 0 below -87, so the large side is taken as exp of a negative number on both signs.
      f8 size = pick(limited > SPLAT(0), -limited, limited), e = exp8(size);
      f8 sigmoid = pick(limited > SPLAT(0), SPLAT(1.0f), e) / (e + 1.0f);
      store(o, a * sigmoid * load(u));
      memcpy(out + i, o, live * 4);
    }
  }
}

// Half-split rotation: (a, b) of dimensions (i, i + half).
INLINE void rotate(const float *x, float *y, const float *c, const float *s, long half) {
  for (long i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    y[i] = a * c[i] - b * s[i];
    y[i + half] = b * c[i] + a * s[i];
  }
}

INLINE void put(const float *x, void *cache, long at, long n, int bf16) {
  if (bf16) for (long i = 0; i < n; i++) ((uint16_t *)cache)[at + i] = to_bf16(x[i]);
  else memcpy((float *)cache + at, x, n * sizeof(float));
}

// Rotates q in place (q may be null) and stores rotated k and plain v at their slots of the cache.
void sw_rope_kv_write(float *q, long q_stride, const float *k, long k_stride, const float *v, long v_stride, const float *cosine,
                      const float *sine, const long *positions, const long *slots, void *keys, void *values, int bf16, long rows,
                      long query_heads, long kv_heads, long dim, int threads) {
  const long half = dim / 2;
  ROWS_LOOP(rows, (query_heads + kv_heads) * dim)
  for (long r = 0; r < rows; r++) {
    const float *c = cosine + positions[r] * half, *s = sine + positions[r] * half;
    float rotated[1024];
    for (long h = 0; q && h < query_heads; h++) {
      float *head = q + r * q_stride + h * dim;
      rotate(head, rotated, c, s, half);
      memcpy(head, rotated, dim * sizeof(float));
    }
    for (long h = 0; h < kv_heads; h++) {
      rotate(k + r * k_stride + h * dim, rotated, c, s, half);
      put(rotated, keys, (slots[r] * kv_heads + h) * dim, dim, bf16);
    }
    put(v + r * v_stride, values, slots[r] * kv_heads * dim, kv_heads * dim, bf16);
  }
}
