/* Blocked attention: arguments, kernel choice, and the split over threads.
 *
 * The algorithm is FlashAttention-2 (Dao 2023). For a block of 64 queries, forward visits the keys
 * in blocks of 128. The scores, the running maximum and sum, and the unnormalised output are kept
 * in a scratch buffer of a few hundred KiB. Backward recomputes the probabilities from lse and
 * needs one more number per query, D = rowsum(dO * O). Blocks whose keys are all hidden by
 * causality, a window or a mask are skipped.
 *
 * Forward is split over (batch, head, run of query blocks), backward over (batch, key-value head).
 * Every result therefore has one writer, and dk and dv are summed over the query heads of a group
 * and their blocks in ascending order. Threads claim units of work through a shared counter; which
 * thread claims a unit does not affect the results. If backward has fewer (batch, key-value head)
 * pairs than threads, some threads stay idle.
 *
 * The kernels are in attention_body.h, which is compiled once per instruction set, and in
 * attention_f64.c for F64. On processors with bf16 product instructions, BF16 inputs are multiplied
 * without conversion. The probabilities P and the score gradients dS are rounded to bf16 before
 * they are multiplied, as FlashAttention and PyTorch do. Everything else is fp32. The other paths,
 * and all paths for F16, convert inputs to fp32 during packing and round only the results.
 */
#include "ops/attention.h"

#include <stdatomic.h>

#include "base/size.h"
#include "ops/attention_kernels.h"

typedef struct attention_job {
    const fsdpc_attention_args *args;
    const fsdpc_attention_kernels *kernels;
    size_t units, run_queries;
    char *scratch; /* a slice of scratch_bytes per thread */
    size_t scratch_bytes;
    atomic_size_t next; /* the next unit; taken with fetch_add, which needs no ordering: units are
                         * independent, and the team's join publishes the results */
} attention_job;

static const fsdpc_attention_kernels *kernels_for(fsdpc_isa isa, fsdpc_dtype dtype)
{
    if (dtype == FSDPC_F64)
        return &fsdpc_attention_f64;
#if defined(__x86_64__)
    if (isa >= FSDPC_ISA_AMX && dtype == FSDPC_BF16)
        return &fsdpc_attention_amx;
    if (isa >= FSDPC_ISA_AVX512BF16 && dtype == FSDPC_BF16)
        return &fsdpc_attention_avx512bf16;
    if (isa >= FSDPC_ISA_AVX512)
        return &fsdpc_attention_avx512;
    if (isa >= FSDPC_ISA_AVX2)
        return &fsdpc_attention_avx2;
#endif
    (void)isa;
    return &fsdpc_attention_portable;
}

static fsdpc_status check_args(const fsdpc_attention_args *args)
{
    if (!fsdpc_dtype_is_float(args->dtype))
        return fsdpc_fail(FSDPC_ERR_DTYPE,
                          "attention on %s; pass float32, bfloat16, float16 or "
                          "float64",
                          fsdpc_dtype_name(args->dtype));
    if (args->kv_heads == 0 ? args->heads != 0 : args->heads % args->kv_heads != 0)
        return fsdpc_fail(FSDPC_ERR_SHAPE,
                          "%zu query heads do not divide among %zu key-value heads; make heads a "
                          "multiple of kv_heads",
                          args->heads, args->kv_heads);
    bool wide = args->dtype == FSDPC_F64;
    if (args->mask && args->mask_dtype != FSDPC_BOOL &&
        (!fsdpc_dtype_is_float(args->mask_dtype) || (args->mask_dtype == FSDPC_F64) != wide))
        return fsdpc_fail(FSDPC_ERR_DTYPE, "attention on %s with a mask of %s; pass bool, or %s",
                          fsdpc_dtype_name(args->dtype), fsdpc_dtype_name(args->mask_dtype),
                          wide ? "float64" : "float32, bfloat16 or float16");
    if (args->window && !args->causal)
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "attention in a window of %zu keys that is not causal; make it causal",
                          args->window);
    size_t padded, bytes;
    FSDPC_TRY(fsdpc_add_size(args->dim, 1024, &padded));
    FSDPC_TRY(fsdpc_mul_size(padded, 64, &bytes));
    size_t keys;
    FSDPC_TRY(fsdpc_add_size(args->tokens_k, 1024, &keys));
    return fsdpc_mul_size(keys, bytes, &bytes); /* this limits all sizes that kernels compute */
}

