/* The CPU's flat kernels for one instruction set.
 *
 * Included once by each flat_cpu*.c, which defines FSDPC_FLAT_TABLE and FSDPC_FLAT_NAME; everything
 * here is static, so the copies do not conflict. All arithmetic is per element and written once for
 * full vectors and tails, so splits and alignment cannot change the result. Every copy uses the
 * same operations (a fused multiply-add only if the source names one), so results are also
 * identical across instruction sets.
 */
#include "base/random.h"
#include "base/size.h"
#include "ops/block_code.h"
#include "ops/flat_cpu.h"
#include "ops/vec.h"

/* Combines two dtypes into one switch label. */
#define FLAT_PAIR(a, b) ((int)(a)*FSDPC_DTYPE_COUNT + (int)(b))

/* The (first, second) pairs that are computed in fp32 vectors. */
#define FLAT_F32_PAIRS(X)                                                                          \
    X(F32, F32)                                                                                    \
    X(F32, BF16)                                                                                   \
    X(F32, F16)                                                                                    \
    X(BF16, F32)                                                                                   \
    X(BF16, BF16)                                                                                  \
    X(BF16, F16)                                                                                   \
    X(F16, F32)                                                                                    \
    X(F16, BF16)                                                                                   \
    X(F16, F16)

/* The pairs that are computed in fp64, element by element: they are rare, so plain loops
 * suffice. */
#define FLAT_F64_PAIRS(X)                                                                          \
    X(F64, F32)                                                                                    \
    X(F64, BF16)                                                                                   \
    X(F64, F16)                                                                                    \
    X(F64, F64)                                                                                    \
    X(F32, F64)                                                                                    \
    X(BF16, F64)                                                                                   \
    X(F16, F64)

#include "ops/flat_stream_body.h"
#include "ops/flat_cast_body.h"
#include "ops/flat_reduce_body.h"
#include "ops/flat_sumsq_body.h"
#include "ops/flat_magnitude_body.h"
#include "ops/flat_round_body.h"
#include "ops/flat_step_body.h"
#include "ops/flat_init_body.h"
#include "ops/flat_factored_body.h"

const fsdpc_flat_ops FSDPC_FLAT_TABLE = {
    .name = FSDPC_FLAT_NAME,
    .cast = flat_cast,
    .accumulate = flat_accumulate,
    .reduce = flat_reduce,
    .scale = flat_scale,
    .sumsq = flat_sumsq,
    .sumpow = flat_sumpow,
    .absmax = flat_absmax,
    .norm_join = fsdpc_flat_norm_join_cpu,
    .norm_value = fsdpc_flat_norm_value_cpu,
    .clip = fsdpc_flat_clip_cpu,
    .clamp = flat_clamp,
    .step = flat_step,
    .equal = flat_equal,
    .init = flat_init,
    .encode = flat_encode,
    .decode = flat_decode,
    .factored = flat_factored,
};
