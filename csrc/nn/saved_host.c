/* The place is a list of pinned segments, one for each time that it grew. An array may be in
 * several. Since a single stream copies, a segment that is written again has been read before.
 */
#include "nn/saved_host.h"

#include <stdlib.h>

#include "base/size.h"
#include "nn/frame.h"
#include "tier/saved_internal.h"

typedef struct segment {
    unsigned char *memory;
    uint64_t from, to; /* its part of the place */
} segment;

typedef struct saved_host {
    fsdpc_saved_mover mover; /* first */
    fsdpc_device *device;
    fsdpc_stream *stream;
    fsdpc_event *computed; /* recorded by main: what is copied exists, and its target is free */
    segment *segments;
    size_t n_segments, room;
} saved_host;

static saved_host *host_of(fsdpc_saved_mover *mover)
{
    return (saved_host *)mover;
}

static fsdpc_status host_grow(fsdpc_saved_mover *mover, uint64_t from, uint64_t to)
{
    saved_host *host = host_of(mover);
    void *memory;
    FSDPC_TRY(
        fsdpc_frame_grow(&host->segments, host->n_segments, &host->room, sizeof *host->segments));
    FSDPC_TRY(fsdpc_device_alloc(host->device, FSDPC_MEM_PINNED, to - from, &memory));
    host->segments[host->n_segments++] = (segment){memory, from, to};
    return FSDPC_OK;
}

/* Copies the part of an array that a segment holds. */
static fsdpc_status copy_part(saved_host *host, const segment *s, const fsdpc_saved_array *array,
                              uint64_t at, bool reads)
{
    uint64_t from = s->from > at ? s->from : at;
    uint64_t to = s->to < at + array->bytes ? s->to : at + array->bytes;
    if (from >= to)
        return FSDPC_OK;
    unsigned char *there = s->memory + (from - s->from), *here = array->memory + (from - at);
    return fsdpc_device_copy(host->device, reads ? here : there, reads ? there : here, to - from,
                             host->stream);
}

static fsdpc_status host_start(fsdpc_saved_mover *mover, fsdpc_saved_set *set, bool reads)
{
    saved_host *host = host_of(mover);
    fsdpc_event *copied = set->copied;
    if (!copied) {
        FSDPC_TRY(fsdpc_event_create(host->device, &copied));
        set->copied = copied;
    }
    FSDPC_TRY(fsdpc_event_record(host->computed, fsdpc_device_main(host->device)));
    FSDPC_TRY(fsdpc_stream_wait(host->stream, host->computed));
    for (size_t i = 0; i < set->n; i++)
        for (size_t s = 0; s < host->n_segments; s++)
            FSDPC_TRY(copy_part(host, &host->segments[s], &set->arrays[i],
                                set->offset + set->arrays[i].offset, reads));
    return fsdpc_event_record(copied, host->stream);
}

static fsdpc_status host_wait(fsdpc_saved_mover *mover, fsdpc_saved_set *set)
{
    const saved_host *host = host_of(mover);
    return fsdpc_stream_wait(fsdpc_device_main(host->device), set->copied);
}

static void host_cancel(fsdpc_saved_mover *mover, fsdpc_saved_set *set)
{
    if (set->copied)
        (void)host_wait(mover, set); /* fails if the device is lost: then nothing is copied */
    fsdpc_event_destroy(set->copied);
    set->copied = NULL;
}

static void host_destroy(fsdpc_saved_mover *mover)
{
    saved_host *host = host_of(mover);
    fsdpc_stream_destroy(host->stream); /* waits for it */
    fsdpc_event_destroy(host->computed);
    for (size_t i = 0; i < host->n_segments; i++)
        fsdpc_device_free(host->device, host->segments[i].memory);
    free(host->segments);
    free(host);
}

fsdpc_status fsdpc_saved_host_create(fsdpc_device *device, fsdpc_saved_mover **out)
{
    saved_host *host = calloc(1, sizeof *host);
    if (!host)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a store of saved tensors");
    host->mover = (fsdpc_saved_mover){host_grow, host_start, host_wait, host_cancel, host_destroy};
    host->device = device;
    fsdpc_status status = fsdpc_stream_create(device, "saved", true, &host->stream);
    if (status == FSDPC_OK)
        status = fsdpc_event_create(device, &host->computed);
    if (status != FSDPC_OK)
        host_destroy(&host->mover);
    else
        *out = &host->mover;
    return status;
}
