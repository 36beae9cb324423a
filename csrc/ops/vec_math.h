/* exp, tanh, erf, log, sin and related functions on vectors; the second part of ops/vec.h.
 *
 * exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2. r is computed by subtracting n
 * ln 2 in two pieces (the first has nine bits, so its product with n is exact), and exp(r) by a
 * minimax polynomial. Scaling takes two steps, so that subnormal results are correct. tanh uses
 * exp(2|x|) - 1, which keeps all bits near zero, as does expm1. erf is a polynomial below 0.93 and
 * 1 - exp(polynomial) above (after N. Juffa's), or, with AVX2, one of eight polynomials, with
 * AVX-512 one of sixteen.
 *
 * log(x) = k ln 2 + log(1 + f) with x = 2^k (1 + f) and 1 + f from sqrt(1/2) to sqrt 2, by a
 * minimax polynomial. log1p computes f without rounding 1 + x. sin and cos subtract n pi/2 in four
 * pieces, whose products with n are exact for |x| up to 6400. pow is exp2(b log2(a)) in double.
 * Other inputs, such as larger angles, are passed to the C library, lane by lane, so no lane's bits
 * depend on its neighbours.
 *
 * tests/c/test_nn_unary.c measures the errors for all inputs (exp: every fp32) or a dense set.
 */
#ifndef FSDPC_OPS_VEC_MATH_H
#define FSDPC_OPS_VEC_MATH_H

#ifndef FSDPC_OPS_VEC_H
#error "include ops/vec.h"
#endif

typedef struct fsdpc_exp_parts {
    fsdpc_vf power;    /* n, integral */
    fsdpc_vf fraction; /* exp(r) - 1 */
} fsdpc_exp_parts;

FSDPC_INLINE fsdpc_exp_parts fsdpc_vf_exp_parts_(fsdpc_vf x)
{
    const fsdpc_vf magic = fsdpc_vf_splat(0x1.8p23f);
    fsdpc_vf n = fsdpc_vf_fma(x, fsdpc_vf_splat(0x1.715476p+0f), magic) - magic;
    fsdpc_vf r = fsdpc_vf_fma(n, fsdpc_vf_splat(-0.693359375f), x);
    r = fsdpc_vf_fma(n, fsdpc_vf_splat(2.12194440e-4f), r);
    fsdpc_vf p = fsdpc_vf_splat(1.9875691500e-4f);
    p = fsdpc_vf_fma(p, r, fsdpc_vf_splat(1.3981999507e-3f));
    p = fsdpc_vf_fma(p, r, fsdpc_vf_splat(8.3334519073e-3f));
    p = fsdpc_vf_fma(p, r, fsdpc_vf_splat(4.1665795894e-2f));
    p = fsdpc_vf_fma(p, r, fsdpc_vf_splat(1.6666665459e-1f));
    p = fsdpc_vf_fma(p, r, fsdpc_vf_splat(5.0000001201e-1f));
    return (fsdpc_exp_parts){n, fsdpc_vf_fma(p, r * r, r)};
}

/* 2^n for integral n in -126..127 */
FSDPC_INLINE fsdpc_vf fsdpc_vf_exp2_integral_(fsdpc_vi n)
{
    return (fsdpc_vf)((n + 127) << 23);
}

/* y 2^power for integral powers in -252..254, rounded once */
FSDPC_INLINE fsdpc_vf fsdpc_vf_scale_(fsdpc_vf y, fsdpc_vf power)
{
#if defined(FSDPC_VEC_AVX512)
    return (fsdpc_vf)_mm512_scalef_ps((__m512)y, (__m512)power);
#else
    fsdpc_vi n = __builtin_convertvector(power, fsdpc_vi), half = n >> 1;
    return y * fsdpc_vf_exp2_integral_(half) * fsdpc_vf_exp2_integral_(n - half);
#endif
}

/* The error is at most 2 ulp; exp(-inf) is 0, overflow gives infinity, and NaN is preserved.
 * Results that round to 0 are selected instead of computed, because a product that underflows takes
 * a hundred cycles. */
