/* What the tests of the nn kernels share: a device per instruction set and thread count, typed
 * buffers with guards around them, and comparison with double.
 *
 * nn_rig_each calls a suite with every table this processor can run and with one and two threads,
 * and checks that two threads gave the bits of one: every buffer handed to buffer_check enters a
 * list of hashes, in order, and the lists must agree.
 */
#ifndef FSDPC_TESTS_NN_RIG_H
#define FSDPC_TESTS_NN_RIG_H

#include <math.h>
#include <stdint.h>

#include "check.h"
#include "ops/nn_ops.h"

enum { RIG_HASHES = 8192, RIG_GUARD = 128 };

typedef struct nn_rig {
    fsdpc_isa isa;
    int threads;
    const fsdpc_nn_ops *ops;
    fsdpc_stream *stream;
    uint64_t hashes[RIG_HASHES];
    size_t n_hashes;
} nn_rig;

typedef void (*nn_suite_fn)(nn_rig *rig);

static void nn_rig_run(nn_rig *rig, nn_suite_fn suite)
{
    fsdpc_mem *mem;
    fsdpc_team *team;
    fsdpc_device *device;
    CHECK_OK(fsdpc_mem_create(&mem));
    CHECK_OK(fsdpc_team_create(rig->threads, &team));
    CHECK_OK(fsdpc_device_cpu_create(mem, team, rig->isa, 0, &device));
    rig->ops = fsdpc_nn_ops_cpu(rig->isa);
    device->nn = rig->ops;
    CHECK_OK(fsdpc_stream_create(device, "test", false, &rig->stream));
    suite(rig);
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(mem, &stats);
    CHECK_NOTE(stats.total_now_bytes == 0, "%zu bytes of scratch not given back",
               stats.total_now_bytes);
    fsdpc_stream_destroy(rig->stream);
    fsdpc_device_destroy(device);
    fsdpc_team_destroy(team);
    fsdpc_mem_destroy(mem);
}

/* On every instruction set up to `most` that this processor has. */
static inline void nn_rig_up_to(fsdpc_isa most, nn_suite_fn suite)
{
    static nn_rig one, two;
    for (int i = 0; i <= (int)most && i <= (int)fsdpc_isa_best(); i++) {
        one = (nn_rig){.isa = (fsdpc_isa)i, .threads = 1};
        two = (nn_rig){.isa = (fsdpc_isa)i, .threads = 2};
        nn_rig_run(&one, suite);
        nn_rig_run(&two, suite);
        CHECK(one.n_hashes == two.n_hashes && one.n_hashes <= RIG_HASHES);
        for (size_t h = 0; h < one.n_hashes; h++)
            CHECK_NOTE(one.hashes[h] == two.hashes[h], "%s: result %zu depends on threads",
                       fsdpc_isa_name(one.isa), h);
    }
}

static inline void nn_rig_each(nn_suite_fn suite)
{
    nn_rig_up_to(FSDPC_ISA_AVX512, suite);
}

/* -- buffers ----------------------------------------------------------------------------------- */

typedef struct buffer {
    fsdpc_dtype dtype;
    size_t numel;
    unsigned char *memory;
    void *data; /* misaligned by one element, so that alignment is never relied on */
} buffer;

static buffer buffer_make(fsdpc_dtype dtype, size_t numel)
{
    size_t element = fsdpc_dtype_bytes(dtype), bytes = numel * element;
    buffer b = {dtype, numel, malloc(bytes + 2 * RIG_GUARD + 64), NULL};
    memset(b.memory, 0xa5, bytes + 2 * RIG_GUARD + 64);
    b.data = b.memory + RIG_GUARD + element;
    return b;
}

static void buffer_free(buffer *b)
{
    free(b->memory);
}

static inline double buffer_get(const buffer *b, size_t i)
{
    const uint16_t *half = b->data;
    switch (b->dtype) {
    case FSDPC_F32:
        return ((const float *)b->data)[i];
    case FSDPC_BF16:
        return fsdpc_bf16_to_f32(half[i]);
    case FSDPC_F16:
        return fsdpc_f16_to_f32(half[i]);
    case FSDPC_F64:
        return ((const double *)b->data)[i];
    case FSDPC_I32:
        return ((const int32_t *)b->data)[i];
    case FSDPC_I64:
        return (double)((const int64_t *)b->data)[i];
    default:
        return ((const uint8_t *)b->data)[i];
    }
}

