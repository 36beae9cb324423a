/* Softmax, norms and cross entropy: forward against double, backward against central differences of
 * the forward in double (at sampled elements of long rows). */
#include "nn_rig.h"

/* A row's function as one number, the loss whose slope is wanted. */
typedef double (*row_loss_fn)(const double *x, size_t cols, const void *arg);

static double row_slope(row_loss_fn loss, double *x, size_t cols, size_t c, const void *arg)
{
    double keep = x[c], h = 1e-5;
    x[c] = keep + h;
    double high = loss(x, cols, arg);
    x[c] = keep - h;
    double low = loss(x, cols, arg);
    x[c] = keep;
    return (high - low) / (2 * h);
}

/* Rounding of a loss over `cols` elements, divided by the step of row_slope. */
static double slope_noise(size_t cols)
{
    return 1e-10 * (double)cols;
}

static double *row_of(const buffer *b, size_t row, size_t cols)
{
    double *x = malloc((cols + 1) * sizeof *x);
    for (size_t c = 0; c < cols; c++)
        x[c] = buffer_get(b, row * cols + c);
    return x;
}

static size_t sample_step(size_t cols)
{
    return cols > 40 ? cols / 11 : 1;
}

static double lse_of(const double *x, size_t cols)
{
    double max = -INFINITY, sum = 0;
    for (size_t c = 0; c < cols; c++)
        max = fmax(max, x[c]);
    for (size_t c = 0; c < cols; c++)
        sum += exp(x[c] - max);
    return max + log(sum);
}

/* -- softmax ----------------------------------------------------------------------------------- */

typedef struct softmax_loss {
    const double *dy;
    bool log;
} softmax_loss;

static double softmax_loss_of(const double *x, size_t cols, const void *arg)
{
    const softmax_loss *loss = arg;
    double lse = lse_of(x, cols), total = 0;
    for (size_t c = 0; c < cols; c++)
        total += loss->dy[c] * (loss->log ? x[c] - lse : exp(x[c] - lse));
    return total;
}

static void test_softmax(nn_rig *rig, fsdpc_dtype dtype, size_t rows, size_t cols, bool log_softmax)
{
    buffer x = buffer_noise(dtype, rows * cols, 1, -4, 4), y = buffer_make(dtype, rows * cols);
    buffer dy = buffer_noise(dtype, rows * cols, 2, -1, 1), dx = buffer_make(dtype, rows * cols);
    fsdpc_softmax_args args = {
        .dtype = dtype, .rows = rows, .cols = cols, .log = log_softmax, .x = x.data, .out = y.data};
    CHECK_OK(rig->ops->softmax(&args, rig->stream));
    buffer_check(rig, &y, "softmax");
    fsdpc_softmax_args back = args;
    back.y = y.data, back.dy = dy.data, back.out = dx.data;
    CHECK_OK(rig->ops->softmax_backward(&back, rig->stream));
    buffer_check(rig, &dx, "softmax backward");
    buffer sums = buffer_make(dtype, rows);
    args.out = NULL, args.lse = sums.data;
    CHECK_OK(rig->ops->softmax(&args, rig->stream));
    buffer_check(rig, &sums, "logsumexp");
    double coarse = dtype == FSDPC_BF16 ? 0.03 : dtype == FSDPC_F16 ? 0.004 : 0; /* y was rounded */
    for (size_t row = 0; row<rows; row += rows> 10 ? 7 : 1) {
        double *vx = row_of(&x, row, cols), *vdy = row_of(&dy, row, cols);
        double lse = lse_of(vx, cols);
        softmax_loss loss = {vdy, log_softmax};
        check_near(rig, "logsumexp", dtype, row, buffer_get(&sums, row), lse,
                   tolerance(dtype, lse, 10, 20));
        for (size_t c = 0; c < cols; c += sample_step(cols)) {
            double want = log_softmax ? vx[c] - lse : exp(vx[c] - lse);
            check_near(rig, "softmax", dtype, c, buffer_get(&y, row * cols + c), want,
                       tolerance(dtype, want, log_softmax ? 10 : want, 20));
            double want_dx = row_slope(softmax_loss_of, vx, cols, c, &loss);
            double size = log_softmax ? sqrt((double)cols) * exp(vx[c] - lse) : exp(vx[c] - lse);
            check_near(rig, "softmax backward", dtype, c, buffer_get(&dx, row * cols + c), want_dx,
                       tolerance(dtype, want_dx, 1, 4) + coarse * size + 1e-8 + slope_noise(cols));
        }
        free(vx);
        free(vdy);
    }
    buffer_free(&x);
    buffer_free(&y);
    buffer_free(&dy);
    buffer_free(&dx);
    buffer_free(&sums);
}

