/* Attention in fp32 for AVX-512; see attention_body.h. */
#if defined(__x86_64__)
#define ATTENTION_KERNELS fsdpc_attention_avx512
#define ATTENTION_NAME "avx512"
#define ATTENTION_PAIR 1
#include "ops/attention_vector_gemm.h"
#include "ops/attention_body.h"
#endif
