/* The CPU's nn kernels: the baseline's table, and the choice between tables.
 *
 * The same bodies (nn_*_body.h) are compiled here for the compiler's baseline, in nn_cpu_avx2.c for
 * AVX2 and in nn_cpu_avx512.c for AVX-512. bf16 dot products and tiles only affect matrix products
 * and attention, which select their own kernels, so those paths use the AVX-512 table.
 */
#define NN_OPS_TABLE fsdpc_nn_ops_portable
#define NN_OPS_NAME "cpu portable"
#include "ops/nn_cpu_body.h"

const fsdpc_nn_ops *fsdpc_nn_ops_cpu(fsdpc_isa isa)
{
#if defined(__x86_64__)
    if (isa >= FSDPC_ISA_AVX512)
        return &fsdpc_nn_ops_avx512;
    if (isa == FSDPC_ISA_AVX2)
        return &fsdpc_nn_ops_avx2;
#endif
    (void)isa;
    return &fsdpc_nn_ops_portable;
}
