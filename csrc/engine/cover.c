/* If all bands are covered, nothing is skipped and the array is as long as the shard. */
#include "engine/cover.h"

#include "base/size.h"

static bool is_covered(const fsdpc_layout *layout, int group, int band, const bool *wanted)
{
    for (int i = 0; i < layout->n_params; i++) {
        const fsdpc_place *place = &layout->params[i];
        if (wanted[i] && place->group == group && place->band == band)
            return true;
    }
    return false;
}

size_t fsdpc_cover(const fsdpc_layout *layout, int group, const bool *wanted, size_t *skips_out)
{
    const fsdpc_group *plan = &layout->groups[group];
    size_t numel = 0;
    for (int b = 0; b < (int)plan->n_bands; b++) {
        const fsdpc_slice *band = &plan->bands[b];
        size_t skip = FSDPC_COVER_NONE;
        if (is_covered(layout, group, b, wanted)) {
            numel = fsdpc_round_up(numel, plan->aligns[b]);
            skip = band->shard_offset - numel;
            numel += band->numel;
        }
        for (int i = 0; i < layout->n_params; i++)
            if (layout->params[i].group == group && layout->params[i].band == b)
                skips_out[i] = skip;
    }
    return numel;
}
