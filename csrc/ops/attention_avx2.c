/* Attention in fp32 for AVX2 and FMA; see attention_body.h. */
#if defined(__x86_64__)
#define ATTENTION_KERNELS fsdpc_attention_avx2
#define ATTENTION_NAME "avx2"
#define ATTENTION_PAIR 1
#include "ops/attention_vector_gemm.h"
#include "ops/attention_body.h"
#endif
