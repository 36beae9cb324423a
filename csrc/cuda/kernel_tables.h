/* A GPU's kernel tables.
 *
 * Flat kernels return results through a pointer (a norm's accumulator, a flag). In device or pinned
 * memory, a result is available once the stream has run the kernel; in ordinary host memory, it
 * requires a wait for the stream.
 */
#ifndef FSDPC_CUDA_KERNEL_TABLES_H
#define FSDPC_CUDA_KERNEL_TABLES_H

#include "ops/flat_ops.h"
#include "ops/nn_ops.h"

extern const fsdpc_flat_ops fsdpc_flat_ops_cuda;
extern const fsdpc_nn_ops fsdpc_nn_ops_cuda;

#endif
