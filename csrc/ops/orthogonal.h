/* Orthogonalises a matrix by Newton-Schulz iterations, in place.
 *
 * With X scaled to a Frobenius norm of at most 1, each iteration is X = p(X X') X, where p(G) is
 * a + b G + c G^2 over the smaller Gram matrix. It moves all singular values of X towards 1 and
 * keeps the singular vectors. Coefficients with a + b + c == 1 and a fixed point at 1 converge to
 * the polar factor U V'; torch.optim.Muon's coefficients instead grow small singular values
 * quickly and leave them all between about 0.7 and 1.2.
 *
 * Products are fp32, with factors in fp32 or bf16, and the norm is fp64. All orders of summation
 * are fixed by the shape, so the result does not depend on threads, and is the same on every rank
 * that computes it with the same instruction set. A matrix of zeros stays zero. If an element is not
 * finite, every element of the result is NaN. The time depends only on the shape.
 */
#ifndef FSDPC_OPS_ORTHOGONAL_H
#define FSDPC_OPS_ORTHOGONAL_H

#include "device/device.h"
#include "ops/flat_norm.h"

typedef struct fsdpc_orthogonal_args {
    size_t rows, cols;
    float *x;       /* (rows, cols), replaced by the result */
    float *work;    /* fsdpc_orthogonal_work(rows, cols) elements */
    double a, b, c; /* of the polynomial */
    double eps;     /* a smaller norm counts as this */
    int steps;
    bool in_bf16; /* factors of products; else fp32 */
    double scale; /* multiplies the result */
} fsdpc_orthogonal_args;

/* Returns the number of elements of `work`. */
static inline size_t fsdpc_orthogonal_work(size_t rows, size_t cols)
{
    size_t side = rows < cols ? rows : cols, norm = sizeof(fsdpc_norm) / sizeof(float) + 1;
    size_t numel = rows * cols + 2 * side * side;
    return numel > norm ? numel : norm;
}

/* Returns the number of multiplications of one iteration, by which ranks share matrices. */
static inline double fsdpc_orthogonal_cost(size_t rows, size_t cols)
{
    double side = (double)(rows < cols ? rows : cols), length = (double)(rows < cols ? cols : rows);
    return side * side * (2 * length + side);
}

/* Runs on the stream's device. */
fsdpc_status fsdpc_orthogonalize(const fsdpc_orthogonal_args *args, fsdpc_stream *stream);

#endif
