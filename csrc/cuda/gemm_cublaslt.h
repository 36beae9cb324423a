/* Matrix products on a GPU: cuBLASLt where it can be loaded and takes the product, else our own.
 *
 * cuBLASLt is never linked: it comes by dlopen at the first product, the copy already in the
 * process (torch's) before any other.  A build without its header has the plain kernel only.
 */
#ifndef FSDPC_CUDA_GEMM_CUBLASLT_H
#define FSDPC_CUDA_GEMM_CUBLASLT_H

#include "ops/nn_ops.h"

typedef struct fsdpc_cuda_products fsdpc_cuda_products;

fsdpc_status fsdpc_cuda_gemm(const fsdpc_gemm_args *args, fsdpc_stream *stream);
void fsdpc_cuda_products_destroy(fsdpc_cuda_products *gemm); /* NULL is fine */

#endif
