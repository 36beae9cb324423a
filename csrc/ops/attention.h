/* Blocked CPU attention, forward and backward; ops/nn_ops.h explains the arguments.
 *
 * These functions fill the attention slots of the CPU's nn_ops tables and select their kernels by
 * stream->device->isa. Results do not depend on the number of threads.
 */
#ifndef FSDPC_OPS_ATTENTION_H
#define FSDPC_OPS_ATTENTION_H

#include "ops/nn_ops.h"

fsdpc_status fsdpc_attention_cpu(const fsdpc_attention_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_attention_backward_cpu(const fsdpc_attention_args *args, fsdpc_stream *stream);

#endif
