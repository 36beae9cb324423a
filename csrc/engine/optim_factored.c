/* A step of Adafactor has four parts. Ranks meet after each of the first three, once for all
 * parameters.
 *
 *     measure   exact sum of p^2; largest |g| of every column
 *     sum       sums of g^2 by row and by column; row_var moves; exact sum of row_var
 *     size up   col_var moves; exact sum of u^2
 *     move      parameters move by u
 *
 * The update u is computed twice, a chunk at a time, instead of being kept. A column's sum is one
 * of integers in units of its largest magnitude (ops/factored.h), for which ranks first agree on the
 * latter. It costs an eighth of the words of an exact sum.
 *
 * Torch divides g by sqrt(r c / mean(r)), where r and c are a row's and a column's mean. This step
 * multiplies g by 1 / sqrt(r / mean(r)) and 1 / sqrt(c), which needs no root for each element.
 *
 * The device's kernels read matrices. The host computes what there is for each row and column, on
 * copies if the device is remote; it waits for each.
 */
#include "engine/optim_factored.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "base/crc32c.h"
#include "base/size.h"
#include "engine/factors.h"
#include "engine/norm.h"
#include "engine/unsharded.h"
#include "ops/flat_ops.h"

/* One parameter of this step. */
typedef struct item {
    fsdpc_step_args args; /* of this rank's elements */
    fsdpc_factors factors;
    float *row_var, *col_var; /* NULL for vectors */
    size_t leaf, numel;       /* numel: of the whole parameter */
    int unit, param;          /* unit: its index in the optimizer, which is the same on all ranks */
    size_t at;                /* its columns among all that are spread */
    double scale;             /* of its gradient */
    double rate;              /* by which the update is multiplied */
} item;

struct fsdpc_optim_factored {
    fsdpc_device *device;
    item *items;
    size_t n, room;
    void *block;
    size_t block_bytes;
    /* For a remote device: as large as the block, then means by row and column. */
    unsigned char *here;
    float *means;
    /* In the block. `most` and `sums` are of all columns that are spread, then of those of one
     * stack. Norms are of parameters, of row_var, and of updates. */
    fsdpc_norm *norms;
    uint64_t *sums;
    double *row_sums, *units;
    float *most, *by_row, *by_col, *update;
    size_t spread_cols;
};

/* ---- Memory ---- */

static void place_arrays(fsdpc_optim_factored *own, const fsdpc_factored_work *work)
{
    size_t cols = work->spread_cols + work->cols;
    own->norms = own->block;
    own->sums = (uint64_t *)(own->norms + 3 * work->params);
    own->row_sums = (double *)(own->sums + cols);
    own->units = own->row_sums + work->rows;
    own->most = (float *)(own->units + work->cols);
    own->by_row = own->most + cols;
    own->by_col = own->by_row + work->rows;
    own->update = own->by_col + work->cols;
    own->spread_cols = work->spread_cols;
    own->means = own->here ? (float *)(void *)(own->here + own->block_bytes) : NULL;
}

/* ---- Copies on the host ---- */

/* Returns the host's copy of an array of the block. */
static void *here(const fsdpc_optim_factored *own, const void *array)
{
    return own->here ? own->here + ((const char *)array - (const char *)own->block) : (void *)array;
}

static fsdpc_status pull(const fsdpc_optim_factored *own, void *to, const void *array, size_t bytes)
{
    return own->here ? fsdpc_device_copy(own->device, to, array, bytes, NULL) : FSDPC_OK;
}

static fsdpc_status push(const fsdpc_optim_factored *own, void *array, const void *from,
                         size_t bytes)
{
    return own->here ? fsdpc_device_copy(own->device, array, from, bytes, NULL) : FSDPC_OK;
}

static fsdpc_status pull_means(const fsdpc_optim_factored *own, const item *it, float **rows_out,
                               float **cols_out)
{
    size_t n_rows = it->factors.n_rows, n_cols = it->factors.n_cols;
    *rows_out = own->here ? own->means : it->row_var;
    *cols_out = own->here ? own->means + n_rows : it->col_var;
    FSDPC_TRY(pull(own, *rows_out, it->row_var, n_rows * sizeof(float)));
    return pull(own, *cols_out, it->col_var, n_cols * sizeof(float));
}

