/* Every rank counts as much as the one with most rows, so that plans and runs agree on all. */
#include "engine/factors.h"

#include "base/size.h"
#include "ops/flat_norm.h"

fsdpc_factors fsdpc_factors_of(int ndim, const size_t *shape, const fsdpc_local_shard *local)
{
    fsdpc_factors f = {0};
    if (ndim < 2 || shape[ndim - 1] == 0 || shape[ndim - 2] == 0)
        return f;
    f.rows = shape[ndim - 2];
    f.cols = shape[ndim - 1];
    f.spread = ndim == 2;
    f.n_rows = local->numel / f.cols;
    f.first_row = local->first / f.cols;
    f.n_cols = f.spread ? f.cols : local->numel / f.rows;
    f.first_col = f.spread ? 0 : local->first / f.rows;
    return f;
}

fsdpc_status fsdpc_factors_check(const fsdpc_place *place)
{
    if (place->ndim < 3 || place->numel == 0 || place->row_numel * place->shape[0] == place->numel)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                      "Adafactor needs whole matrices of '%s' on a rank, but its %zu slices do not "
                      "divide evenly and are cut inside: shard it over a divisor of %zu ranks, or "
                      "give it to another optimizer",
                      place->name, place->shape[0], place->shape[0]);
}

fsdpc_local_shard fsdpc_factors_most(const fsdpc_layout *layout, int param)
{
    fsdpc_local_shard most = {0};
    for (int rank = 0; rank < layout->ranks; rank++) {
        fsdpc_local_shard local = fsdpc_layout_local_shard(layout, param, rank);
        most.numel = fsdpc_max_size(most.numel, local.numel);
    }
    return most;
}

size_t fsdpc_factors_numel(const fsdpc_layout *layout, int param)
{
    const fsdpc_place *place = &layout->params[param];
    fsdpc_local_shard most = fsdpc_factors_most(layout, param);
    fsdpc_factors f = fsdpc_factors_of(place->ndim, place->shape, &most);
    return f.n_rows + f.n_cols;
}

size_t fsdpc_factored_chunk(const fsdpc_factors *f, size_t leaf)
{
    size_t rows = fsdpc_max_size(1, FSDPC_FACTORED_CHUNK / f->cols), step = 1;
    while (step * f->cols % leaf != 0)
        step++;
    return fsdpc_round_up(rows, step);
}

void fsdpc_factored_work_add(fsdpc_factored_work *work, int ndim, const size_t *shape,
                             const fsdpc_local_shard *local)
{
    fsdpc_factors f = fsdpc_factors_of(ndim, shape, local);
    size_t chunk = fsdpc_min_size(local->numel, FSDPC_FACTORED_CHUNK);
    work->params++;
    if (f.cols > 0) {
        size_t rows = fsdpc_factored_chunk(&f, fsdpc_layout_leaf(ndim, shape));
        chunk = fsdpc_min_size(local->numel, rows * f.cols);
    }
    work->spread_cols += f.spread ? f.cols : 0;
    work->rows = fsdpc_max_size(work->rows, f.n_rows);
    work->cols = fsdpc_max_size(work->cols, f.n_cols);
    work->chunk = fsdpc_max_size(work->chunk, chunk);
}

size_t fsdpc_factored_work_bytes(const fsdpc_factored_work *work)
{
    size_t cols = work->spread_cols + work->cols; /* sums and maxima */
    return 3 * work->params * sizeof(fsdpc_norm) + cols * (sizeof(uint64_t) + sizeof(float)) +
           (work->rows + work->cols) * (sizeof(double) + sizeof(float)) +
           work->chunk * sizeof(float);
}