FSDPC_INLINE fsdpc_vf fsdpc_vf_exp(fsdpc_vf x)
{
    const fsdpc_vf zero = {0};
    fsdpc_vi none = x < fsdpc_vf_splat(-104.0f);
    x = fsdpc_vf_min(fsdpc_vf_splat(89.5f), fsdpc_vf_select(none, zero, x));
    fsdpc_exp_parts parts = fsdpc_vf_exp_parts_(x);
    return fsdpc_vf_select(none, zero, fsdpc_vf_scale_(parts.fraction + 1.0f, parts.power));
}

FSDPC_INLINE fsdpc_vf fsdpc_vf_sigmoid(fsdpc_vf x)
{
    return 1.0f / (1.0f + fsdpc_vf_exp(-x));
}

/* The error is at most 3 ulp; the function is odd and preserves -0 and NaN. */
FSDPC_INLINE fsdpc_vf fsdpc_vf_tanh(fsdpc_vf x)
{
    fsdpc_vf a = fsdpc_vf_min(fsdpc_vf_splat(10.0f), fsdpc_vf_abs(x));
    fsdpc_exp_parts parts = fsdpc_vf_exp_parts_(a + a);
    fsdpc_vi n = __builtin_convertvector(parts.power, fsdpc_vi);
    fsdpc_vf scale = fsdpc_vf_exp2_integral_(n);
    fsdpc_vf t = fsdpc_vf_fma(scale, parts.fraction, scale - 1.0f); /* exp(2a) - 1 */
    return fsdpc_vf_copysign(t / (t + 2.0f), x);
}

#if defined(FSDPC_VEC_AVX512) || defined(FSDPC_VEC_AVX2)
/* Computes erf(t) / t by a polynomial in t's distance to the nearest multiple of 1/4 (1/2 with
 * AVX2), with coefficients from a table. This takes half the work of evaluating one polynomial near
 * zero and another with exp. */
