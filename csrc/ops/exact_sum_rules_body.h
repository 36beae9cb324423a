/* Carries and the final rounding of exact sums.
 *
 * Digits are added without carrying, so between two normalisations a word may hold any value up to
 * 2^63 (and, after an integer all-reduce, the sum of all ranks' words). Normalising moves the bits
 * above 32 into the next digit, from the lowest digit up. Afterwards every digit but the last is
 * in [0, 2^32), and the words are a canonical form of the number: equal sums have equal words.
 *
 * Reading a sum extracts 53 bits, beginning with its leading one. It rounds them according to the
 * next bit and whether any lower bit is set. This is the only rounding. The number is an integer
 * times 2^-1074, the smallest subnormal. A sum of fewer than 54 bits is therefore exact, and its
 * bit pattern is the integer itself, so subnormals need no special case.
 *
 * Written once for CPU and GPU: the including file first includes ops/exact_sum.h and math.h and
 * defines RULE, which precedes each function.
 */

RULE void exact_sum_merge(fsdpc_exact_sum *sum, const fsdpc_exact_sum *other)
{
    for (int d = 0; d < FSDPC_EXACT_SUM_DIGITS; d++)
        sum->digits[d] += other->digits[d];
    sum->nans += other->nans;
    sum->infinities += other->infinities;
}

RULE void exact_sum_normalize(fsdpc_exact_sum *sum)
{
    for (int d = 0; d + 1 < FSDPC_EXACT_SUM_DIGITS; d++) {
        sum->digits[d + 1] += sum->digits[d] >> 32;
        sum->digits[d] &= 0xffffffff;
    }
}

RULE void put_digit(fsdpc_exact_sum *sum, int digit, uint64_t value)
{
    if (digit >= FSDPC_EXACT_SUM_DIGITS)
        sum->infinities += value != 0;
    else if (digit >= 0)
        sum->digits[digit] += (int64_t)value;
}

/* Multiplies the sum by 2^bits and normalises it. Digits below 2^-1074 are truncated; a sum beyond
 * fp64 becomes infinity. */
RULE void exact_sum_shift(fsdpc_exact_sum *sum, int bits)
{
    fsdpc_exact_sum shifted;
    memset(&shifted, 0, sizeof shifted);
    shifted.nans = sum->nans;
    shifted.infinities = sum->infinities;
    int rest = (bits % 32 + 32) % 32, digits = (bits - rest) / 32;
    exact_sum_normalize(sum);
    for (int d = 0; d < FSDPC_EXACT_SUM_DIGITS; d++) {
        uint64_t value = (uint64_t)sum->digits[d] << rest; /* digits have 32 bits; rest < 32 */
        put_digit(&shifted, d + digits, value & 0xffffffff);
        put_digit(&shifted, d + digits + 1, value >> 32);
    }
    *sum = shifted;
}

/* Returns bits first .. first + 63 of a normalised sum as one integer. */
RULE uint64_t bits_from(const fsdpc_exact_sum *sum, int first)
{
    int digit = first / 32, shift = first % 32;
    uint64_t words[3] = {0};
    for (int k = 0; k < 3 && digit + k < FSDPC_EXACT_SUM_DIGITS; k++)
        words[k] = (uint64_t)sum->digits[digit + k];
    uint64_t low = words[0] | words[1] << 32;
    return shift ? low >> shift | words[2] << (64 - shift) : low;
}

RULE int any_bit_below(const fsdpc_exact_sum *sum, int end)
{
    for (int d = 0; d < end / 32; d++)
        if (sum->digits[d])
            return 1;
    return (sum->digits[end / 32] & ((INT64_C(1) << end % 32) - 1)) != 0;
}

RULE double exact_sum_value(const fsdpc_exact_sum *sum)
{
    if (sum->nans)
        return NAN;
    if (sum->infinities)
        return INFINITY;
    fsdpc_exact_sum canonical = *sum;
    exact_sum_normalize(&canonical);
    int top = FSDPC_EXACT_SUM_DIGITS - 1;
    while (top > 0 && canonical.digits[top] == 0)
        top--;
    if (canonical.digits[top] == 0)
        return 0;
    int leading = 32 * top;
    for (uint64_t rest = (uint64_t)canonical.digits[top] >> 1; rest; rest >>= 1)
        leading++;
    uint64_t bits;
    if (leading <= 52) {
        bits = bits_from(&canonical, 0);
    } else if (leading - 52 > 2045) {
        return INFINITY;
    } else {
        int lowest = leading - 52; /* of the 53 bits kept */
        uint64_t kept = bits_from(&canonical, lowest) & 0x1fffffffffffffu;
        int half = bits_from(&canonical, lowest - 1) & 1;
        kept += (uint64_t)(half && ((kept & 1) || any_bit_below(&canonical, lowest - 1)));
        /* the leading bit adds 1 to the exponent field, a carry from rounding another 1 */
        bits = ((uint64_t)lowest << 52) + kept;
    }
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
