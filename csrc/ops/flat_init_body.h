/* init: constant, normal and uniform values, each a function of its absolute index.
 *
 * Element i comes from Philox block i / 4 of its stream. A uniform value uses word i mod 4. Normal
 * values come in pairs: words 0 and 1 give elements 0 and 1, and words 2 and 3 give elements 2 and
 * 3. (Box and Muller 1958: radius sqrt(-2 log u), angle 2 pi w, cosine first.) Any slice can
 *    therefore be computed independently.
 *
 * Initial weights are the same on every machine and instruction set (ops/flat_init_rules_body.h).
 * The rules work on blocks of words in branch-free loops, which the compiler vectorises.
 */
enum { INIT_BLOCKS = 64, INIT_WORDS = 4 * INIT_BLOCKS };

#define RULE static inline
#include "ops/flat_init_rules_body.h"
#undef RULE

static void normals_from_words(double *values, const uint32_t *words)
{
    for (int i = 0; i < INIT_WORDS; i += 2) {
        double radius = sqrt(-2 * log_fraction((double)words[i] + 1)), x, y;
        turn(words[i + 1], &x, &y);
        values[i] = radius * x;
        values[i + 1] = radius * y;
    }
}

/* Returns the dtype's largest number below b, because rounding must not raise a uniform value to
 * b. */
static double below(double b, fsdpc_dtype dtype)
{
    _Alignas(8) unsigned char bytes[8] = {0}; /* chars, to hold one element of any dtype */
    fsdpc_f64_store_as(bytes, 0, dtype, b);
    double rounded = fsdpc_f64_load_as(bytes, 0, dtype);
    if (rounded < b)
        return rounded;
    uint64_t bits;
    memcpy(&bits, bytes, sizeof bits);
    if (rounded == 0) /* becomes the least negative subnormal */
        bits = (UINT64_C(1) << (8 * fsdpc_dtype_bytes(dtype) - 1)) | 1;
    else
        bits = rounded < 0 ? bits + 1 : bits - 1;
    memcpy(bytes, &bits, sizeof bits);
    return fsdpc_f64_load_as(bytes, 0, dtype);
}

static void uniforms_from_words(double *values, const uint32_t *words, double a, double b,
                                double top)
{
    for (int i = 0; i < INIT_WORDS; i++) {
        double value = a + (b - a) * (double)fsdpc_uniform_from_bits(words[i]);
        values[i] = value > top ? top : value;
    }
}

/* Computes elements 4 * block .. 4 * block + INIT_WORDS - 1, in fp64. */
static void init_block(const fsdpc_init_args *a, double top, uint64_t block, double *values)
{
    uint32_t words[INIT_WORDS];
    for (int k = 0; k < INIT_BLOCKS; k++) {
        fsdpc_philox x = fsdpc_philox_block(a->seed, a->stream, block + (uint64_t)k);
        memcpy(words + 4 * k, x.x, sizeof x.x);
    }
    if (a->kind == FSDPC_INIT_UNIFORM) {
        uniforms_from_words(values, words, a->a, a->b, top);
        return;
    }
    normals_from_words(values, words);
    for (int i = 0; i < INIT_WORDS; i++)
        values[i] = a->a + a->b * values[i];
}

static void init_part(void *arg, size_t begin, size_t end)
{
    const fsdpc_init_args *a = arg;
    double values[INIT_WORDS];
    double top = a->kind == FSDPC_INIT_UNIFORM && a->a < a->b ? below(a->b, a->dtype) : a->a;
    if (a->kind == FSDPC_INIT_CONSTANT) {
        for (size_t j = begin; j < end; j++)
            fsdpc_f64_store_as(a->dst, j, a->dtype, a->a);
        return;
    }
    for (size_t j = begin; j < end;) {
        uint64_t index = a->first + j;
        size_t skip = index % 4, numel = fsdpc_min_size(INIT_WORDS - skip, end - j);
        init_block(a, top, index / 4, values);
        for (size_t i = 0; i < numel; i++)
            fsdpc_f64_store_as(a->dst, j + i, a->dtype, values[skip + i]);
        j += numel;
    }
}

static fsdpc_status flat_init(const fsdpc_init_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_init(args));
    fsdpc_flat_split(stream, args->numel, 64, init_part, (void *)args);
    return FSDPC_OK;
}
