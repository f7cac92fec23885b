// Pieces of docs/numerics.md as device code: exponentials, digits, words, closing. Included by every kernel.
// The constants (POLY_*, MAGIC, …) are defined by the loader from rl_engine/numerics/constants.py.
// Compile with -fmad=false: what is fused is spelled __fmaf_rn.
//
// Built for rows of bf16 logits, two to a 32-bit word. A logit takes one of two ways, and the bits do not
// depend on which:
//   arithmetic: its digits are computed and added (about 20 instructions);
//   counting:   the histogram bin of its bit pattern is incremented in shared memory (about 5). Each bin's digits
//               are computed once a row and multiplied by the count: integers, hence the same words.
// The two load different units of a multiprocessor, and a mix of them outruns either.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__

// Bins: 34 binades from 2^-26 up (scaled by the power of two below T), both signs, one bin below them where
// exp2(x·L) rounds to 1, one above for what the counting path does not know (large, infinite, NaN).
#define BINADES 34
#define NUM_BINS (BINADES * 256 + 2)
#define MAX_FAST_EXPONENT 1024

DEVICE u32 max_nan_bf16x2(u32 a, u32 b) {
  u32 r;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEVICE u32 max_bf16x2(u32 a, u32 b) {
  u32 r;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEVICE u32 max_u16x2(u32 a, u32 b) {
  u32 r;
  asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEVICE u32 min_u16x2(u32 a, u32 b) {
  u32 r;
  asm("min.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEVICE float low_bf16(u32 w) { return __uint_as_float(w << 16); }
DEVICE float high_bf16(u32 w) { return __uint_as_float(w & 0xffff0000u); }

// 2^r on [-1/2, 1/2]
DEVICE float exp2_poly(float r) {
  float p = __fmaf_rn(r, POLY_6, POLY_5);
  p = __fmaf_rn(p, r, POLY_4);
  p = __fmaf_rn(p, r, POLY_3);
  p = __fmaf_rn(p, r, POLY_2);
  p = __fmaf_rn(p, r, POLY_1);
  return __fmaf_rn(p, r, POLY_0);
}
DEVICE float scale_by(float p, int shift_bits) {
  return __int_as_float(__float_as_int(p) + (shift_bits << 23));
}

struct Exponent {  // the reference exponent, and what follows from it
  int e;
  float magic;   // MAGIC - e
  float x_min;   // below it every digit is 0
  float rise;    // the t = fma(x, L, MAGIC) above which e must rise
};
DEVICE Exponent empty_exponent() { return {EMPTY_EXPONENT, MAGIC, 0.0f, 8388607.5f}; }
DEVICE Exponent settle(float t_top, float inv_l) {
  int k = (int)__fsub_rn(t_top, MAGIC);
  int e = ((k + 2 + 21 + 4400000) / 22 - 200000) * 22;
  float ef = (float)e;
  return {e, __fsub_rn(MAGIC, ef), __fmul_rn(__fsub_rn(ef, CLAMP_BITS), inv_l), __fadd_rn(MAGIC, __fsub_rn(ef, 2.0f))};
}

struct Digits {
  int d0, d1, d2;  // with the magic constants' bits still in
};
DEVICE Digits cut(float g) {
  float b0 = __fadd_rn(g, DIGIT_0);
  float g1 = __fsub_rn(g, __fsub_rn(b0, DIGIT_0));
  float b1 = __fadd_rn(g1, DIGIT_1);
  float b2 = __fadd_rn(__fsub_rn(g1, __fsub_rn(b1, DIGIT_1)), DIGIT_2);
  return {__float_as_int(b0), __float_as_int(b1), __float_as_int(b2)};
}
DEVICE float exponential(float x, float scale_l, float magic) {  // of a clamped logit: 2^(x L - e)
  float t = __fmaf_rn(x, scale_l, magic);
  float r = __fmaf_rn(x, scale_l, __fsub_rn(magic, t));
  return scale_by(exp2_poly(r), __float_as_int(t));
}
DEVICE Digits digits(float x, float scale_l, float magic) { return cut(exponential(x, scale_l, magic)); }

template <typename Int>
DEVICE void shift_words(int steps, Int& w0, Int& w1, Int& w2) {
  Int s0 = w0, s1 = w1;
  w2 = steps == 0 ? w2 : steps == 1 ? s1 : steps == 2 ? s0 : 0;
  w1 = steps == 0 ? s1 : steps == 1 ? s0 : 0;
  w0 = steps == 0 ? s0 : 0;
}

// ------------------------------------------------------------------------------------------ a thread's sums

struct Sums {
  Exponent at;
  int w0, w1, w2;
  u32 unusual;  // not 0: something the fast path does not know was met
};
DEVICE Sums empty_sums() { return {empty_exponent(), 0, 0, 0, 0}; }

DEVICE void rise_to(Sums& s, float top, float scale_l, float inv_l) {
  float t_top = __fmaf_rn(top, scale_l, MAGIC);
  if (!(t_top <= s.at.rise)) {  // also on NaN
    if (fabsf(__fsub_rn(t_top, MAGIC)) <= (float)MAX_FAST_EXPONENT) {
      Exponent next = settle(t_top, inv_l);
      shift_words((next.e - s.at.e) / 22, s.w0, s.w1, s.w2);
      s.at = next;
    } else {
      s.unusual = 1;
    }
  }
}

// Four words, eight logits, by arithmetic.
DEVICE void add_digits(const uint4 v, Sums& s, float scale_l, u32 x_min2) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  u32 c0 = -8u * DIGIT_BITS_0, c1 = -8u * DIGIT_BITS_1, c2 = -8u * DIGIT_BITS_2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 w = max_bf16x2(words[i], x_min2);
    Digits lo = digits(low_bf16(w), scale_l, s.at.magic);
    Digits hi = digits(high_bf16(w), scale_l, s.at.magic);
    c0 += lo.d0 + hi.d0;
    c1 += lo.d1 + hi.d1;
    c2 += lo.d2 + hi.d2;
  }
  s.w0 += c0;
  s.w1 += c1;
  s.w2 += c2;
}
DEVICE u32 top2(const uint4 v) { return max_nan_bf16x2(max_nan_bf16x2(v.x, v.y), max_nan_bf16x2(v.z, v.w)); }
DEVICE float top_of(u32 w) {
  float lo = low_bf16(w), hi = high_bf16(w), r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(lo), "f"(hi));
  return r;
}
// x_min as two bf16: any number in the clamp's window does, and |e| <= 1024 keeps bf16's steps inside it
DEVICE u32 pack_x_min(float x_min) {
  u32 b = __float_as_uint(x_min) & 0xffff0000u;
  return b | (b >> 16);
}

// ------------------------------------------------------------------------------------------ counting

// Byte offsets of two logits' bins, in the halves of a word. `first` = the rotated pattern of the lowest bin.
DEVICE u32 bin_offsets(u32 w, u32 first2, u32 last2) {
  u32 v = ((w + w) & 0xfffefffeu) | ((w >> 15) & 0x00010001u);  // magnitude first, the sign lowest
  v = min_u16x2(max_u16x2(v, first2), last2);
  return (v - first2) * 4u;
}
DEVICE void count_one(u32 address) { asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(address) : "memory"); }
DEVICE void count_vector(const uint4 v, u32 bins, u32 first2, u32 last2) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 o = bin_offsets(words[i], first2, last2);
    count_one(bins + (o & 0xffffu));
    count_one(bins + (o >> 16));
  }
}
DEVICE float bin_value(int bin, u32 first) {  // bin 0: 0
  u32 v = bin + first;
  u32 b = (v >> 1) | ((v & 1u) << 15);
  return bin == 0 ? 0.0f : __uint_as_float(b << 16);
}

