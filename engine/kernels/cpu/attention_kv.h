// The inner loops of attention for one KV type. Included twice, with KV, LOAD_KV and NAME(x) defined.

// scores[j] for 8 keys at a time: eight dot products side by side, then one transposing sum.
static void NAME(scores)(const float *q, const KV *cache, const long *offsets, long first, long last, long dim, float *out) {
  for (long j = first; j < last; j += 8) {
    f8 a[8];
    const KV *k[8];
    for (int i = 0; i < 8; i++) { a[i] = SPLAT(0); k[i] = cache + offsets[j + i]; }
    for (long d = 0; d < dim; d += 8) {
      const f8 x = load(q + d);
      _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) a[i] += x * LOAD_KV(k[i] + d);
    }
    store(out + j, transpose_sum(a));
  }
}

// out[d..d+8*N) += sum of weights[j] * value[j], keys in rising order, one chain per element.
#define WEIGHTED(N) \
  static void NAME(weighted##N)(const float *weights, const KV *cache, const long *offsets, long first, long last, float *out) { \
    f8 a[N]; \
    for (int i = 0; i < N; i++) a[i] = load(out + i * 8); \
    for (long j = first; j < last; j++) { \
      const f8 p = SPLAT(weights[j]); \
      const KV *v = cache + offsets[j]; \
      _Pragma("GCC unroll 8") for (int i = 0; i < N; i++) a[i] += p * LOAD_KV(v + i * 8); \
    } \
    for (int i = 0; i < N; i++) store(out + i * 8, a[i]); \
  }
WEIGHTED(8) WEIGHTED(1)
#undef WEIGHTED

static void NAME(weighted)(const float *weights, const KV *cache, const long *offsets, long first, long last, long dim, float *out) {
  long d = 0;
  for (; d + 64 <= dim; d += 64) NAME(weighted8)(weights, cache + d, offsets, first, last, out + d);
  for (; d < dim; d += 8) NAME(weighted1)(weights, cache + d, offsets, first, last, out + d);
}

static void NAME(tile)(const struct job *job, const struct span *s, long head, long first_vector, long vectors, float *scratch) {
  const long group = job->query_heads / job->kv_heads, dim = job->dim, width = job->scratch_width;
  const KV *keys = (const KV *)job->keys + head * dim, *values = (const KV *)job->values + head * dim;
  long low = s->end, high = 0;
  long *offsets = (long *)scratch;
  float *weights = scratch + 2 * width;
  for (long i = 0; i < vectors; i++) {
    const long row = s->first_row + (first_vector + i) / group;
    if (job->low[row] < low) low = job->low[row];
    if (job->high[row] > high) high = job->high[row];
  }
  key_offsets(job, s, low & ~7L, high, offsets);
  for (long b = low & ~7L; b < high; b += KEY_BLOCK)
    for (long i = 0; i < vectors; i++) {
      const long row = s->first_row + (first_vector + i) / group, h = head * group + (first_vector + i) % group;
      const long from = b > (job->low[row] & ~7L) ? b : job->low[row] & ~7L;
      const long to = b + KEY_BLOCK < job->high[row] ? b + KEY_BLOCK : job->high[row];
      if (from < to) NAME(scores)(job->q + row * job->q_stride + h * dim, keys, offsets, from, to, dim, weights + i * width);
    }
  for (long i = 0; i < vectors; i++) {
    const long row = s->first_row + (first_vector + i) / group, h = head * group + (first_vector + i) % group;
    softmax(weights + i * width, job->low[row], job->high[row], job->scale);
    memset(job->out + (row * job->query_heads + h) * dim, 0, dim * sizeof(float));
  }
  for (long b = low & ~7L; b < high; b += KEY_BLOCK)
    for (long i = 0; i < vectors; i++) {
      const long row = s->first_row + (first_vector + i) / group, h = head * group + (first_vector + i) % group;
      const long from = b > job->low[row] ? b : job->low[row];
      const long to = b + KEY_BLOCK < job->high[row] ? b + KEY_BLOCK : job->high[row];
      if (from < to) NAME(weighted)(weights + i * width, values, offsets, from, to, dim, job->out + (row * job->query_heads + h) * dim);
    }
}
