/* Decides who shares: units of the same size take turns if that needs less memory than one full
 * each. */
#include "engine/slots.h"

#include "base/size.h"

static bool same_class(const fsdpc_slot_want *a, const fsdpc_slot_want *b)
{
    return !a->alone && !b->alone && a->bytes == b->bytes;
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

int fsdpc_slots_assign(const fsdpc_slot_want *wants, int n, int per_class, size_t granule,
                       int *slots_out)
{
    int n_slots = 0;
    size_t each = (size_t)per_class;
    for (int i = 0; i < n; i++) {
        const fsdpc_slot_want *want = &wants[i];
        slots_out[i] = -1;
        if (want->alone || want->bytes == 0 || granule == 0)
            continue;
        size_t all = members(wants, n, want), before = members(wants, i, want);
        if (all <= each || each * fsdpc_round_up(want->bytes, granule) >= all * want->bytes)
            continue; /* sharing would save nothing */
        if (before == 0) {
            slots_out[i] = n_slots;
            n_slots += per_class;
        } else {
            slots_out[i] = slots_out[first_member(wants, i)] + (int)(before % each);
        }
    }
    return n_slots;
}

bool fsdpc_slots_is_windowed(size_t bytes, size_t granule)
{
    enum { MOST_WASTED = 8 }; /* at most one part in 8 */
    return bytes > 0 && granule > 0 &&
           fsdpc_round_up(bytes, granule) - bytes <= bytes / MOST_WASTED;
}

static size_t own_bytes(size_t bytes, size_t granule)
{
    return fsdpc_slots_is_windowed(bytes, granule) ? fsdpc_round_up(bytes, granule) : bytes;
}

size_t fsdpc_slots_bytes(const fsdpc_slot_want *wants, int n, int per_class, size_t granule,
                         const int *slots)
{
    size_t bytes = 0;
    for (int i = 0; i < n; i++) {
        if (slots[i] < 0)
            bytes += own_bytes(wants[i].bytes, granule);
        else if (first_member(wants, i) == i)
            bytes += (size_t)per_class * fsdpc_round_up(wants[i].bytes, granule);
    }
    return bytes;
}
