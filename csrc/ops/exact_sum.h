/* An exact sum of fp64 values has the same bits for any order of additions, any split and any
 * number of ranks.
 *
 * The sum is kept as 68 signed words, each a 32-bit digit with 31 bits for carries. Together they
 * are a fixed-point number that spans the whole fp64 range (digit d has weight 2^(32 d - 1074)).
 * Adding a value changes three words. Sums are added word by word, as integers, so an integer
 * all-reduce of fsdpc_exact_sum (560 bytes) gives every rank the same double. Values must be
 * non-negative. A NaN or a negative value is counted in `nans` and an infinity in `infinities`; the
 * sum's value is then NaN or infinity. At most 2^31 additions are allowed between two
 * normalisations (fsdpc_exact_sum_normalize); merging a normalised sum counts as one. After
 * normalisation, two sums of the same values have the same words.
 */
#ifndef FSDPC_OPS_EXACT_SUM_H
#define FSDPC_OPS_EXACT_SUM_H

#include <stdint.h>
#include <string.h>

enum { FSDPC_EXACT_SUM_DIGITS = 68 };

typedef struct fsdpc_exact_sum {
    int64_t digits[FSDPC_EXACT_SUM_DIGITS];
    int64_t nans, infinities; /* counts, which are also added as integers */
} fsdpc_exact_sum;

void fsdpc_exact_sum_merge(fsdpc_exact_sum *sum, const fsdpc_exact_sum *other);
void fsdpc_exact_sum_normalize(fsdpc_exact_sum *sum);
double fsdpc_exact_sum_value(const fsdpc_exact_sum *sum); /* rounded once, to nearest even */

/* Inline, because norms add one value per 64 elements that they read. */
static inline void fsdpc_exact_sum_add(fsdpc_exact_sum *sum, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (__builtin_expect(bits >= 0x7ff0000000000000u, 0)) { /* not finite, or the sign is set */
        sum->infinities += bits == 0x7ff0000000000000u;
        sum->nans += bits != 0x7ff0000000000000u && bits != 0x8000000000000000u;
        return;
    }
    /* value = mantissa * 2^(place - 1074) */
    uint64_t exponent = bits >> 52, mantissa = bits & 0xfffffffffffffu;
    mantissa |= (uint64_t)(exponent != 0) << 52;
    unsigned place = (unsigned)(exponent - (exponent != 0));
    unsigned digit = place / 32, shift = place % 32;
    uint64_t low = mantissa << shift, high = shift ? mantissa >> (64 - shift) : 0;
    sum->digits[digit] += (int64_t)(low & 0xffffffffu);
    sum->digits[digit + 1] += (int64_t)(low >> 32);
    sum->digits[digit + 2] += (int64_t)high;
}

#endif