// A thread's share of the histogram: bins threadIdx.x + k·THREADS.
#define BINS_PER_THREAD ((NUM_BINS + THREADS - 1) / THREADS)
#define NO_BIN (-NUM_BINS)

// Reads the counts; returns the rank of the largest logit counted: bin numbers are odd for positive logits, and grow
// with the magnitude. NUM_BINS - 1 stands for something that the bins do not know.
DEVICE int read_counts(const u32* bins, u32 mask, int (&counts)[BINS_PER_THREAD]) {
  int best = NO_BIN;
#pragma unroll
  for (int k = 0; k < BINS_PER_THREAD; ++k) {
    const int bin = threadIdx.x + k * THREADS;
    counts[k] = bin < NUM_BINS ? (int)(bins[bin] & mask) : 0;
    if (counts[k]) best = max(best, bin & 1 ? bin : -bin);
  }
  return best;
}

struct BlockState {  // in shared memory, reset by whoever has read it
  int bin;      // largest of read_counts
  int e;        // largest reference exponent of the arithmetic path
  int unusual;
};
DEVICE void reset(BlockState& b) { b.bin = NO_BIN, b.e = EMPTY_EXPONENT, b.unusual = 0; }

DEVICE void publish(BlockState& b, int bin, const Sums& s) {
  bin = __reduce_max_sync(0xffffffffu, bin);
  const int e = __reduce_max_sync(0xffffffffu, s.at.e);
  const bool unusual = __any_sync(0xffffffffu, s.unusual);
  if (threadIdx.x % 32 == 0) {
    atomicMax(&b.bin, bin);
    atomicMax(&b.e, e);
    if (unusual || bin == NUM_BINS - 1) b.unusual = 1;
  }
}
// The reference exponent of all logits of the block; the empty one where there are none.
DEVICE Exponent block_exponent(const BlockState& b, u32 first, float scale_l, float inv_l) {
  Exponent at = empty_exponent();
  if (b.bin != NO_BIN) {
    const float t_top = __fmaf_rn(bin_value(abs(b.bin), first), scale_l, MAGIC);
    if (t_top > at.rise) at = settle(t_top, inv_l);
  }
  if (b.e > at.e) {
    const float ef = (float)b.e;
    at.e = b.e, at.magic = __fsub_rn(MAGIC, ef), at.x_min = __fmul_rn(__fsub_rn(ef, CLAMP_BITS), inv_l);
  }
  return at;
}
// exp2 of this thread's bins below `at`: the same for every row with that exponent, which is nearly all of them.
DEVICE void bin_exponentials(float (&g)[BINS_PER_THREAD], const Exponent& at, u32 first, float scale_l) {
#pragma unroll
  for (int k = 0; k < BINS_PER_THREAD; ++k) {
    const float x = fmaxf(bin_value(threadIdx.x + k * THREADS, first), at.x_min);
    g[k] = exponential(x, scale_l, at.magic);
  }
}
// This thread's words relative to `at`: what it added itself, and each of its bins' digits times its count.
DEVICE void total_words(const Sums& s, const int (&counts)[BINS_PER_THREAD], const float (&g)[BINS_PER_THREAD],
                        const Exponent& at, i64 (&w)[3]) {
  const bool risen = s.at.e != EMPTY_EXPONENT;  // until then digits mean nothing
  w[0] = risen ? s.w0 : 0, w[1] = risen ? s.w1 : 0, w[2] = risen ? s.w2 : 0;
  if (at.e != s.at.e) shift_words((at.e - s.at.e) / 22, w[0], w[1], w[2]);
#pragma unroll
  for (int k = 0; k < BINS_PER_THREAD; k += 3) {
    int any = 0;
#pragma unroll
    for (int i = k; i < k + 3 && i < BINS_PER_THREAD; ++i) any |= counts[i];
    if (!any) continue;
#pragma unroll
    for (int i = k; i < k + 3 && i < BINS_PER_THREAD; ++i) {
      const Digits d = cut(g[i]);
      w[0] += (i64)(d.d0 - DIGIT_BITS_0) * counts[i];
      w[1] += (i64)(d.d1 - DIGIT_BITS_1) * counts[i];
      w[2] += (i64)(d.d2 - DIGIT_BITS_2) * counts[i];
    }
  }
}
// The sum over a warp, in lane 0 and all others.
DEVICE i64 warp_sum(i64 v) {
  const int lo = __reduce_add_sync(0xffffffffu, (int)(v & 0x3fffff));
  const int mid = __reduce_add_sync(0xffffffffu, (int)((v >> 22) & 0x3fffff));
  const int hi = __reduce_add_sync(0xffffffffu, (int)(v >> 44));
  return (i64)lo + ((i64)mid << 22) + ((i64)hi << 44);
}

