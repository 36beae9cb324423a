/* The tables of kernels that a GPU offers.
 *
 * Results that flat kernels return through a pointer (a norm's accumulator, a flag) may be asked
 * for in device or pinned memory, where they appear when the stream gets there, or in ordinary host
 * memory, which costs a wait for the stream.
 */
#ifndef FSDPC_CUDA_KERNEL_TABLES_H
#define FSDPC_CUDA_KERNEL_TABLES_H

#include "ops/flat_ops.h"
#include "ops/nn_ops.h"

extern const fsdpc_flat_ops fsdpc_flat_ops_cuda;
extern const fsdpc_nn_ops fsdpc_nn_ops_cuda;

#endif
