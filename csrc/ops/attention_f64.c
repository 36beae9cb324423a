/* Attention in double precision, computed row by row, for tests and gradient checks.
 *
 * A scratch row holds a query's scores; sums run over keys in ascending order. Backward does not
 * read lse (a float would lose half the digits) and recomputes the row's softmax.
 */
#include "ops/attention_kernels.h"

#include <math.h>

static const double *row_of(const void *base, const size_t *stride, size_t b, size_t t, size_t h)
{
    return (const double *)base + b * stride[0] + t * stride[1] + h * stride[2];
}

static double dot(const double *a, const double *b, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

/* y += s * x */
static void add_scaled(double *y, double s, const double *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] += s * x[i];
}

/* Returns the value that a mask adds to the score of query t and key j: -inf if it hides the
 * key. */
static double bias_of(const fsdpc_attention_args *x, size_t b, size_t h, size_t t, size_t j)
{
    if (j < fsdpc_attention_first(x, t))
        return -INFINITY;
    if (!x->mask)
        return 0;
    size_t at = b * x->stride_mask[0] + h * x->stride_mask[1] + t * x->stride_mask[2] +
                j * x->stride_mask[3];
    if (x->mask_dtype == FSDPC_BOOL)
        return ((const uint8_t *)x->mask)[at] ? 0 : -INFINITY;
    return ((const double *)x->mask)[at];
}

/* Writes query t's softmax over its first n keys to p, or zeros if it sees none; returns the
 * log-sum-exp. */
static double probabilities(const fsdpc_attention_args *x, size_t b, size_t h, size_t t, size_t n,
                            double *p)
{
    size_t kv_head = h / (x->heads / x->kv_heads);
    const double *q = row_of(x->q, x->stride_q, b, t, h);
    double top = -INFINITY, sum = 0;
    for (size_t j = 0; j < n; j++) {
        double bias = bias_of(x, b, h, t, j);
        p[j] = x->scale * dot(q, row_of(x->k, x->stride_k, b, j, kv_head), x->dim) + bias;
        if (bias == -INFINITY)
            p[j] = bias;
        top = fmax(top, p[j]);
    }
    for (size_t j = 0; j < n; j++)
        sum += p[j] = p[j] == -INFINITY ? 0 : exp(p[j] - top);
    for (size_t j = 0; j < n; j++)
        p[j] = sum == 0 ? 0 : p[j] / sum;
    return sum == 0 ? -INFINITY : top + log(sum);
}

static size_t forward_bytes(const fsdpc_attention_args *x)
{
    return x->tokens_k * sizeof(double);
}

static void forward(const fsdpc_attention_args *x, const fsdpc_attention_run *run, void *scratch)
{
    size_t b = run->batch, h = run->head, kv_head = h / (x->heads / x->kv_heads);
    double *p = scratch;
    for (size_t t = run->first; t < run->last; t++) {
        size_t n = fsdpc_attention_visible(x, t);
        double *out = (double *)row_of(x->out, x->stride_out, b, t, h);
        for (size_t i = 0; i < x->dim; i++)
            out[i] = 0;
        double lse = probabilities(x, b, h, t, n, p);
        for (size_t j = fsdpc_attention_first(x, t); j < n; j++)
            add_scaled(out, p[j], row_of(x->v, x->stride_v, b, j, kv_head), x->dim);
        x->lse[(b * x->heads + h) * x->tokens_q + t] = (float)lse;
    }
}

/* Adds the contribution of query t to dk and dv, and writes its dq. */
static void backward_query(const fsdpc_attention_args *x, size_t b, size_t h, size_t t, double *p)
{
    size_t kv_head = h / (x->heads / x->kv_heads), n = fsdpc_attention_visible(x, t);
    const double *q = row_of(x->q, x->stride_q, b, t, h);
    const double *dout = row_of(x->dout, x->stride_out, b, t, h);
    double *dq = (double *)row_of(x->dq, x->stride_q, b, t, h);
    probabilities(x, b, h, t, n, p);
    double mean = dot(dout, row_of(x->out, x->stride_out, b, t, h), x->dim);
    for (size_t i = 0; i < x->dim; i++)
        dq[i] = 0;
    for (size_t j = fsdpc_attention_first(x, t); j < n; j++) {
        double dp = dot(dout, row_of(x->v, x->stride_v, b, j, kv_head), x->dim);
        double ds = x->scale * p[j] * (dp - mean);
        add_scaled((double *)row_of(x->dv, x->stride_v, b, j, kv_head), p[j], dout, x->dim);
        add_scaled((double *)row_of(x->dk, x->stride_k, b, j, kv_head), ds, q, x->dim);
        add_scaled(dq, ds, row_of(x->k, x->stride_k, b, j, kv_head), x->dim);
    }
}

static void backward(const fsdpc_attention_args *x, size_t b, size_t kv_head, void *scratch)
{
    size_t group = x->heads / x->kv_heads;
    for (size_t j = 0; j < x->tokens_k; j++) {
        double *dk = (double *)row_of(x->dk, x->stride_k, b, j, kv_head);
        double *dv = (double *)row_of(x->dv, x->stride_v, b, j, kv_head);
        for (size_t i = 0; i < x->dim; i++)
            dk[i] = dv[i] = 0;
    }
    for (size_t h = kv_head * group; h < (kv_head + 1) * group; h++)
        for (size_t t = 0; t < x->tokens_q; t++)
            backward_query(x, b, h, t, scratch);
}

const fsdpc_attention_kernels fsdpc_attention_f64 = {
    .name = "f64",
    .forward_bytes = forward_bytes,
    .forward = forward,
    .backward_bytes = forward_bytes,
    .backward = backward,
};