static void forward_part(void *arg, size_t part)
{
    attention_job *job = arg;
    const fsdpc_attention_args *x = job->args;
    size_t runs = fsdpc_ceil_div(x->tokens_q, job->run_queries);
    for (;;) {
        size_t unit = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (unit >= job->units)
            return;
        /* The later runs come first, because they are the longest under a causal mask. */
        size_t first = (runs - 1 - unit % runs) * job->run_queries, pair = unit / runs;
        fsdpc_attention_run run = {pair / x->heads, pair % x->heads, first,
                                   fsdpc_min_size(first + job->run_queries, x->tokens_q)};
        job->kernels->forward(x, &run, job->scratch + part * job->scratch_bytes);
    }
}

static void backward_part(void *arg, size_t part)
{
    attention_job *job = arg;
    const fsdpc_attention_args *x = job->args;
    for (;;) {
        size_t unit = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (unit >= job->units)
            return;
        job->kernels->backward(x, unit / x->kv_heads, unit % x->kv_heads,
                               job->scratch + part * job->scratch_bytes);
    }
}

static fsdpc_status run_job(attention_job *job, fsdpc_team_fn fn, fsdpc_stream *stream)
{
    fsdpc_device *device = stream->device;
    size_t parts = fsdpc_min_size((size_t)fsdpc_team_threads(device->team), job->units), bytes;
    job->scratch_bytes = fsdpc_round_up(job->scratch_bytes, 64);
    FSDPC_TRY(fsdpc_mul_size(job->scratch_bytes, parts, &bytes));
    void *scratch;
    FSDPC_TRY(fsdpc_mem_alloc(device->mem, FSDPC_MEM_OTHER, bytes, &scratch));
    job->scratch = scratch;
    fsdpc_team_run(device->team, parts, fn, job);
    fsdpc_mem_free(device->mem, scratch);
    return FSDPC_OK;
}

fsdpc_status fsdpc_attention_cpu(const fsdpc_attention_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(check_args(args));
    size_t pairs, blocks = fsdpc_ceil_div(args->tokens_q, FSDPC_ATTENTION_QUERIES);
    FSDPC_TRY(fsdpc_mul_size(args->batch, args->heads, &pairs));
    if (pairs == 0 || blocks == 0)
        return FSDPC_OK;
    /* Each run packs the keys and values that it sees, so use only enough runs to keep the threads
     * busy. */
    size_t threads = (size_t)fsdpc_team_threads(stream->device->team);
    size_t runs = threads == 1 ? 1 : fsdpc_ceil_div(4 * threads, pairs);
    size_t run_blocks = fsdpc_ceil_div(blocks, fsdpc_min_size(runs, blocks));
    const fsdpc_attention_kernels *kernels = kernels_for(stream->device->isa, args->dtype);
    attention_job job = {.args = args,
                         .kernels = kernels,
                         .run_queries = run_blocks * FSDPC_ATTENTION_QUERIES,
                         .scratch_bytes = kernels->forward_bytes(args)};
    FSDPC_TRY(fsdpc_mul_size(pairs, fsdpc_ceil_div(blocks, run_blocks), &job.units));
    return run_job(&job, forward_part, stream);
}

fsdpc_status fsdpc_attention_backward_cpu(const fsdpc_attention_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(check_args(args));
    const fsdpc_attention_kernels *kernels = kernels_for(stream->device->isa, args->dtype);
    attention_job job = {
        .args = args, .kernels = kernels, .scratch_bytes = kernels->backward_bytes(args)};
    FSDPC_TRY(fsdpc_mul_size(args->batch, args->kv_heads, &job.units));
    return job.units == 0 ? FSDPC_OK : run_job(&job, backward_part, stream);
}