FSDPC_INLINE fsdpc_vf fsdpc_vf_erf_table_(fsdpc_vf x)
{
#if defined(FSDPC_VEC_AVX512)
    enum { TERMS = 6 };
    const float end = 3.875f;                         /* erf is 1 from here on */
    const fsdpc_vf magic = fsdpc_vf_splat(0x1.8p21f); /* sums with it are rounded to quarters */
    static const float table[TERMS][16] = {
        {-3.12642863e-11f, -0.0356895626f, -0.04978019f, -0.0376870818f, -0.0125384182f,
         0.00850323215f, 0.0169937126f, 0.0149851497f, 0.00887202844f, 0.00349453348f,
         0.000448343955f, -0.000704414444f, -0.000878721359f, -0.000718009309f, -0.000514393905f,
         -0.000354072428f},
        {0.112210467f, 0.0886064544f, 0.0323598199f, -0.0245321002f, -0.056299258f, -0.0577499531f,
         -0.0404915325f, -0.01975145f, -0.0047310465f, 0.00278750528f, 0.00501624728f,
         0.00471193343f, 0.00366322137f, 0.00265144673f, 0.00188360841f, 0.0013462425f},
        {4.63517625e-13f, 0.104719862f, 0.166897938f, 0.169340491f, 0.125883773f, 0.0663255602f,
         0.0161920991f, -0.0136780078f, -0.0251793787f, -0.0255048182f, -0.021238979f,
         -0.016238302f, -0.0120308222f, -0.00889315456f, -0.00665012794f, -0.00505440822f},
        {-0.376122713f, -0.335348725f, -0.229913875f, -0.100219384f, 0.0124834599f, 0.0846288353f,
         0.114464976f, 0.114094824f, 0.0985821262f, 0.0791103244f, 0.0614473224f, 0.0474155545f,
         0.0368814878f, 0.029098535f, 0.0233177412f, 0.0189620052f},
        {-1.38432246e-15f, -0.181165725f, -0.32443434f, -0.407035261f, -0.427593291f, -0.40143919f,
         -0.350093216f, -0.292021364f, -0.238497078f, -0.194067568f, -0.159063578f, -0.132004902f,
         -0.111062236f, -0.0946651697f, -0.0816310495f, -0.071110867f},
        {1.12837923f, 1.10530555f, 1.04099977f, 0.948207498f, 0.842700779f, 0.738320112f,
         0.644070089f, 0.563812375f, 0.497661144f, 0.44379434f, 0.399837226f, 0.363599777f,
         0.333325982f, 0.307690978f, 0.28571406f, 0.266666651f},
    };
#else
    enum { TERMS = 7 };
    const float end = 3.75f;
    const fsdpc_vf magic = fsdpc_vf_splat(0x1.8p22f);
    static const float table[TERMS][8] = {
        {0.0492701605f, -0.000571866636f, 0.0172053389f, 0.0019071094f, -0.00451947981f,
         -0.00155270414f, -0.000421504141f, 0.000621291867f},
        {-0.0612757094f, -0.0489163585f, -0.0126927625f, 0.0166624021f, 0.00890268572f,
         0.000512171362f, -0.000869291194f, -0.000515487045f},
        {0.131950349f, 0.0324183367f, -0.0567366146f, -0.0405641273f, -0.00459224265f,
         0.00507366192f, 0.00371274468f, 0.00182628026f},
        {-0.00287147448f, 0.166864216f, 0.125889927f, 0.0162047371f, -0.0251805596f, -0.0212416593f,
         -0.0120311817f, -0.00665010512f},
        {-0.375916272f, -0.229915679f, 0.0124872997f, 0.114466287f, 0.098580204f, 0.0614463128f,
         0.0368799195f, 0.0233194605f},
        {-6.59000716e-06f, -0.324434072f, -0.42759335f, -0.350093305f, -0.238497064f, -0.159063548f,
         -0.111062236f, -0.0816310495f},
        {1.12837923f, 1.04099977f, 0.842700779f, 0.644070089f, 0.497661144f, 0.399837226f,
         0.333325982f, 0.28571406f},
    };
#endif
    fsdpc_vf t = fsdpc_vf_abs(x), sum = t + magic, u = t - (sum - magic), q = u;
#pragma GCC unroll 7
    for (int i = 0; i < TERMS; i++) {
#if defined(FSDPC_VEC_AVX512)
        fsdpc_vf row = (fsdpc_vf)_mm512_permutexvar_ps((__m512i)sum, _mm512_loadu_ps(table[i]));
#else
        fsdpc_vf row = (fsdpc_vf)_mm256_permutevar8x32_ps(_mm256_loadu_ps(table[i]), (__m256i)sum);
#endif
        q = i ? fsdpc_vf_fma(q, u, row) : row;
    }
    const fsdpc_vf one = fsdpc_vf_splat(1.0f);
    fsdpc_vf y = fsdpc_vf_select(t >= end, one, fsdpc_vf_min(one, q * t)); /* NaN stays */
    return (fsdpc_vf)((fsdpc_vu)y | ((fsdpc_vu)x & 0x80000000u));
}
#endif