/* -- norms ------------------------------------------------------------------------------------- */

typedef struct norm_loss {
    const double *dy, *weight, *bias;
    bool layer;
    double eps;
} norm_loss;

static void norm_of(const double *x, size_t cols, const norm_loss *loss, double *mean_out,
                    double *rstd_out)
{
    double mean = 0, square = 0;
    for (size_t c = 0; c < cols && loss->layer; c++)
        mean += x[c] / (double)cols;
    for (size_t c = 0; c < cols; c++)
        square += (x[c] - mean) * (x[c] - mean) / (double)cols;
    *mean_out = mean;
    *rstd_out = 1 / sqrt(square + loss->eps);
}

static double norm_loss_of(const double *x, size_t cols, const void *arg)
{
    const norm_loss *loss = arg;
    double mean, rstd, total = 0;
    norm_of(x, cols, loss, &mean, &rstd);
    for (size_t c = 0; c < cols; c++)
        total += loss->dy[c] * (x[c] - mean) * rstd * (loss->weight ? loss->weight[c] : 1);
    return total;
}

#define OLD_SLOPE 0.5 /* what dx holds before it is added to */

typedef struct norm_case {
    fsdpc_dtype dtype, dgrad_dtype;
    bool layer, affine, accumulate;
    size_t rows, cols;
} norm_case;

static void check_norm_row(nn_rig *rig, const norm_case *n, const buffer *const io[4], size_t row,
                           norm_loss *loss, double *dweight, double *dbias, double *size)
{
    const buffer *x = io[0], *dy = io[1], *y = io[2], *dx = io[3];
    double *vx = row_of(x, row, n->cols), *vdy = row_of(dy, row, n->cols), mean, rstd;
    loss->dy = vdy;
    norm_of(vx, n->cols, loss, &mean, &rstd);
    for (size_t c = 0; c < n->cols; c++) {
        double xhat = (vx[c] - mean) * rstd;
        double want =
            xhat * (loss->weight ? loss->weight[c] : 1) + (loss->bias ? loss->bias[c] : 0);
        check_near(rig, "norm", n->dtype, c, buffer_get(y, row * n->cols + c), want,
                   tolerance(n->dtype, want, 4 * rstd + 4, 6) + 1e-15 * (double)n->cols);
        dweight[c] += vdy[c] * xhat;
        dbias[c] += vdy[c];
        size[c] += fabs(vdy[c]) * (fabs(xhat) + 1);
    }
    for (size_t c = 0; c < n->cols; c += row % 5 ? n->cols : sample_step(n->cols)) {
        double want =
            row_slope(norm_loss_of, vx, n->cols, c, loss) + (n->accumulate ? OLD_SLOPE : 0);
        check_near(rig, "norm backward", n->dtype, c, buffer_get(dx, row * n->cols + c), want,
                   tolerance(n->dtype, want, 10 * (rstd + 1), 8) + 1e-7 * rstd * rstd +
                       slope_noise(n->cols));
    }
    free(vx);
    free(vdy);
}

