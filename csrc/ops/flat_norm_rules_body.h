/* Single-threaded norm rules (ops/flat_norm.h), written once for CPU and GPU: the including file
 * first includes exact_sum_rules_body.h and defines RULE, which precedes each function.
 *
 * Because norms can be scaled afterwards, the factor of a gradient can stay pending. A power of two
 * shifts the exponent of every term equally, so the sum of the scaled terms is the shifted sum.
 * (Elements that the factor makes subnormal would be rounded; the shifted sum is not.)
 */

RULE void norm_join(const fsdpc_norm_join_args *args)
{
    bool is_sum = args->p < (double)INFINITY;
    fsdpc_norm into = *args->into;
    if (args->from) {
        fsdpc_norm from = *args->from;
        if (is_sum) {
            if (args->exponent)
                exact_sum_shift(&from.sum, args->exponent * (int)args->p);
            exact_sum_merge(&into.sum, &from.sum);
        } else {
            if (args->exponent && from.magnitude == from.magnitude) /* not the sign of a NaN */
                from.magnitude = ldexp(from.magnitude, args->exponent);
            into.largest = from.largest > into.largest ? from.largest : into.largest;
        }
    }
    if (is_sum)
        exact_sum_normalize(&into.sum);
    *args->into = into;
}

/* p is 1, 2 or INFINITY */
RULE double norm_value(const fsdpc_norm *norm, double p)
{
    if (!(p < (double)INFINITY))
        return norm->magnitude;
    double sum = exact_sum_value(&norm->sum);
    return p == 2 ? sqrt(sum) : sum;
}

RULE void clip(const fsdpc_clip_args *args)
{
    double factor = FSDPC_CLIP_FACTOR(*args->norm, args->max_norm);
    for (int i = 0; i < args->n; i++) {
        bool pending = args->pending >> i & 1;
        *args->factors[i] = pending ? *args->factors[i] * factor : factor;
    }
}
