/* Attention in fp32 for the baseline instruction set; see attention_body.h. */
#define ATTENTION_KERNELS fsdpc_attention_portable
#define ATTENTION_NAME "portable"
#define ATTENTION_PAIR 1
#include "ops/attention_vector_gemm.h"
#include "ops/attention_body.h"
