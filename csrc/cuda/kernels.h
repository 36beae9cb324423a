/* Launchers for the kernels in kernels/, one for each table slot and with the same arguments.
 *
 * A launcher enqueues its kernel and returns without waiting. All pointers, including those for
 * results, point to memory that the device can access: its own or pinned host memory. The tables in
 * flat_cuda.c and nn_cuda.c wrap the launchers and copy results to ordinary host memory if needed.
 * Scratch memory comes from the device's pool and is freed as soon as the last kernel that uses it
 * is enqueued, which the pool allows (pool.h). Every launcher has a CPU counterpart with the same
 * name except for `cuda`; the tests compare the two.
 */
#ifndef FSDPC_CUDA_KERNELS_H
#define FSDPC_CUDA_KERNELS_H

#include "ops/flat_ops.h"
#include "ops/nn_ops.h"

enum { FSDPC_CUDA_REDUCE_SOURCES = 256 };

/* kernels/cast.cu */
fsdpc_status fsdpc_cuda_cast(void *dst, fsdpc_dtype dst_dtype, const void *src,
                             fsdpc_dtype src_dtype, size_t numel, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_accumulate(void *dst, fsdpc_dtype dst_dtype, const void *src,
                                   fsdpc_dtype src_dtype, size_t numel, fsdpc_stream *stream);

/* kernels/scale.cu */
fsdpc_status fsdpc_cuda_scale(void *x, fsdpc_dtype dtype, size_t numel, double scale,
                              const double *scale_at, int *nonfinite_io, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_equal(const void *dst, fsdpc_dtype dst_dtype, const void *src,
                              fsdpc_dtype src_dtype, size_t numel, bool *equal_io,
                              fsdpc_stream *stream);

/* kernels/tree.cu, sumpow.cu, magnitude.cu, step.cu, step_coded.cu, step_f64.cu, init.cu,
 * block_code.cu, factored.cu */
fsdpc_status fsdpc_cuda_reduce(const fsdpc_reduce_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_sumsq(const void *x, fsdpc_dtype dtype, size_t numel, size_t leaf,
                              fsdpc_exact_sum *sum_io, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_sumpow(const void *x, fsdpc_dtype dtype, size_t numel, size_t leaf,
                               double p, fsdpc_exact_sum *sum_io, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_absmax(const void *x, fsdpc_dtype dtype, size_t numel, double *max_io,
                               fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_norm_join(const fsdpc_norm_join_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_norm_value(const fsdpc_norm *norm, double p, double *out,
                                   fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_clip(const fsdpc_clip_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_clamp(void *x, fsdpc_dtype dtype, size_t numel, double limit,
                              fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_step(const fsdpc_step_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_step_f64(const fsdpc_step_args *args,
                                 fsdpc_stream *stream); /* F64 masters */
fsdpc_status fsdpc_cuda_step_coded(const fsdpc_step_args *args, fsdpc_stream *stream); /* codes */
fsdpc_status fsdpc_cuda_encode(const fsdpc_code_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_decode(const fsdpc_code_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_factored(const fsdpc_factored_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_init(const fsdpc_init_args *args, fsdpc_stream *stream);

/* kernels/extremum.cu: max (if `most`) or min of `ranks` contributions in `gathered` (ranks,
 * numel), as in fsdpc_coll_combine; not in a table, only for communicators */
fsdpc_status fsdpc_cuda_extremum(bool most, fsdpc_dtype dtype, const void *gathered, int ranks,
                                 size_t numel, void *out, fsdpc_stream *stream);

/* kernels/unary.cu, gate.cu, binary.cu, sum.cu, cumsum.cu, copy.cu */
fsdpc_status fsdpc_cuda_unary(const fsdpc_unary_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_unary_backward(const fsdpc_unary_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_swiglu(const fsdpc_swiglu_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_swiglu_backward(const fsdpc_swiglu_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_dropout(const fsdpc_dropout_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_binary(const fsdpc_binary_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_sum(const fsdpc_sum_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_cumsum(const fsdpc_cumsum_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_copy(const fsdpc_copy_args *args, fsdpc_stream *stream);

/* kernels/softmax.cu, norm.cu, moments.cu, cross_entropy.cu, rotary.cu, embedding.cu,
 * weight_code.cu */
fsdpc_status fsdpc_cuda_softmax(const fsdpc_softmax_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_softmax_backward(const fsdpc_softmax_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_norm(const fsdpc_norm_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_norm_backward(const fsdpc_norm_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_row_moments(const fsdpc_row_moments_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_row_affine(const fsdpc_row_affine_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_cross_entropy(const fsdpc_cross_entropy_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_cross_entropy_backward(const fsdpc_cross_entropy_args *args,
                                               fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_loss_gradient(const fsdpc_loss_gradient_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_rotary(const fsdpc_rotary_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_embedding(const fsdpc_embedding_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_embedding_backward(const fsdpc_embedding_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_dequantize(const fsdpc_dequantize_args *args, fsdpc_stream *stream);

/* kernels/attention.cu, gemm.cu */
fsdpc_status fsdpc_cuda_attention(const fsdpc_attention_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_attention_backward(const fsdpc_attention_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_gemm_plain(const fsdpc_gemm_args *args, fsdpc_stream *stream);

#endif
