/* Matrix products on a GPU: cuBLASLt if it can be loaded and supports the product, otherwise our
 * own kernel.
 *
 * cuBLASLt is never linked: it is opened with dlopen at the first product, preferring the copy
 * already in the process (torch's). Gelu is fused into a product of 16-bit floats if cuBLASLt
 * supports that; otherwise it is a separate kernel.
 */
#ifndef FSDPC_CUDA_GEMM_CUBLASLT_H
#define FSDPC_CUDA_GEMM_CUBLASLT_H

#include "ops/nn_ops.h"

typedef struct fsdpc_cuda_products fsdpc_cuda_products;

fsdpc_status fsdpc_cuda_gemm(const fsdpc_gemm_args *args, fsdpc_stream *stream);
fsdpc_status fsdpc_cuda_gemm_gelu(const fsdpc_gemm_gelu_args *args, fsdpc_stream *stream);
/* Opens cuBLASLt and writes its version, such as "cuBLASLt 13.1.0", or reports that it is
 * missing. */
void fsdpc_cuda_products_describe(char *text, size_t bytes);
void fsdpc_cuda_products_destroy(fsdpc_cuda_products *gemm); /* NULL is fine */

#endif
