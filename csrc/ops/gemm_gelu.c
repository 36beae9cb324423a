/* A product followed by gelu, computed by the table's separate kernels: see nn_ops.h.
 *
 * The intermediate value is rounded to its dtype, so results have the same bits as two separate
 * calls. Gelu works in place, or reads `before` if that is kept, so it needs no extra memory.
 */
#include <assert.h>

#include "ops/nn_ops.h"

fsdpc_status fsdpc_gemm_gelu_by_parts(const fsdpc_gemm_gelu_args *args, fsdpc_stream *stream)
{
    const fsdpc_nn_ops *kernels = fsdpc_nn_ops_of(stream);
    fsdpc_gemm_args gemm = args->gemm;
    assert(gemm.c_dtype == gemm.dtype && gemm.ldc == gemm.n && gemm.batch <= 1 && !gemm.accumulate);
    if (!args->backward && args->before)
        gemm.c = args->before;
    FSDPC_TRY(kernels->gemm(&gemm, stream));
    fsdpc_unary_args gelu = {.kind = FSDPC_UNARY_GELU_TANH,
                             .dtype = gemm.dtype,
                             .numel = gemm.m * gemm.n,
                             .x = args->backward ? args->before : gemm.c,
                             .dy = gemm.c,
                             .out = args->gemm.c};
    return (args->backward ? kernels->unary_backward : kernels->unary)(&gelu, stream);
}
