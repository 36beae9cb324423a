/* The nn kernels compiled for AVX-512; see nn_cpu.c. */
#if defined(__x86_64__)
#define NN_OPS_TABLE fsdpc_nn_ops_avx512
#define NN_OPS_NAME "cpu avx512"
#include "ops/nn_cpu_body.h"
#else
typedef int fsdpc_nn_cpu_avx512_is_for_x86; /* a file must declare something */
#endif