// ------------------------------------------------------------------------------------------ rows out of the ordinary

struct Partial {  // of a row, as in section 2; `flags` 0 in the part below FLAG_OWNED where all is well
  i64 e, w0, w1, w2, flags, target_bits;
};

// A slice by arithmetic alone, whatever it holds: for rows that the fast path gave up on.
DEVICE Partial careful_partial(const u16* slice, int count, float scale_l, float inv_l, i64* scratch) {
  const int tid = threadIdx.x;
  float top = -__int_as_float(0x7f800000);
  for (int i = tid; i < count; i += THREADS) {
    float x = __uint_as_float((u32)slice[i] << 16);
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(top) : "f"(x));
  }
  float* tops = (float*)scratch;
  __syncthreads();
  for (int d = 16; d; d /= 2) {
    float other = __shfl_xor_sync(0xffffffffu, top, d);
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(top) : "f"(other));
  }
  if (tid % 32 == 0) tops[tid / 32] = top;
  __syncthreads();
  for (int i = 0; i < (THREADS / 32); ++i) asm("max.NaN.f32 %0, %0, %1;" : "+f"(top) : "f"(tops[i]));
  __syncthreads();
  float t_top = __fmaf_rn(top, scale_l, MAGIC);
  bool nan = top != top, infinite = top == __int_as_float(0x7f800000), over = t_top >= 16777216.0f;
  bool usable = !nan && !over && t_top > 8388607.5f;
  Partial p = {over && !infinite ? (i64)OVER_EXPONENT : (i64)EMPTY_EXPONENT, 0, 0, 0, (i64)nan + (infinite ? FLAG_POSINF : 0), 0};
  if (!usable) return p;
  Exponent at = settle(t_top, inv_l);
  i64 w[3] = {0, 0, 0};
  for (int i = tid; i < count; i += THREADS) {
    Digits d = digits(fmaxf(__uint_as_float((u32)slice[i] << 16), at.x_min), scale_l, at.magic);
    w[0] += d.d0 - DIGIT_BITS_0;
    w[1] += d.d1 - DIGIT_BITS_1;
    w[2] += d.d2 - DIGIT_BITS_2;
  }
  if (tid < 3) scratch[tid] = 0;
  __syncthreads();
  for (int k = 0; k < 3; ++k) {
    for (int d = 16; d; d /= 2) w[k] += __shfl_xor_sync(0xffffffffu, w[k], d);
    if (tid % 32 == 0) atomicAdd((u64*)&scratch[k], (u64)w[k]);
  }
  __syncthreads();
  p.e = at.e, p.w0 = scratch[0], p.w1 = scratch[1], p.w2 = scratch[2];
  __syncthreads();
  return p;
}

DEVICE void mask_tail(uint4& v, int keep) {  // -inf in place of what follows the first `keep` logits
  u32* words = (u32*)&v;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (2 * i >= keep) words[i] = 0xff80ff80u;
    else if (2 * i + 1 >= keep) words[i] = (words[i] & 0xffffu) | 0xff800000u;
  }
}
