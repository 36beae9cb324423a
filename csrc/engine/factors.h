/* The sizes of Adafactor's states and working memory, computed only from shapes.
 *
 * The last two dimensions of a parameter are a matrix. Its state is a mean of squares for each row
 * and each column of every matrix: row_var (..., rows, 1) and col_var (..., 1, columns). A rank has
 * the means of the rows that it owns. If the parameter is one matrix, its columns are spread over
 * ranks, and each rank has all means by column. A stack's matrices are on one rank each; layouts
 * that cut inside them, because a unit has few but large slices, are refused.
 */
#ifndef FSDPC_ENGINE_FACTORS_H
#define FSDPC_ENGINE_FACTORS_H

#include "engine/layout.h"

typedef struct fsdpc_factors {
    size_t rows, cols;           /* of one matrix */
    size_t n_rows, n_cols;       /* means that a rank has */
    size_t first_row, first_col; /* among those of the whole parameter */
    bool spread;                 /* one matrix, whose rows are on several ranks */
} fsdpc_factors;

/* Returns zeros if the parameter has fewer than two dimensions. */
fsdpc_factors fsdpc_factors_of(int ndim, const size_t *shape, const fsdpc_local_shard *local);

/* Refuses a stack whose layout cuts inside its matrices. */
fsdpc_status fsdpc_factors_check(const fsdpc_place *place);

/* Returns the longest local shard of any rank, as if it were the first. */
fsdpc_local_shard fsdpc_factors_most(const fsdpc_layout *layout, int param);

/* Returns the floats of a parameter's means, the same on every rank. */
size_t fsdpc_factors_numel(const fsdpc_layout *layout, int param);

/* The working memory of a step, in numbers of elements. */
typedef struct fsdpc_factored_work {
    size_t params, spread_cols; /* all of them */
    size_t rows, cols, chunk;   /* of the largest */
} fsdpc_factored_work;

/* Adds a parameter; `local` is what a rank has. */
void fsdpc_factored_work_add(fsdpc_factored_work *work, int ndim, const size_t *shape,
                             const fsdpc_local_shard *local);

enum { FSDPC_FACTORED_CHUNK = 1 << 16 }; /* elements of an update; two fit the L2 cache */

/* Returns the rows of an update that are computed at a time, which end at a leaf (layout.h). */
size_t fsdpc_factored_chunk(const fsdpc_factors *factors, size_t leaf);

size_t fsdpc_factored_work_bytes(const fsdpc_factored_work *work);

#endif
