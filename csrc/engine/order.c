/* The event between each pair of accesses:
 *
 *     own slices               main writes (copied_in) -> gathers read
 *     unsharded parameters     the gather writes -> main reads (released) -> the next gather writes
 *     a reduce buffer          main fills (filled) -> the reduction reads -> main fills again
 *     a gradient shard         main reads (filled) -> the reduction writes -> main reads
 *     a partial                the first stage writes -> the second reads -> (via main and
 *                              `filled`) the next first stage writes
 *     a CPU step's input       main computes (computed) -> a copy brings (arrived) -> host reads
 *     masters of a CPU step    main copies in (computed) -> (arrived) the host writes
 *
 * This file creates the events for arrows that begin at main. The communicator handles arrows that
 * begin at a collective, since it knows when an operation is on its stream (fsdpc_comm_order). Main
 * waits for collectives only when it needs the unsharded parameters or the sum, so compute overlaps
 * with gathers and reductions.
 *
 * A gather waits only for its unit's own `released` event, and for that of the unit that last used
 * the same slot (slots.h). It can therefore run while main computes with other units. `filled` is
 * recorded when a reduction is posted, after all of main's work on the buffer and the shard.
 */
#include "engine/order.h"

fsdpc_status fsdpc_order_create(fsdpc_root *root)
{
    root->overlaps = root->device->remote && fsdpc_comm_orders(root->reduce_comm);
    if (!root->overlaps)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_event_create(root->device, &root->copied_in));
    FSDPC_TRY(fsdpc_event_create(root->device, &root->filled));
    for (int i = 0; i < root->n_units; i++)
        FSDPC_TRY(fsdpc_event_create(root->device, &root->units[i]->released));
    return FSDPC_OK;
}

/* Between steps all ranks have posted the same operations, so the stream finishes unless a peer has
 * died, which the sync detects. Within a step, peers may never post the operation that this rank
 * waits for. */
static void run_dry(const fsdpc_root *root, fsdpc_stream *stream)
{
    bool between = !root->model->in_backward && !root->model->forward_depth && !root->needs_reset;
    if (!stream)
        return;
    fsdpc_status status = FSDPC_IN_PROGRESS;
    if (!between && fsdpc_event_record(root->filled, stream) == FSDPC_OK)
        status = fsdpc_event_test(root->filled);
    else if (between)
        status = fsdpc_stream_sync(stream);
    if (status != FSDPC_OK)
        fsdpc_comm_abort(root->comm, "a model was destroyed in a step that peers may be in; let "
                                     "backward end, on every rank, before dropping a model");
}

void fsdpc_order_destroy(fsdpc_root *root)
{
    if (!root->overlaps)
        return;
    run_dry(root, root->gather_stream);
    run_dry(root, root->reduce_stream);
    run_dry(root, root->replicate_stream);
    fsdpc_event_destroy(root->copied_in);
    fsdpc_event_destroy(root->filled);
    for (int i = 0; i < root->n_units; i++) {
        if (!root->units[i])
            break;
        fsdpc_event_destroy(root->units[i]->released);
        root->units[i]->released = NULL;
    }
}

fsdpc_status fsdpc_order_behind(fsdpc_device *device, fsdpc_event *event, fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_event_record(event, fsdpc_device_main(device)));
    return fsdpc_stream_wait(stream, event);
}

void fsdpc_order_note_released(fsdpc_unit *unit)
{
    if (fsdpc_event_record(unit->released, fsdpc_device_main(unit->device)) != FSDPC_OK)
        fsdpc_comm_abort(unit->root->comm,
                         fsdpc_last_error()); /* otherwise a gather could come too early */
}

fsdpc_status fsdpc_order_follow(fsdpc_root *root)
{
    if (!root->overlaps)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_order_copied_in(root));
    FSDPC_TRY(fsdpc_stream_wait(root->reduce_stream, root->copied_in));
    return root->replicate_stream ? fsdpc_stream_wait(root->replicate_stream, root->copied_in)
                                  : FSDPC_OK;
}

fsdpc_status fsdpc_order_fork(fsdpc_root *root)
{
    if (!root->overlaps)
        return FSDPC_OK;
    fsdpc_stream *main = fsdpc_device_main(root->device);
    FSDPC_TRY(fsdpc_order_follow(root));
    for (int i = 0; i < root->n_units; i++)
        FSDPC_TRY(fsdpc_event_record(root->units[i]->released, main));
    return FSDPC_OK;
}

fsdpc_status fsdpc_order_join(fsdpc_root *root)
{
    if (!root->overlaps)
        return FSDPC_OK;
    fsdpc_stream *main = fsdpc_device_main(root->device);
    fsdpc_stream *streams[] = {root->gather_stream, root->reduce_stream, root->replicate_stream};
    for (size_t i = 0; i < sizeof streams / sizeof *streams; i++) {
        if (!streams[i])
            continue;
        FSDPC_TRY(fsdpc_event_record(root->filled, streams[i]));
        FSDPC_TRY(fsdpc_stream_wait(main, root->filled));
    }
    return FSDPC_OK;
}
