/* Works like unsharded_shared.c, but the parameter buffer is in a file: the kernel loads pages when
 * they are read and evicts them when memory is short. A gather prefetches them.
 *
 * Each rank keeps the CRC-32C of its own slices and checks it at every gather, since the kernel may
 * have read pages again. All ranks gather every unit, and the ranks of a host share the same pages,
 * so together they check the whole file. If a rank's slices have changed, that rank fails, which
 * makes the step fail on all ranks.
 */
#include <stdio.h>
#include <sys/mman.h>

#include "base/crc32c.h"
#include "engine/unsharded.h"
#include "tier/tier.h"

enum { TEXT_BYTES = 512 };

static fsdpc_status make_room(fsdpc_unit *unit)
{
    for (int g = 0; g < unit->layout->n_groups; g++)
        (void)madvise(unit->groups[g].unsharded, fsdpc_unsharded_bytes(&unit->groups[g]),
                      MADV_WILLNEED);
    return FSDPC_OK; /* if the kernel ignores the hint, it reads pages later */
}

static uint32_t crc_of(const fsdpc_unit *unit)
{
    uint32_t crc = 0;
    for (int g = 0; g < unit->layout->n_groups; g++) {
        const fsdpc_unit_group *group = &unit->groups[g];
        for (size_t i = 0; i < group->plan->n_bands; i++) {
            const fsdpc_slice *band = &group->plan->bands[i];
            crc =
                fsdpc_crc32c(crc, fsdpc_unsharded_own_slice(unit, group, band, band->shard_offset),
                             band->numel * fsdpc_dtype_bytes(group->param_dtype));
        }
    }
    return crc;
}

static void seal(fsdpc_unit *unit)
{
    unit->copied_in_crc = crc_of(unit);
}

static fsdpc_status compare(fsdpc_unit *unit)
{
    const fsdpc_root *root = unit->root;
    uint32_t crc = crc_of(unit);
    if (crc == unit->copied_in_crc) /* known, since the first epoch copies in every unit */
        return FSDPC_OK;
    char text[TEXT_BYTES];
    snprintf(text, sizeof text,
             "rank %d's params of unit '%s', in '%s', are not what was written there: CRC-32C "
             "%08x, it was %08x; the disk is damaged, or something wrote to it",
             root->comm->rank, unit->name, fsdpc_tier_path(unit->offload.tier), crc,
             unit->copied_in_crc);
    fsdpc_root_abort(root, text); /* peers may already have read them */
    return fsdpc_fail(FSDPC_ERR_OS, "%s", text);
}

const fsdpc_unsharded_ops fsdpc_unsharded_file = {.name = "file",
                                                  .place = fsdpc_unsharded_place_in_param_buffer,
                                                  .make_room = make_room,
                                                  .reveal = compare,
                                                  .seal = seal};
