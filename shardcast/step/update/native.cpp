// The update of rows on a processor: rules.update_, with the same operations in the same order.
//
// A row at a time goes through the first-level cache: decoded, updated, encoded; each loop over it
// is one that a compiler turns into vector instructions. torch.compile's own code for a processor
// is 3 to 10 times slower here: it updates bf16 in place by masked loads and stores, which wait for
// each other, and knows no vectors of 16-bit integers. native.py puts definitions before this text:
//
//   ROW                             elements per row
//   ADAM, COUPLED, AMSGRAD          or SGD: ADAM 0, MOMENTUM, NESTEROV
//   DECAYS, MAXIMIZE                flags of both
//   STATES                          number of state tensors
//   FORM                            0 exact, 1 rounded to bf16 by chance, 2 bytes with a scale
//   LOW_GRAD, SPLIT, CASTS          bf16 gradient; split master; bf16 parameter beside the master

#include <cmath>
#include <cstdint>

typedef uint16_t half;  // bf16
#define ROW_OF(j) for (int j = 0; j < count; ++j)
#define EACH _Pragma("omp simd") ROW_OF(j)  // elements do not depend on each other

static inline uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
static inline float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

static inline uint32_t nearest(uint32_t bits) {  // as bf16, ties to even
  return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC00000
                                          : (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000;
}

struct Operands {
  const void* grad;
  void *published, *master, *rest, *ties;  // master: fp32, if not split
  void *state[3], *scale[3];
};

struct Draw {
  uint32_t first, seed[2];  // of the state tensors 0 and 1, and of 2
};

#if SPLIT
#if ROW == 64
typedef uint64_t Word;
#elif ROW == 32
typedef uint32_t Word;
#elif ROW == 16
typedef uint16_t Word;
#else
typedef uint8_t Word;
#endif

static inline void join(const half* published, const int16_t* rest, Word ties, int count, float* out) {
  EACH {
    uint32_t upper = uint32_t(published[j]) << 16, value = upper + uint32_t(int32_t(rest[j]));
    out[j] = from_bits((value ^ upper) >> 31 ? upper : value);  // set to zero by hand
  }
  if (__builtin_expect(ties != 0, 0))
    ROW_OF(j) if (ties >> j & 1) {
      uint32_t upper = uint32_t(published[j]) << 16;
      uint32_t value = upper + uint32_t(int32_t(rest[j])) + 0x10000;
      out[j] = from_bits((value ^ upper) >> 31 ? upper : value);
    }
}

static inline Word split(const float* values, int count, half* published, int16_t* rest) {
  int32_t some = 0;
  _Pragma("omp simd reduction(|: some)") ROW_OF(j) {
    uint32_t bits = bits_of(values[j]), upper = nearest(bits);
    int32_t left = int32_t(bits - upper);
    published[j] = half(upper >> 16);
    rest[j] = int16_t(left);
    some |= left == 0x8000;
  }
  Word ties = 0;
  if (__builtin_expect(some, 0))
    ROW_OF(j) {
      uint32_t bits = bits_of(values[j]);
      ties |= Word(bits - nearest(bits) == 0x8000) << j;
    }
  return ties;
}
#endif

#if FORM == 1
static inline void round_by_chance(const float* values, int count, uint32_t first, uint32_t seed,
                                   bool low, half* out) {
  EACH {
    uint32_t hash = (first + uint32_t(j)) * 0x9E3779B1u ^ seed;
    hash = (hash ^ hash >> 16) * 0x85EBCA6Bu;
    hash = (hash ^ hash >> 13) * 0xC2B2AE35u;
    out[j] = half((bits_of(values[j]) + (low ? hash & 0xFFFF : hash >> 16)) >> 16);
  }
}
#elif FORM == 2
static inline void to_bytes(const float* values, int count, bool is_signed, void* codes, float* scale) {
  uint32_t bits = 0;  // of absolute values, which are in the order of their bits
  _Pragma("omp simd reduction(max: bits)") ROW_OF(j) {
    uint32_t other = bits_of(values[j]) & 0x7FFFFFFF;
    bits = bits > other ? bits : other;
  }
  const float most = from_bits(bits), least_scale = 1.1754943508222875e-38f;
  const float whole = most > least_scale ? most : least_scale;
  if (is_signed) {
    EACH {
      float share = values[j] / whole;
      float steps = std::copysign(__builtin_rintf(std::sqrt(std::fabs(share)) * 127.f), share);
      static_cast<int8_t*>(codes)[j] = int8_t(int32_t(steps));
    }
  } else {
    EACH {
      float root = std::sqrt(std::sqrt(values[j] / whole));
      float least = root * 1e30f, steps = __builtin_rintf(root * 255.f);
      least = least < 1.f ? least : 1.f;
      static_cast<uint8_t*>(codes)[j] = uint8_t(int32_t(steps > least ? steps : least));
    }
  }
  *scale = most;
}
#endif

static inline void update_row(const Operands& all, int64_t row, const int count, const float* x,
                              float factor, const Draw& draw) {
  const int64_t at = row * ROW;
  float master[ROW], grad[ROW], state[STATES + 1][ROW];

#if LOW_GRAD
  EACH grad[j] = from_bits(uint32_t(static_cast<const half*>(all.grad)[at + j]) << 16) * factor;
#else
  EACH grad[j] = static_cast<const float*>(all.grad)[at + j] * factor;
#endif
#if SPLIT
  half* published = static_cast<half*>(all.published) + at;
  int16_t* rest = static_cast<int16_t*>(all.rest) + at;
  Word* ties = static_cast<Word*>(all.ties) + row;
  join(published, rest, *ties, count, master);
#else
  float* kept = static_cast<float*>(all.master) + at;
  EACH master[j] = kept[j];
#endif
  for (int s = 0; s < STATES; ++s) {
#if FORM == 0
    EACH state[s][j] = static_cast<const float*>(all.state[s])[at + j];
#elif FORM == 1
    EACH state[s][j] = from_bits(uint32_t(static_cast<const half*>(all.state[s])[at + j]) << 16);
#else
    const float scale = static_cast<const float*>(all.scale[s])[row];
    if (s == 0) {
      EACH {
        float root = float(static_cast<const int8_t*>(all.state[s])[at + j]) / 127.f;
        state[s][j] = root * std::fabs(root) * scale;
      }
    } else {
      EACH {
        float root = float(static_cast<const uint8_t*>(all.state[s])[at + j]) / 255.f;
        root *= root;
        state[s][j] = root * root * scale;
      }
    }
#endif
  }

#if MAXIMIZE
  EACH grad[j] = -grad[j];
#endif
#if ADAM
  const float step_size = x[0], weight1 = x[1], beta2 = x[2], weight2 = x[3], root = x[4];
  const float eps = x[5], decay = x[6];
  const bool near = std::fabs(weight1) < 0.5f;  // from which end torch's lerp begins
  const float way = near ? weight1 : weight1 - 1.f;
  EACH {
#if DECAYS && COUPLED
    grad[j] += master[j] * decay;
#elif DECAYS
    master[j] *= decay;
#endif
    float g = grad[j], m = state[0][j];
    m = (near ? m : g) + way * (g - m);
    float v = state[1][j] * beta2 + g * weight2 * g, most = v;
#if AMSGRAD
    most = state[2][j] > v ? state[2][j] : v;
    state[2][j] = most;
#endif
    master[j] += m * step_size / (std::sqrt(most) / root + eps);
    state[0][j] = m;
    state[1][j] = v;
  }
#else
  const float negative_lr = x[0], decay = x[1], momentum = x[2], weight = x[3];
  const bool first = x[4] != 0;
  EACH {
#if DECAYS
    grad[j] += master[j] * decay;
#endif
    float direction = grad[j];
#if MOMENTUM
    float buffer = state[0][j] * momentum + direction * weight;
    buffer = first ? direction : buffer;
    state[0][j] = buffer;
#if NESTEROV
    direction += buffer * momentum;
#else
    direction = buffer;
#endif
#endif
    master[j] += direction * negative_lr;
  }
  (void)decay, (void)momentum, (void)weight, (void)first;
#endif

#if SPLIT
  *ties = split(master, count, published, rest);
#else
  EACH kept[j] = master[j];
#if CASTS
  EACH static_cast<half*>(all.published)[at + j] = half(nearest(bits_of(master[j])) >> 16);
#endif
#endif
  for (int s = 0; s < STATES; ++s) {
#if FORM == 0
    EACH static_cast<float*>(all.state[s])[at + j] = state[s][j];
#elif FORM == 1
    round_by_chance(state[s], count, draw.first + uint32_t(at), draw.seed[s / 2], s % 2 == 0,
                    static_cast<half*>(all.state[s]) + at);
#else
    to_bytes(state[s], count, s == 0, static_cast<int8_t*>(all.state[s]) + at,
             static_cast<float*>(all.scale[s]) + row);
#endif
  }
}

extern "C" void update(const Operands* all, const float* x, float factor, const Draw* draw,
                       int64_t numel, int threads) {
  const int64_t rows = numel / ROW;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 256)
  for (int64_t row = 0; row < rows; ++row) update_row(*all, row, ROW, x, factor, *draw);
  if (numel % ROW) update_row(*all, rows, int(numel % ROW), x, factor, *draw);
}
