/* Attention by cuDNN, for devices that were told to (fsdpc_cuda_device's `cudnn`) and shapes it takes.
 *
 * `done_out` says whether cuDNN computed it: it may not be compiled in, requested, or present.  If
 * it did not, callers use our own kernels.  Both keep the same log-sum-exp, so each direction may
 * go either way.
 */
#ifndef FSDPC_CUDA_ATTENTION_CUDNN_H
#define FSDPC_CUDA_ATTENTION_CUDNN_H

#include "ops/nn_ops.h"

typedef struct fsdpc_cuda_attentions fsdpc_cuda_attentions;

/* *done_out: cuDNN took the shape and was asked.  Inside a capture it takes only shapes that it had
 * before; any other is an error that says to run a step first. */
fsdpc_status fsdpc_cuda_attention_cudnn(const fsdpc_attention_args *args, bool backward,
                                        fsdpc_stream *stream, bool *done_out);
/* Opens cuDNN and names it, "cuDNN 9.28.1", or says why there is none. */
void fsdpc_cuda_attentions_describe(char *text, size_t bytes);
/* How often cuDNN was asked by this device; 0 with NULL. */
size_t fsdpc_cuda_attentions_done(const fsdpc_cuda_attentions *attentions);
void fsdpc_cuda_attentions_destroy(fsdpc_cuda_attentions *attentions); /* NULL is fine */

#endif
