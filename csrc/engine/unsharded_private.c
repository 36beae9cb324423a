/* No-alias mode: unsharded parameters in private pages that are readable only while the unit is
 * UNSHARDED.
 *
 * This is slower, but a read that comes too early or too late ends the process at once. The pages
 * are inside an ordinary block that is two pages larger, so their bytes are counted and the
 * protected pages contain nothing else. If the device cannot protect memory, the pages are filled
 * with NaN, so that any read that comes too early or too late returns NaN.
 *
 * If ranks share a parameter buffer, reveal copies from it; otherwise gathers write the pages.
 */
#include <unistd.h>

#include "base/size.h"
#include "engine/unsharded.h"

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static fsdpc_status protect(fsdpc_unit *unit, fsdpc_unit_group *group, fsdpc_access access)
{
    return fsdpc_device_protect(unit->device, group->unsharded,
                                fsdpc_round_up(fsdpc_unsharded_bytes(group), page_bytes()), access);
}

static fsdpc_status create(fsdpc_root *root, const bool *encloses)
{
    (void)encloses;
    if (!root->param_buffer->offsets_only)
        return FSDPC_OK;
    return fsdpc_comm_agree(root->comm, fsdpc_unsharded_own_slices(root),
                            "memory for unsharded parameters");
}

static fsdpc_status place(fsdpc_unit *unit, fsdpc_unit_group *group)
{
    size_t page = page_bytes(), bytes = fsdpc_round_up(fsdpc_unsharded_bytes(group), page);
    FSDPC_TRY(fsdpc_device_alloc(unit->device, FSDPC_MEM_OTHER, bytes + page, &group->own_block));
    group->unsharded = (unsigned char *)fsdpc_round_up((size_t)group->own_block, page);
    group->target = unit->root->param_buffer->offsets_only ? group->unsharded : NULL;
    FSDPC_TRY(fsdpc_device_fill(unit->device, group->unsharded, 0xff, bytes, NULL));
    FSDPC_TRY(fsdpc_unit_join_param_buffer(unit, group, unit->root->param_buffer));
    return protect(unit, group, FSDPC_ACCESS_NONE);
}

static void remove_pages(fsdpc_unit *unit)
{
    fsdpc_unit_leave_param_buffer(unit);
    for (int g = 0; g < unit->layout->n_groups; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        if (group->own_block && protect(unit, group, FSDPC_ACCESS_WRITE) == FSDPC_OK)
            fsdpc_device_free(unit->device, group->own_block);
        group->own_block = NULL;
    }
}

static fsdpc_status reveal(fsdpc_unit *unit)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    const fsdpc_param_buffer *param_buffer = unit->root->param_buffer;
    for (int g = 0; !param_buffer->offsets_only && g < unit->layout->n_groups; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        FSDPC_TRY(protect(unit, group, FSDPC_ACCESS_WRITE));
        FSDPC_TRY(fsdpc_device_copy(unit->device, group->unsharded,
                                    param_buffer->read + group->param_buffer_offset,
                                    fsdpc_unsharded_bytes(group), main));
        FSDPC_TRY(protect(unit, group, FSDPC_ACCESS_READ));
    }
    return FSDPC_OK;
}

/* If the kernel lacks memory to split the mapping, or the device cannot run the fill, the pages
 * stay readable and keep their contents. */
static void hide(fsdpc_unit *unit)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    for (int g = 0; g < unit->layout->n_groups; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        if (protect(unit, group, FSDPC_ACCESS_WRITE) != FSDPC_OK)
            continue;
        (void)fsdpc_device_fill(unit->device, group->unsharded,
                                0xff, /* a NaN in every float dtype */
                                fsdpc_unsharded_bytes(group), main);
        protect(unit, group, FSDPC_ACCESS_NONE);
    }
}

const fsdpc_unsharded_ops fsdpc_unsharded_private = {
    .name = "private",
    .create = create,
    .place = place,
    .remove = remove_pages,
    .reveal = reveal,
    .hide = hide,
};