static void test_norm(nn_rig *rig, norm_case n)
{
    size_t numel = n.rows * n.cols;
    buffer x = buffer_noise(n.dtype, numel, 1, -1, 3), y = buffer_make(n.dtype, numel);
    buffer dy = buffer_noise(n.dtype, numel, 2, -1, 1);
    buffer dx = n.accumulate ? buffer_noise(n.dtype, numel, 7, OLD_SLOPE, OLD_SLOPE)
                             : buffer_make(n.dtype, numel);
    buffer weight = buffer_noise(n.dtype, n.cols, 3, 0.5, 2);
    buffer bias = buffer_noise(n.dtype, n.cols, 4, -1, 1);
    buffer dweight = buffer_noise(n.dgrad_dtype, n.cols, 5, -1, 1);
    buffer dbias = buffer_noise(n.dgrad_dtype, n.cols, 6, -1, 1);
    float *mean = calloc(n.rows + 1, sizeof *mean), *rstd = calloc(n.rows + 1, sizeof *rstd);
    double *want_dweight = calloc(n.cols + 1, sizeof(double)),
           *size = calloc(n.cols + 1, sizeof(double));
    double *want_dbias = calloc(n.cols + 1, sizeof(double));
    double *vweight = row_of(&weight, 0, n.cols), *vbias = row_of(&bias, 0, n.cols);
    for (size_t c = 0; c < n.cols && n.accumulate; c++) {
        want_dweight[c] = buffer_get(&dweight, c);
        want_dbias[c] = buffer_get(&dbias, c);
    }
    fsdpc_norm_args args = {.layer = n.layer, .dtype = n.dtype, .rows = n.rows, .cols = n.cols};
    args.eps = 1e-5;
    args.x = x.data;
    args.weight = n.affine ? weight.data : NULL;
    args.bias = n.affine && n.layer ? bias.data : NULL;
    args.y = y.data;
    args.mean = mean;
    args.rstd = rstd;
    args.dy = dy.data;
    args.dx = dx.data;
    args.dweight = dweight.data;
    args.dbias = dbias.data;
    args.dgrad_dtype = n.dgrad_dtype;
    args.dx_accumulate = args.dweight_accumulate = args.dbias_accumulate = n.accumulate;
    CHECK_OK(rig->ops->norm(&args, rig->stream));
    CHECK_OK(rig->ops->norm_backward(&args, rig->stream));
    buffer_check(rig, &y, "norm");
    buffer_check(rig, &dx, "norm backward");
    buffer_check(rig, &dweight, "norm dweight");
    buffer_check(rig, &dbias, "norm dbias");
    norm_loss loss = {NULL, args.weight ? vweight : NULL, args.bias ? vbias : NULL, n.layer, 1e-5};
    for (size_t row = 0; row < n.rows; row++)
        check_norm_row(rig, &n, (const buffer *const[]){&x, &dy, &y, &dx}, row, &loss, want_dweight,
                       want_dbias, size);
    for (size_t c = 0; c < n.cols; c++) {
        double slack =
            size[c] * (n.dtype == FSDPC_F64 && n.dgrad_dtype == FSDPC_F64 ? 1e-13 : 2e-6);
        if (n.dtype == FSDPC_F64) /* summed in dgrad_dtype, row by row */
            slack += size[c] * tolerance(n.dgrad_dtype, 2, 0, 0);
        check_near(rig, "norm dweight", n.dgrad_dtype, c, buffer_get(&dweight, c), want_dweight[c],
                   tolerance(n.dgrad_dtype, want_dweight[c], 1, 2) + slack);
        check_near(rig, "norm dbias", n.dgrad_dtype, c, buffer_get(&dbias, c), want_dbias[c],
                   tolerance(n.dgrad_dtype, want_dbias[c], 1, 2) + slack);
    }
    buffer *all[] = {&x, &y, &dy, &dx, &weight, &bias, &dweight, &dbias};
    for (size_t i = 0; i < 8; i++)
        buffer_free(all[i]);
    free(mean);
    free(rstd);
    free(want_dweight);
    free(want_dbias);
    free(size);
    free(vweight);
    free(vbias);
}

/* -- cross entropy ----------------------------------------------------------------------------- */

typedef struct class_loss {
    size_t target;
    double smoothing, z_loss;
} class_loss;

static double cross_entropy_of(const double *x, size_t cols, const void *arg)
{
    const class_loss *loss = arg;
    double lse = lse_of(x, cols), mean = 0;
    for (size_t c = 0; c < cols; c++)
        mean += x[c] / (double)cols;
    return lse - (1 - loss->smoothing) * x[loss->target] - loss->smoothing * mean +
           loss->z_loss * lse * lse;
}

