/* Attention on bf16 pairs with vdpbf16ps; see attention_body.h. */
#if defined(__x86_64__)
#define ATTENTION_KERNELS fsdpc_attention_avx512bf16
#define ATTENTION_NAME "avx512bf16"
#define ATTENTION_PAIR 2
#include "ops/attention_vector_gemm.h"
#include "ops/attention_body.h"
#endif
