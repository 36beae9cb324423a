/* For each element, 4 bytes of gradient are copied to the host and a master is copied back, which
 * the device casts. The bus carries both directions at once, so casting on the CPU to send 2 bytes
 * instead of 4 would save no time. States and masters stay on the host. If this rank's slices of
 * the parameter buffer are also in host memory, the step writes them in its pass, and gathers copy
 * them to the device.
 *
 *     main      backward, norm, factor ─┬─ (step of A) ── copy-in A ── (step of B) ── copy-in B ──
 *     down                    computed  └─► A's chunks ─► B's chunks ─►
 *     host                                  arrived ▲ step A ─────► step B ─────►
 *
 * A separate stream copies chunks into a ring in pinned memory, in the order in which the step uses
 * them. Each chunk's header contains the clipping factor, so clipping does not wait. If gradients
 * are in host memory, the reductions have already written them there, and each group has a single
 * chunk that contains only a header.
 *
 * The host waits for a chunk before using it in a step. By then the main stream has finished all
 * work before the step, so the previous copy-in has stopped reading the masters. A ring entry is
 * reused once the host has used its contents in a step. When a step ends, all requested chunks have
 * arrived, so later writes of gradients cannot overtake a copy.
 *
 * If a step fails here, only part of the model is updated, as with data in a file (optim.c).
 */
#include "engine/optim_host.h"

#include <stdlib.h>

#include "base/size.h"
#include "engine/gather.h"
#include "engine/order.h"

typedef struct chunk {
    const unit_states *states;
    int group;
    size_t begin, end; /* the chunk's range in the group's shard */
    fsdpc_event *arrived;
} chunk;

struct fsdpc_optim_host {
    fsdpc_stream *down;
    fsdpc_event *computed; /* recorded by main: gradients and factors are computed */
    unsigned char *ring;
    size_t place_bytes;
    chunk chunks[FSDPC_HOST_CHUNKS]; /* chunk n is at n % FSDPC_HOST_CHUNKS */
    uint64_t used, sent;             /* the one in use, the next to request */
    bool awaited;                    /* the host has waited for the one in use */
    fsdpc_status failed;
    int unit, group; /* position of the next chunk */
    size_t at;
};

static bool is_ours(const fsdpc_unit *unit)
{
    return fsdpc_offload_steps_on_host(&unit->offload);
}

/* ---- The ring ---- */