/* The error is at most 3 ulp; the function is odd and preserves NaN. */
FSDPC_INLINE fsdpc_vf fsdpc_vf_erf(fsdpc_vf x)
{
#if defined(FSDPC_VEC_AVX512) || defined(FSDPC_VEC_AVX2)
    return fsdpc_vf_erf_table_(x);
#else
    fsdpc_vf t = fsdpc_vf_min(fsdpc_vf_splat(8.0f), fsdpc_vf_abs(x)), s = t * t;
    fsdpc_vf u = fsdpc_vf_fma(t, fsdpc_vf_splat(-3.88396438e-3f), fsdpc_vf_splat(2.42546219e-2f));
    fsdpc_vf far = fsdpc_vf_fma(t, fsdpc_vf_splat(-1.72853470e-5f), fsdpc_vf_splat(3.83197126e-4f));
    far = fsdpc_vf_fma(far, s, u);
    far = fsdpc_vf_fma(far, t, fsdpc_vf_splat(-1.06777877e-1f));
    far = fsdpc_vf_fma(far, t, fsdpc_vf_splat(-6.34846687e-1f));
    far = fsdpc_vf_fma(far, t, fsdpc_vf_splat(-1.28717512e-1f));
    far = fsdpc_vf_fma(far, t, -t);
    far = 1.0f - fsdpc_vf_exp(far);
    fsdpc_vf near = fsdpc_vf_splat(-5.96761703e-4f);
    near = fsdpc_vf_fma(near, s, fsdpc_vf_splat(4.99119423e-3f));
    near = fsdpc_vf_fma(near, s, fsdpc_vf_splat(-2.67681349e-2f));
    near = fsdpc_vf_fma(near, s, fsdpc_vf_splat(1.12819925e-1f));
    near = fsdpc_vf_fma(near, s, fsdpc_vf_splat(-3.76125336e-1f));
    near = fsdpc_vf_fma(near, s, fsdpc_vf_splat(1.28379166e-1f));
    near = fsdpc_vf_fma(near, t, t);
    fsdpc_vf y = fsdpc_vf_select(t > fsdpc_vf_splat(0.927734375f), far, near); /* NaN: near */
    return fsdpc_vf_copysign(y, x);
#endif
}

/* Returns fn(x) in the lanes selected by `far`, and y in the others. */
FSDPC_INLINE fsdpc_vf fsdpc_vf_by_lane_(fsdpc_vi far, fsdpc_vf x, fsdpc_vf y, float (*fn)(float))
{
    if (__builtin_expect(fsdpc_vi_any(far), 0))
        for (int i = 0; i < FSDPC_LANES; i++)
            if (far[i])
                y[i] = fn(x[i]);
    return y;
}

/* The error is at most 2 ulp; -0 and NaN are preserved, -inf gives -1, and overflow gives
 * infinity. */
FSDPC_INLINE fsdpc_vf fsdpc_vf_expm1(fsdpc_vf x)
{
    fsdpc_vf a = fsdpc_vf_min(fsdpc_vf_splat(88.75f), fsdpc_vf_max(fsdpc_vf_splat(-30.0f), x));
    fsdpc_exp_parts parts = fsdpc_vf_exp_parts_(a);
    fsdpc_vi n = __builtin_convertvector(parts.power, fsdpc_vi);
    fsdpc_vf half = (fsdpc_vf)((n + 126) << 23); /* of 2^n, which may overflow */
    fsdpc_vf y = 2.0f * fsdpc_vf_fma(half, parts.fraction, half - 0.5f);
    return fsdpc_vf_select(fsdpc_vf_abs(x) < fsdpc_vf_splat(0x1p-26f), x, y);
}

/* Returns the k for which 2^-k x is between sqrt(1/2) and sqrt 2; x is normal and positive. */
FSDPC_INLINE fsdpc_vi fsdpc_vf_exponent_(fsdpc_vf x)
{
    return ((fsdpc_vi)x - 0x3f3504f3) >> 23;
}

/* k ln 2 + log(1 + f) */
FSDPC_INLINE fsdpc_vf fsdpc_vf_log_parts_(fsdpc_vi k, fsdpc_vf f)
{
    fsdpc_vf power = __builtin_convertvector(k, fsdpc_vf), s = f * f;
    fsdpc_vf p = fsdpc_vf_splat(0x1.146310p-4f);
    p = fsdpc_vf_fma(p, f, fsdpc_vf_splat(-0x1.de4fa0p-4f));
    p = fsdpc_vf_fma(p, f, fsdpc_vf_splat(0x1.e6f608p-4f));
    p = fsdpc_vf_fma(p, f, fsdpc_vf_splat(-0x1.fc1f6cp-4f));
    p = fsdpc_vf_fma(p, f, fsdpc_vf_splat(0x1.2336e2p-3f));
    p = fsdpc_vf_fma(p, f, fsdpc_vf_splat(-0x1.555c5ap-3f));
    p = fsdpc_vf_fma(p, f, fsdpc_vf_splat(0x1.99a4bcp-3f));
    p = fsdpc_vf_fma(p, f, fsdpc_vf_splat(-0x1.000006p-2f));
    p = fsdpc_vf_fma(p, f, fsdpc_vf_splat(0x1.555548p-2f));
    fsdpc_vf y = fsdpc_vf_fma(power, fsdpc_vf_splat(-2.12194440e-4f), s * f * p);
    y = f + fsdpc_vf_fma(s, fsdpc_vf_splat(-0.5f), y);
    return fsdpc_vf_fma(power, fsdpc_vf_splat(0.693359375f), y);
}

