/* Flat kernels for any processor, with the compiler's baseline instructions (SSE2 on x86-64). The
 * kernels are in flat_cpu_body.h. */
#define FSDPC_FLAT_TABLE fsdpc_flat_ops_portable
#define FSDPC_FLAT_NAME "portable"

#include "ops/flat_cpu_body.h"
