// argmax(logits / T + gumbel noise) per row. Philox4x32-10 with key = seed and counter = (token / 4, index, choice, 0).
#include "vec.h"

#define SEGMENT 4096

struct best { float value, top, second; int32_t id; };

// Eight counters at once; words[w][i] is word w of counter i.
static void philox8(uint32_t first, uint32_t index, uint32_t choice, uint64_t seed, uint32_t words[4][8]) {
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  uint32_t c0[8], c1[8], c2[8], c3[8];
  for (int i = 0; i < 8; i++) { c0[i] = first + i; c1[i] = index; c2[i] = choice; c3[i] = 0; }
  for (int round = 0; round < 10; round++) {
    for (int i = 0; i < 8; i++) {
      const uint64_t a = (uint64_t)0xD2511F53u * c0[i], b = (uint64_t)0xCD9E8D57u * c2[i];
      c0[i] = (uint32_t)(b >> 32) ^ c1[i] ^ k0;
      c2[i] = (uint32_t)(a >> 32) ^ c3[i] ^ k1;
      c1[i] = (uint32_t)b;
      c3[i] = (uint32_t)a;
    }
    k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
  }
  memcpy(words[0], c0, 32); memcpy(words[1], c1, 32); memcpy(words[2], c2, 32); memcpy(words[3], c3, 32);
}

// Noise of tokens [first, first + 32), `first` a multiple of 4.
static void noise32(long first, uint32_t index, uint32_t choice, uint64_t seed, float *out) {
  uint32_t words[4][8];
  philox8((uint32_t)(first / 4), index, choice, seed, words);
  for (int w = 0; w < 4; w++) {
    u8 x; memcpy(&x, words[w], 32);
    const f8 u = (__builtin_convertvector(x >> 9, f8) + 0.5f) * 1.1920928955078125e-07f;
    const f8 g = -log8(-log8(u));
    for (int i = 0; i < 8; i++) out[i * 4 + w] = g[i];
  }
}

// The best of tokens [from, to); on equal values the lowest id stays.
static struct best segment(const float *logits, long from, long to, float temperature, uint64_t seed, uint32_t choice,
                           uint32_t index, int margin) {
  const float low = -__builtin_inff();
  struct best best = {low, low, low, (int32_t)from};
  for (long t = from; t < to; t += 32) {
    float noise[32];
    const long n = to - t < 32 ? to - t : 32;
    if (temperature > 0) noise32(t, index, choice, seed, noise);
    for (long i = 0; i < n; i++) {
      const float logit = logits[t + i], value = temperature > 0 ? logit / temperature + noise[i] : logit;
      if (value > best.value) { best.value = value; best.id = (int32_t)(t + i); }
      if (margin) {
        if (logit > best.top) { best.second = best.top; best.top = logit; }
        else if (logit > best.second) best.second = logit;
      }
    }
  }
  return best;
}

// scratch: rows x ceil(vocab / SEGMENT) structs. margins may be null: highest logit minus the second, without noise.
void sw_gumbel_argmax(const float *logits, long rows, long vocab, const float *temperatures, const long *seeds,
                      const long *choices, const long *indices, long *ids, float *margins, void *scratch, int threads) {
  struct best *all = (struct best *)scratch;
  const long parts = (vocab + SEGMENT - 1) / SEGMENT;
  #pragma omp parallel for schedule(static) num_threads(threads)
  for (long i = 0; i < rows * parts; i++) {
    const long r = i / parts, from = i % parts * SEGMENT, to = from + SEGMENT < vocab ? from + SEGMENT : vocab;
    all[i] = segment(logits + r * vocab, from, to, temperatures[r], (uint64_t)seeds[r], (uint32_t)choices[r],
                     (uint32_t)indices[r], margins != 0);
  }
  for (long r = 0; r < rows; r++) {
    struct best *b = all + r * parts, out = b[0];
    for (long i = 1; i < parts; i++) {
      if (b[i].value > out.value) { out.value = b[i].value; out.id = b[i].id; }
      const float top = b[i].top > out.top ? b[i].top : out.top, rest = b[i].top > out.top ? out.top : b[i].top;
      out.second = b[i].second > out.second ? b[i].second : out.second;
      out.second = rest > out.second ? rest : out.second;
      out.top = top;
    }
    ids[r] = out.id;
    if (margins) margins[r] = out.top - out.second;
  }
}

// The noise alone, for tests and for references: out [vocab].
void sw_gumbel_noise(long vocab, long seed, long choice, long index, float *out) {
  for (long t = 0; t < vocab; t += 32) {
    float noise[32];
    noise32(t, (uint32_t)index, (uint32_t)choice, (uint64_t)seed, noise);
    memcpy(out + t, noise, (vocab - t < 32 ? vocab - t : 32) * sizeof(float));
  }
}