/* The error is at most 2 ulp; log(0) is -inf, negative numbers give NaN, and infinity and NaN are
 * preserved. */
FSDPC_INLINE fsdpc_vf fsdpc_vf_log(fsdpc_vf x)
{
    const fsdpc_vf zero = {0}, infinity = fsdpc_vf_splat(INFINITY);
    fsdpc_vi tiny = x < fsdpc_vf_splat(0x1p-126f);
    fsdpc_vf a = fsdpc_vf_select(tiny, x * 0x1p23f, x);
    fsdpc_vi k = fsdpc_vf_exponent_(a);
    fsdpc_vf f = (fsdpc_vf)((fsdpc_vi)a - (k << 23)) - 1.0f;
    fsdpc_vf y = fsdpc_vf_log_parts_(k - (tiny & 23), f);
    fsdpc_vf other = fsdpc_vf_select(x < zero, fsdpc_vf_splat(NAN), x);
    other = fsdpc_vf_select(x == zero, -infinity, other);
    return fsdpc_vf_select((x > zero) & (x < infinity), y, other);
}

/* The error is at most 2 ulp; -0 is preserved. */
FSDPC_INLINE fsdpc_vf fsdpc_vf_log1p(fsdpc_vf x)
{
    const fsdpc_vf zero = {0};
    fsdpc_vi near = (x > fsdpc_vf_splat(-1.0f)) & (x < fsdpc_vf_splat(0x1p126f));
    fsdpc_vi k = fsdpc_vf_exponent_(1.0f + fsdpc_vf_select(near, x, zero));
    fsdpc_vf scale = fsdpc_vf_exp2_integral_(-k);
    fsdpc_vf y = fsdpc_vf_log_parts_(k, fsdpc_vf_fma(x, scale, scale - 1.0f));
    return fsdpc_vf_by_lane_(~near, x, fsdpc_vf_select(x == zero, x, y), log1pf);
}

/* sin(x + quarters pi/2); fn computes it for large x */
FSDPC_INLINE fsdpc_vf fsdpc_vf_sine_(fsdpc_vf x, int quarters, float (*fn)(float))
{
    const fsdpc_vf magic = fsdpc_vf_splat(0x1.8p23f); /* its last bits then hold n */
    fsdpc_vf shifted = fsdpc_vf_fma(x, fsdpc_vf_splat(0x1.45f306p-1f), magic), n = shifted - magic;
    fsdpc_vi quadrant = (fsdpc_vi)shifted + quarters;
    fsdpc_vf r = fsdpc_vf_fma(n, fsdpc_vf_splat(-0x1.922p+0f), x);
    r = fsdpc_vf_fma(n, fsdpc_vf_splat(0x1.28p-18f), r);
    fsdpc_vf step = n * 0x1.778p-25f, low = r + step; /* its error is added in the last step */
    r = low + fsdpc_vf_fma(n, fsdpc_vf_splat(-0x1.68c234p-39f), (r - low) + step);
    fsdpc_vf s = r * r, sine = fsdpc_vf_splat(0x1.6cd5ecp-19f);
    sine = fsdpc_vf_fma(sine, s, fsdpc_vf_splat(-0x1.a00f94p-13f));
    sine = fsdpc_vf_fma(sine, s, fsdpc_vf_splat(0x1.111108p-7f));
    sine = fsdpc_vf_fma(sine, s, fsdpc_vf_splat(-0x1.555556p-3f));
    sine = fsdpc_vf_fma(sine * s, r, r);
    fsdpc_vf cosine = fsdpc_vf_splat(0x1.99ff40p-16f);
    cosine = fsdpc_vf_fma(cosine, s, fsdpc_vf_splat(-0x1.6c0c82p-10f));
    cosine = fsdpc_vf_fma(cosine, s, fsdpc_vf_splat(0x1.55554ap-5f));
    cosine = fsdpc_vf_fma(cosine * s, s, 1.0f - 0.5f * s);
    fsdpc_vf y = fsdpc_vf_select(-(quadrant & 1), cosine, sine);
    y = (fsdpc_vf)((fsdpc_vi)y ^ ((quadrant & 2) << 30));
    return fsdpc_vf_by_lane_(fsdpc_vf_abs(x) > fsdpc_vf_splat(6400.0f), x, y, fn);
}