static fsdpc_status make_work(fsdpc_optim *optim, const fsdpc_factored_work *work)
{
    if (!optim->factored)
        optim->factored = calloc(1, sizeof *optim->factored);
    fsdpc_optim_factored *own = optim->factored;
    if (own)
        own->device = optim->device;
    if (own && own->room < work->params) {
        item *items = realloc(own->items, work->params * sizeof *items);
        own->items = items ? items : own->items;
        own->room = items ? work->params : own->room;
    }
    if (!own || own->room < work->params)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for an optimizer");
    size_t bytes = fsdpc_factored_work_bytes(work);
    if (bytes > own->block_bytes) {
        fsdpc_device_free(optim->device, own->block);
        own->block = NULL;
        own->block_bytes = 0;
        FSDPC_TRY(fsdpc_device_alloc(optim->device, FSDPC_MEM_STAGING, bytes, &own->block));
        own->block_bytes = bytes;
    }
    if (optim->device->remote) {
        size_t means = (work->rows + work->cols) * sizeof(float);
        unsigned char *grown = realloc(own->here, own->block_bytes + means);
        if (!grown)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for an optimizer");
        own->here = grown;
    }
    place_arrays(own, work);
    return FSDPC_OK;
}

void fsdpc_optim_factored_destroy(fsdpc_optim *optim)
{
    if (!optim->factored)
        return;
    fsdpc_device_free(optim->device, optim->factored->block);
    free(optim->factored->here);
    free(optim->factored->items);
    free(optim->factored);
    optim->factored = NULL;
}

fsdpc_status fsdpc_optim_factored_prepare(fsdpc_optim *optim)
{
    fsdpc_factored_work work = {0};
    for (int u = 0; u < optim->n_units; u++) {
        const unit_states *states = &optim->units[u];
        const fsdpc_layout *layout = states->unit->layout;
        for (int p = 0; p < layout->n_params; p++) {
            const fsdpc_place *place = &layout->params[p];
            if (place->group >= states->unit->n_trained || place->numel == 0 ||
                !fsdpc_optim_is_factored(optim, states, p))
                continue;
            FSDPC_TRY(
                fsdpc_optim_check_plain(optim, states->params[p].group, place->name, place->dtype));
            FSDPC_TRY(fsdpc_optim_check_memory(optim, states, p));
            FSDPC_TRY(fsdpc_factors_check(place));
            fsdpc_local_shard most = fsdpc_factors_most(layout, p);
            fsdpc_factored_work_add(&work, place->ndim, place->shape, &most);
        }
    }
    return work.params > 0 ? make_work(optim, &work) : FSDPC_OK;
}

/* ---- The parts of a step ---- */

static float *most_of(const fsdpc_optim_factored *own, const item *it)
{
    return own->most + (it->factors.spread ? it->at : own->spread_cols);
}

static uint64_t *sums_of(const fsdpc_optim_factored *own, const item *it)
{
    return own->sums + (it->factors.spread ? it->at : own->spread_cols);
}

static fsdpc_status set_scale(const fsdpc_optim_factored *own, item *it)
{
    double pending = 1;
    if (it->args.grad_scale_at)
        FSDPC_TRY(
            fsdpc_device_copy(own->device, &pending, it->args.grad_scale_at, sizeof pending, NULL));
    it->scale = it->args.grad_scale * pending;
    return FSDPC_OK;
}

static fsdpc_factored_args pass_of(const item *it, fsdpc_factored_pass pass)
{
    return (fsdpc_factored_args){.pass = pass,
                                 .grad = it->args.grad,
                                 .grad_dtype = it->args.grad_dtype,
                                 .scale = (float)it->scale,
                                 .rows = it->factors.n_rows,
                                 .cols = it->factors.cols,
                                 .rows_per_matrix = it->factors.rows};
}

static fsdpc_status run_pass(const fsdpc_factored_args *args, fsdpc_stream *stream)
{
    return args->rows == 0 ? FSDPC_OK : stream->device->flat->factored(args, stream);
}

static fsdpc_status find_most(const fsdpc_optim_factored *own, const item *it, fsdpc_stream *stream)
{
    fsdpc_factored_args args = pass_of(it, FSDPC_FACTORED_MOST);
    args.most = most_of(own, it);
    FSDPC_TRY(fsdpc_device_fill(own->device, args.most, 0, it->factors.n_cols * sizeof *args.most,
                                stream));
    return run_pass(&args, stream);
}

static fsdpc_status measure(const fsdpc_optim_factored *own, size_t i, fsdpc_stream *stream)
{
    const item *it = &own->items[i];
    FSDPC_TRY(fsdpc_norm_add(&own->norms[i], 2, it->args.param, it->args.param_dtype,
                             it->args.numel, it->leaf, stream));
    return it->factors.spread ? find_most(own, it, stream) : FSDPC_OK;
}