/* `options`: with smoothing, a z-loss, a soft cap, and a gradient for each row. */
static void test_cross_entropy(nn_rig *rig, fsdpc_dtype dtype, fsdpc_dtype id_dtype, size_t rows,
                               size_t cols, bool ignore_some, bool options)
{
    enum { CAP = 10 };
    class_loss all = {.smoothing = options ? 0.25 : 0, .z_loss = options ? 0.0625 : 0};
    float *means = calloc(rows + 1, sizeof *means), *losses = calloc(rows + 1, sizeof *losses);
    float *dlosses = calloc(rows + 1, sizeof *dlosses);
    for (size_t row = 0; row < rows; row++)
        dlosses[row] = (float)(row % 5) - 1.5f;
    buffer logits = buffer_noise(dtype, rows * cols, 1, -5, 5),
           dlogits = buffer_make(dtype, rows * cols);
    buffer targets = buffer_noise(id_dtype, rows, 2, 0, (double)cols);
    for (size_t row = 0; row < rows && ignore_some; row += 3)
        buffer_set(&targets, row, -100);
    float *lse = calloc(rows + 1, sizeof *lse), loss = 0, dloss = 0.5f;
    fsdpc_loss_sum sum = {1, 99};
    size_t want_count = 0;
    fsdpc_cross_entropy_args args = {.dtype = dtype, .id_dtype = id_dtype, .rows = rows};
    args.cols = cols;
    args.logits = logits.data;
    args.targets = targets.data;
    args.ignore_index = -100;
    args.lse = lse;
    args.loss = &loss;
    args.sum = &sum;
    args.dloss = &dloss;
    args.dlogits = dlogits.data;
    args.losses = losses;
    if (options) {
        args.smoothing = (float)all.smoothing, args.z_loss = (float)all.z_loss;
        args.means = means, args.dlosses = dlosses, args.softcap = CAP;
    }
    CHECK_OK(rig->ops->cross_entropy(&args, rig->stream));
    CHECK_OK(rig->ops->cross_entropy_backward(&args, rig->stream));
    buffer_check(rig, &dlogits, "cross entropy backward");
    buffer loss_bits = buffer_make(FSDPC_F32, 1);
    buffer_set(&loss_bits, 0, loss);
    buffer_check(rig, &loss_bits, "cross entropy");
    buffer_free(&loss_bits);
    double want_loss = 0;
    for (size_t row = 0; row < rows; row++) {
        double target = buffer_get(&targets, row), *x = row_of(&logits, row, cols);
        all.target = target < 0 ? 0 : (size_t)target;
        double want = target >= 0 ? cross_entropy_of(x, cols, &all) : 0;
        check_near(rig, "cross entropy of a row", FSDPC_F32, row, losses[row], want, 1e-5);
        want_count += target >= 0;
        want_loss += want;
        free(x);
    }
    CHECK(sum.count == want_count);
    check_near(rig, "cross entropy", FSDPC_F32, 0, loss, want_loss / (double)want_count,
               4e-7 * (10 + want_loss / fmax((double)want_count, 1)));
    for (size_t row = 0; row<rows; row += rows> 20 ? 7 : 1) {
        double target = buffer_get(&targets, row), *x = row_of(&logits, row, cols);
        size_t hit = target < 0 ? 0 : (size_t)target;
        all.target = hit;
        double factor = options ? (double)dlosses[row] : 0.5 / (double)want_count;
        for (size_t c = 0; c < cols; c += c == hit || c + 1 == hit ? 1 : sample_step(cols)) {
            double want = row_slope(cross_entropy_of, x, cols, c, &all) * factor;
            want *= options ? 1 - x[c] / CAP * (x[c] / CAP) : 1;
            want = target < 0 ? 0 : want;
            check_near(rig, "cross entropy backward", dtype, c,
                       buffer_get(&dlogits, row * cols + c), want,
                       tolerance(dtype, want, fabs(factor), 8) + 1e-9 +
                           fabs(factor) * 2 * slope_noise(cols));
        }
        free(x);
    }
    args.dlogits = logits.data; /* over the logits */
    CHECK_OK(rig->ops->cross_entropy_backward(&args, rig->stream));
    CHECK(rows == 0 ||
          memcmp(logits.data, dlogits.data, rows * cols * fsdpc_dtype_bytes(dtype)) == 0);
    buffer_free(&logits);
    buffer_free(&dlogits);
    buffer_free(&targets);
    free(lse);
    free(means);
    free(losses);
    free(dlosses);
}