/* The error is at most 2 ulp; -0 and NaN are preserved, and infinity gives NaN. */
FSDPC_INLINE fsdpc_vf fsdpc_vf_sin(fsdpc_vf x)
{
    return fsdpc_vf_select(x == (fsdpc_vf){0}, x, fsdpc_vf_sine_(x, 0, sinf));
}

FSDPC_INLINE fsdpc_vf fsdpc_vf_cos(fsdpc_vf x)
{
    return fsdpc_vf_sine_(x, 1, cosf);
}

#if defined(FSDPC_VEC_AVX512) || defined(FSDPC_VEC_AVX2)

typedef double fsdpc_vd __attribute__((vector_size(FSDPC_LANES * 4))); /* half of the lanes */

FSDPC_INLINE fsdpc_vd fsdpc_vd_half_(fsdpc_vf v, bool high)
{
#if defined(FSDPC_VEC_AVX512)
    return (fsdpc_vd)_mm512_cvtps_pd(high ? _mm512_extractf32x8_ps((__m512)v, 1)
                                          : _mm512_castps512_ps256((__m512)v));
#else
    return (fsdpc_vd)_mm256_cvtps_pd(high ? _mm256_extractf128_ps((__m256)v, 1)
                                          : _mm256_castps256_ps128((__m256)v));
#endif
}

FSDPC_INLINE fsdpc_vf fsdpc_vd_join_(fsdpc_vd low, fsdpc_vd high)
{
#if defined(FSDPC_VEC_AVX512)
    return (fsdpc_vf)_mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)low)),
                                        _mm512_cvtpd_ps((__m512d)high), 1);
#else
    return (fsdpc_vf)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)high), _mm256_cvtpd_ps((__m256d)low));
#endif
}

FSDPC_INLINE fsdpc_vd fsdpc_vd_fma_(fsdpc_vd a, fsdpc_vd b, double c)
{
    fsdpc_vd sum = c + (fsdpc_vd){0};
#if defined(FSDPC_VEC_AVX512)
    return (fsdpc_vd)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)sum);
#else
    return (fsdpc_vd)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)sum);
#endif
}

/* Clamps to [-999, 999]. */
FSDPC_INLINE fsdpc_vd fsdpc_vd_bounded_(fsdpc_vd e)
{
#if defined(FSDPC_VEC_AVX512)
    return (fsdpc_vd)_mm512_max_pd(_mm512_set1_pd(-999),
                                   _mm512_min_pd((__m512d)e, _mm512_set1_pd(999)));
#else
    return (fsdpc_vd)_mm256_max_pd(_mm256_set1_pd(-999),
                                   _mm256_min_pd((__m256d)e, _mm256_set1_pd(999)));
#endif
}

