/* What the GPU tests share: a GPU and a CPU side by side, buffers that exist on both, comparison.
 *
 * Every kernel is run by both tables on the same fresh random numbers; the CPU's is the twin that
 * says what is right. A test is a main() like those of tests/c. Without a GPU it says so and ends
 * well, unless FSDPC_TEST_GPU=1 demands one. On the emulated device (tests/emu) every test runs
 * twice, with the threads of a block in ascending and in descending order.
 */
#ifndef FSDPC_TESTS_GPU_GPU_RIG_H
#define FSDPC_TESTS_GPU_GPU_RIG_H

#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "check.h"
#include "cuda/queue.h"
#include "cuda/wait.h"
#include "cuda/device_cuda.h"
#include "ops/flat_ops.h"
#include "ops/nn_ops.h"

static fsdpc_device *gpu, *cpu;
static fsdpc_stream *gpu_stream, *cpu_stream;
static fsdpc_mem *gpu_mem, *cpu_mem;
static uint64_t rig_state;

typedef void (*rig_test_fn)(void);

/* -- random numbers ---------------------------------------------------------------------------- */

static inline uint64_t rig_bits(void)
{
    rig_state += 0x9e3779b97f4a7c15u;
    uint64_t z = rig_state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* In (-1, 1), of many magnitudes. */
static inline double rig_value(void)
{
    double unit = (double)(int64_t)(rig_bits() << 11) * 0x1p-63;
    return ldexp(unit, -(int)(rig_bits() % 8));
}

/* -- buffers ----------------------------------------------------------------------------------- */

enum { RIG_GUARD_BYTES = 256 };

/* The same elements on both sides, between guards, `shift` elements behind alignment. */
typedef struct buffer {
    fsdpc_dtype dtype;
    size_t numel, bytes;
    unsigned char *host, *device; /* with guards */
    void *on_cpu, *on_gpu;        /* first elements */
    unsigned char *back;          /* the GPU's elements, once fetched */
} buffer;

static inline double element_of(const void *base, size_t i, fsdpc_dtype dtype)
{
    switch (dtype) {
    case FSDPC_F32:
        return ((const float *)base)[i];
    case FSDPC_BF16:
        return fsdpc_bf16_to_f32(((const uint16_t *)base)[i]);
    case FSDPC_F16:
        return fsdpc_f16_to_f32(((const uint16_t *)base)[i]);
    case FSDPC_F64:
        return ((const double *)base)[i];
    case FSDPC_I32:
        return ((const int32_t *)base)[i];
    case FSDPC_I64:
        return (double)((const int64_t *)base)[i];
    default:
        return ((const uint8_t *)base)[i];
    }
}

static inline void element_set(void *base, size_t i, fsdpc_dtype dtype, double x)
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
    case FSDPC_F64:
        ((double *)base)[i] = x;
        break;
    case FSDPC_I32:
        ((int32_t *)base)[i] = (int32_t)x;
        break;
    case FSDPC_I64:
        ((int64_t *)base)[i] = (int64_t)x;
        break;
    default:
        ((uint8_t *)base)[i] = (uint8_t)x;
        break;
    }
}

/* Copies what the CPU has to the GPU, guards too. */
static inline void buffer_send(buffer *b)
{
    CHECK_OK(fsdpc_device_copy(gpu, b->device, b->host, b->bytes, gpu_stream));
}

static inline buffer buffer_make(fsdpc_dtype dtype, size_t numel, size_t shift)
{
    size_t element = fsdpc_dtype_bytes(dtype);
    buffer b = {.dtype = dtype, .numel = numel};
    b.bytes = numel * element + 2 * RIG_GUARD_BYTES + shift * element;
    void *device;
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_OTHER, b.bytes, &device));
    b.device = device;
    b.host = aligned_alloc(64, (b.bytes + 63) / 64 * 64);
    b.back = malloc(b.bytes);
    memset(b.host, 0xa5, b.bytes); /* outputs that nobody writes differ from none */
    b.on_cpu = b.host + RIG_GUARD_BYTES + shift * element;
    b.on_gpu = b.device + RIG_GUARD_BYTES + shift * element;
    return b;
}

