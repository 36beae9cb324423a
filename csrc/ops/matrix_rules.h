/* The table of matrix rules: optimizers whose update needs a whole matrix at once.
 *
 * A matrix rule is a row of optim_table.c (name, hyper-parameters, states) and a row here. Its
 * step has three parts. Element by element, the step rule AHEAD updates the momentum and writes a
 * row of the matrix. The function here then turns the whole matrix into its update. Finally, the
 * step rule GIVEN moves the parameter by the update. Only the middle part needs all rows in one
 * place; optim_matrix.h says how they meet.
 *
 * A matrix of a parameter with three dimensions is each of its slices along the first.
 */
#ifndef FSDPC_OPS_MATRIX_RULES_H
#define FSDPC_OPS_MATRIX_RULES_H

#include "device/device.h"
#include "ops/optim_table.h"

typedef struct fsdpc_matrix_args {
    const fsdpc_hyper *hyper;
    size_t rows, cols;
    float *x;    /* (rows, cols): momentum, replaced by the update */
    float *work; /* as many elements as the rule's `work` returns */
} fsdpc_matrix_args;

typedef struct fsdpc_matrix_rule {
    size_t (*work)(size_t rows, size_t cols);
    double (*cost)(size_t rows, size_t cols); /* by which ranks share matrices */
    fsdpc_status (*update)(const fsdpc_matrix_args *args, fsdpc_stream *stream);
} fsdpc_matrix_rule;

/* Returns the optimizer's rule, or NULL if it is element-wise. */
const fsdpc_matrix_rule *fsdpc_matrix_rule_of(fsdpc_optim_kind kind);

#endif