/* Rows in two calls, and their sum's gradient made the mean's afterwards. */
static void test_cross_entropy_in_parts(nn_rig *rig, fsdpc_dtype dtype)
{
    enum { ROWS = 7, COLS = 37, NUMEL = ROWS * COLS, FIRST = 3 };
    size_t bytes = fsdpc_dtype_bytes(dtype);
    buffer logits = buffer_noise(dtype, NUMEL, 3, -5, 5), of_mean = buffer_make(dtype, NUMEL);
    buffer of_sum = buffer_make(dtype, NUMEL), targets = buffer_noise(FSDPC_I64, ROWS, 4, 0, COLS);
    float lse[ROWS], dloss = 3, loss, in_parts;
    fsdpc_loss_sum sum = {0, 0}, parts = {9, 9};
    buffer_set(&targets, 1, -100);
    fsdpc_cross_entropy_args args = {.dtype = dtype, .id_dtype = FSDPC_I64, .rows = ROWS};
    args.cols = COLS, args.ignore_index = -100, args.lse = lse;
    args.logits = logits.data, args.targets = targets.data, args.sum = &sum, args.loss = &loss;
    args.dloss = &dloss, args.dlogits = of_mean.data;
    CHECK_OK(rig->ops->cross_entropy(&args, rig->stream));
    CHECK_OK(rig->ops->cross_entropy_backward(&args, rig->stream));
    args.sum = &parts, args.loss = &in_parts, args.dloss = NULL;
    for (size_t at = 0; at < ROWS; at += args.rows) {
        args.rows = at ? ROWS - FIRST : FIRST;
        args.accumulate = at > 0;
        args.logits = (char *)logits.data + at * COLS * bytes;
        args.targets = (int64_t *)targets.data + at;
        args.dlogits = (char *)of_sum.data + at * COLS * bytes;
        CHECK_OK(rig->ops->cross_entropy(&args, rig->stream));
        CHECK_OK(rig->ops->cross_entropy_backward(&args, rig->stream));
    }
    CHECK(parts.count == ROWS - 1 && fabsf(in_parts - loss) <= 1e-6f * loss);
    fsdpc_loss_gradient_args scale = {.dtype = dtype, .numel = NUMEL, .sum = &parts};
    scale.dloss = &dloss, scale.x = of_sum.data, scale.out = of_sum.data;
    CHECK_OK(rig->ops->loss_gradient(&scale, rig->stream));
    for (size_t i = 0; i < NUMEL; i++) {
        double want = buffer_get(&of_mean, i);
        check_near(rig, "loss gradient", dtype, i, buffer_get(&of_sum, i), want,
                   2 * tolerance(dtype, want, 1, 1) + (dtype == FSDPC_F16 ? 1e-7 : 0));
    }
    parts.count = 0; /* nothing counted: no gradient */
    CHECK_OK(rig->ops->loss_gradient(&scale, rig->stream));
    CHECK(buffer_get(&of_sum, 0) == 0 && buffer_get(&of_sum, NUMEL - 1) == 0);
    buffer_free(&logits);
    buffer_free(&of_mean);
    buffer_free(&of_sum);
    buffer_free(&targets);
}

/* Rows of logarithms: without `lse` the loss is minus what the targets have. */
static void test_cross_entropy_of_logs(nn_rig *rig, fsdpc_dtype dtype)
{
    enum { ROWS = 5, COLS = 37, NUMEL = ROWS * COLS };
    buffer logs = buffer_noise(dtype, NUMEL, 3, -9, 0), dlogs = buffer_noise(dtype, NUMEL, 4, 0, 1);
    buffer targets = buffer_noise(FSDPC_I32, ROWS, 4, 0, COLS);
    float loss, dloss = -2;
    fsdpc_loss_sum sum;
    buffer_set(&targets, 2, -7);
    fsdpc_cross_entropy_args args = {.dtype = dtype, .id_dtype = FSDPC_I32, .rows = ROWS};
    args.cols = COLS, args.ignore_index = -7, args.sum = &sum, args.loss = &loss;
    args.logits = logs.data, args.targets = targets.data;
    args.dloss = &dloss, args.dlogits = dlogs.data;
    CHECK_OK(rig->ops->cross_entropy(&args, rig->stream));
    CHECK_OK(rig->ops->cross_entropy_backward(&args, rig->stream));
    double total = 0;
    for (size_t row = 0; row < ROWS; row++) {
        double target = buffer_get(&targets, row);
        total -= target < 0 ? 0 : buffer_get(&logs, row * COLS + (size_t)target);
        for (size_t c = 0; c < COLS; c++)
            CHECK(buffer_get(&dlogs, row * COLS + c) == ((double)c == target ? 0.5 : 0));
    }
    CHECK(sum.count == ROWS - 1 && loss == (float)(total / (ROWS - 1)));
    buffer_set(&targets, 1, COLS);
    CHECK_FAILS(rig->ops->cross_entropy(&args, rig->stream), FSDPC_ERR_INDEX, "target 37 at row 1");
    buffer_free(&logs);
    buffer_free(&dlogs);
    buffer_free(&targets);
}

