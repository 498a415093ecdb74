// Paged attention over ragged spans with grouped heads.
//
// Two passes per query vector: all scores, then softmax and the weighted sum. Sums run over absolute key positions in rising
// order, so a vector's bits depend on its own position and keys only, never on the span, the tile or the threads.
#include "vec.h"

#define KEY_BLOCK 64
#define MAX_VECTORS 16

struct span { long first_row, row_count, end, table; };
struct job {
  const float *q; const void *keys, *values; float *out;
  long q_stride, query_heads, kv_heads, dim, page_tokens, scratch_width;
  const long *low, *high;   // per row: keys [low, high)
  const int32_t *pages;     // page tables of all spans; a span's begins at its `table`
  float scale;
};

// The eight sums of eight vectors: three rounds of pairwise adding instead of eight horizontal sums.
INLINE f8 transpose_sum(const f8 *a) {
  #define EVEN(x, y) SHUFFLE(x, y, 0, 8, 2, 10, 4, 12, 6, 14)
  #define ODD(x, y) SHUFFLE(x, y, 1, 9, 3, 11, 5, 13, 7, 15)
  f8 b[4], c[2];
  for (int i = 0; i < 4; i++) b[i] = EVEN(a[2 * i], a[2 * i + 1]) + ODD(a[2 * i], a[2 * i + 1]);
  for (int i = 0; i < 2; i++)
    c[i] = SHUFFLE(b[2 * i], b[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
           SHUFFLE(b[2 * i], b[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  return SHUFFLE(c[0], c[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         SHUFFLE(c[0], c[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

// Where each key lives in the flat cache, in elements; past the end the last key again, so that blocks of 8 stay inside.
static void key_offsets(const struct job *job, const struct span *s, long low, long high, long *offsets) {
  const long stride = job->kv_heads * job->dim;
  const int32_t *pages = job->pages + s->table;
  for (long j = low; j < high;) {
    const long page = j / job->page_tokens;
    long stop = (page + 1) * job->page_tokens, slot = pages[page] * job->page_tokens + j % job->page_tokens;
    if (stop > high) stop = high;
    for (; j < stop; j++, slot++) offsets[j] = slot * stride;
  }
  for (long j = high; j < ((high + 7) & ~7L); j++) offsets[j] = offsets[high - 1];
}

static void softmax(float *scores, long low, long high, float scale) {
  const long first = low & ~7L, last = (high + 7) & ~7L;
  for (long j = first; j < low; j++) scores[j] = -__builtin_inff();
  for (long j = high; j < last; j++) scores[j] = -__builtin_inff();
  f8 top = load(scores + first), total = SPLAT(0);
  for (long j = first + 8; j < last; j += 8) { f8 s = load(scores + j); top = pick(s > top, s, top); }
  float peak = top[0];
  for (int i = 1; i < 8; i++) if (top[i] > peak) peak = top[i];
  for (long j = first; j < last; j += 8) {
    const f8 e = exp8((load(scores + j) - peak) * scale);
    total += e;
    store(scores + j, e);
  }
  const float inverse = 1.0f / sum8(total);
  for (long j = first; j < last; j += 8) store(scores + j, load(scores + j) * inverse);
}

#define KV float
#define LOAD_KV load
#define NAME(x) f32_##x
#include "attention_kv.h"
#undef KV
#undef LOAD_KV
#undef NAME
#define KV uint16_t
#define LOAD_KV load_bf16
#define NAME(x) bf16_##x
#include "attention_kv.h"

// spans: 4 longs each (struct span); tiles: 3 longs each (span, first vector, vectors); scratch: threads x scratch_size floats.
void sw_attention(const float *q, long q_stride, const void *keys, const void *values, int bf16, float *out, const long *spans,
                  const long *tiles, long tile_count, const long *low, const long *high, const int32_t *pages, long query_heads,
                  long kv_heads, long dim, long page_tokens, float scale, float *scratch, long scratch_width, int threads) {
  const struct job job = {q, keys, values, out, q_stride, query_heads, kv_heads, dim, page_tokens, scratch_width, low, high,
                          pages, scale};
  extern int omp_get_thread_num(void);
  #pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (long t = 0; t < tile_count * kv_heads; t++) {
    const long *tile = tiles + t / kv_heads * 3;
    const struct span *s = (const struct span *)spans + tile[0];
    float *mine = scratch + omp_get_thread_num() * scratch_width * (MAX_VECTORS + 2);
    if (bf16) bf16_tile(&job, s, t % kv_heads, tile[1], tile[2], mine);
    else f32_tile(&job, s, t % kv_heads, tile[1], tile[2], mine);
  }
}