/* Moves a mean by `weight` towards sum / n. */
static float towards(float mean, double sum, size_t n, double weight)
{
    return (float)((double)mean + weight * (sum / (double)n - (double)mean));
}

static double weight_of(const item *it)
{
    return pow((double)it->args.step, it->args.hyper.beta2_decay);
}

static fsdpc_status sum_rows(const fsdpc_optim_factored *own, size_t i, fsdpc_stream *stream)
{
    const item *it = &own->items[i];
    fsdpc_norm total = {0};
    fsdpc_factored_args args = pass_of(it, FSDPC_FACTORED_ROWS);
    double weight = weight_of(it), *sums = here(own, own->row_sums);
    float *means, *unused;
    args.row_sums = own->row_sums;
    FSDPC_TRY(run_pass(&args, stream));
    FSDPC_TRY(pull(own, sums, args.row_sums, args.rows * sizeof *sums));
    FSDPC_TRY(pull_means(own, it, &means, &unused));
    for (size_t row = 0; row < args.rows; row++) {
        means[row] = towards(means[row], sums[row], args.cols, weight);
        if (it->factors.spread)
            fsdpc_exact_sum_add(&total.sum, (double)means[row]);
    }
    FSDPC_TRY(push(own, it->row_var, means, args.rows * sizeof *means));
    return fsdpc_device_copy(own->device, &own->norms[own->n + i], &total, sizeof total, NULL);
}

static fsdpc_status sum_columns(const fsdpc_optim_factored *own, const item *it,
                                fsdpc_stream *stream)
{
    const fsdpc_factors *f = &it->factors;
    fsdpc_factored_args args = pass_of(it, FSDPC_FACTORED_SUMS);
    float *most = here(own, most_of(own, it));
    double *units = here(own, own->units);
    FSDPC_TRY(pull(own, most, most_of(own, it), f->n_cols * sizeof *most));
    for (size_t j = 0; j < f->n_cols; j++)
        units[j] = fsdpc_factored_unit(most[j], f->rows);
    FSDPC_TRY(push(own, own->units, units, f->n_cols * sizeof *units));
    args.units = own->units;
    args.sums = sums_of(own, it);
    FSDPC_TRY(fsdpc_device_fill(own->device, args.sums, 0, f->n_cols * sizeof *args.sums, stream));
    return run_pass(&args, stream);
}

/* Columns with infinities or NaN have these as their mean, and a sum that means nothing. */
static fsdpc_status move_columns(const fsdpc_optim_factored *own, const item *it)
{
    const fsdpc_factors *f = &it->factors;
    float *most = here(own, most_of(own, it)), *means, *unused;
    uint64_t *sums = here(own, sums_of(own, it));
    double weight = weight_of(it);
    FSDPC_TRY(pull(own, most, most_of(own, it), f->n_cols * sizeof *most));
    FSDPC_TRY(pull(own, sums, sums_of(own, it), f->n_cols * sizeof *sums));
    FSDPC_TRY(pull_means(own, it, &unused, &means));
    for (size_t j = 0; j < f->n_cols; j++) {
        double sum = (double)(int64_t)sums[j] / fsdpc_factored_unit(most[j], f->rows);
        if (!isfinite(most[j]))
            sum = (double)most[j];
        means[j] = towards(means[j], sum, f->rows, weight);
    }
    return push(own, it->col_var, means, f->n_cols * sizeof *means);
}

static fsdpc_status sum(const fsdpc_optim_factored *own, size_t i, fsdpc_stream *stream)
{
    const item *it = &own->items[i];
    if (!it->row_var)
        return FSDPC_OK;
    if (!it->factors.spread) {
        FSDPC_TRY(find_most(own, it, stream));
        FSDPC_TRY(sum_columns(own, it, stream));
        FSDPC_TRY(move_columns(own, it)); /* no rank has other rows of these */
    } else {
        FSDPC_TRY(sum_columns(own, it, stream));
    }
    return sum_rows(own, i, stream);
}

