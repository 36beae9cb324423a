/* Plans a layout: bands of equal row length, cut into equal slices of whole rows.
 *
 * Why bands. FSDP2 pads every parameter to a multiple of the rank count, which inflates small
 * parameters many times over at large world sizes. A flat buffer that is cut at arbitrary positions
 * splits rows, so optimizers and checkpoints need a planner. Parameters whose rows have equal
 * length can be placed end to end and cut at any row. A band is therefore padded by less than one
 * row per rank, regardless of how many parameters it contains. A rank's shard of each parameter is
 * a run of whole rows.
 *
 * Some rows are so long that even a band wastes more than both 1 % of the unit and 65,536 elements
 * (fused three-dimensional experts, convolutions over many ranks). In such a band, parameters with
 * three or more dimensions are cut between rows of dim 1, if the length of these rows is a multiple
 * of 256. Otherwise they are cut into chunks of 256 elements, the block size of 8-bit codes. The
 * rule uses only shapes, so every rank makes the same decision.
 *
 * A 1-D parameter has rows of one element, so it is cut where torch.chunk would cut it. Alignment
 * gaps count as padding, as does the unused end of a slice. Shards and unsharded parameters include
 * the padding, but its contents never affect a parameter.
 */
#include "engine/layout.h"

#include <stdlib.h>

#include "base/size.h"

enum { PADDING_FLOOR = 65536, FINE_ROW = FSDPC_LAYOUT_BLOCK };

