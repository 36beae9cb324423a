/* Attention by cuDNN, for devices with it enabled (fsdpc_cuda_device's `cudnn`) and shapes it
 * supports.
 *
 * `done_out` says whether cuDNN computed it: it may not be compiled in, requested, or installed.
 * If it did not, callers use our own kernels.  Both keep the same log-sum-exp, so forward and
 * backward may choose independently.
 */
#ifndef FSDPC_CUDA_ATTENTION_CUDNN_H
#define FSDPC_CUDA_ATTENTION_CUDNN_H

#include "ops/nn_ops.h"

typedef struct fsdpc_cuda_attentions fsdpc_cuda_attentions;

/* *done_out: cuDNN supports the shape and was called.  Inside a capture it only accepts shapes that
 * it has seen before; any other is an error that says to run a step first. */
fsdpc_status fsdpc_cuda_attention_cudnn(const fsdpc_attention_args *args, bool backward,
                                        fsdpc_stream *stream, bool *done_out);
/* Opens cuDNN and names its version, "cuDNN 9.28.1", or says why it is not available. */
void fsdpc_cuda_attentions_describe(char *text, size_t bytes);
/* How often this device called cuDNN; 0 for NULL. */
size_t fsdpc_cuda_attentions_done(const fsdpc_cuda_attentions *attentions);
void fsdpc_cuda_attentions_destroy(fsdpc_cuda_attentions *attentions); /* NULL is fine */

#endif