/* The factors by which a row's and a column's elements are multiplied. */
static fsdpc_status fill_factors(const fsdpc_optim_factored *own, size_t i)
{
    const item *it = &own->items[i];
    const fsdpc_factors *f = &it->factors;
    float *rows, *cols, *by_row = here(own, own->by_row), *by_col = here(own, own->by_col);
    fsdpc_norm total;
    double mean = 0;
    FSDPC_TRY(pull_means(own, it, &rows, &cols));
    FSDPC_TRY(fsdpc_norm_fetch(&total, &own->norms[own->n + i], 1, own->device));
    if (f->spread)
        mean = fsdpc_exact_sum_value(&total.sum) / (double)f->rows;
    for (size_t row = 0; row < f->n_rows; row++) {
        if (!f->spread && row % f->rows == 0) {
            mean = 0;
            for (size_t k = 0; k < f->rows; k++)
                mean += (double)rows[row + k] / (double)f->rows;
        }
        double floor = mean < it->args.hyper.eps1 ? it->args.hyper.eps1 : mean;
        by_row[row] = (float)sqrt(floor / (double)rows[row]);
    }
    for (size_t j = 0; j < f->n_cols; j++)
        by_col[j] = (float)(1 / sqrt((double)cols[j]));
    FSDPC_TRY(push(own, own->by_row, by_row, f->n_rows * sizeof *by_row));
    return push(own, own->by_col, by_col, f->n_cols * sizeof *by_col);
}

static const void *at(const void *memory, size_t i, fsdpc_dtype dtype)
{
    return (const char *)memory + i * fsdpc_dtype_bytes(dtype);
}

/* Writes the update's elements [begin, end) to own->update. `again` leaves states as they are. */
static fsdpc_status fill_update(const fsdpc_optim_factored *own, const item *it, size_t begin,
                                size_t end, bool again, fsdpc_stream *stream)
{
    if (!it->row_var) {
        fsdpc_step_args args = it->args;
        args.hyper.maximize = false;
        args.grad = at(it->args.grad, begin, args.grad_dtype);
        args.states[0] = (float *)args.states[0] + begin;
        args.param = own->update;
        args.param_dtype = FSDPC_F32;
        args.copy_in = NULL;
        args.numel = end - begin;
        args.hyper.beta2_decay = again ? 1 : args.hyper.beta2_decay; /* optim_table.c */
        return fsdpc_flat_step(&args, stream);
    }
    const fsdpc_factors *f = &it->factors;
    fsdpc_factored_args args = pass_of(it, FSDPC_FACTORED_UPDATE);
    size_t row = begin / f->cols;
    args.grad = at(it->args.grad, begin, args.grad_dtype);
    args.rows = (end - begin) / f->cols;
    args.most_factor = (float)(1 / it->args.hyper.eps1);
    args.by_row = own->by_row + row;
    args.by_col = own->by_col + row / f->rows * f->cols;
    args.first_row = row % f->rows;
    args.out = own->update;
    return run_pass(&args, stream);
}

/* Calls fn for every chunk of the update. */
static fsdpc_status each_chunk(const fsdpc_optim_factored *own, size_t i, bool again,
                               fsdpc_status (*fn)(const fsdpc_optim_factored *own, size_t i,
                                                  size_t begin, size_t end, fsdpc_stream *stream),
                               fsdpc_stream *stream)
{
    const item *it = &own->items[i];
    size_t chunk = FSDPC_FACTORED_CHUNK;
    if (it->row_var) {
        chunk = fsdpc_factored_chunk(&it->factors, it->leaf) * it->factors.cols;
        FSDPC_TRY(fill_factors(own, i));
    }
    for (size_t begin = 0; begin < it->args.numel; begin += chunk) {
        size_t end = fsdpc_min_size(begin + chunk, it->args.numel);
        FSDPC_TRY(fill_update(own, it, begin, end, again, stream));
        FSDPC_TRY(fn(own, i, begin, end, stream));
    }
    return FSDPC_OK;
}

static fsdpc_status add_update(const fsdpc_optim_factored *own, size_t i, size_t begin, size_t end,
                               fsdpc_stream *stream)
{
    return fsdpc_norm_add(&own->norms[2 * own->n + i], 2, own->update, FSDPC_F32, end - begin,
                          own->items[i].leaf, stream);
}

static fsdpc_status size_up(const fsdpc_optim_factored *own, size_t i, fsdpc_stream *stream)
{
    const item *it = &own->items[i];
    if (it->factors.spread)
        FSDPC_TRY(move_columns(own, it));
    return each_chunk(own, i, false, add_update, stream);
}