static inline buffer buffer_poison(fsdpc_dtype dtype, size_t numel, size_t shift)
{
    buffer b = buffer_make(dtype, numel, shift);
    buffer_send(&b);
    return b;
}

static inline buffer buffer_random(fsdpc_dtype dtype, size_t numel, size_t shift)
{
    buffer b = buffer_make(dtype, numel, shift);
    for (size_t i = 0; i < numel; i++)
        element_set(b.on_cpu, i, dtype, rig_value());
    buffer_send(&b);
    return b;
}

static inline void buffer_fini(buffer *b)
{
    fsdpc_device_free(gpu, b->device);
    free(b->host);
    free(b->back);
}

/* Waits and brings the GPU's bytes back; `back` is then as `on_cpu`, first element first. */
static inline const void *buffer_fetch(buffer *b)
{
    CHECK_OK(fsdpc_device_copy(gpu, b->back, b->device, b->bytes, gpu_stream));
    CHECK_OK(fsdpc_stream_sync(gpu_stream));
    return b->back + ((unsigned char *)b->on_cpu - b->host);
}

/* -- comparison -------------------------------------------------------------------------------- */

/* Guards included; NaN equals NaN, since arithmetic on a GPU makes one NaN only. */
static inline void check_same_bits(buffer *b, const char *what)
{
    const unsigned char *got = buffer_fetch(b), *want = b->on_cpu;
    size_t element = fsdpc_dtype_bytes(b->dtype), wrong = 0;
    for (size_t i = 0; i < b->numel; i++) {
        if (memcmp(got + i * element, want + i * element, element) == 0)
            continue;
        double x = element_of(got, i, b->dtype), y = element_of(want, i, b->dtype);
        if ((isnan(x) && isnan(y)) || wrong++)
            continue;
        CHECK_NOTE(false, "%s: %s [%zu of %zu] is %.17g instead of %.17g", what,
                   fsdpc_dtype_name(b->dtype), i, b->numel, x, y);
    }
    CHECK_NOTE(wrong == 0, "%s: %zu of %zu elements differ", what, wrong, b->numel);
    size_t head = (size_t)((unsigned char *)b->on_cpu - b->host), tail = head + b->numel * element;
    CHECK_NOTE(memcmp(b->back, b->host, head) == 0 &&
                   memcmp(b->back + tail, b->host + tail, b->bytes - tail) == 0,
               "%s wrote outside its %zu elements", what, b->numel);
}

/* One rounding of the dtype, and `steps` of fp32 (F64: fp64) on numbers of size `scale`. */
static inline void check_close(buffer *b, double scale, double steps, const char *what)
{
    const void *got = buffer_fetch(b);
    double unit = b->dtype == FSDPC_F64    ? 0x1p-52
                  : b->dtype == FSDPC_F32  ? 0x1p-23
                  : b->dtype == FSDPC_BF16 ? 0x1p-7
                                           : 0x1p-10;
    double inner = b->dtype == FSDPC_F64 ? 0x1p-52 : 0x1p-23,
           tiny = b->dtype == FSDPC_F16 ? 0x1p-24 : 0;
    size_t wrong = 0;
    for (size_t i = 0; i < b->numel; i++) {
        double x = element_of(got, i, b->dtype), y = element_of(b->on_cpu, i, b->dtype);
        double allowed = fabs(y) * unit + inner * steps * scale + tiny;
        if (x == y || (isnan(x) && isnan(y)) || fabs(x - y) <= allowed || wrong++)
            continue;
        CHECK_NOTE(false, "%s: %s [%zu of %zu] is %.9g instead of %.9g (tolerance %.3g)", what,
                   fsdpc_dtype_name(b->dtype), i, b->numel, x, y, allowed);
    }
    CHECK_NOTE(wrong == 0, "%s: %zu of %zu elements are off", what, wrong, b->numel);
}

