/* Attention on bf16 pairs with AMX tiles; see attention_body.h. */
#if defined(__x86_64__)
#define ATTENTION_KERNELS fsdpc_attention_amx
#define ATTENTION_NAME "amx"
#define ATTENTION_PAIR 2
#include "ops/attention_tile_gemm.h"
#include "ops/attention_body.h"
#endif
