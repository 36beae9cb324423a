/* cuDNN attention, for devices with cuDNN enabled (fsdpc_cuda_device's `cudnn`) and shapes it
 * supports.
 *
 * `done_out` tells whether cuDNN computed the result: it may not be compiled in, requested, or
 * installed. If cuDNN did not compute the result, callers use our own kernels. Both implementations
 * store the same log-sum-exp, so the choice may differ between the forward and backward passes.
 */
#ifndef FSDPC_CUDA_ATTENTION_CUDNN_H
#define FSDPC_CUDA_ATTENTION_CUDNN_H

#include "ops/nn_ops.h"

typedef struct fsdpc_cuda_attentions fsdpc_cuda_attentions;

/* *done_out: cuDNN supports the shape and was called. Inside a capture, only shapes seen before are
 * accepted; for any other shape, the error asks the user to run a step first. */
fsdpc_status fsdpc_cuda_attention_cudnn(const fsdpc_attention_args *args, bool backward,
                                        fsdpc_stream *stream, bool *done_out);
/* Opens cuDNN and writes its version, such as "cuDNN 9.28.1", or the reason why it is not
 * available. */
void fsdpc_cuda_attentions_describe(char *text, size_t bytes);
/* Returns how many times this device has called cuDNN, or 0 for NULL. */
size_t fsdpc_cuda_attentions_done(const fsdpc_cuda_attentions *attentions);
void fsdpc_cuda_attentions_destroy(fsdpc_cuda_attentions *attentions); /* NULL is fine */

#endif
