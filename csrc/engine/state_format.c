/* Lays out side arrays band by band.
 *
 * All coded parameters of a band have the same code row, because they have the same row length. The
 * band's maxima are therefore indexed like its slice, and parameters that are not coded follow. A
 * band without coded parameters has its fp32 states indexed like its slice.
 */
#include "engine/state_format.h"

#include "base/size.h"
#include "ops/block_code.h"

static size_t code_row_of(const fsdpc_state_format *format, const fsdpc_place *place)
{
    if (format->dtype != FSDPC_U8 || place->dtype == FSDPC_F64 ||
        place->numel < format->min_coded_numel)
        return 0;
    return fsdpc_layout_code_row(place->ndim, place->shape);
}

/* Returns the code row of a band's coded parameters, or 0 if it has none. */
static size_t band_code_row(const fsdpc_state_format *format, const fsdpc_layout *layout, int group,
                            int band)
{
    size_t row = 0;
    for (int i = 0; i < layout->n_params && row == 0; i++) {
        const fsdpc_place *place = &layout->params[i];
        if (place->group == group && place->band == band)
            row = code_row_of(format, place);
    }
    return row;
}

/* Returns the index at which the next band begins. */
static size_t lay_out_band(const fsdpc_state_format *format, const fsdpc_layout *layout, int group,
                           int band, int rank, size_t begin, fsdpc_state_place *places)
{
    const fsdpc_slice *slice = &layout->groups[group].bands[band];
    size_t row = band_code_row(format, layout, group, band);
    size_t end = begin + (row ? fsdpc_code_blocks(slice->numel, row) : slice->numel);
    for (int i = 0; i < layout->n_params; i++) {
        const fsdpc_place *place = &layout->params[i];
        if (place->group != group || place->band != band)
            continue;
        fsdpc_state_place own = {.code_row = code_row_of(format, place)};
        fsdpc_local_shard local = fsdpc_layout_local_shard(layout, i, rank);
        if (own.code_row) {
            own.side = begin + fsdpc_code_blocks(local.shard_offset - slice->shard_offset, row);
        } else if (row == 0) {
            own.side = begin - slice->shard_offset;
        } else {
            own.side = end - local.shard_offset;
            end += fsdpc_min_size(place->numel, slice->numel);
        }
        if (places)
            places[i] = own;
    }
    return fsdpc_round_up(end, 64 / sizeof(float));
}

size_t fsdpc_state_side(const fsdpc_state_format *format, const fsdpc_layout *layout, int group,
                        int rank, fsdpc_state_place *places)
{
    size_t end = 0;
    bool coded = false;
    for (int i = 0; i < layout->n_params; i++) {
        const fsdpc_place *place = &layout->params[i];
        if (place->group != group)
            continue;
        coded |= code_row_of(format, place) > 0;
        if (places)
            places[i] = (fsdpc_state_place){0};
    }
    for (size_t b = 0; coded && b < layout->groups[group].n_bands; b++)
        end = lay_out_band(format, layout, group, (int)b, rank, end, places);
    return end;
}
