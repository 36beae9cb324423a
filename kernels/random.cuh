/* Philox on the device, which generates the same words as csrc/base/random.h. */
#ifndef FSDPC_KERNELS_RANDOM_CUH
#define FSDPC_KERNELS_RANDOM_CUH

#include "common.cuh"

struct philox_words {
    uint32_t at[4];
};

/* Computes words 4 * block .. 4 * block + 3 of a stream. */
__device__ __forceinline__ philox_words philox(uint64_t seed, uint64_t stream, uint64_t block)
{
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32);
    uint32_t c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return philox_words{{c0, c1, c2, c3}};
}

#endif
