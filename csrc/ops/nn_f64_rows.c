/* F64 forms of the row kernels: softmax, norms, moments, cross entropy, pooling.
 *
 * Plain loops in double; see nn_f64.c. Statistics that the arguments store as fp32 (mean, rstd,
 * lse) are written for other readers, but backward recomputes them in double.
 */
#include "ops/nn_internal.h"

#include <math.h>
#include <string.h>

static double row_max(const double *x, size_t cols)
{
    double max = -INFINITY;
    for (size_t c = 0; c < cols; c++)
        max = x[c] > max ? x[c] : max;
    return max;
}

static double row_exp_sum(const double *x, size_t cols, double max)
{
    double sum = 0;
    for (size_t c = 0; c < cols; c++)
        sum += exp(x[c] - max);
    return sum;
}

void fsdpc_nn_softmax_f64(const void *arg, size_t first, size_t last)
{
    const fsdpc_softmax_args *args = arg;
    for (size_t row = first; row < last; row++) {
        const double *x = (const double *)args->x + row * args->cols;
        double max = row_max(x, args->cols);
        if (args->lse) {
            double shift = isfinite(max) ? max : 0;
            ((double *)args->lse)[row] = log(row_exp_sum(x, args->cols, shift)) + shift;
            continue;
        }
        double *out = (double *)args->out + row * args->cols;
        double sum = args->slopes && max == INFINITY ? 1 : row_exp_sum(x, args->cols, max);
        for (size_t c = 0; c < args->cols; c++)
            out[c] = args->log ? x[c] - max - log(sum) : exp(x[c] - max) / sum;
    }
}

void fsdpc_nn_softmax_backward_f64(const void *arg, size_t first, size_t last)
{
    const fsdpc_softmax_args *args = arg;
    for (size_t row = first; row < last; row++) {
        const double *y = (const double *)args->y + row * args->cols;
        const double *dy = (const double *)args->dy + row * args->cols;
        double *out = (double *)args->out + row * args->cols, dot = 0;
        for (size_t c = 0; c < args->cols; c++)
            dot += args->log ? dy[c] : dy[c] * y[c];
        for (size_t c = 0; c < args->cols; c++)
            out[c] = args->log ? dy[c] - exp(y[c]) * dot : y[c] * (dy[c] - dot);
    }
}

static void norm_statistics(const fsdpc_norm_args *args, const double *x, double *mean_out,
                            double *rstd_out)
{
    double mean = 0, square = 0, cols = (double)args->cols;
    if (args->layer) {
        for (size_t c = 0; c < args->cols; c++)
            mean += x[c];
        mean /= cols;
    }
    for (size_t c = 0; c < args->cols; c++)
        square += (x[c] - mean) * (x[c] - mean);
    *mean_out = mean;
    *rstd_out = 1 / sqrt(square / cols + args->eps);
}

void fsdpc_nn_norm_f64(const void *arg, size_t first, size_t last)
{
    const fsdpc_norm_args *args = arg;
    const double *weight = args->weight, *bias = args->bias;
    for (size_t row = first; row < last; row++) {
        const double *x = (const double *)args->x + row * args->cols;
        double *y = (double *)args->y + row * args->cols, mean, rstd;
        norm_statistics(args, x, &mean, &rstd);
        if (args->mean)
            args->mean[row] = (float)mean;
        if (args->rstd)
            args->rstd[row] = (float)rstd;
        for (size_t c = 0; c < args->cols; c++)
            y[c] = (x[c] - mean) * rstd * (weight ? weight[c] : 1) + (bias ? bias[c] : 0);
    }
}

