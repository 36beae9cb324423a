/* Counter-based random numbers (Philox 4x32-10, Salmon et al., SC 2011).
 *
 * Element i of stream (seed, stream) is a pure function of (seed, stream, i). Any rank can
 * therefore compute any slice of a parameter's initial values, and dropout gives the same mask in
 * forward and recompute.
 */
#ifndef FSDPC_BASE_RANDOM_H
#define FSDPC_BASE_RANDOM_H

#include <stdint.h>

typedef struct fsdpc_philox {
    uint32_t x[4];
} fsdpc_philox;

/* Returns the block of four words for elements 4*block .. 4*block+3. */
static inline fsdpc_philox fsdpc_philox_block(uint64_t seed, uint64_t stream, uint64_t block)
{
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32);
    uint32_t c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (fsdpc_philox){{c0, c1, c2, c3}};
}

/* Returns a value in [0, 1) with 24 random bits. */
static inline float fsdpc_uniform_from_bits(uint32_t x)
{
    return (float)(x >> 8) * 0x1p-24f;
}

#endif
