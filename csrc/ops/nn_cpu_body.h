/* One instruction set's kernels and their table, named by NN_OPS_TABLE and NN_OPS_NAME. Included
 * once by nn_cpu.c, nn_cpu_avx2.c and nn_cpu_avx512.c. */
#include "ops/attention.h"
#include "ops/nn_internal.h"
#include "ops/vec.h"

#include "ops/nn_unary_body.h"
#include "ops/nn_compare_body.h"
#include "ops/nn_binary_body.h"
#include "ops/nn_gate_body.h"
#include "ops/nn_copy_body.h"
#include "ops/nn_sum_body.h"
#include "ops/nn_embedding_body.h"
#include "ops/nn_weight_body.h"
#include "ops/nn_softmax_body.h"
#include "ops/nn_cross_entropy_body.h"
#include "ops/nn_norm_body.h"
#include "ops/nn_moments_body.h"
#include "ops/nn_pool_body.h"

const fsdpc_nn_ops NN_OPS_TABLE = {
    .name = NN_OPS_NAME,
    .gemm = fsdpc_gemm_cpu,
    .gemm_gelu = fsdpc_gemm_gelu_by_parts,
    .unary = unary,
    .unary_backward = unary_backward,
    .binary = binary,
    .sum = sum,
    .cumsum = fsdpc_nn_cumsum,
    .copy = copy,
    .softmax = softmax,
    .softmax_backward = softmax_backward,
    .norm = norm,
    .norm_backward = norm_backward,
    .row_moments = row_moments,
    .row_affine = row_affine,
    .rotary = rotary,
    .attention = fsdpc_attention_cpu,
    .attention_backward = fsdpc_attention_backward_cpu,
    .pool = pool,
    .pool_backward = pool_backward,
    .embedding = embedding,
    .embedding_backward = embedding_backward,
    .dequantize = dequantize,
    .cross_entropy = cross_entropy,
    .cross_entropy_backward = cross_entropy_backward,
    .loss_gradient = loss_gradient,
    .dropout = dropout,
    .swiglu = swiglu,
    .swiglu_backward = swiglu_backward,
};
