/* The nn kernels compiled for AVX2; see nn_cpu.c. */
#if defined(__x86_64__)
#define NN_OPS_TABLE fsdpc_nn_ops_avx2
#define NN_OPS_NAME "cpu avx2"
#include "ops/nn_cpu_body.h"
#else
typedef int fsdpc_nn_cpu_avx2_is_for_x86; /* a file must declare something */
#endif