static fsdpc_status move_chunk(const fsdpc_optim_factored *own, size_t i, size_t begin, size_t end,
                               fsdpc_stream *stream)
{
    const item *it = &own->items[i];
    fsdpc_step_args args = it->args;
    args.given = true;
    args.param = (char *)args.param + begin * fsdpc_dtype_bytes(args.param_dtype);
    args.grad = own->update;
    args.grad_dtype = FSDPC_F32;
    args.grad_scale = it->rate;
    args.grad_scale_at = NULL;
    args.states[0] = args.states[1] = NULL;
    args.numel = end - begin;
    if (args.copy_in)
        args.copy_in = (char *)args.copy_in + begin * fsdpc_dtype_bytes(args.copy_in_dtype);
    return fsdpc_flat_step(&args, stream);
}

static fsdpc_status move(const fsdpc_optim_factored *own, size_t i, fsdpc_stream *stream)
{
    item *it = &own->items[i];
    const fsdpc_hyper *hyper = &it->args.hyper;
    const double root = sqrt((double)it->numel);
    double size, update;
    FSDPC_TRY(fsdpc_norm_read(&own->norms[i], 2, own->device, &size));
    FSDPC_TRY(fsdpc_norm_read(&own->norms[2 * own->n + i], 2, own->device, &update));
    it->rate = fmax(hyper->eps2, size / root) * fmin(hyper->lr, 1 / sqrt((double)it->args.step)) /
               fmax(1, update / root / hyper->d);
    return each_chunk(own, i, true, move_chunk, stream);
}

/* ---- A step ---- */

static fsdpc_status all_reduce(fsdpc_comm *comm, void *data, fsdpc_dtype dtype, fsdpc_red op,
                               size_t numel, fsdpc_stream *stream)
{
    const fsdpc_coll coll = {.kind = FSDPC_COLL_ALL_REDUCE,
                             .unit = -1,
                             .what = "means of Adafactor",
                             .dtype = dtype,
                             .op = op,
                             .stream = stream,
                             .send = data,
                             .recv = data,
                             .numel = numel};
    return comm && comm->size > 1 && numel > 0 ? fsdpc_comm_run(comm, &coll) : FSDPC_OK;
}

/* Ranks that step different parameters fail here. */
static fsdpc_status compare(fsdpc_comm *comm, const fsdpc_optim_factored *own)
{
    uint32_t hash = 0;
    for (size_t i = 0; i < own->n; i++) {
        const int key[] = {own->items[i].unit, own->items[i].param};
        hash = fsdpc_crc32c(hash, key, sizeof key);
    }
    bool single = !comm || comm->size == 1;
    return single ? FSDPC_OK : fsdpc_optim_meet(comm, "an optimizer's parameters", hash);
}

static fsdpc_status join_norms(fsdpc_comm *comm, fsdpc_norm *norms, size_t n, fsdpc_stream *stream)
{
    return comm && n > 0 ? fsdpc_norm_all_reduce(norms, n, 2, comm, stream) : FSDPC_OK;
}

static fsdpc_status each(const fsdpc_optim_factored *own,
                         fsdpc_status (*part)(const fsdpc_optim_factored *own, size_t i,
                                              fsdpc_stream *stream),
                         fsdpc_stream *stream)
{
    for (size_t i = 0; i < own->n; i++)
        FSDPC_TRY(part(own, i, stream));
    return FSDPC_OK;
}

/* Steps the parameters in own->items, whose ranks are those of `comm`; NULL: one rank. */
static fsdpc_status step_items(fsdpc_optim_factored *own, fsdpc_comm *comm, fsdpc_stream *stream)
{
    size_t cols = 0;
    FSDPC_TRY(compare(comm, own));
    for (size_t i = 0; i < own->n; i++) {
        own->items[i].at = cols;
        cols += own->items[i].factors.spread ? own->items[i].factors.cols : 0;
        FSDPC_TRY(set_scale(own, &own->items[i]));
    }
    FSDPC_TRY(
        fsdpc_device_fill(own->device, own->norms, 0, 3 * own->n * sizeof *own->norms, stream));
    FSDPC_TRY(each(own, measure, stream));
    /* magnitudes sort like their bits */
    FSDPC_TRY(all_reduce(comm, own->most, FSDPC_I32, FSDPC_RED_MAX, cols, stream));
    FSDPC_TRY(each(own, sum, stream));
    FSDPC_TRY(all_reduce(comm, own->sums, FSDPC_I64, FSDPC_RED_SUM, cols, stream));
    FSDPC_TRY(join_norms(comm, own->norms, 2 * own->n, stream));
    FSDPC_TRY(each(own, size_up, stream));
    FSDPC_TRY(join_norms(comm, own->norms + 2 * own->n, own->n, stream));
    return each(own, move, stream);
}

