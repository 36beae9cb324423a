/* Makes the rows of a small matrix orthonormal, in place.
 *
 * Row k becomes the direction of row k that is orthogonal to rows 0 to k - 1, by Gram-Schmidt. A row
 * that is zero, or in the span of earlier ones up to 1e-6 of its length, is first replaced by
 * pseudo-random numbers, so that the result always has `rows` directions. If an element is not
 * finite, every element of the result is NaN.
 *
 * Only additions and products in a fixed order are used, so all CPUs compute the same bits.
 */
#ifndef FSDPC_OPS_ORTHONORMAL_H
#define FSDPC_OPS_ORTHONORMAL_H

#include <stddef.h>
#include <stdint.h>

/* Returns a pseudo-random number in [-1, 1), which replaces element `col` of row `row`: 24 bits of
 * splitmix64's function of seed + 2^32 row + col. */
float fsdpc_orthonormal_draw(uint64_t seed, size_t row, size_t col);

/* x: (rows, cols) with rows <= cols */
void fsdpc_orthonormalize(float *x, size_t rows, size_t cols, uint64_t seed);

#endif
