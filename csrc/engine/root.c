/* Roots: one wire for all units, and the epochs that keep it true to the masters.
 *
 * The protocol is explained in docs/design.md, section 3, and modelled in tests/model.  In short: a
 * rank that arrives has finished with everything it read in earlier epochs, so once all have
 * arrived nobody reads, and whoever changed masters may write.  If nobody did, all go on at once.
 *
 * An optimizer's epoch always changes.  It publishes without waiting for the others to have
 * published: the next reader begins an epoch of its own, and a rank arrives there only after it
 * published here, so waiting for that arrival is enough.
 *
 * Memory: the wire holds the fulls of all units end to end, each group on a page boundary.  Reduce
 * buffers are sized for the largest unit that uses them.
 */
#include "engine/root.h"

#include <stdlib.h>
#include <string.h>

#include "base/size.h"
#include "engine/gather.h"
#include "engine/reduce.h"

static fsdpc_status place_full(fsdpc_root *root, fsdpc_unit *unit)
{
    for (int g = 0; g < unit->layout->n_groups; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        size_t bytes = group->plan->full_numel * fsdpc_dtype_bytes(group->wire_dtype);
        if (unit->no_alias) {
            void *memory;
            FSDPC_TRY(fsdpc_device_alloc(root->device, FSDPC_MEM_OTHER, bytes, &memory));
            group->full = memory;
            FSDPC_TRY(fsdpc_device_fill(root->device, group->full, 0xff, bytes, NULL));
        } else {
            group->full = (unsigned char *)root->wire->read + group->wire_offset;
        }
    }
    return FSDPC_OK;
}

static fsdpc_status create_buffers(fsdpc_root *root, const bool *encloses)
{
    size_t largest = 0;
    int sharing = 0;
    for (int i = 0; i < root->n_units; i++) {
        fsdpc_unit *unit = root->units[i];
        if (i == 0 || encloses[i]) {
            if (unit->reduce_bytes > 0)
                FSDPC_TRY(fsdpc_buffer_create(root->comm, unit->reduce_bytes, &unit->own_buffer));
        } else {
            largest = fsdpc_max_size(largest, unit->reduce_bytes);
            sharing++;
        }
    }
    for (int i = 0; i < FSDPC_POOLED_BUFFERS && i < sharing; i++)
        FSDPC_TRY(fsdpc_buffer_create(root->comm, largest, &root->pool[i]));
    return FSDPC_OK;
}

static fsdpc_status adopt_units(fsdpc_root *root, fsdpc_unit *const *units, size_t *wire_bytes_out)
{
    size_t wire_bytes = 0;
    for (int i = 0; i < root->n_units; i++) {
        fsdpc_unit *unit = units[i];
        if (unit->root)
            return fsdpc_fail(
                FSDPC_ERR_STATE,
                "unit '%s' already belongs to the root '%s': run the outermost module "
                "first, so that all units are found together",
                unit->name, unit->root->units[0]->name);
        if (unit->mesh.shard != root->comm)
            return fsdpc_fail(FSDPC_ERR_STATE,
                              "units '%s' and '%s' of one model are sharded over different meshes",
                              units[0]->name, unit->name);
        for (int g = 0; g < unit->layout->n_groups; g++)
            unit->groups[g].wire_offset += wire_bytes;
        FSDPC_TRY(fsdpc_add_size(wire_bytes, unit->wire_bytes, &wire_bytes));
        root->units[i] = unit;
        unit->root = root;
        unit->id = i;
        unit->dirty = true;
    }
    *wire_bytes_out = wire_bytes;
    return FSDPC_OK;
}

fsdpc_status fsdpc_root_create(fsdpc_unit *const *units, const bool *encloses, int n_units,
                               fsdpc_root **out)
{
    fsdpc_status status = FSDPC_OK;
    fsdpc_root *root = calloc(1, sizeof *root);
    if (!root)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the root of %d units", n_units);
    root->n_units = n_units;
    root->comm = units[0]->mesh.shard;
    root->device = units[0]->device;
    root->trace = units[0]->trace;
    root->prefetch = 1;
    root->units = calloc((size_t)n_units, sizeof(fsdpc_unit *));
    root->reducing = calloc((size_t)n_units, sizeof(fsdpc_unit *));
    if (!root->units || !root->reducing) {
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the root of %d units", n_units);
        goto destroy;
    }
    size_t wire_bytes = 0;
    FSDPC_TRY_GOTO(status, adopt_units(root, units, &wire_bytes), destroy);
    FSDPC_TRY_GOTO(status, fsdpc_wire_create(root->comm, wire_bytes, &root->wire), destroy);
    for (int i = 0; i < n_units; i++)
        FSDPC_TRY_GOTO(status, place_full(root, units[i]), destroy);
    FSDPC_TRY_GOTO(status, create_buffers(root, encloses), destroy);
    FSDPC_TRY_GOTO(status, fsdpc_stream_create(root->device, "gather", true, &root->gather_stream),
                   destroy);
    FSDPC_TRY_GOTO(status, fsdpc_stream_create(root->device, "reduce", true, &root->reduce_stream),
                   destroy);
    *out = root;
    return FSDPC_OK;

destroy:
    fsdpc_root_destroy(root);
    return status;
}

