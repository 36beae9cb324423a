/* Flat kernels for AVX2, FMA and F16C. The kernels are in flat_cpu_body.h. */
#if defined(__x86_64__)
#define FSDPC_FLAT_TABLE fsdpc_flat_ops_avx2
#define FSDPC_FLAT_NAME "avx2"

#include "ops/flat_cpu_body.h"
#else
typedef int fsdpc_flat_cpu_avx2_is_for_x86; /* a file must declare something */
#endif
