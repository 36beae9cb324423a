/* Internals of the CPU's flat kernels, shared by flat_ops.c and the bodies.
 *
 * The kernels are written once, in flat_*_body.h, and compiled once per instruction set:
 * flat_cpu.c, flat_cpu_avx2.c and flat_cpu_avx512.c each include flat_cpu_body.h and export one
 * table. Functions without vector code are compiled once and shared by all tables.
 */
#ifndef FSDPC_OPS_FLAT_CPU_H
#define FSDPC_OPS_FLAT_CPU_H

#include <math.h>

#include "ops/flat_check.h"
#include "ops/flat_ops.h"

extern const fsdpc_flat_ops fsdpc_flat_ops_portable;
#if defined(__x86_64__)
extern const fsdpc_flat_ops fsdpc_flat_ops_avx2;
extern const fsdpc_flat_ops fsdpc_flat_ops_avx512;
#endif

/* Processes elements begin .. end - 1 of the range passed to fsdpc_flat_split. */
typedef void (*fsdpc_flat_range_fn)(void *arg, size_t begin, size_t end);

/* Runs fn over [0, numel), split at multiples of `unit` among the device team's threads, or in one
 * piece if the range or the team is small. */
void fsdpc_flat_split(fsdpc_stream *stream, size_t numel, size_t unit, fsdpc_flat_range_fn fn,
                      void *arg);

/* All paths share these functions, so their results are identical. */
fsdpc_status fsdpc_flat_norm_join_cpu(const fsdpc_norm_join_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_flat_norm_value_cpu(const fsdpc_norm *norm, double p, double *out,
                                       fsdpc_stream *stream);
fsdpc_status fsdpc_flat_clip_cpu(const fsdpc_clip_args *args, fsdpc_stream *stream);
void fsdpc_flat_step_f64(const fsdpc_step_args *args, size_t begin, size_t end);

static inline void *fsdpc_flat_at(const void *base, size_t i, fsdpc_dtype dtype)
{
    return (char *)base + i * fsdpc_dtype_bytes(dtype);
}

/* fp64 to fp32, rounded to odd. Rounding the result to bf16 or fp16 then equals a single rounding:
 * fp32 has more than two extra bits, and the odd bit records inexactness. */
static inline float fsdpc_f64_to_f32_odd(double x)
{
    float rounded = (float)x;
    if ((double)rounded == x || x != x)
        return rounded;
    uint32_t bits = fsdpc_f32_bits(rounded);
    bits -= fabs((double)rounded) > fabs(x);
    return fsdpc_f32_from_bits(bits | 1);
}

/* Load and store element i as fp64; if the dtype is constant, selecting the conversion costs
 * nothing. */
static inline double fsdpc_f64_load_as(const void *base, size_t i, fsdpc_dtype dtype)
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

static inline void fsdpc_f64_store_as(void *base, size_t i, fsdpc_dtype dtype, double x)
{
    switch (dtype) {
    case FSDPC_F32:
        ((float *)base)[i] = (float)x;
        break;
    case FSDPC_BF16:
        ((uint16_t *)base)[i] = fsdpc_f32_to_bf16(fsdpc_f64_to_f32_odd(x));
        break;
    case FSDPC_F16:
        ((uint16_t *)base)[i] = fsdpc_f32_to_f16(fsdpc_f64_to_f32_odd(x));
        break;
    default:
        ((double *)base)[i] = x;
    }
}

#endif
