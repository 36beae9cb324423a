/* Block codes: fp32 numbers stored as a byte each, relative to the largest magnitude of their block.
 *
 * Blocks divide each `row` of consecutive elements; the last block of a row may be short. A block
 * stores a scale in fp32, and per element a level q:
 *
 *     root8     q in [-127, 127]     value = scale * R(|q| / 127), with q's sign
 *     uroot8    q in [1, 255]        value = scale * R(q / 255)
 *     int8      q in [-127, 127]     value = scale * q / 127
 *     fp8       q is an e4m3 float   value = scale * q / 448
 *     int4      q in [-7, 7]         value = scale * q / 7
 *
 * The first two store states of optimizers, whose magnitudes differ by decades; their scale is the
 * block's largest magnitude. R(x) is the fourth power of x in floating point's own logarithm: the
 * bits of R(x), counted from those of 1.0, are four times those of x. It equals x^4 where x is a
 * power of 2 and is piecewise linear in between, so that coding takes a shift instead of roots.
 * Numbers down to 4e-9 of the maximum have a level. The relative error is at most 3 % in the upper
 * half of the levels (root8, from 0.06 of the maximum), and doubles with each halving of q.
 * uroot8 stores means of squares: it has no 0, because a step divides by its root. The dynamic code
 * of Dettmers et al. (2022) has similar errors and ends at 1e-6 of the maximum; without a table
 * lookup, finding an element's level took three times as long.
 *
 * The others travel between hosts. Their scale is the largest magnitude, rounded up to 16 bits, so
 * that scale times q is exact and the quotient is rounded once. The largest element then decodes to
 * the scale itself.
 *
 * Encoding takes the nearest level. A decoded block is encoded to the same bytes again; for the
 * last three also if the decoded numbers were rounded to bf16 or fp16 in between, unless that makes
 * them coarser than the levels, and then to codes that decode to the same numbers. Blocks with a
 * maximum below 2^-120 become zeros. In blocks with a NaN or an infinity, int8, fp8 and int4 decode
 * every element to one; root8 and uroot8 decode to NaN and infinities.
 */
#ifndef FSDPC_OPS_BLOCK_CODE_H
#define FSDPC_OPS_BLOCK_CODE_H

#include <stddef.h>
#include <stdint.h>

enum { FSDPC_CODE_BLOCK = 256 }; /* of states, and the longest of any code */

/* X(NAME, name, block) */
#define FSDPC_CODE_TABLE(X)                                                                        \
    X(ROOT8, "root8", FSDPC_CODE_BLOCK)                                                            \
    X(UROOT8, "uroot8", FSDPC_CODE_BLOCK)                                                          \
    X(INT8, "int8", FSDPC_CODE_BLOCK)                                                              \
    X(FP8, "fp8", FSDPC_CODE_BLOCK)                                                                \
    X(INT4, "int4", 64)

typedef enum fsdpc_code {
#define X(NAME, name, block) FSDPC_CODE_##NAME,
    FSDPC_CODE_TABLE(X)
#undef X
} fsdpc_code;

/* Numbers and their codes: `numel` elements in rows of `row`; `values` and the codes do not
 * overlap. */
typedef struct fsdpc_code_args {
    fsdpc_code code;
    float *values;
    uint8_t *codes;
    float *maxima; /* the scales: fsdpc_code_blocks_of(code, numel, row) of them */
    size_t numel, row;
} fsdpc_code_args;

/* Returns the length of a code's blocks. */
static inline size_t fsdpc_code_block(fsdpc_code code)
{
    static const size_t blocks[] = {
#define X(NAME, name, block) [FSDPC_CODE_##NAME] = block,
        FSDPC_CODE_TABLE(X)
#undef X
    };
    return blocks[code];
}

/* Returns the number of blocks in `numel` elements, which are whole rows. */
static inline size_t fsdpc_code_blocks_of(fsdpc_code code, size_t numel, size_t row)
{
    size_t block = fsdpc_code_block(code);
    return numel / row * ((row + block - 1) / block);
}

/* The same for codes of states. */
static inline size_t fsdpc_code_blocks(size_t numel, size_t row)
{
    return fsdpc_code_blocks_of(FSDPC_CODE_ROOT8, numel, row);
}

#endif
