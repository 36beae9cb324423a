/* The arguments of the table's `factored`: passes over a matrix of gradients for Adafactor.
 *
 * g is a gradient times `scale`, rounded to fp32.
 *
 * The memory is rows of one matrix, or a stack of whole matrices (rows is then a multiple of
 * rows_per_matrix). Arrays by column have `cols` elements for each matrix.
 *
 *     MOST    most = max(most, |g|) by column; NaN is above infinity
 *     SUMS    sums += rint(g^2 unit) by column, as integers
 *     ROWS    row_sums = sum of g^2 by row, in fp64
 *     UPDATE  out = g min(by_row by_col, most_factor); NaN stays NaN
 *
 * A column's rows are on several ranks. Its sum is therefore one of integers, which has the same
 * bits for any order and any split. `unit` is a power of two such that every product is below 2^51
 * and their sum below 2^63 (fsdpc_factored_unit).
 */
#ifndef FSDPC_OPS_FACTORED_H
#define FSDPC_OPS_FACTORED_H

#include <math.h>

#include "device/device.h"

typedef enum fsdpc_factored_pass {
    FSDPC_FACTORED_MOST,
    FSDPC_FACTORED_SUMS,
    FSDPC_FACTORED_ROWS,
    FSDPC_FACTORED_UPDATE
} fsdpc_factored_pass;

typedef struct fsdpc_factored_args {
    fsdpc_factored_pass pass;
    const void *grad; /* (rows, cols) */
    fsdpc_dtype grad_dtype;
    float scale;
    size_t rows, cols, rows_per_matrix;
    float *most;         /* MOST */
    const double *units; /* SUMS */
    uint64_t *sums;
    double *row_sums;             /* ROWS */
    float most_factor;            /* UPDATE, as are the next four */
    const float *by_row, *by_col; /* of the first row, and of its matrix */
    size_t first_row;             /* of this memory, in its matrix */
    float *out;                   /* (rows, cols) */
} fsdpc_factored_args;

/* Returns the unit of a column of `rows` squares whose largest magnitude is `most`. A square is
 * rounded by at most 2^-51 of the column's largest, or more in columns above 4096 rows. */
static inline double fsdpc_factored_unit(float most, size_t rows)
{
    int exponent, count;
    if (most == 0 || !isfinite(most))
        return 1;
    frexp((double)most, &exponent); /* most < 2^exponent */
    frexp((double)rows, &count);    /* rows < 2^count */
    int bits = 62 - count < 50 ? 62 - count : 50;
    return ldexp(1, bits - 2 * exponent);
}

#endif
