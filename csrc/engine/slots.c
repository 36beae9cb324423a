/* Slots: who shares, and what happens when two that share are full at the same time.
 *
 * A slot notes the unit that was gathered into it last.  A gather ahead of demand goes only where
 * that unit is sharded again (sched.c); a gather on demand takes the slot from a unit that waits
 * there unused, and never from one that is full.  The gather waits for what read the full of that
 * unit last, as one of that unit would (order.h).
 *
 * Two units that share and are full together (held by unshard(), used inside each other's forward,
 * told to stay after backward) are parted where they are first met: this rank's operations are
 * waited for, then the stream that reads fulls, and the one that comes second gets memory of its
 * own.  All ranks come here at the same place of the program, so they agree on the outcome.
 */
#include "engine/slots.h"

#include <stdlib.h>

#include "base/size.h"
#include "engine/full.h"
#include "engine/order.h"
#include "engine/reduce.h"

static bool same_class(const fsdpc_slot_want *a, const fsdpc_slot_want *b)
{
    return !a->alone && !b->alone && a->bytes == b->bytes;
}

/* How many of the first `n` share a size with this one. */
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

/* Whether memory of its own is a window too, so that a transport can prepare it: granules that are
 * filled but for a little. */
static bool fills_granules(size_t bytes, size_t granule)
{
    enum { MOST_WASTED = 8 }; /* the part of it */
    return bytes > 0 && granule > 0 &&
           fsdpc_round_up(bytes, granule) - bytes <= bytes / MOST_WASTED;
}

static size_t own_bytes(size_t bytes, size_t granule)
{
    return fills_granules(bytes, granule) ? fsdpc_round_up(bytes, granule) : bytes;
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

/* ---- Memory ---- */

/* What every rank can do; ranks whose devices differ share nothing. */
static fsdpc_status agree_granule(const fsdpc_root *root, size_t *granule_out)
{
    int64_t mine = (int64_t)root->device->window_granule, ends[2] = {mine, -mine};
    FSDPC_TRY(fsdpc_comm_run(root->comm, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_REDUCE,
                                                       .unit = -1,
                                                       .what = "windows",
                                                       .dtype = FSDPC_I64,
                                                       .op = FSDPC_RED_MAX,
                                                       .send = ends,
                                                       .recv = ends,
                                                       .numel = 2}));
    *granule_out = ends[0] == -ends[1] ? (size_t)mine : 0;
    return FSDPC_OK;
}

static fsdpc_status assign(fsdpc_root *root, const bool *encloses, size_t granule)
{
    size_t n = (size_t)root->n_units;
    fsdpc_slot_want *wants = calloc(n, sizeof *wants);
    int *slots = calloc(n, sizeof *slots);
    int n_slots = 0;
    if (wants && slots) {
        for (int i = 0; i < root->n_units; i++) {
            const fsdpc_unit *unit = root->units[i];
            wants[i].bytes = unit->wire_bytes;
            wants[i].alone = i == 0 || encloses[i] || unit->rank_dependent || unit->no_alias ||
                             !unit->reshard_after_forward;
        }
        n_slots = fsdpc_slots_assign(wants, root->n_units, root->prefetch + 1, granule, slots);
        root->slot_users = calloc((size_t)n_slots + 1, sizeof(fsdpc_unit *));
        for (int i = 0; i < root->n_units; i++)
            root->units[i]->slot = slots[i];
    }
    bool done = wants && slots && root->slot_users;
    free(wants);
    free(slots);
    return done ? FSDPC_OK : fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to assign %zu units", n);
}

static const fsdpc_window *sharer(const fsdpc_unit *unit)
{
    for (int i = 0; i < unit->id && unit->slot >= 0; i++)
        if (unit->root->units[i]->slot == unit->slot)
            return unit->root->units[i]->window;
    return NULL;
}

static size_t own_slices_bytes(const fsdpc_unit_group *group)
{
    enum { ALIGN = 64 };
    return fsdpc_round_up(group->plan->shard_numel * fsdpc_dtype_bytes(group->wire_dtype), ALIGN);
}

/* The wire's memory for own slices, group behind group. */
static fsdpc_status place_own_slices(fsdpc_root *root)
{
    size_t bytes = 0;
    unsigned char *at;
    for (int i = 0; i < root->n_units; i++)
        for (int g = 0; g < root->units[i]->layout->n_groups; g++)
            bytes += own_slices_bytes(&root->units[i]->groups[g]);
    FSDPC_TRY(fsdpc_wire_own(root->wire, bytes, &at));
    for (int i = 0; i < root->n_units; i++)
        for (int g = 0; g < root->units[i]->layout->n_groups; g++) {
            fsdpc_unit_group *group = &root->units[i]->groups[g];
            group->published = at;
            at += own_slices_bytes(group);
        }
    return FSDPC_OK;
}

