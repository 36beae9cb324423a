/* Constant, normal and uniform initial values, computed from absolute indices; twin of
 * csrc/ops/flat_init_body.h.
 *
 * The logarithm, sine and cosine share the CPU's source and, compiled with -fmad=false, give the
 * same bits. Each thread computes one Philox block, that is, four elements of the stream.
 * Initialisation runs only once, so elements are stored one by one.
 */
#include "dtype.cuh"
#include "random.cuh"

#define RULE __device__ __forceinline__
#include "ops/flat_init_rules_body.h"
#undef RULE

struct init_plan {
    fsdpc_init_kind kind;
    double a, b, top; /* top: no uniform value may round to more than this */
    uint64_t seed, stream, first;
    size_t numel;
};

__device__ __forceinline__ void init_values(const init_plan &p, uint64_t block, double values[4])
{
    philox_words words = philox(p.seed, p.stream, block);
    if (p.kind == FSDPC_INIT_UNIFORM) {
        for (int w = 0; w < 4; w++) {
            float unit = (float)(words.at[w] >> 8) * 0x1p-24f;
            double value = p.a + (p.b - p.a) * (double)unit;
            values[w] = value > p.top ? p.top : value;
        }
        return;
    }
    for (int w = 0; w < 4; w += 2) {
        double radius = sqrt(-2 * log_fraction((double)words.at[w] + 1)), x, y;
        turn(words.at[w + 1], &x, &y);
        values[w] = p.a + p.b * (radius * x);
        values[w + 1] = p.a + p.b * (radius * y);
    }
}

template <typename T>
static __global__ void __launch_bounds__(BLOCK_THREADS) init_kernel(T *dst, init_plan p)
{
    uint64_t first_block = p.first / 4, blocks = (p.first + p.numel - 1) / 4 - first_block + 1;
    for (uint64_t n = grid_thread(); n < blocks; n += grid_threads()) {
        double values[4] = {p.a, p.a, p.a, p.a};
        uint64_t block = first_block + n;
        if (p.kind != FSDPC_INIT_CONSTANT)
            init_values(p, block, values);
        for (int w = 0; w < 4; w++) {
            uint64_t index = block * 4 + w;
            if (index >= p.first && index - p.first < p.numel)
                dst[index - p.first] = narrow<T>(values[w]);
        }
    }
}

/* Returns the largest value below b that the dtype can represent. */
static double below(double b, fsdpc_dtype dtype)
{
    uint64_t bits = 0;
    float narrow_b = (float)b;
    double rounded = b;
    if (dtype == FSDPC_F64) {
        memcpy(&bits, &b, 8);
        bits = b == 0 ? UINT64_C(0x8000000000000001) : b < 0 ? bits + 1 : bits - 1;
        memcpy(&rounded, &bits, 8);
        return rounded;
    }
    /* Rounds to odd first, as stores do, so that the second rounding gives the same result as a
     * single one. */
    uint32_t f = fsdpc_f32_bits(narrow_b), half;
    if ((double)narrow_b != b)
        f = (f - (fabs((double)narrow_b) > fabs(b))) | 1;
    float odd = fsdpc_f32_from_bits(f);
    if (dtype == FSDPC_F32)
        rounded = (double)narrow_b, half = fsdpc_f32_bits(narrow_b);
    else if (dtype == FSDPC_BF16)
        half = fsdpc_f32_to_bf16(odd), rounded = fsdpc_bf16_to_f32((uint16_t)half);
    else
        half = fsdpc_f32_to_f16(odd), rounded = fsdpc_f16_to_f32((uint16_t)half);
    if (rounded < b)
        return rounded;
    uint32_t sign = dtype == FSDPC_F32 ? 0x80000000u : 0x8000u;
    half = rounded == 0 ? sign | 1 : rounded < 0 ? half + 1 : half - 1;
    if (dtype == FSDPC_F32)
        return fsdpc_f32_from_bits(half);
    return dtype == FSDPC_BF16 ? fsdpc_bf16_to_f32((uint16_t)half)
                               : fsdpc_f16_to_f32((uint16_t)half);
}

extern "C" fsdpc_status fsdpc_cuda_init(const fsdpc_init_args *args, fsdpc_stream *stream)
{
    if (args->numel == 0)
        return FSDPC_OK;
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    bool bounded = args->kind == FSDPC_INIT_UNIFORM && args->a < args->b;
    init_plan plan = {
        args->kind, args->a,      args->b,     bounded ? below(args->b, args->dtype) : args->a,
        args->seed, args->stream, args->first, args->numel};
    unsigned grid = grid_of(queue, args->numel / 4 + 2, BLOCK_THREADS);
    FSDPC_FOR_FLOAT(args->dtype, T, {
        FSDPC_LAUNCH(init_kernel<T>, grid, BLOCK_THREADS, 0, queue, (T *)args->dst, plan);
        return launched("init");
    })
    return FSDPC_ERR_DTYPE;
}
