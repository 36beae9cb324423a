/* Quantised weights: matrices that store their elements in few bits, each row on its own.
 *
 * A row is divided into blocks, which have a scale each; an element is its code's level times the
 * scale of its block. A scheme of the table says how long blocks are and which levels there are:
 *
 *     nf4    4 bits, blocks of 64: the 16 levels of NormalFloat (Dettmers et al. 2023, QLoRA)
 *     int4   4 bits, blocks of 128: (code - 8) / 7
 *     int8   8 bits, a block per row: the code, from -127 to 127, divided by 127
 *
 * The scale is the largest magnitude of the block in fp32. nf4 stores its scales in a byte each: q
 * stands for `low + q * step`, where a row's smallest scale is q = 0 and its largest q = 255. (The
 * paper codes the distances from a tensor's mean scale instead. This code has a smaller error, and
 * a row needs nothing from other rows, so that ranks can encode theirs alone.)
 *
 * A row's bytes are its header (nf4: low and step; others: all scales), nf4's bytes of scales, and
 * the codes. A byte holds two codes of 4 bits, the first in the high half. Rows have no padding,
 * so numbers in a header are unaligned. A row of zero bytes stands for zeros.
 */
#ifndef FSDPC_OPS_WEIGHT_CODE_H
#define FSDPC_OPS_WEIGHT_CODE_H

#include <stdint.h>
#include <string.h>

#include "base/dtype.h"
#include "base/size.h"
#include "base/status.h"

/* X(NAME, name, bits, block, coded_scales); a block of 0 is a whole row */
#define FSDPC_WEIGHT_TABLE(X)                                                                      \
    X(NF4, "nf4", 4, 64, true)                                                                     \
    X(INT4, "int4", 4, 128, false)                                                                 \
    X(INT8, "int8", 8, 0, false)

typedef enum fsdpc_weight_scheme {
#define X(NAME, name, bits, block, coded_scales) FSDPC_WEIGHT_##NAME,
    FSDPC_WEIGHT_TABLE(X)
#undef X
        FSDPC_WEIGHT_SCHEMES
} fsdpc_weight_scheme;

enum { FSDPC_WEIGHT_LEVELS = 16 };

/* Where the parts of a row are, and what its codes mean. */
typedef struct fsdpc_weight_row {
    size_t block, blocks;
    size_t scales_at; /* bytes of scales, if they are coded; otherwise scales are at 0 */
    size_t codes_at, bytes;
    bool coded_scales, nibbles;
    float levels[FSDPC_WEIGHT_LEVELS]; /* of nibbles */
} fsdpc_weight_row;

fsdpc_weight_row fsdpc_weight_row_of(fsdpc_weight_scheme scheme, size_t cols);

const char *fsdpc_weight_name(fsdpc_weight_scheme scheme);

/* Finds a scheme; the error lists all. */
fsdpc_status fsdpc_weight_find(const char *name, fsdpc_weight_scheme *out);

/* Encodes rows of `cols` numbers, in the calling thread. Fails for values that are not finite. */
fsdpc_status fsdpc_weight_encode(fsdpc_weight_scheme scheme, size_t rows, size_t cols,
                                 const float *values, uint8_t *codes);

/* Columns [first, first + n) of rows; `first` begins a block, or is even if a block is a whole row.
 * `out` is (rows, n) of `dtype`, dense. */
typedef struct fsdpc_dequantize_args {
    fsdpc_weight_row row;
    size_t rows, first, n;
    const uint8_t *codes;
    fsdpc_dtype dtype;
    void *out;
} fsdpc_dequantize_args;

/* Returns what a code of block b is multiplied by. */
static inline float fsdpc_weight_scale(const fsdpc_weight_row *row, const uint8_t *bytes, size_t b)
{
    float scale[2];
    if (row->coded_scales) {
        memcpy(scale, bytes, sizeof scale);
        return scale[0] + (float)bytes[row->scales_at + b] * scale[1];
    }
    memcpy(scale, bytes + b * sizeof *scale, sizeof *scale);
    return row->nibbles ? scale[0] : scale[0] * (1.0f / 127);
}

/* The range function of nn_internal.h for F64, whose values are those of F32. */
void fsdpc_dequantize_f64(const void *args, size_t first, size_t last);

#endif
