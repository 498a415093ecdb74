// y[M,N] = x[M,K] * W[N,K]^T with fp32 activations and packed weights (bf16 or fp32), in panels of 16 columns.
//
// Every output is one chain of fused multiply-adds over k = 0..K-1, whatever the number of rows or threads: a row's bits
// do not depend on the rows beside it. Blocking over k, and turning a panel into fp32 once for many rows, were measured
// and are slower than this.
#include "vec.h"

// bf16 panels hold K x 8 words: columns 0..7 in the low halves, 8..15 in the high halves. fp32 panels hold K x 16 floats.
#define STEP_BF16(k) \
  u8 u; memcpy(&u, (const uint32_t *)w + (k) * 8, 32); \
  const f8 w0 = (f8)(u << 16), w1 = (f8)(u & 0xffff0000u);
#define STEP_F32(k) const f8 w0 = load((const float *)w + (k) * 16), w1 = load((const float *)w + (k) * 16 + 8);
#define MADD(MR, k) \
  _Pragma("GCC unroll 8") for (int m = 0; m < MR; m++) { \
    const float s = x[m * ldx + (k)]; \
    a[m][0] += SPLAT(s) * w0; a[m][1] += SPLAT(s) * w1; \
  }

// `next` runs `ahead` bytes for every 4 k: the passes over one panel share the fetching of the following one.
#define KERNEL(NAME, STEP, MR) \
  static void NAME##MR(const float *restrict x, long ldx, const void *restrict w, long K, float *restrict y, long ldy, \
                       const char *next, long ahead) { \
    f8 a[MR][2]; \
    for (int m = 0; m < MR; m++) a[m][0] = a[m][1] = SPLAT(0); \
    long k = 0; \
    for (; k + 4 <= K; k += 4) { \
      __builtin_prefetch(next, 0, 2); \
      if (ahead > 64) __builtin_prefetch(next + 64, 0, 2); \
      next += ahead; \
      { STEP(k) MADD(MR, k) } { STEP(k + 1) MADD(MR, k + 1) } \
      { STEP(k + 2) MADD(MR, k + 2) } { STEP(k + 3) MADD(MR, k + 3) } \
    } \
    for (; k < K; k++) { STEP(k) MADD(MR, k) } \
    for (int m = 0; m < MR; m++) { store(y + m * ldy, a[m][0]); store(y + m * ldy + 8, a[m][1]); } \
  }

typedef void kernel(const float *, long, const void *, long, float *, long, const char *, long);
#define FAMILY(NAME, STEP) \
  KERNEL(NAME, STEP, 1) KERNEL(NAME, STEP, 2) KERNEL(NAME, STEP, 3) KERNEL(NAME, STEP, 4) KERNEL(NAME, STEP, 5) \
  KERNEL(NAME, STEP, 6) \
  static kernel *const NAME[7] = {0, NAME##1, NAME##2, NAME##3, NAME##4, NAME##5, NAME##6};
FAMILY(bf16_rows, STEP_BF16)
FAMILY(f32_rows, STEP_F32)

// How many rows the next pass takes: even passes (8 = 4 + 4, 7 = 4 + 3) beat 6 and a rest.
INLINE long pass_rows(long left) { return left <= 6 ? left : left < 12 ? (left + 1) / 2 : 6; }

// A panel that N fills only in part goes through a tile.
static void panel_rows(kernel *const *rows, const float *x, const char *w, long K, float *y, long N, long M, long columns,
                       long bytes) {
  float tile[6 * 16];
  const long passes = (M + 5) / 6, ahead = 4 * bytes / K / passes;
  const char *next = w + bytes;
  for (long m = 0, n; m < M; m += n, next += bytes / passes) {
    n = pass_rows(M - m);
    if (columns == 16) { rows[n](x + m * K, K, w, K, y + m * N, N, next, ahead); continue; }
    rows[n](x + m * K, K, w, K, tile, 16, next, ahead);
    for (long r = 0; r < n; r++) memcpy(y + (m + r) * N, tile + r * 16, columns * sizeof(float));
  }
}

static void gemm(const float *x, const void *w, float *y, long M, long N, long K, int bf16, int threads) {
  if (M < 1) return;  // no rows, no passes to share the fetching
  const long panels = (N + 15) / 16, bytes = K * (bf16 ? 32 : 64);
  kernel *const *rows = bf16 ? bf16_rows : f32_rows;
  #pragma omp parallel for schedule(static) num_threads(threads)
  for (long p = 0; p < panels; p++) {
    const long columns = N - p * 16 < 16 ? N - p * 16 : 16;
    panel_rows(rows, x, (const char *)w + p * bytes, K, y + p * 16, N, M, columns, bytes);
  }
}

void sw_gemm_bf16(const float *x, const void *w, float *y, long M, long N, long K, int threads) {
  gemm(x, w, y, M, N, K, 1, threads);
}
void sw_gemm_f32(const float *x, const void *w, float *y, long M, long N, long K, int threads) {
  gemm(x, w, y, M, N, K, 0, threads);
}
