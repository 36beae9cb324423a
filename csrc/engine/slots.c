/* Decides which units share memory: units of the same size take turns if that takes less memory
 * than giving each its own slot. */
#include "engine/slots.h"

#include "base/size.h"

static bool same_class(const fsdpc_slot_want *a, const fsdpc_slot_want *b)
{
    return !a->unshared && !b->unshared && a->bytes == b->bytes;
}

/* Returns how many of the first `n` units are the same size as this one. */
static size_t members(const fsdpc_slot_want *wants, int n, const fsdpc_slot_want *one)
{
    size_t count = 0;
    for (int i = 0; i < n; i++)
        count += same_class(&wants[i], one);
    return count;
}

static int first_member(const fsdpc_slot_want *wants, int i)
{
    int first = 0;
    while (!same_class(&wants[first], &wants[i]))
        first++;
    return first;
}

bool fsdpc_slots_is_windowed(size_t bytes, size_t granule)
{
    enum { MOST_WASTED = 8 }; /* at most one part in 8 */
    return bytes > 0 && granule > 0 &&
           fsdpc_round_up(bytes, granule) - bytes <= bytes / MOST_WASTED;
}

int fsdpc_slots_assign(fsdpc_slot_want *wants, int n, int per_class, size_t granule)
{
    int n_slots = 0;
    size_t each = (size_t)per_class;
    for (int i = 0; i < n; i++) {
        fsdpc_slot_want *want = &wants[i];
        size_t whole = granule ? fsdpc_round_up(want->bytes, granule) : want->bytes;
        want->slot = -1;
        want->block_bytes = fsdpc_slots_is_windowed(want->bytes, granule) ? whole : want->bytes;
        want->n_blocks = 1;
        if (want->unshared || want->bytes == 0 || granule == 0)
            continue;
        size_t all = members(wants, n, want), before = members(wants, i, want);
        if (all <= each || each * whole >= all * want->bytes)
            continue; /* sharing would save nothing */
        want->block_bytes = whole;
        want->n_blocks = before == 0 ? per_class : 0;
        if (before == 0) {
            want->slot = n_slots;
            n_slots += per_class;
        } else {
            want->slot = wants[first_member(wants, i)].slot + (int)(before % each);
        }
    }
    return n_slots;
}
