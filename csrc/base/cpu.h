/* Detects at run time what this processor supports.
 *
 * There are several kernel paths, each a superset of the previous one. Each context selects one
 * path: the fastest that this processor supports, or the one named by FSDPC_ISA (an error if
 * unsupported).
 */
#ifndef FSDPC_BASE_CPU_H
#define FSDPC_BASE_CPU_H

#include "base/status.h"

/* X(name, text), in ascending order */
#define FSDPC_ISA_TABLE(X)                                                                         \
    X(PORTABLE, "portable")     /* the compiler's baseline */                                      \
    X(AVX2, "avx2")             /* AVX2, FMA, F16C */                                              \
    X(AVX512, "avx512")         /* AVX-512 F, BW, DQ, VL */                                        \
    X(AVX512BF16, "avx512bf16") /* and vdpbf16ps */                                                \
    X(AMX, "amx")               /* and bf16 tiles, with the kernel's permission */

typedef enum fsdpc_isa {
#define X(name, text) FSDPC_ISA_##name,
    FSDPC_ISA_TABLE(X)
#undef X
        FSDPC_ISA_COUNT
} fsdpc_isa;

fsdpc_isa fsdpc_isa_best(void); /* the last path in the table that this processor supports */
const char *fsdpc_isa_name(fsdpc_isa isa);
fsdpc_status fsdpc_isa_parse(const char *name, fsdpc_isa *out); /* "auto": the fastest */

/* Returns the number of cores (at least 1) that this process may use, given its affinity and cgroup
 * quota. */
int fsdpc_usable_cores(void);

#endif