static void norm_backward_row(const fsdpc_norm_args *args, size_t row)
{
    const double *x = (const double *)args->x + row * args->cols, *weight = args->weight;
    const double *dy = (const double *)args->dy + row * args->cols;
    double *dx = args->dx ? (double *)args->dx + row * args->cols : NULL;
    double mean, rstd, mean_g = 0, mean_gx = 0, cols = (double)args->cols;
    norm_statistics(args, x, &mean, &rstd);
    for (size_t c = 0; c < args->cols; c++) {
        double g = dy[c] * (weight ? weight[c] : 1);
        mean_g += args->layer ? g / cols : 0;
        mean_gx += g * (x[c] - mean) * rstd / cols;
    }
    for (size_t c = 0; c < args->cols; c++) {
        double xhat = (x[c] - mean) * rstd, g = dy[c] * (weight ? weight[c] : 1), dyc = dy[c];
        if (dx) /* may be dy */
            dx[c] = rstd * (g - mean_g - xhat * mean_gx) + (args->dx_accumulate ? dx[c] : 0);
        if (args->dweight)
            fsdpc_nn_store_f64(args->dweight, c, args->dgrad_dtype,
                               fsdpc_nn_load_f64(args->dweight, c, args->dgrad_dtype) + dyc * xhat);
        if (args->dbias)
            fsdpc_nn_store_f64(args->dbias, c, args->dgrad_dtype,
                               fsdpc_nn_load_f64(args->dbias, c, args->dgrad_dtype) + dyc);
    }
}

void fsdpc_nn_norm_backward_f64(const fsdpc_norm_args *args)
{
    size_t bytes = args->cols * fsdpc_dtype_bytes(args->dgrad_dtype);
    if (args->dweight && !args->dweight_accumulate)
        memset(args->dweight, 0, bytes);
    if (args->dbias && !args->dbias_accumulate)
        memset(args->dbias, 0, bytes);
    for (size_t row = 0; row < args->rows; row++)
        norm_backward_row(args, row);
}

static void moments_of(const fsdpc_row_moments_args *args, const double *x, double *mean_out,
                       double *square_out)
{
    double mean = 0, square = 0, left = 0, cols = (double)args->cols;
    for (size_t c = 0; c < args->cols; c++)
        mean += x[c] / cols;
    for (size_t c = 0; c < args->cols; c++) {
        left += x[c] - mean;
        square += (x[c] - mean) * (x[c] - mean);
    }
    *mean_out = args->cols ? mean + left / cols : 0;
    *square_out = args->cols ? square - left * left / cols : 0;
}

void fsdpc_nn_row_moments_f64(const void *arg, size_t first, size_t last)
{
    const fsdpc_row_moments_args *args = arg;
    const double *dy = args->dy;
    double *out = args->out;
    for (size_t row = first; row < last; row++) {
        const double *x = (const double *)args->x + row * args->cols;
        double shift = args->shift ? ((const double *)args->shift)[row % args->values] : 0;
        double sum = 0, products = 0;
        for (size_t c = 0; dy && c < args->cols; c++) {
            double each = dy[row * args->cols + c];
            sum += each;
            products += each * (x[c] - shift);
        }
        if (!dy)
            moments_of(args, x, &sum, &products);
        out[row] = sum;
        out[args->rows + row] = products;
    }
}

void fsdpc_nn_row_affine_f64(const void *arg, size_t first, size_t last)
{
    const fsdpc_row_affine_args *args = arg;
    const double *shift = args->shift, *a = args->a, *b = args->b, *c = args->c;
    for (size_t row = first; row < last; row++) {
        size_t v = row % args->values;
        for (size_t i = row * args->cols; i < (row + 1) * args->cols; i++) {
            double value = (((const double *)args->x)[i] - (shift ? shift[v] : 0)) * a[v];
            if (args->y)
                value += ((const double *)args->y)[i] * (b ? b[v] : 1);
            ((double *)args->out)[i] = value + (c ? c[v] : 0);
        }
    }
}

static double cross_entropy_lse(const double *x, size_t cols)
{
    double max = row_max(x, cols);
    return max + log(row_exp_sum(x, cols, max > -INFINITY ? max : 0));
}

void fsdpc_nn_cross_entropy_f64(const void *arg, size_t first, size_t last)
{
    const fsdpc_cross_entropy_args *args = arg;
    for (size_t row = first; row < last; row++) {
        const double *x = (const double *)args->logits + row * args->cols;
        args->lse[row] = (float)cross_entropy_lse(x, args->cols);
        double sum = 0;
        for (size_t c = 0; c < args->cols && args->means; c++)
            sum += x[c];
        if (args->means)
            args->means[row] = (float)(sum / (double)args->cols);
    }
}

