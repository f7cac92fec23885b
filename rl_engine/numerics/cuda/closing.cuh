// Closing a row (docs/numerics.md, section 3) and the elementwise formulas of the loss (section 7).

struct Closed {
  double lse2;
  float logp;
  bool good, owned;
};

DEVICE double words_to_double(i64 w0, i64 w1, i64 w2) {
  w1 += w2 >> 22;
  w0 += w1 >> 22;
  double high = __dadd_rn(__dmul_rn((double)w0, 4194304.0), (double)(w1 & 0x3fffff));
  return __dadd_rn(high, __dmul_rn((double)(w2 & 0x3fffff), 2.384185791015625e-07));
}

DEVICE double log2_of(double total, double& exponent) {  // log2 of the mantissa; the exponent beside it
  i64 bits = __double_as_longlong(total);
  double j = (double)((bits >> 52) - 1023);
  double m = __longlong_as_double((bits & 0xfffffffffffffll) | 0x3ff0000000000000ll);
  if (m > SQRT2) {
    m = __dmul_rn(m, 0.5);
    j = __dadd_rn(j, 1.0);
  }
  exponent = j;
  double u = __ddiv_rn(__dsub_rn(m, 1.0), __dadd_rn(m, 1.0));
  double q = __dmul_rn(u, u);
  const double c[10] = {LOG2_9, LOG2_8, LOG2_7, LOG2_6, LOG2_5, LOG2_4, LOG2_3, LOG2_2, LOG2_1, LOG2_0};
  double p = LOG2_10;
#pragma unroll
  for (int i = 0; i < 10; ++i) p = __dadd_rn(__dmul_rn(p, q), c[i]);
  return __dmul_rn(u, p);
}

DEVICE Closed close_row(const Partial& p, float scale_l) {
  Closed r;
  const float nan = __int_as_float(0x7fffffff);
  r.good = (p.flags & (FLAG_OWNED - 1)) == 0 && p.e <= MAX_EXPONENT && p.e >= -MAX_EXPONENT;
  r.owned = (p.flags >> 42) == 1;
  r.lse2 = (double)nan;
  if (r.good) {
    double j;
    double log2m = log2_of(words_to_double(p.w0, p.w1, p.w2), j);
    r.lse2 = __dadd_rn(__dsub_rn(__dadd_rn((double)p.e, j), 44.0), log2m);
  }
  float v = nan;
  if (r.owned) {
    double x = (double)__uint_as_float((u32)p.target_bits);
    v = (float)__dmul_rn(__dsub_rn(__dmul_rn(x, (double)scale_l), r.lse2), LN2_64);
  }
  r.logp = v < 0.0f || v != v ? v : 0.0f;
  return r;
}

DEVICE float exp32(float x) {
  if (x != x) return x;
  if (x > EXP_MAX) return __int_as_float(0x7f800000);
  if (x < EXP_MIN) return 0.0f;
  float t = __fmaf_rn(x, EXP_L_HI, MAGIC);
  float k = __fsub_rn(t, MAGIC);
  float r = __fmaf_rn(x, EXP_L_HI, -k);
  r = __fmaf_rn(x, EXP_L_LO, r);
  return scale_by(exp2_poly(r), (int)k);
}
DEVICE float phi32(float d) {  // exp(d) - 1 - d
  if (!(fabsf(d) <= 1.0f)) return __fsub_rn(__fsub_rn(exp32(d), 1.0f), d);
  const float c[8] = {PHI_7, PHI_6, PHI_5, PHI_4, PHI_3, PHI_2, PHI_1, PHI_0};
  float q = PHI_8;
#pragma unroll
  for (int i = 0; i < 8; ++i) q = __fmaf_rn(q, d, c[i]);
  return __fmul_rn(__fmul_rn(d, d), q);
}
DEVICE float expm1_32(float d) {
  return fabsf(d) <= 1.0f ? __fadd_rn(d, phi32(d)) : __fsub_rn(exp32(d), 1.0f);
}

struct Objective {
  float low, high, guard, beta, inv_t;
  int kl;         // 0 none, 1 k1, 3 k3
  int kl_slope;   // whether the KL term is in the gradient
};
DEVICE float clamp_nan(float x, float low, float high) { return x != x ? x : fminf(fmaxf(x, low), high); }

// The derivative in logp of surrogate + beta·KL of an active token.
DEVICE float token_gradient(float logp, float old, float advantage, float ref, const Objective& o) {
  const float delta = __fsub_rn(logp, old);
  const bool over = delta > o.guard;
  const float ratio = exp32(over ? o.guard : delta);
  const float unclipped = __fmul_rn(ratio, advantage);
  const float clipped = __fmul_rn(clamp_nan(ratio, o.low, o.high), advantage);
  float gradient = unclipped > clipped || over ? 0.0f : -unclipped;
  if (o.kl && o.kl_slope) {
    float slope = 1.0f;
    if (o.kl == 3) {
      const float d = __fsub_rn(ref, logp);
      slope = d > o.guard ? 0.0f : -expm1_32(d);
    }
    gradient = __fadd_rn(gradient, __fmul_rn(slope, o.beta));
  }
  return gradient;
}
