/* Gram-Schmidt, with each projection subtracted twice.
 *
 * The first pass leaves a remainder whose components along earlier rows are rounding errors of the
 * original length. If the remainder is short, they are large relative to it, and the second pass
 * removes them. Dot products are in fp64, in LANES interleaved partial sums, so that compilers may
 * use vectors without changing the order.
 */
#include "ops/orthonormal.h"

#include <math.h>
#include <stdbool.h>

enum { LANES = 8, TRIES = 4 };

#define LEAST 1e-6 /* of its length must remain of a row */

float fsdpc_orthonormal_draw(uint64_t seed, size_t row, size_t col)
{
    uint64_t z = seed + ((uint64_t)row << 32) + col + 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    return (float)(z >> 40) / (float)(1 << 23) - 1;
}

static double dot(const float *a, const float *b, size_t n)
{
    double sums[LANES] = {0}, all = 0;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t k = 0; k < LANES; k++)
            sums[k] += (double)a[i + k] * b[i + k];
    for (size_t k = 0; i + k < n; k++)
        sums[k] += (double)a[i + k] * b[i + k];
    for (size_t k = 0; k < LANES; k++)
        all += sums[k];
    return all;
}

/* Removes from row `row` its components along the rows before it. */
static void project(float *x, size_t row, size_t cols)
{
    float *v = x + row * cols;
    for (int pass = 0; pass < 2; pass++)
        for (size_t r = 0; r < row; r++) {
            const float *u = x + r * cols;
            double length = dot(u, v, cols);
            for (size_t i = 0; i < cols; i++)
                v[i] = (float)(v[i] - length * u[i]);
        }
}

/* Writes the direction of row `row` into it. Returns false if an element is not finite. */
static bool make_row(float *x, size_t row, size_t cols, uint64_t seed)
{
    float *v = x + row * cols;
    double length = sqrt(dot(v, v, cols)), left = 0;
    if (!isfinite(length))
        return false;
    for (uint64_t i = 0; i < TRIES && left <= LEAST * length; i++) {
        if (i > 0 || length == 0) {
            for (size_t col = 0; col < cols; col++)
                v[col] = fsdpc_orthonormal_draw(seed + i, row, col);
            length = sqrt(dot(v, v, cols));
        }
        project(x, row, cols);
        left = sqrt(dot(v, v, cols));
    }
    for (size_t col = 0; col < cols; col++)
        v[col] = (float)(v[col] / left);
    return true;
}

void fsdpc_orthonormalize(float *x, size_t rows, size_t cols, uint64_t seed)
{
    bool finite = true;
    for (size_t row = 0; row < rows && finite; row++)
        finite = make_row(x, row, cols, seed);
    for (size_t i = 0; !finite && i < rows * cols; i++)
        x[i] = NAN;
}
