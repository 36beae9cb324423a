/* As full_shared.c, over a wire that lies in a file: the kernel brings pages when they are read, and
 * takes them away when memory is short.  A gather asks for them ahead.
 */
#include <sys/mman.h>

#include "engine/full.h"

static fsdpc_status make_room(fsdpc_unit *unit)
{
    for (int g = 0; g < unit->layout->n_groups; g++)
        (void)madvise(unit->groups[g].full, fsdpc_full_bytes(&unit->groups[g]), MADV_WILLNEED);
    return FSDPC_OK; /* a kernel that does not take the hint reads later */
}

const fsdpc_full_ops fsdpc_full_file = {
    .name = "file", .place = fsdpc_full_place_in_wire, .make_room = make_room};
