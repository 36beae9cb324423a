/* The attention kernels' interface to attention.c: one table per instruction set.
 *
 * A unit of work is a run of query blocks of one head (forward), or one key-value head with all
 * queries of its group (backward). Units never write to the same memory, and a query block's
 * arithmetic does not depend on its run, so any split into units gives the same bits. A kernel
 * works in `scratch` (64-byte aligned); its *_bytes function returns the required size, which is
 * proportional to the number of keys. It needs no other memory.
 */
#ifndef FSDPC_OPS_ATTENTION_KERNELS_H
#define FSDPC_OPS_ATTENTION_KERNELS_H

#include "ops/nn_ops.h"

enum {
    FSDPC_ATTENTION_QUERIES = 64, /* queries per block: the lanes of every score computation */
    FSDPC_ATTENTION_KEYS = 128,   /* keys per block */
};

/* Queries [first, last) of query head `head`; first is a multiple of FSDPC_ATTENTION_QUERIES. */
typedef struct fsdpc_attention_run {
    size_t batch, head, first, last;
} fsdpc_attention_run;

typedef struct fsdpc_attention_kernels {
    const char *name;
    size_t (*forward_bytes)(const fsdpc_attention_args *args);
    void (*forward)(const fsdpc_attention_args *args, const fsdpc_attention_run *run,
                    void *scratch);
    size_t (*backward_bytes)(const fsdpc_attention_args *args);
    void (*backward)(const fsdpc_attention_args *args, size_t batch, size_t kv_head, void *scratch);
} fsdpc_attention_kernels;

/* fp32 arithmetic on F32, BF16 and F16 */
extern const fsdpc_attention_kernels fsdpc_attention_portable;
#if defined(__x86_64__)
extern const fsdpc_attention_kernels fsdpc_attention_avx2;
extern const fsdpc_attention_kernels fsdpc_attention_avx512;
/* BF16 only: products of bf16 pairs summed in fp32 */
extern const fsdpc_attention_kernels fsdpc_attention_avx512bf16;
extern const fsdpc_attention_kernels fsdpc_attention_amx;
#endif
/* F64 only */
extern const fsdpc_attention_kernels fsdpc_attention_f64;

/* Returns the number of keys, counted from the first, that query t sees. */
static inline size_t fsdpc_attention_visible(const fsdpc_attention_args *args, size_t t)
{
    if (!args->causal)
        return args->tokens_k;
    size_t end = t + 1 + args->tokens_k; /* visible keys plus tokens_q */
    if (end <= args->tokens_q)
        return 0;
    end -= args->tokens_q;
    return end < args->tokens_k ? end : args->tokens_k;
}

/* Returns the first key that query t sees; a window hides earlier ones. */
static inline size_t fsdpc_attention_first(const fsdpc_attention_args *args, size_t t)
{
    size_t end = t + 1 + args->tokens_k, before = args->tokens_q + args->window;
    return args->window && end > before ? end - before : 0;
}

#endif