static inline void buffer_set(buffer *b, size_t i, double x)
{
    uint16_t *half = b->data;
    switch (b->dtype) {
    case FSDPC_F32:
        ((float *)b->data)[i] = (float)x;
        break;
    case FSDPC_BF16:
        half[i] = fsdpc_f32_to_bf16((float)x);
        break;
    case FSDPC_F16:
        half[i] = fsdpc_f32_to_f16((float)x);
        break;
    case FSDPC_F64:
        ((double *)b->data)[i] = x;
        break;
    case FSDPC_I32:
        ((int32_t *)b->data)[i] = (int32_t)x;
        break;
    case FSDPC_I64:
        ((int64_t *)b->data)[i] = (int64_t)x;
        break;
    default:
        ((uint8_t *)b->data)[i] = (uint8_t)x;
        break;
    }
}

/* Values in [low, high), the same for the same seed. */
static inline double noise(uint64_t seed, size_t i)
{
    uint64_t x = (seed + 1) * 0x9E3779B97F4A7C15u + i * 0xD1B54A32D192ED03u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return (double)((x ^ x >> 31) >> 11) * 0x1p-53;
}

static inline buffer buffer_noise(fsdpc_dtype dtype, size_t numel, uint64_t seed, double low,
                                  double high)
{
    buffer b = buffer_make(dtype, numel);
    for (size_t i = 0; i < numel; i++)
        buffer_set(&b, i, low + (high - low) * noise(seed, i));
    return b;
}

/* -- comparison -------------------------------------------------------------------------------- */

/* Enters the bits into the list that must not depend on threads, and checks the guards. */
static inline void buffer_check(nn_rig *rig, const buffer *b, const char *what)
{
    size_t bytes = b->numel * fsdpc_dtype_bytes(b->dtype),
           begin = RIG_GUARD + fsdpc_dtype_bytes(b->dtype);
    uint64_t hash = 1469598103934665603u;
    bool guards = true;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ b->memory[begin + i]) * 1099511628211u;
    for (size_t i = 0; i < begin; i++)
        guards = guards && b->memory[i] == 0xa5;
    for (size_t i = begin + bytes; i < bytes + 2 * RIG_GUARD + 64; i++)
        guards = guards && b->memory[i] == 0xa5;
    CHECK_NOTE(guards, "%s %s wrote outside its output of %zu", rig->ops->name, what, b->numel);
    if (rig->n_hashes < RIG_HASHES)
        rig->hashes[rig->n_hashes] = hash;
    rig->n_hashes++;
}

/* Rounding of the result (half an ulp of dtype) plus `steps` roundings of intermediates of size
 * `scale` in fp32, or in fp64 for F64. */
static inline double tolerance(fsdpc_dtype dtype, double value, double scale, double steps)
{
    double ulp = dtype == FSDPC_F64    ? 0x1p-53
                 : dtype == FSDPC_F32  ? 0x1p-24
                 : dtype == FSDPC_BF16 ? 0x1p-8
                                       : 0x1p-11;
    double inner = dtype == FSDPC_F64 ? 0x1p-52 : 0x1p-23;
    double tiny = dtype == FSDPC_F16 ? 0x1p-24 : 0;
    return fabs(value) * ulp * 1.0001 + inner * steps * scale + tiny;
}

static inline void check_near(const nn_rig *rig, const char *what, fsdpc_dtype dtype, size_t i,
                              double got, double want, double tol)
{
    bool same = (isnan(got) && isnan(want)) || got == want || fabs(got - want) <= tol;
    CHECK_NOTE(same, "%s %s %s [%zu]: %.9g instead of %.9g (tolerance %.3g)", rig->ops->name, what,
               fsdpc_dtype_name(dtype), i, got, want, tol);
}

static const fsdpc_dtype float_dtypes[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};

#endif