void fsdpc_nn_cross_entropy_backward_f64(const void *arg, size_t first, size_t last)
{
    const fsdpc_cross_entropy_args *args = arg;
    double all = args->dloss ? fsdpc_nn_loss_scale(args->sum, args->dloss) : 1;
    double smoothing = (double)args->smoothing, z_loss = (double)args->z_loss;
    double cap = (double)args->softcap;
    for (size_t row = first; row < last; row++) {
        double scale = args->dlosses ? (double)args->dlosses[row] : all;
        const double *x = (const double *)args->logits + row * args->cols;
        double *dx = (double *)args->dlogits + row * args->cols;
        int64_t target = fsdpc_nn_load_id(args->targets, row, args->id_dtype);
        if (target == args->ignore_index || !args->lse) {
            memset(dx, 0, args->cols * sizeof *dx);
            if (target != args->ignore_index)
                dx[target] = -scale;
            continue;
        }
        double lse = cross_entropy_lse(x, args->cols);
        for (size_t c = 0; c < args->cols; c++) {
            double hit = c == (size_t)target ? 1 - smoothing : 0;
            double slope = cap > 0 ? 1 - x[c] / cap * (x[c] / cap) : 1;
            dx[c] =
                (exp(x[c] - lse) * (1 + 2 * z_loss * lse) - hit - smoothing / (double)args->cols) *
                scale * slope;
        }
    }
}

/* Returns a window's maximum, with its index in *at_out, or its mean, with SIZE_MAX in *at_out. */
static double pool_window(const fsdpc_pool_args *args, const double *x, const nn_span *rows,
                          const nn_span *cols, size_t *at_out)
{
    double all = args->max ? -INFINITY : 0;
    *at_out = SIZE_MAX;
    for (size_t i = rows->first; i < rows->end; i++)
        for (size_t j = cols->first; j < cols->end; j++) {
            size_t at = i * args->image[1] + j;
            if (!args->max) {
                all += x[at];
            } else if (x[at] > all || x[at] != x[at] || *at_out == SIZE_MAX) {
                all = x[at];
                *at_out = at;
            }
        }
    return args->max ? all : all / (double)(args->kernel[0] * args->kernel[1]);
}

void fsdpc_nn_pool_f64(const void *arg, size_t first, size_t last)
{
    const fsdpc_pool_args *args = arg;
    size_t plane = args->image[0] * args->image[1], ignored;
    for (size_t row = first; row < last; row++) {
        nn_span rows = nn_pool_span(args, 0, row % args->places[0]);
        const double *image = (const double *)args->x + row / args->places[0] * plane;
        for (size_t x = 0; x < args->places[1]; x++) {
            nn_span cols = nn_pool_span(args, 1, x);
            ((double *)args->y)[row * args->places[1] + x] =
                pool_window(args, image, &rows, &cols, &ignored);
        }
    }
}

void fsdpc_nn_pool_backward_f64(const void *arg, size_t first, size_t last)
{
    const fsdpc_pool_args *args = arg;
    size_t pixels = args->image[0] * args->image[1], at;
    size_t windows = args->places[0] * args->places[1];
    for (size_t plane = first; plane < last; plane++) {
        const double *dy = (const double *)args->dy + plane * windows;
        double *dx = (double *)args->dx + plane * pixels;
        memset(dx, 0, pixels * sizeof *dx);
        for (size_t place = 0; place < windows; place++) {
            nn_span rows = nn_pool_span(args, 0, place / args->places[1]);
            nn_span cols = nn_pool_span(args, 1, place % args->places[1]);
            if (args->max) {
                pool_window(args, (const double *)args->x + plane * pixels, &rows, &cols, &at);
                if (at != SIZE_MAX)
                    dx[at] += dy[place];
                continue;
            }
            for (size_t i = rows.first; i < rows.end; i++)
                for (size_t j = cols.first; j < cols.end; j++)
                    dx[i * args->image[1] + j] +=
                        dy[place] / (double)(args->kernel[0] * args->kernel[1]);
        }
    }
}