/* -- life -------------------------------------------------------------------------------------- */

static inline int rig_count(void)
{
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

/* A device's watch->wait_for, for waits that fail. */
static inline fsdpc_status rig_no_wait(void *arg, fsdpc_status (*poll)(void *poll_arg),
                                       void *poll_arg)
{
    (void)arg;
    (void)poll;
    (void)poll_arg;
    return fsdpc_fail(FSDPC_ERR_TIMEOUT, "a peer is gone");
}

#if defined(FSDPC_EMU)
/* So much more memory than is in use now; SIZE_MAX: plenty again. */
static inline void rig_leave_free(size_t bytes)
{
    size_t free_bytes, total;
    char text[32];
    unsetenv("EMU_MEMORY_BYTES");
    if (bytes == SIZE_MAX)
        return;
    CHECK_OK(fsdpc_cuda_make_room(gpu));
    CHECK(cudaMemGetInfo(&free_bytes, &total) == cudaSuccess);
    snprintf(text, sizeof text, "%zu", total - free_bytes + bytes);
    setenv("EMU_MEMORY_BYTES", text, 1);
}
#endif

static inline void rig_open(void)
{
    CHECK_OK(fsdpc_mem_create(&gpu_mem));
    CHECK_OK(fsdpc_mem_create(&cpu_mem));
    CHECK_OK(fsdpc_device_cuda_create(gpu_mem, 0, &gpu));
    CHECK_OK(fsdpc_device_cpu_create(cpu_mem, NULL, fsdpc_isa_best(), 0, &cpu));
    cpu->flat = fsdpc_flat_ops_cpu(fsdpc_isa_best());
    cpu->nn = fsdpc_nn_ops_cpu(fsdpc_isa_best());
    CHECK_OK(fsdpc_stream_create(cpu, "test", false, &cpu_stream));
    gpu_stream = &((fsdpc_cuda_device *)gpu)->main->head;
}

static inline void rig_close(void)
{
    fsdpc_stream_destroy(cpu_stream);
    fsdpc_device_destroy(gpu); /* gives back what it keeps for itself, a workspace for products */
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(gpu_mem, &stats);
    CHECK_NOTE(stats.total_now_bytes == 0, "%zu bytes of device memory not given back",
               stats.total_now_bytes);
    CHECK(stats.now_bytes[FSDPC_MEM_PINNED] == 0);
    fsdpc_device_destroy(cpu);
    fsdpc_mem_destroy(gpu_mem);
    fsdpc_mem_destroy(cpu_mem);
}

/* Runs tests in this order of threads, which the emulated device alone lets choose. */
static inline int rig_round(const char *name, const rig_test_fn *tests, size_t n_tests,
                            bool descending)
{
#if defined(FSDPC_EMU)
    emu_set_descending(descending);
#else
    (void)descending;
#endif
    rig_open();
    for (size_t t = 0; t < n_tests; t++)
        tests[t]();
    rig_close();
    return check_report(name);
}

static inline int rig_main(const char *name, const rig_test_fn *tests, size_t n_tests)
{
    if (rig_count() == 0) {
        const char *demanded = getenv("FSDPC_TEST_GPU");
        printf("%s: no GPU, nothing tested\n", name);
        return demanded && strcmp(demanded, "1") == 0;
    }
    const char *seed = getenv("FSDPC_TEST_SEED");
    rig_state = seed ? strtoull(seed, NULL, 10) : (uint64_t)time(NULL);
    printf("%s: FSDPC_TEST_SEED=%llu\n", name, (unsigned long long)rig_state);
#if defined(FSDPC_EMU)
    rig_round(name, tests, n_tests, true);
#endif
    return rig_round(name, tests, n_tests, false);
}

#endif
