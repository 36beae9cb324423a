/* CPU matrix products: C = A' B' + bias or C += A' B', row-major, fp32 accumulation.
 *
 * A' is A (m x k) or, with trans_a, the transpose of A (k x m); B' is k x n, or n x k transposed.
 * A and B share a dtype (F32, BF16; F16 and F64 are also accepted, but slower); C has that dtype or
 * F32. k == 0 gives zeros (plus bias, plus C). The result does not depend on the number of threads,
 * because k is never split between them. Called through the nn_ops table.
 */
#ifndef FSDPC_OPS_GEMM_H
#define FSDPC_OPS_GEMM_H

#include "device/device.h"
#include "ops/gemm_patches.h"

typedef struct fsdpc_gemm_args {
    size_t m, n, k;
    fsdpc_dtype dtype, c_dtype;
    const void *a;
    size_t lda; /* elements between rows of A as stored */
    bool trans_a;
    const void *b;
    size_t ldb;
    bool trans_b;
    void *c;
    size_t ldc;
    bool accumulate;  /* C += */
    const void *bias; /* (n) of dtype, added to every row before the rounding; NULL: none */
    size_t batch;     /* number of products; 0 counts as 1 */
    size_t stride_a, stride_b, stride_c; /* elements between the matrices of a batch; 0 repeats */
    /* On CPUs, B may consist of the patches of the image at `b`, as (k, n) or, with trans_b, (n,
     * k); ldb is then unused. NULL: a matrix. `bias` is then (m), added to every column. */
    const fsdpc_patches *patches;
} fsdpc_gemm_args;

fsdpc_status fsdpc_gemm_cpu(const fsdpc_gemm_args *args, fsdpc_stream *stream);

#endif