static fsdpc_status create(fsdpc_optim *optim)
{
    fsdpc_device *device = optim->device;
    fsdpc_optim_host *host = optim->host = calloc(1, sizeof *host);
    if (!host)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the steps of an optimizer");
    FSDPC_TRY(fsdpc_stream_create(device, "down", true, &host->down));
    FSDPC_TRY(fsdpc_event_create(device, &host->computed));
    for (int i = 0; i < FSDPC_HOST_CHUNKS; i++)
        FSDPC_TRY(fsdpc_event_create(device, &host->chunks[i].arrived));
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_host_prepare(fsdpc_optim *optim)
{
    size_t bytes = 0;
    for (int i = 0; i < optim->n_units; i++) {
        const fsdpc_unit *unit = optim->units[i].unit;
        for (int g = 0; is_ours(unit) && g < unit->n_trained; g++) {
            const fsdpc_unit_group *group = &unit->groups[g];
            bytes = fsdpc_max_size(bytes,
                                   fsdpc_plan_host_bytes(&unit->offload, group->plan->shard_numel,
                                                         fsdpc_dtype_bytes(group->grad_dtype)));
        }
    }
    if (bytes == 0)
        return FSDPC_OK;
    if (!optim->host || !optim->host->chunks[FSDPC_HOST_CHUNKS - 1].arrived)
        FSDPC_TRY(create(optim));
    fsdpc_optim_host *host = optim->host;
    if (bytes <= host->place_bytes)
        return FSDPC_OK;
    void *ring;
    FSDPC_TRY(
        fsdpc_device_alloc(optim->device, FSDPC_MEM_PINNED, FSDPC_HOST_CHUNKS * bytes, &ring));
    fsdpc_device_free(optim->device, host->ring); /* nothing is in flight between steps */
    host->ring = ring;
    host->place_bytes = bytes;
    return FSDPC_OK;
}

void fsdpc_optim_host_destroy(fsdpc_optim *optim)
{
    fsdpc_optim_host *host = optim->host;
    if (!host)
        return;
    fsdpc_stream_destroy(host->down); /* waits for it */
    fsdpc_event_destroy(host->computed);
    for (int i = 0; i < FSDPC_HOST_CHUNKS; i++)
        fsdpc_event_destroy(host->chunks[i].arrived);
    fsdpc_device_free(optim->device, host->ring);
    free(host);
    optim->host = NULL;
}

/* ---- A step ---- */

static chunk *chunk_of(fsdpc_optim_host *host, uint64_t number)
{
    return &host->chunks[number % FSDPC_HOST_CHUNKS];
}

static unsigned char *place_of(const fsdpc_optim_host *host, uint64_t number)
{
    return host->ring + number % FSDPC_HOST_CHUNKS * host->place_bytes;
}

/* Finds the next chunk to copy; returns false if none is left. */
static bool find_next(const fsdpc_optim *optim, fsdpc_optim_host *host, chunk *out)
{
    for (; host->unit < optim->n_units; host->unit++, host->group = 0) {
        const unit_states *states = &optim->units[optim->order[host->unit]];
        const fsdpc_unit *unit = states->unit;
        bool steps = is_ours(unit);
        for (; steps && host->group < unit->n_trained; host->group++, host->at = 0) {
            size_t numel = unit->groups[host->group].plan->shard_numel, most = FSDPC_HOST_CHUNK;
            if (host->at >= numel || !fsdpc_optim_steps_group(states, host->group))
                continue;
            if (optim->host_chunk)
                most = optim->host_chunk;
            out->states = states;
            out->group = host->group;
            out->begin = host->at;
            out->end = unit->offload.gradients ? numel : fsdpc_min_size(numel, host->at + most);
            host->at = out->end;
            return true;
        }
    }
    return false;
}

/* Requests the next chunk, if there is one and the ring has room. */
static fsdpc_status send_for_next(const fsdpc_optim *optim, fsdpc_optim_host *host)
{
    fsdpc_device *device = optim->device;
    chunk *next = chunk_of(host, host->sent);
    unsigned char *place = place_of(host, host->sent);
    if (!find_next(optim, host, next))
        return FSDPC_OK;
    const fsdpc_unit *unit = next->states->unit;
    const fsdpc_unit_group *group = &unit->groups[next->group];
    size_t element = fsdpc_dtype_bytes(group->grad_dtype);
    if (next->states->scale_at)
        FSDPC_TRY(
            fsdpc_device_copy(device, place, next->states->scale_at, sizeof(double), host->down));
    if (!unit->offload.gradients)
        FSDPC_TRY(fsdpc_device_copy(device, place + FSDPC_HOST_HEAD_BYTES,
                                    group->grad + next->begin * element,
                                    (next->end - next->begin) * element, host->down));
    FSDPC_TRY(fsdpc_event_record(next->arrived, host->down));
    host->sent++;
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_host_begin(fsdpc_optim *optim)
{
    fsdpc_optim_host *host = optim->host;
    host->used = host->sent = 0;
    host->unit = host->group = 0;
    host->at = 0;
    host->awaited = false;
    host->failed = fsdpc_order_behind(optim->device, host->computed, host->down);
    for (int i = 0; host->failed == FSDPC_OK && i < FSDPC_HOST_CHUNKS; i++)
        host->failed = send_for_next(optim, host);
    return host->failed;
}

/* Switches to the chunk that contains element `at`, and waits for it. */
static fsdpc_status move_to(const fsdpc_optim *optim, const unit_states *states, int group,
                            size_t at)
{
    fsdpc_optim_host *host = optim->host;
    for (;; host->used++, host->awaited = false) {
        const chunk *now = chunk_of(host, host->used);
        if (host->used == host->sent)
            return fsdpc_fail(FSDPC_ERR_INTERNAL, "gradients of unit '%s' were not sent for",
                              states->unit->name);
        if (now->states == states && now->group == group && at < now->end)
            break;
        FSDPC_TRY(send_for_next(optim, host)); /* into the entry that is now free */
    }
    if (!host->awaited)
        FSDPC_TRY(fsdpc_event_await(chunk_of(host, host->used)->arrived));
    host->awaited = true;
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_host_bring(const fsdpc_optim *optim, const unit_states *states, int group,
                                    size_t at, size_t *end_io, fsdpc_step_args *args)
{
    fsdpc_optim_host *host = optim->host;
    const fsdpc_unit *unit = states->unit;
    host->failed = move_to(optim, states, group, at);
    FSDPC_TRY(host->failed);
    const chunk *now = chunk_of(host, host->used);
    const unsigned char *place = place_of(host, host->used);
    size_t element = fsdpc_dtype_bytes(unit->groups[group].grad_dtype);
    if (!unit->offload.gradients)
        args->grad = place + FSDPC_HOST_HEAD_BYTES + (at - now->begin) * element;
    args->grad_scale_at = states->scale_at ? (const double *)(const void *)place : NULL;
    *end_io = fsdpc_min_size(*end_io, now->end);
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_host_stepped(fsdpc_unit *unit)
{
    bool copied_in = !unit->root || unit->root->param_buffer->pinned;
    return copied_in ? FSDPC_OK : fsdpc_gather_copy_in(unit);
}

fsdpc_status fsdpc_optim_host_end(fsdpc_optim *optim)
{
    fsdpc_optim_host *host = optim->host;
    for (; host->failed == FSDPC_OK && host->used < host->sent; host->used++)
        host->failed = fsdpc_event_await(chunk_of(host, host->used)->arrived);
    return host->failed;
}