static void disown_unit(fsdpc_root *root, fsdpc_unit *unit)
{
    for (int g = 0; g < unit->layout->n_groups; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        if (unit->no_alias)
            fsdpc_device_free(root->device, group->full);
        group->full = NULL;
    }
    fsdpc_buffer_destroy(unit->own_buffer);
    unit->own_buffer = unit->buffer = NULL;
    unit->state = FSDPC_UNIT_SHARDED;
    unit->root = NULL;
    size_t offset = 0; /* back to offsets within the unit, as unit_create left them */
    if (unit->layout->n_groups > 0)
        offset = unit->groups[0].wire_offset;
    for (int g = 0; g < unit->layout->n_groups; g++)
        unit->groups[g].wire_offset -= offset;
}

void fsdpc_root_destroy(fsdpc_root *root)
{
    if (!root)
        return;
    fsdpc_stream_destroy(root->gather_stream);
    fsdpc_stream_destroy(root->reduce_stream);
    for (int i = 0; root->units && i < root->n_units; i++) {
        if (root->units[i])
            disown_unit(root, root->units[i]);
    }
    for (int i = 0; i < FSDPC_POOLED_BUFFERS; i++)
        fsdpc_buffer_destroy(root->pool[i]);
    fsdpc_wire_destroy(root->wire);
    free(root->record.entries);
    free(root->reducing);
    free(root->units);
    free(root);
}

/* Announces what this rank is about to do and learns what the others are. */
static fsdpc_status meet(fsdpc_root *root, fsdpc_epoch_kind kind, const fsdpc_unit *called,
                         uint32_t bits, uint32_t *all_bits_out)
{
    for (int i = 0; i < root->n_units; i++) {
        if (root->units[i]->held)
            bits |= FSDPC_EPOCH_HELD;
    }
    if (root->needs_reset)
        bits |= FSDPC_EPOCH_RESET;
    fsdpc_epoch_note all, mine = {
                              .bits = bits,
                              .kind = (uint32_t)kind,
                              .unit = called->id,
                              .steps = root->steps,
                          };
    FSDPC_TRY(fsdpc_wire_arrive(root->wire, &mine));
    fsdpc_trace_add(root->trace, FSDPC_TRACE_EPOCH, called->id, 0, root->wire->epoch, 0);
    FSDPC_TRY(fsdpc_wire_epoch_wait(root->wire, called->name, &all));
    root->needs_reset = false;
    *all_bits_out = all.bits;
    return FSDPC_OK;
}

/* Nobody reads the wire now. */
static fsdpc_status publish_dirty(fsdpc_root *root)
{
    for (int i = 0; i < root->n_units; i++) {
        if (root->units[i]->dirty)
            FSDPC_TRY(fsdpc_gather_publish(root->units[i]));
    }
    return FSDPC_OK;
}

static void begin_sharded(fsdpc_root *root)
{
    for (int i = 0; i < root->n_units; i++)
        fsdpc_gather_drop(root->units[i]);
}

fsdpc_status fsdpc_root_epoch(fsdpc_root *root, fsdpc_epoch_kind kind, fsdpc_unit *called,
                              uint32_t bits)
{
    begin_sharded(root);
    for (int i = 0; i < root->n_units; i++) {
        bool changed;
        FSDPC_TRY(fsdpc_gather_changed(root->units[i], &changed));
        if (changed)
            bits |= FSDPC_EPOCH_CHANGED;
    }
    uint32_t all;
    FSDPC_TRY(meet(root, kind, called, bits, &all));
    if (!(all & FSDPC_EPOCH_CHANGED))
        return FSDPC_OK;
    root->generation++;
    FSDPC_TRY(publish_dirty(root));
    FSDPC_TRY(fsdpc_wire_publish(root->wire));
    return fsdpc_wire_published_wait(root->wire, called->name);
}

fsdpc_status fsdpc_root_write_begin(fsdpc_root *root)
{
    if (root->holds)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "an optimizer stepped inside hold() of '%s': the weights are fixed there",
                          root->units[0]->name);
    begin_sharded(root);
    root->steps++;
    uint32_t all;
    FSDPC_TRY(meet(root, FSDPC_EPOCH_OPTIM, root->units[0], FSDPC_EPOCH_CHANGED | FSDPC_EPOCH_STEP,
                   &all));
    root->generation++;
    root->writing = true;
    return publish_dirty(root);
}

fsdpc_status fsdpc_root_write_end(fsdpc_root *root)
{
    root->writing = false;
    return fsdpc_wire_publish(root->wire);
}