static size_t gcd(size_t a, size_t b)
{
    while (b) {
        size_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Returns how many rows apart parameters may begin in a band with this row length. */
static size_t start_rows(size_t row)
{
    return FSDPC_LAYOUT_ALIGN / gcd(row, FSDPC_LAYOUT_ALIGN);
}

static size_t trailing_numel(int ndim, const size_t *shape, int first_dim)
{
    size_t product = 1;
    for (int d = first_dim; d < ndim; d++)
        product *= shape[d];
    return product;
}

static size_t row_of(int ndim, const size_t *shape)
{
    if (ndim < 2 || trailing_numel(ndim, shape, 0) == 0)
        return 1;
    return trailing_numel(ndim, shape, 1);
}

static size_t finer_row_of(const fsdpc_place *place)
{
    size_t row = trailing_numel(place->ndim, place->shape, 2);
    return row % FINE_ROW == 0 && row < place->row_numel ? row : FINE_ROW;
}

/* The result depends only on the shape because norms must not depend on the number of ranks. Rows
 * may be refined at some world sizes and not at others, so the leaf size divides both the row
 * length and the chunk size. */
size_t fsdpc_layout_leaf(int ndim, const size_t *shape)
{
    size_t row = row_of(ndim, shape);
    if (row % FSDPC_LAYOUT_ALIGN == 0)
        return FSDPC_LAYOUT_ALIGN;
    return ndim >= 3 ? gcd(row, FSDPC_LAYOUT_ALIGN) : row;
}

size_t fsdpc_layout_code_row(int ndim, const size_t *shape)
{
    size_t row = row_of(ndim, shape);
    if (row % FSDPC_LAYOUT_BLOCK == 0)
        return FSDPC_LAYOUT_BLOCK;
    return ndim == 2 && row >= FSDPC_LAYOUT_ALIGN ? row : 0;
}

static fsdpc_status read_spec(const fsdpc_param_spec *spec, fsdpc_place *place)
{
    if (!fsdpc_dtype_is_float(spec->dtype) && !(spec->frozen && spec->dtype == FSDPC_U8))
        return fsdpc_fail(FSDPC_ERR_DTYPE,
                          "parameter '%s' is %s; only floating point parameters and frozen bytes "
                          "(uint8) can be sharded: register it as a buffer instead",
                          spec->name, fsdpc_dtype_name(spec->dtype));
    if (spec->ndim < 0 || spec->ndim > FSDPC_LAYOUT_MAX_DIMS)
        return fsdpc_fail(FSDPC_ERR_SHAPE,
                          "parameter '%s' has %d dimensions; at most %d are supported", spec->name,
                          spec->ndim, FSDPC_LAYOUT_MAX_DIMS);
    place->dtype = spec->dtype;
    place->ndim = spec->ndim;
    place->numel = 1;
    for (int d = 0; d < spec->ndim; d++) {
        place->shape[d] = spec->shape[d];
        FSDPC_TRY(fsdpc_mul_size(place->numel, spec->shape[d], &place->numel));
    }
    place->row_numel = row_of(place->ndim, place->shape);
    place->code_row =
        spec->dtype == FSDPC_U8 ? 0 : fsdpc_layout_code_row(place->ndim, place->shape);
    place->band = -1; /* not placed yet */
    place->name = strdup(spec->name);
    if (!place->name)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the layout");
    return FSDPC_OK;
}

static bool same_band(const fsdpc_place *a, const fsdpc_place *b)
{
    return a->group == b->group && a->row_numel == b->row_numel && a->code_row == b->code_row;
}

/* Returns the number of rows in the band of `first`, with aligned starts; *real_out is its element
 * count without padding.
 */
static size_t band_rows(const fsdpc_layout *layout, const fsdpc_place *first, size_t *real_out)
{
    size_t rows = 0, real = 0, step = start_rows(first->row_numel);
    for (int i = 0; i < layout->n_params; i++) {
        const fsdpc_place *place = &layout->params[i];
        if (!same_band(first, place))
            continue;
        rows = fsdpc_round_up(rows, step) + fsdpc_ceil_div(place->numel, place->row_numel);
        real += place->numel;
    }
    *real_out = real;
    return rows;
}

/* Removes parameters of three or more dimensions from bands that pad too much. Each pass makes
 * rows strictly finer, so the loop ends. */
static void refine_rows(fsdpc_layout *layout)
{
    for (bool again = true; again;) {
        again = false;
        for (int i = 0; i < layout->n_params; i++) {
            fsdpc_place *first = &layout->params[i];
            if (first->ndim < 3 || first->row_numel <= FINE_ROW)
                continue;
            size_t real, rows = band_rows(layout, first, &real);
            size_t slice = fsdpc_ceil_div(rows, (size_t)layout->ranks) * first->row_numel;
            size_t padding = slice * (size_t)layout->ranks - real;
            if (padding <= PADDING_FLOOR || padding * 100 <= layout->real_numel)
                continue;
            fsdpc_place key = *first;
            for (int j = i; j < layout->n_params; j++) {
                fsdpc_place *place = &layout->params[j];
                if (same_band(&key, place) && place->ndim >= 3)
                    place->row_numel = finer_row_of(place);
            }
            again = true;
        }
    }
}

/* Places every parameter before `end` that belongs to the band opened by `first`, and closes the
 * band. */
static void place_band(fsdpc_layout *layout, fsdpc_group *group, int first, int end)
{
    fsdpc_place key = layout->params[first];
    fsdpc_slice *band = &group->bands[group->n_bands];
    size_t ranks = (size_t)layout->ranks, row = key.row_numel, rows = 0;
    size_t align = row % FSDPC_LAYOUT_BLOCK == 0 ? FSDPC_LAYOUT_BLOCK : FSDPC_LAYOUT_ALIGN;
    group->aligns[group->n_bands] = align;
    band->unsharded_offset = fsdpc_round_up(group->unsharded_numel, align);
    band->shard_offset = fsdpc_round_up(group->shard_numel, align);
    band->row = key.code_row;
    for (int i = first; i < end; i++) {
        fsdpc_place *place = &layout->params[i];
        if (place->band != -1 || !same_band(&key, place))
            continue;
        rows = fsdpc_round_up(rows, start_rows(row));
        place->unsharded_offset = band->unsharded_offset + rows * row;
        place->band = (int)group->n_bands;
        rows += fsdpc_ceil_div(place->numel, row);
    }
    band->numel = fsdpc_ceil_div(rows, ranks) * row;
    group->unsharded_numel = band->unsharded_offset + ranks * band->numel;
    group->shard_numel = band->shard_offset + band->numel;
    group->n_bands++;
}

/* Adds the groups for trainable parameters, frozen ones, or frozen bytes. */
static fsdpc_status add_groups(fsdpc_layout *layout, const fsdpc_param_spec *specs, bool frozen,
                               bool bytes)
{
    int first = layout->n_groups;
    for (int i = 0; i < layout->n_params; i++) {
        fsdpc_place *place = &layout->params[i];
        int g = first;
        if (specs[i].frozen != frozen || (specs[i].dtype == FSDPC_U8) != bytes)
            continue;
        while (g < layout->n_groups && layout->groups[g].dtype != place->dtype)
            g++;
        place->group = g;
        if (g < layout->n_groups)
            continue;
        layout->groups[g].dtype = place->dtype;
        layout->groups[g].frozen = frozen;
        layout->groups[g].bands = calloc((size_t)layout->n_params, sizeof(fsdpc_slice));
        layout->groups[g].aligns = calloc((size_t)layout->n_params, sizeof(size_t));
        layout->n_groups++;
        if (!layout->groups[g].bands || !layout->groups[g].aligns)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the layout");
    }
    return FSDPC_OK;
}

static fsdpc_status make_groups(fsdpc_layout *layout, const fsdpc_param_spec *specs)
{
    FSDPC_TRY(add_groups(layout, specs, false, false));
    layout->n_trained = layout->n_groups;
    FSDPC_TRY(add_groups(layout, specs, true, false));
    return add_groups(layout, specs, true, true);
}

fsdpc_status fsdpc_layout_create(const fsdpc_param_spec *specs, int n_specs, int ranks,
                                 bool band_per_param, fsdpc_layout **out)
{
    if (ranks < 1)
        return fsdpc_fail(FSDPC_ERR_VALUE, "a layout needs at least one rank, got %d", ranks);
    fsdpc_status status = FSDPC_OK;
    fsdpc_layout *layout = calloc(1, sizeof *layout);
    size_t slots = n_specs > 0 ? (size_t)n_specs : 1;
    if (layout) {
        layout->ranks = ranks;
        layout->params = calloc(slots, sizeof *layout->params);
        layout->groups = calloc(slots, sizeof *layout->groups);
    }
    if (!layout || !layout->params || !layout->groups) {
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the layout of %d parameters", n_specs);
        goto destroy;
    }
    for (int i = 0; i < n_specs; i++) {
        layout->n_params = i + 1;
        FSDPC_TRY_GOTO(status, read_spec(&specs[i], &layout->params[i]), destroy);
        layout->real_numel += layout->params[i].numel;
    }
    FSDPC_TRY_GOTO(status, make_groups(layout, specs), destroy);
    if (!band_per_param)
        refine_rows(layout);
    for (int i = 0; i < n_specs; i++) {
        fsdpc_place *place = &layout->params[i];
        int end = band_per_param ? i + 1 : n_specs;
        if (place->band < 0)
            place_band(layout, &layout->groups[place->group], i, end);
        place->leaf_numel = fsdpc_layout_leaf(place->ndim, place->shape);
    }
    *out = layout;
    return FSDPC_OK;

destroy:
    fsdpc_layout_destroy(layout);
    return status;
}

void fsdpc_layout_destroy(fsdpc_layout *layout)
{
    if (!layout)
        return;
    for (int i = 0; layout->params && i < layout->n_params; i++)
        free(layout->params[i].name);
    for (int g = 0; layout->groups && g < layout->n_groups; g++) {
        free(layout->groups[g].bands);
        free(layout->groups[g].aligns);
    }
    free(layout->params);
    free(layout->groups);
    free(layout);
}

fsdpc_local_shard fsdpc_layout_local_shard(const fsdpc_layout *layout, int param, int rank)
{
    const fsdpc_place *place = &layout->params[param];
    const fsdpc_slice *band = &layout->groups[place->group].bands[place->band];
    fsdpc_local_shard local = {0, 0, band->shard_offset};
    size_t slice_begin = band->unsharded_offset + (size_t)rank * band->numel;
    size_t slice_end = slice_begin + band->numel;
    size_t begin = fsdpc_max_size(place->unsharded_offset, slice_begin);
    size_t end = fsdpc_min_size(place->unsharded_offset + place->numel, slice_end);
    if (begin >=
        end) { /* an empty local shard still reports the element before which it would begin */
        local.first = slice_begin > place->unsharded_offset ? place->numel : 0;
        return local;
    }
    local.first = begin - place->unsharded_offset;
    local.numel = end - begin;
    local.shard_offset = band->shard_offset + (begin - slice_begin);
    return local;
}
