/* Functions for exact sums; the arithmetic is in exact_sum_rules_body.h. */
#include "ops/exact_sum.h"

#include <math.h>

#define RULE static inline
#include "ops/exact_sum_rules_body.h"
#undef RULE

void fsdpc_exact_sum_merge(fsdpc_exact_sum *sum, const fsdpc_exact_sum *other)
{
    exact_sum_merge(sum, other);
}

void fsdpc_exact_sum_normalize(fsdpc_exact_sum *sum)
{
    exact_sum_normalize(sum);
}

double fsdpc_exact_sum_value(const fsdpc_exact_sum *sum)
{
    return exact_sum_value(sum);
}