static void test_cross_entropy_edges(nn_rig *rig)
{
    static float logits[2 * 5000], lse[2], loss, dlogits[2 * 5000];
    int64_t targets[2] = {-100, -100};
    const float dloss = 1;
    fsdpc_loss_sum sum;
    for (size_t c = 0; c < 5000; c++) { /* a first piece of -inf, then finite values */
        logits[c] = c < 4500 ? -INFINITY : 0;
        logits[5000 + c] = c == 77 ? NAN : -INFINITY;
    }
    fsdpc_cross_entropy_args args = {.dtype = FSDPC_F32, .id_dtype = FSDPC_I64, .rows = 2};
    args.cols = 5000;
    args.logits = logits;
    args.targets = targets;
    args.ignore_index = -100;
    args.lse = lse;
    args.loss = &loss;
    args.sum = &sum;
    args.dloss = &dloss;
    args.dlogits = dlogits;
    CHECK_OK(rig->ops->cross_entropy(&args, rig->stream));
    CHECK(isnan(loss) && sum.count == 0); /* every row ignored */
    CHECK(fabs(lse[0] - log(500)) < 1e-5 && isnan(lse[1]));
    CHECK_OK(rig->ops->cross_entropy_backward(&args, rig->stream));
    CHECK(dlogits[0] == 0 && dlogits[9999] == 0);
    targets[1] = 5000;
    CHECK_FAILS(rig->ops->cross_entropy(&args, rig->stream), FSDPC_ERR_INDEX,
                "target 5000 at row 1 of a cross entropy over 5000");
    targets[1] = -1;
    CHECK_FAILS(rig->ops->cross_entropy_backward(&args, rig->stream), FSDPC_ERR_INDEX, "target -1");
    args.dtype = FSDPC_U8;
    CHECK_FAILS(rig->ops->cross_entropy(&args, rig->stream), FSDPC_ERR_DTYPE, "uint8");
}

static void suite(nn_rig *rig)
{
    const size_t shapes[][2] = {{0, 5}, {1, 1}, {5, 3}, {3, 16}, {4, 33}, {70, 513}, {9, 9001}};
    for (size_t d = 0; d < 4; d++)
        for (size_t s = 0; s < 7; s++) {
            fsdpc_dtype dtype = float_dtypes[d];
            size_t rows = shapes[s][0], cols = shapes[s][1];
            test_softmax(rig, dtype, rows, cols, false);
            test_softmax(rig, dtype, rows, cols, true);
            test_cross_entropy(rig, dtype, FSDPC_I64, rows, cols, false, false);
            test_cross_entropy(rig, dtype, FSDPC_I32, rows, cols, true, false);
            test_cross_entropy(rig, dtype, FSDPC_I32, rows, cols, true, true);
            for (int layer = 0; layer < 2; layer++)
                for (int affine = 0; affine < 2; affine++)
                    test_norm(rig, (norm_case){dtype, float_dtypes[(d + s) % 4], layer, affine,
                                               (s + d) % 2, rows, cols});
        }
    test_norm(rig, (norm_case){FSDPC_BF16, FSDPC_F32, false, true, true, 700, 96});
    test_norm(rig, (norm_case){FSDPC_F32, FSDPC_F32, true, true, false, 700, 96});
    for (size_t d = 0; d < 4; d++)
        test_cross_entropy_in_parts(rig, float_dtypes[d]);
    for (size_t d = 0; d < 4; d++)
        test_cross_entropy_of_logs(rig, float_dtypes[d]);
    test_cross_entropy_edges(rig);
}

int main(void)
{
    nn_rig_each(suite);
    return check_report("test_nn_rows");
}
