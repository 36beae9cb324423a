/* Unsharded parameters that gathers fill by moving bytes, in shared slots or in a unit's own memory
 * (slots.h).
 *
 * A slot records which unit was last gathered into it. A gather ahead of demand may use a slot only
 * if that unit has been resharded (sched.c). A gather on demand may also evict a unit that was
 * gathered but not used, but never an unsharded one. The gather waits for the last read of the
 * previous unit's parameters, just as the previous unit's next gather would (order.h).
 *
 * Two units that share a slot may need to be unsharded at the same time (held by unshard(), nested
 * in forward, kept unsharded after backward). The first time that happens, they are separated. The
 * rank waits for its own operations, then for the stream that reads unsharded parameters, and gives
 * the second unit separate memory at the same address. All ranks do this at the same point in the
 * program, so they agree on the result.
 */
#include <stdlib.h>

#include "engine/unsharded.h"
#include "engine/order.h"
#include "engine/reduce.h"
#include "engine/slots.h"

/* ---- Memory ---- */

/* Agrees on a granule that all ranks support; if their devices' granules differ, units share
 * nothing. */
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
    int n_slots = 0;
    if (wants) {
        for (int i = 0; i < root->n_units; i++) {
            const fsdpc_unit *unit = root->units[i];
            wants[i].bytes = unit->param_buffer_bytes;
            wants[i].unshared = fsdpc_unit_owns_unsharded(&unit->settings, encloses[i]);
        }
        n_slots = fsdpc_slots_assign(wants, root->n_units, root->model->prefetch + 1, granule);
        root->slot_users = calloc((size_t)n_slots + 1, sizeof(fsdpc_unit *));
        for (int i = 0; i < root->n_units; i++)
            root->units[i]->slot = wants[i].slot;
    }
    bool done = wants && root->slot_users;
    free(wants);
    return done ? FSDPC_OK : fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to assign %zu units", n);
}

static const fsdpc_window *sharer(const fsdpc_unit *unit)
{
    for (int i = 0; unit->root->units[i] != unit && unit->slot >= 0; i++)
        if (unit->root->units[i]->slot == unit->slot)
            return unit->root->units[i]->window;
    return NULL;
}

static fsdpc_status give_memory(fsdpc_unit *unit, size_t granule)
{
    fsdpc_device *device = unit->device;
    if (unit->slot < 0 && !fsdpc_slots_is_windowed(unit->param_buffer_bytes, granule))
        return fsdpc_device_alloc(device, FSDPC_MEM_UNSHARDED, unit->param_buffer_bytes,
                                  (void **)&unit->room);
    return fsdpc_window_create(device, FSDPC_MEM_UNSHARDED, unit->param_buffer_bytes, sharer(unit),
                               &unit->window);
}

/* Attaches each window's memory once, for the first unit that uses it. */
static fsdpc_status attach(const fsdpc_root *root)
{
    for (int i = 0; i < root->n_units; i++) {
        fsdpc_unit *unit = root->units[i];
        if (unit->window && !sharer(unit))
            FSDPC_TRY(fsdpc_param_buffer_attach(root->param_buffer, unit->window->memory,
                                                unit->window->bytes));
    }
    return FSDPC_OK;
}

static fsdpc_status create(fsdpc_root *root, const bool *encloses)
{
    size_t granule;
    FSDPC_TRY(agree_granule(root, &granule));
    FSDPC_TRY(fsdpc_comm_agree(root->comm, assign(root, encloses, granule), "slots"));
    fsdpc_status status = fsdpc_unsharded_own_slices(root);
    for (int i = 0; status == FSDPC_OK && i < root->n_units; i++)
        status = give_memory(root->units[i], granule);
    FSDPC_TRY(fsdpc_comm_agree(root->comm, status, "memory for unsharded parameters"));
    return attach(root);
}

static fsdpc_status place(fsdpc_unit *unit, fsdpc_unit_group *group)
{
    size_t offset = fsdpc_unsharded_offset(unit, group);
    group->unsharded = (unit->window ? unit->window->address : unit->room) + offset;
    group->target = (unit->window ? unit->window->memory : unit->room) + offset;
    return FSDPC_OK;
}

static void give_back(fsdpc_unit *unit)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    if (unit->window) {
        (void)fsdpc_stream_sync(main); /* work that reads it */
        fsdpc_param_buffer_detach(unit->root->param_buffer, unit->window->memory);
    }
    if (fsdpc_window_destroy(unit->window) != FSDPC_OK)
        FSDPC_WARN(&unit->root->comm->log,
                   "%zu bytes of the device stay taken: unit %s may still be read there (%s)",
                   unit->param_buffer_bytes, unit->name, fsdpc_last_error());
    fsdpc_device_free(unit->device, unit->room);
    unit->window = NULL;
    unit->room = NULL;
    unit->slot = -1;
}

/* ---- Turns ---- */

static bool has_room(const fsdpc_unit *unit)
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
        FSDPC_TRY(fsdpc_unsharded_settle(root->units[i]));
    FSDPC_TRY(fsdpc_reduce_wait_all(root));
    fsdpc_status status = fsdpc_stream_sync(main);
    if (status == FSDPC_OK)
        status = fsdpc_window_part(unit->window);
    FSDPC_TRY(fsdpc_comm_agree(root->comm, status, "memory of its own for a unit"));
    unit->slot = -1;
    for (int g = 0; g < unit->layout->n_groups; g++)
        FSDPC_TRY(place(unit, &unit->groups[g])); /* at the same address, in different memory */
    return fsdpc_param_buffer_attach(root->param_buffer, unit->window->memory, unit->window->bytes);
}

static fsdpc_status make_room(fsdpc_unit *unit)
{
    if (unit->slot < 0)
        return FSDPC_OK;
    fsdpc_unit **user = &unit->root->slot_users[unit->slot];
    if (*user && *user != unit) {
        if ((*user)->state == FSDPC_UNIT_GATHERING)
            fsdpc_unsharded_drop(*user); /* unless it is held */
        if ((*user)->state != FSDPC_UNIT_SHARDED)
            return part(unit);
        FSDPC_TRY(fsdpc_unsharded_settle(*user));
        FSDPC_TRY(fsdpc_order_gather(*user)); /* the unit is overwritten, as by its own gather */
    }
    *user = unit;
    return FSDPC_OK;
}

const fsdpc_unsharded_ops fsdpc_unsharded_slots = {
    .name = "slots",
    .create = create,
    .place = place,
    .remove = give_back,
    .has_room = has_room,
    .make_room = make_room,
};
