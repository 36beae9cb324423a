/* CRC-32C (Castagnoli), and a function that combines the checksums of separate pieces. */
#ifndef FSDPC_BASE_CRC32C_H
#define FSDPC_BASE_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Updates `crc` (initially 0) with `bytes` more bytes. Uses the processor's CRC instruction if
 * available; every path returns the same bits. */
uint32_t fsdpc_crc32c(uint32_t crc, const void *data, size_t bytes);

/* Computes the same CRC without the instruction; tests use it as the reference for the fast
 * version. */
uint32_t fsdpc_crc32c_portable(uint32_t crc, const void *data, size_t bytes);

/* Returns the CRC of A followed by B, from crc(A), crc(B) and the length of B. */
uint32_t fsdpc_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b);

#endif
