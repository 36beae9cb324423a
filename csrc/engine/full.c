/* Fulls: shared memory mapped read-only, memory that gathers write, or private pages in no-alias
 * mode.
 *
 * Private memory is whole pages of an ordinary block that is two pages larger, so that its bytes
 * are counted and nothing else lies on a page that is protected.  A device that cannot protect
 * memory fills it with NaN all the same: there a read too early or too late is a NaN, not a death.
 */
#include "engine/full.h"

#include <unistd.h>

#include "base/fault.h"
#include "base/size.h"
#include "engine/acts.h"
#include "engine/order.h"

size_t fsdpc_full_bytes(const fsdpc_unit_group *group)
{
    return group->plan->full_numel * fsdpc_dtype_bytes(group->wire_dtype);
}

static size_t offset_in_unit(const fsdpc_unit *unit, const fsdpc_unit_group *group)
{
    return group->wire_offset - unit->groups[0].wire_offset;
}

unsigned char *fsdpc_full_target(const fsdpc_unit *unit, const fsdpc_unit_group *group)
{
    return unit->window ? unit->window->memory + offset_in_unit(unit, group) : group->full;
}

unsigned char *fsdpc_full_published(const fsdpc_unit *unit, const fsdpc_unit_group *group,
                                    const fsdpc_slice *band, size_t at)
{
    size_t element = fsdpc_dtype_bytes(group->wire_dtype);
    if (group->published)
        return group->published + at * element;
    return unit->root->wire->write + group->wire_offset +
           fsdpc_slice_full(band, fsdpc_unit_rank(unit), at) * element;
}

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static fsdpc_status protect(fsdpc_unit *unit, fsdpc_unit_group *group, fsdpc_access access)
{
    return fsdpc_device_protect(unit->device, group->full,
                                fsdpc_round_up(fsdpc_full_bytes(group), page_bytes()), access);
}

/* Runs in the handler of a fault: only reads. */
static const char *name_at(const void *owner, const void *address)
{
    const fsdpc_unit *unit = owner;
    uintptr_t at = (uintptr_t)address;
    for (int p = 0; p < unit->layout->n_params; p++) {
        const fsdpc_place *place = &unit->layout->params[p];
        const fsdpc_unit_group *group = &unit->groups[place->group];
        size_t element = fsdpc_dtype_bytes(group->wire_dtype);
        uintptr_t begin = (uintptr_t)group->full + place->full_offset * element;
        if (at >= begin && at - begin < place->numel * element)
            return place->name;
    }
    return NULL; /* padding */
}

static fsdpc_status place_privately(fsdpc_unit *unit, fsdpc_unit_group *group)
{
    size_t page = page_bytes(), bytes = fsdpc_round_up(fsdpc_full_bytes(group), page);
    FSDPC_TRY(fsdpc_device_alloc(unit->device, FSDPC_MEM_OTHER, bytes + page, &group->own_block));
    group->full = (unsigned char *)fsdpc_round_up((size_t)group->own_block, page);
    FSDPC_TRY(fsdpc_device_fill(unit->device, group->full, 0xff, bytes, NULL));
    return protect(unit, group, FSDPC_ACCESS_NONE);
}

fsdpc_status fsdpc_full_place(fsdpc_root *root, fsdpc_unit *unit)
{
    for (int g = 0; g < unit->layout->n_groups; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        if (unit->no_alias)
            FSDPC_TRY(place_privately(unit, group));
        else if (root->wire->moved)
            group->full =
                (unit->window ? unit->window->address : unit->room) + offset_in_unit(unit, group);
        else
            group->full = (unsigned char *)root->wire->read + group->wire_offset;
        fsdpc_fault_watch(&(fsdpc_fault_range){.begin = group->full,
                                               .bytes = fsdpc_full_bytes(group),
                                               .rank = root->comm->world_rank,
                                               .unit = unit->name,
                                               .owner = unit,
                                               .name = name_at});
    }
    return FSDPC_OK;
}

void fsdpc_full_remove(fsdpc_unit *unit)
{
    for (int g = 0; g < unit->layout->n_groups; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        fsdpc_fault_unwatch(group->full, unit);
        if (group->own_block && protect(unit, group, FSDPC_ACCESS_WRITE) == FSDPC_OK)
            fsdpc_device_free(unit->device, group->own_block);
        group->full = NULL;
        group->own_block = NULL;
    }
}

fsdpc_status fsdpc_full_reveal(fsdpc_unit *unit)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    bool copies = unit->no_alias && !unit->root->wire->moved;
    for (int g = 0; copies && g < unit->layout->n_groups; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        FSDPC_TRY(protect(unit, group, FSDPC_ACCESS_WRITE));
        FSDPC_TRY(fsdpc_device_copy(unit->device, group->full,
                                    unit->root->wire->read + group->wire_offset,
                                    fsdpc_full_bytes(group), main));
        FSDPC_TRY(protect(unit, group, FSDPC_ACCESS_READ));
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_full_settle(fsdpc_unit *unit)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    for (int g = 0; g < unit->layout->n_groups; g++)
        FSDPC_TRY(fsdpc_comm_order(&unit->groups[g].gather, main));
    return FSDPC_OK;
}

/* Giving up cannot fail; where the kernel has no memory for a split mapping, or the device cannot
 * take the fill, the full stays as it is, readable. */
static void hide(fsdpc_unit *unit)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    for (int g = 0; unit->no_alias && g < unit->layout->n_groups; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        if (protect(unit, group, FSDPC_ACCESS_WRITE) != FSDPC_OK)
            continue;
        (void)fsdpc_device_fill(unit->device, group->full, 0xff, /* a NaN in every float dtype */
                                fsdpc_full_bytes(group), main);
        protect(unit, group, FSDPC_ACCESS_NONE);
    }
}

void fsdpc_full_drop(fsdpc_unit *unit)
{
    if (unit->state == FSDPC_UNIT_SHARDED || unit->held)
        return;
    bool read = unit->state == FSDPC_UNIT_FULL;
    unit->state = FSDPC_UNIT_SHARDED;
    fsdpc_root_trace(unit, FSDPC_TRACE_RESHARD, 0, unit->root->in_backward);
    hide(unit);
    if (read && unit->root->overlaps)
        fsdpc_order_released(unit);
}
