/* exp, tanh, erf and their kin on vectors; included by ops/vec.h and part of it.
 *
 * exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2, r by subtracting n ln 2 in two
 * pieces (the first has nine bits, so n times it is exact), exp(r) by a minimax polynomial, the
 * scaling in two steps so that subnormal results are right.  tanh goes through exp(2|x|) - 1, which
 * keeps all bits near zero.  erf is a polynomial below 0.93 and 1 - exp(polynomial) above (after N.
 * Juffa's). Errors measured over all (exp: every fp32) or dense inputs by tests/c/test_nn_unary.c.
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

/* At most 2 ulp everywhere; exp(-inf) = 0, overflow gives infinity, NaN stays. */
FSDPC_INLINE fsdpc_vf fsdpc_vf_exp(fsdpc_vf x)
{
    x = fsdpc_vf_max(fsdpc_vf_splat(-105.0f), x);
    x = fsdpc_vf_min(fsdpc_vf_splat(89.5f), x);
    fsdpc_exp_parts parts = fsdpc_vf_exp_parts_(x);
    fsdpc_vf y = parts.fraction + 1.0f;
#if defined(FSDPC_VEC_AVX512)
    return (fsdpc_vf)_mm512_scalef_ps((__m512)y, (__m512)parts.power);
#else
    fsdpc_vi n = __builtin_convertvector(parts.power, fsdpc_vi), half = n >> 1;
    return y * fsdpc_vf_exp2_integral_(half) * fsdpc_vf_exp2_integral_(n - half);
#endif
}

FSDPC_INLINE fsdpc_vf fsdpc_vf_sigmoid(fsdpc_vf x)
{
    return 1.0f / (1.0f + fsdpc_vf_exp(-x));
}

/* At most 3 ulp; odd, keeps -0 and NaN. */
FSDPC_INLINE fsdpc_vf fsdpc_vf_tanh(fsdpc_vf x)
{
    fsdpc_vf a = fsdpc_vf_min(fsdpc_vf_splat(10.0f), fsdpc_vf_abs(x));
    fsdpc_exp_parts parts = fsdpc_vf_exp_parts_(a + a);
    fsdpc_vi n = __builtin_convertvector(parts.power, fsdpc_vi);
    fsdpc_vf scale = fsdpc_vf_exp2_integral_(n);
    fsdpc_vf t = fsdpc_vf_fma(scale, parts.fraction, scale - 1.0f); /* exp(2a) - 1 */
    return fsdpc_vf_copysign(t / (t + 2.0f), x);
}

/* At most 3 ulp; odd, keeps NaN. */
FSDPC_INLINE fsdpc_vf fsdpc_vf_erf(fsdpc_vf x)
{
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
}

#endif
