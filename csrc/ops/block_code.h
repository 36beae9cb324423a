/* Block codes: fp32 numbers stored as a byte each, relative to the largest magnitude of their block.
 *
 * Blocks are at most FSDPC_CODE_BLOCK elements inside `row` consecutive elements; the last block of
 * a row may be short. A block stores its largest magnitude in fp32, and per element a level q:
 *
 *     root8     q in [-127, 127]   value = maximum * R(|q| / 127), with q's sign
 *     uroot8    q in [1, 255]      value = maximum * R(q / 255)
 *
 * R(x) is the fourth power of x in floating point's own logarithm: the bits of R(x), counted from
 * those of 1.0, are four times those of x. It equals x^4 where x is a power of 2 and is piecewise
 * linear in between, so that coding takes a shift instead of roots. Encoding takes the nearest
 * level. The largest element keeps its exact value, and a decoded block is encoded to the same
 * bytes again.
 *
 * Numbers down to 4e-9 of the maximum have a level. The relative error is at most 3 % in the upper
 * half of the levels (root8, from 0.06 of the maximum), and doubles with each halving of q.
 * uroot8 stores means of squares: it has no 0, because a step divides by its root. Blocks with a
 * maximum below 2^-120 become zeros. Blocks with a NaN or an infinity decode to NaN and infinities.
 *
 * The dynamic code of Dettmers et al. (2022) has similar errors and ends at 1e-6 of the maximum;
 * without a table lookup, finding an element's level took three times as long.
 */
#ifndef FSDPC_OPS_BLOCK_CODE_H
#define FSDPC_OPS_BLOCK_CODE_H

#include <stddef.h>
#include <stdint.h>

enum { FSDPC_CODE_BLOCK = 256 };

/* X(NAME, name) */
#define FSDPC_CODE_TABLE(X)                                                                        \
    X(ROOT8, "root8")                                                                              \
    X(UROOT8, "uroot8")

typedef enum fsdpc_code {
#define X(NAME, name) FSDPC_CODE_##NAME,
    FSDPC_CODE_TABLE(X)
#undef X
} fsdpc_code;

/* Numbers and their codes: `numel` elements in rows of `row`; `values` and the codes do not
 * overlap. */
typedef struct fsdpc_code_args {
    fsdpc_code code;
    float *values;
    uint8_t *codes;
    float *maxima; /* fsdpc_code_blocks(numel, row) of them */
    size_t numel, row;
} fsdpc_code_args;

/* Returns the number of blocks in `numel` elements, which are whole rows. */
static inline size_t fsdpc_code_blocks(size_t numel, size_t row)
{
    return numel / row * ((row + FSDPC_CODE_BLOCK - 1) / FSDPC_CODE_BLOCK);
}

#endif
