/* What the tests of the flat kernels share: one stream per instruction set and thread count,
 * numbers with all kinds of trouble in them, and conversions of one element that are written
 * differently from the kernels'. */
#ifndef FSDPC_TESTS_TEST_FLAT_COMMON_H
#define FSDPC_TESTS_TEST_FLAT_COMMON_H

#include "check.h"

#include <math.h>

#include "ops/flat_ops.h"

typedef struct rig {
    fsdpc_team *team;
    fsdpc_device device;
    fsdpc_stream stream;
    const fsdpc_flat_ops *ops;
} rig;

static const fsdpc_dtype all_floats[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};

/* Long enough for several parts on three threads, and odd. */
enum { LARGE_NUMEL = 200003 };
static const size_t some_sizes[] = {0, 1, 15, 16, 17, 63, 1025, LARGE_NUMEL};
enum { SIZES = sizeof some_sizes / sizeof some_sizes[0] };

static inline void rig_init(rig *r, fsdpc_isa isa, int threads)
{
    memset(r, 0, sizeof *r);
    CHECK_OK(fsdpc_team_create(threads, &r->team));
    r->device.team = r->team;
    r->device.isa = isa;
    r->stream.device = &r->device;
    r->ops = fsdpc_flat_ops_cpu(isa);
    r->device.flat = r->ops;
}

static inline void rig_fini(rig *r)
{
    fsdpc_team_destroy(r->team);
}

/* The paths with kernels of their own that this processor can run. */
static inline int usable_isas(fsdpc_isa *isas)
{
    int n = 0;
    for (int isa = FSDPC_ISA_PORTABLE; isa <= FSDPC_ISA_AVX512; isa++)
        if (isa <= (int)fsdpc_isa_best())
            isas[n++] = (fsdpc_isa)isa;
    return n;
}

static inline uint64_t random_bits(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* In (-1, 1), about 2^-k as often as 2^-(k + 1). */
static inline double random_value(uint64_t *state)
{
    double unit = (double)(int64_t)(random_bits(state) << 11) * 0x1p-63;
    return ldexp(unit, -(int)(random_bits(state) % 12));
}

static inline void *test_alloc(size_t bytes)
{
    void *p = calloc(1, bytes ? bytes : 1);
    if (!p)
        exit(2);
    return p;
}

/* One element by way of long arithmetic: no bit tricks in common with the kernels. */
static inline double round_to_bits(double x, int mantissa_bits, int exponent_min, double max)
{
    if (!isfinite(x) || x == 0)
        return x;
    int exponent;
    frexp(x, &exponent); /* x = [0.5, 1) * 2^exponent */
    int lowest = (exponent - 1 < exponent_min ? exponent_min : exponent - 1) - mantissa_bits;
    double rounded = copysign(ldexp(nearbyint(ldexp(fabs(x), -lowest)), lowest), x);
    return fabs(rounded) > max ? copysign(INFINITY, x) : rounded;
}

static inline double round_as(double x, fsdpc_dtype dtype)
{
    if (dtype == FSDPC_BF16)
        return round_to_bits(x, 7, -126, 0x1.fep127);
    if (dtype == FSDPC_F16)
        return round_to_bits(x, 10, -14, 65504);
    return dtype == FSDPC_F32 ? (double)(float)x : x;
}

static inline double element(const void *base, size_t i, fsdpc_dtype dtype)
{
    switch (dtype) {
    case FSDPC_F32:
        return (double)((const float *)base)[i];
    case FSDPC_BF16:
        return (double)fsdpc_bf16_to_f32(((const uint16_t *)base)[i]);
    case FSDPC_F16:
        return (double)fsdpc_f16_to_f32(((const uint16_t *)base)[i]);
    default:
        return ((const double *)base)[i];
    }
}

/* x must be a value of the dtype already. */
static inline void set_element(void *base, size_t i, fsdpc_dtype dtype, double x)
{
    switch (dtype) {
    case FSDPC_F32:
        ((float *)base)[i] = (float)x;
        break;
    case FSDPC_BF16:
        ((uint16_t *)base)[i] = fsdpc_f32_to_bf16((float)x);
        break;
    case FSDPC_F16:
        ((uint16_t *)base)[i] = fsdpc_f32_to_f16((float)x);
        break;
    default:
        ((double *)base)[i] = x;
    }
}

static inline void fill_random(void *base, size_t numel, fsdpc_dtype dtype, uint64_t seed)
{
    for (size_t i = 0; i < numel; i++)
        set_element(base, i, dtype, round_as(random_value(&seed), dtype));
}

static inline bool same_value(double a, double b)
{
    return (isnan(a) && isnan(b)) || (a == b && signbit(a) == signbit(b));
}

static inline void *at_element(void *base, size_t i, fsdpc_dtype dtype)
{
    return (char *)base + i * fsdpc_dtype_bytes(dtype);
}

#endif