static fsdpc_status give_memory(fsdpc_unit *unit, size_t granule)
{
    fsdpc_device *device = unit->device;
    if (unit->no_alias)
        return FSDPC_OK; /* full.c */
    if (unit->slot < 0 && !fills_granules(unit->wire_bytes, granule))
        return fsdpc_device_alloc(device, FSDPC_MEM_WIRE, unit->wire_bytes, (void **)&unit->room);
    return fsdpc_window_create(device, FSDPC_MEM_WIRE, unit->wire_bytes, sharer(unit),
                               &unit->window);
}

/* The memory of each window, once: by the first unit that has it. */
static fsdpc_status attach(const fsdpc_root *root)
{
    for (int i = 0; i < root->n_units; i++) {
        fsdpc_unit *unit = root->units[i];
        if (unit->window && !sharer(unit))
            FSDPC_TRY(fsdpc_wire_attach(root->wire, unit->window->memory, unit->window->bytes));
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_slots_create(fsdpc_root *root, const bool *encloses)
{
    size_t granule;
    FSDPC_TRY(agree_granule(root, &granule));
    FSDPC_TRY(fsdpc_comm_agree(root->comm, assign(root, encloses, granule), "slots"));
    fsdpc_status status = place_own_slices(root);
    for (int i = 0; status == FSDPC_OK && i < root->n_units; i++)
        status = give_memory(root->units[i], granule);
    FSDPC_TRY(fsdpc_comm_agree(root->comm, status, "memory for fulls"));
    return attach(root);
}

void fsdpc_slots_give_back(fsdpc_unit *unit)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    if (unit->window) {
        (void)fsdpc_stream_sync(main); /* what reads it */
        fsdpc_wire_detach(unit->root->wire, unit->window->memory);
    }
    if (fsdpc_window_destroy(unit->window) != FSDPC_OK)
        FSDPC_WARN(&unit->root->comm->log,
                   "%zu bytes of the device stay taken: unit %s may still be read there (%s)",
                   unit->wire_bytes, unit->name, fsdpc_last_error());
    fsdpc_device_free(unit->device, unit->room);
    unit->window = NULL;
    unit->room = NULL;
    unit->slot = -1;
    for (int g = 0; g < unit->layout->n_groups; g++)
        unit->groups[g].published = NULL; /* the wire's */
}

/* ---- Turns ---- */

bool fsdpc_slot_is_free(const fsdpc_unit *unit)
{
    if (unit->slot < 0)
        return true;
    const fsdpc_unit *user = unit->root->slot_users[unit->slot];
    return !user || user == unit || user->state == FSDPC_UNIT_SHARDED;
}

static fsdpc_status part(fsdpc_unit *unit)
{
    fsdpc_root *root = unit->root;
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    for (int i = 0; i < root->n_units; i++)
        FSDPC_TRY(fsdpc_full_settle(root->units[i]));
    FSDPC_TRY(fsdpc_reduce_wait_all(root));
    fsdpc_status status = fsdpc_stream_sync(main);
    if (status == FSDPC_OK)
        status = fsdpc_window_part(unit->window);
    FSDPC_TRY(fsdpc_comm_agree(root->comm, status, "memory of its own for a unit"));
    unit->slot = -1;
    return fsdpc_wire_attach(root->wire, unit->window->memory, unit->window->bytes);
}

fsdpc_status fsdpc_slot_take(fsdpc_unit *unit)
{
    if (unit->slot < 0)
        return FSDPC_OK;
    fsdpc_unit **user = &unit->root->slot_users[unit->slot];
    if (*user && *user != unit) {
        if ((*user)->state == FSDPC_UNIT_GATHERING)
            fsdpc_full_drop(*user); /* unless it is held */
        if ((*user)->state != FSDPC_UNIT_SHARDED)
            return part(unit);
        FSDPC_TRY(fsdpc_full_settle(*user));
        if (unit->root->overlaps) /* it is overwritten as by a gather of its own */
            FSDPC_TRY(fsdpc_order_gather(*user));
    }
    *user = unit;
    return FSDPC_OK;
}
