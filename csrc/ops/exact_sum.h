/* An exact sum of fp64 values: the same bits for any order, any cuts and any number of ranks.
 *
 * The sum is kept as 68 signed words, each a 32-bit digit of a fixed-point number that spans the
 * whole fp64 range (digit d weighs 2^(32 d - 1074)) with 31 bits of room for carries.  Adding a
 * value touches three words; two sums are added word by word, as integers, so ranks combine theirs
 * by an integer all-reduce of fsdpc_exact_sum (552 bytes) and read the same double.
 * Values must be finite and non-negative; anything else sets the flag, and the sum reads as NaN/Inf.
 * At most 2^31 additions between two normalisations (fsdpc_exact_sum_normalize).
 */
#ifndef FSDPC_OPS_EXACT_SUM_H
#define FSDPC_OPS_EXACT_SUM_H

#include <stdint.h>

enum { FSDPC_EXACT_SUM_DIGITS = 68 };

typedef struct fsdpc_exact_sum {
    int64_t digits[FSDPC_EXACT_SUM_DIGITS];
    int64_t nans, infinities; /* how many; they add as integers too */
} fsdpc_exact_sum;

enum { FSDPC_EXACT_SUM_WORDS = sizeof(fsdpc_exact_sum) / sizeof(int64_t) };

void fsdpc_exact_sum_add(fsdpc_exact_sum *sum, double value);
void fsdpc_exact_sum_merge(fsdpc_exact_sum *sum, const fsdpc_exact_sum *other);
void fsdpc_exact_sum_normalize(fsdpc_exact_sum *sum);
double fsdpc_exact_sum_value(const fsdpc_exact_sum *sum); /* rounded once, to nearest even */

#endif