/* 2^(b (k + log2(1 + f))) = *fraction 2^(return value) */
FSDPC_INLINE fsdpc_vd fsdpc_vd_pow_(fsdpc_vd k, fsdpc_vd f, fsdpc_vd b, fsdpc_vd *fraction)
{
    fsdpc_vd t = f / (f + 2.0), s = t * t; /* log2(1 + f) = 2 / ln 2 artanh(t) */
    fsdpc_vd p = fsdpc_vd_fma_(s, 0x1.21ba3d67e8d98p-2 + (fsdpc_vd){0}, 0x1.4794b3c1cc169p-2);
    p = fsdpc_vd_fma_(p, s, 0x1.a61a329fabc3cp-2);
    p = fsdpc_vd_fma_(p, s, 0x1.2776c28e94626p-1);
    p = fsdpc_vd_fma_(p, s, 0x1.ec709dc540414p-1);
    p = fsdpc_vd_fma_(p, s, 0x1.71547652b8247p+1);
    fsdpc_vd e = fsdpc_vd_bounded_(b * (t * p + k)), n = (e + 0x1.8p52) - 0x1.8p52, r = e - n;
    p = fsdpc_vd_fma_(r, 0x1.640dddf3d4f8bp-20 + (fsdpc_vd){0}, 0x1.00dc646f86dafp-16);
    p = fsdpc_vd_fma_(p, r, 0x1.43086fd81f9e5p-13);
    p = fsdpc_vd_fma_(p, r, 0x1.5d87457f81a6ap-10);
    p = fsdpc_vd_fma_(p, r, 0x1.3b2ab73e0b56dp-7);
    p = fsdpc_vd_fma_(p, r, 0x1.c6b08dd71ec8dp-5);
    p = fsdpc_vd_fma_(p, r, 0x1.ebfbdff80575dp-3);
    p = fsdpc_vd_fma_(p, r, 0x1.62e42fef84c1ap-1);
    *fraction = fsdpc_vd_fma_(p, r, 1.0);
    return n;
}

#endif

/* The error is at most 1 ulp; special cases are those of C's pow. */
FSDPC_INLINE fsdpc_vf fsdpc_vf_pow(fsdpc_vf a, fsdpc_vf b)
{
#if defined(FSDPC_VEC_AVX512) || defined(FSDPC_VEC_AVX2)
    const fsdpc_vf zero = {0}, infinity = fsdpc_vf_splat(INFINITY);
    fsdpc_vf x = fsdpc_vf_abs(a), size = fsdpc_vf_abs(b);
    fsdpc_vi plain = (x >= fsdpc_vf_splat(0x1p-126f)) & (x < infinity) & (size < infinity);
    fsdpc_vi k = fsdpc_vf_exponent_(x), whole = __builtin_convertvector(b, fsdpc_vi);
    fsdpc_vf f = (fsdpc_vf)((fsdpc_vi)x - (k << 23)) - 1.0f;
    fsdpc_vf power = __builtin_convertvector(k, fsdpc_vf);
    fsdpc_vd low, high;
    fsdpc_vd n_low = fsdpc_vd_pow_(fsdpc_vd_half_(power, false), fsdpc_vd_half_(f, false),
                                   fsdpc_vd_half_(b, false), &low);
    fsdpc_vd n_high = fsdpc_vd_pow_(fsdpc_vd_half_(power, true), fsdpc_vd_half_(f, true),
                                    fsdpc_vd_half_(b, true), &high);
    fsdpc_vf n = fsdpc_vd_join_(n_low, n_high);
    n = fsdpc_vf_min(fsdpc_vf_splat(200.0f), fsdpc_vf_max(fsdpc_vf_splat(-200.0f), n));
    fsdpc_vf y = fsdpc_vf_scale_(fsdpc_vd_join_(low, high), n);
    /* for negative a: NaN unless b is an integer, and negative for odd b */
    fsdpc_vi negative = a < zero, even = size >= fsdpc_vf_splat(0x1p24f);
    fsdpc_vi integral = (__builtin_convertvector(whole, fsdpc_vf) == b) | even;
    y = fsdpc_vf_select(negative & -(whole & 1) & ~even, -y, y);
    y = fsdpc_vf_select(negative & ~integral, fsdpc_vf_splat(NAN), y);
    if (__builtin_expect(!fsdpc_vi_any(~plain), 1))
        return y;
#else
    fsdpc_vf y = a;
    fsdpc_vi plain = {0};
#endif
    for (int i = 0; i < FSDPC_LANES; i++)
        if (!plain[i])
            y[i] = powf(a[i], b[i]);
    return y;
}

#endif
