/* The rows of the table of matrix rules.
 *
 * Muon is torch.optim.Muon: its five default iterations with coefficients that grow small singular
 * values quickly, and one of its two corrections of the learning rate for the matrix's shape, by
 * which the update is scaled. OrthogonalSGD takes the iteration that converges, so its update is
 * the nearest matrix with orthonormal rows or columns.
 */
#include "ops/matrix_rules.h"

#include <math.h>

#include "ops/orthogonal.h"

/* sqrt(max(1, rows / cols)): the update changes outputs of any width alike */
static double spread(size_t rows, size_t cols)
{
    return sqrt(fmax(1, (double)rows / (double)cols));
}

/* a, b, c: the polynomial's coefficients */
static fsdpc_status orthogonalize(const fsdpc_matrix_args *args, double a, double b, double c,
                                  double scale, fsdpc_stream *stream)
{
    const fsdpc_orthogonal_args orthogonal = {.rows = args->rows,
                                              .cols = args->cols,
                                              .x = args->x,
                                              .work = args->work,
                                              .a = a,
                                              .b = b,
                                              .c = c,
                                              .eps = args->hyper->eps,
                                              .steps = (int)args->hyper->ns_steps,
                                              .in_bf16 = args->hyper->ns_bf16,
                                              .scale = scale};
    return fsdpc_orthogonalize(&orthogonal, stream);
}

static fsdpc_status muon_update(const fsdpc_matrix_args *args, fsdpc_stream *stream)
{
    const fsdpc_hyper *hyper = args->hyper;
    double scale = hyper->match_rms_adamw ? 0.2 * sqrt(fmax((double)args->rows, (double)args->cols))
                                          : spread(args->rows, args->cols);
    return orthogonalize(args, hyper->ns_a, hyper->ns_b, hyper->ns_c, scale, stream);
}

static fsdpc_status orthogonal_sgd_update(const fsdpc_matrix_args *args, fsdpc_stream *stream)
{
    return orthogonalize(args, 1.5, -0.5, 0, spread(args->rows, args->cols), stream);
}

static const fsdpc_matrix_rule table[FSDPC_OPTIM_KINDS] = {
    [FSDPC_OPTIM_MUON] = {fsdpc_orthogonal_work, fsdpc_orthogonal_cost, muon_update},
    [FSDPC_OPTIM_ORTHOGONAL_SGD] = {fsdpc_orthogonal_work, fsdpc_orthogonal_cost,
                                    orthogonal_sgd_update},
};

const fsdpc_matrix_rule *fsdpc_matrix_rule_of(fsdpc_optim_kind kind)
{
    return table[kind].update ? &table[kind] : NULL;
}