/* Replaces options that depend on the parameter. */
static void settle(item *it)
{
    static const double epsilon[FSDPC_DTYPE_COUNT] = {
        [FSDPC_F32] = (double)FLT_EPSILON, [FSDPC_BF16] = 0x1p-7, [FSDPC_F16] = 0x1p-10};
    if (it->args.hyper.eps1 < 0)
        it->args.hyper.eps1 = epsilon[it->args.param_dtype];
}

static item item_of(const fsdpc_optim *optim, const unit_states *states, int param)
{
    const fsdpc_unit *unit = states->unit;
    const fsdpc_place *place = &unit->layout->params[param];
    const param_states *own = &states->params[param];
    const fsdpc_unit_group *group = &unit->groups[place->group];
    const fsdpc_slice *band = &group->plan->bands[place->band];
    fsdpc_local_shard local = fsdpc_layout_local_shard(unit->layout, param, fsdpc_unit_rank(unit));
    item it = {.factors = fsdpc_factors_of(place->ndim, place->shape, &local),
               .unit = (int)(states - optim->units),
               .param = param,
               .leaf = place->leaf_numel,
               .numel = place->numel};
    it.args = (fsdpc_step_args){
        .kind = fsdpc_optim_kind_of(optim, own->group),
        .hyper = optim->hypers[own->group],
        .param = fsdpc_unit_stepped(unit, group, band, local.shard_offset),
        .param_dtype = place->dtype,
        .grad = group->grad + local.shard_offset * fsdpc_dtype_bytes(group->grad_dtype),
        .grad_dtype = group->grad_dtype,
        .state_dtype = FSDPC_F32,
        .copy_in_dtype = group->param_dtype,
        .numel = local.numel,
        .grad_scale = states->scale,
        .grad_scale_at = states->scale_at,
        .step = own->steps,
    };
    if (local.numel > 0 && unit->root && !unit->root->unsharded->at_use)
        it.args.copy_in = fsdpc_unsharded_own_slice(unit, group, band, local.shard_offset);
    if (it.factors.cols > 0) {
        it.row_var = own->factors;
        it.col_var = own->factors + it.factors.n_rows;
    } else {
        it.args.states[0] = fsdpc_optim_locate(optim, states, param, 0, local.shard_offset).data;
    }
    settle(&it);
    return it;
}

static fsdpc_status step_on(const fsdpc_optim *optim, fsdpc_comm *comm)
{
    fsdpc_optim_factored *own = optim->factored;
    own->n = 0;
    for (int u = 0; u < optim->n_units; u++) {
        const unit_states *states = &optim->units[optim->order[u]];
        const fsdpc_layout *layout = states->unit->layout;
        for (int p = 0; states->unit->mesh.shard == comm && p < layout->n_params; p++)
            if (states->params[p].stepping && fsdpc_optim_is_factored(optim, states, p) &&
                layout->params[p].numel > 0)
                own->items[own->n++] = item_of(optim, states, p);
    }
    return step_items(own, comm, fsdpc_device_main(optim->device));
}

fsdpc_status fsdpc_optim_factored_step(fsdpc_optim *optim)
{
    return optim->factored ? fsdpc_optim_each_shard_group(optim, step_on) : FSDPC_OK;
}

fsdpc_status fsdpc_optim_factored_alone(fsdpc_optim *optim, int group, const fsdpc_step_args *given,
                                        const char *name, int ndim, const size_t *shape,
                                        fsdpc_stream *stream)
{
    const fsdpc_local_shard all = {.numel = given->numel};
    fsdpc_factored_work work = {0};
    FSDPC_TRY(fsdpc_optim_check_plain(optim, group, name, given->param_dtype));
    if (given->numel == 0)
        return FSDPC_OK;
    fsdpc_factored_work_add(&work, ndim, shape, &all);
    FSDPC_TRY(make_work(optim, &work));
    fsdpc_optim_factored *own = optim->factored;
    own->n = 1;
    item *it = own->items;
    *it = (item){.args = *given,
                 .factors = fsdpc_factors_of(ndim, shape, &all),
                 .leaf = fsdpc_layout_leaf(ndim, shape),
                 .numel = given->numel};
    it->args.kind = fsdpc_optim_kind_of(optim, group);
    it->args.hyper = optim->hypers[group];
    if (it->factors.cols > 0) {
        it->row_var = given->states[0];
        it->col_var = given->states[1];
        it->args.states[0] = it->args.states[1] = NULL;
    }
    settle(it);
    return step_items(own, NULL, stream);
}
