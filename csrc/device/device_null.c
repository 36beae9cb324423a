/* A device that only records the calls made to it.
 *
 * Tests use it to check the schedule itself: which copy came before which wait, and on which
 * stream. Every point on every stream counts as reached immediately. Memory is allocated and
 * counted, so recorded pointers are distinct, but copies and fills never touch it. If
 * `run_host_work` is set, the device calls submitted functions in order, since the host's schedule
 * may depend on their effects.
 *
 * Stream names outlive their streams, because records point to them.
 */
#include "device/device.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_RECORDS = 256, MESSAGE_BYTES = 1024 };

typedef struct name_entry {
    struct name_entry *next;
    char text[];
} name_entry;

typedef struct null_device {
    fsdpc_device head; /* first */
    bool run_host_work;
    int64_t flops;
    fsdpc_null_record *records;
    size_t count, capacity;
    name_entry *names;
} null_device;

typedef struct null_stream {
    fsdpc_stream head;  /* first */
    fsdpc_status error; /* the first error of its work, until sync */
    char message[MESSAGE_BYTES];
} null_stream;

static fsdpc_status add_record(fsdpc_device *base, const fsdpc_stream *stream, const char *what,
                               const void *object)
{
    null_device *device = (null_device *)base;
    if (device->count == device->capacity) {
        size_t capacity = device->capacity ? device->capacity * 2 : FIRST_RECORDS;
        fsdpc_null_record *records = realloc(device->records, capacity * sizeof *records);
        if (!records)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for %zu records of the null device",
                              capacity);
        device->records = records;
        device->capacity = capacity;
    }
    device->records[device->count++] =
        (fsdpc_null_record){.stream = stream ? stream->name : NULL, .what = what, .object = object};
    return FSDPC_OK;
}

/* Returns the device's own copy of a name, or NULL if memory runs out. */
static const char *keep_name(null_device *device, const char *name)
{
    for (const name_entry *known = device->names; known; known = known->next)
        if (strcmp(known->text, name) == 0)
            return known->text;
    size_t bytes = strlen(name) + 1;
    name_entry *entry = malloc(sizeof *entry + bytes);
    if (!entry)
        return NULL;
    memcpy(entry->text, name, bytes);
    entry->next = device->names;
    device->names = entry;
    return entry->text;
}

static fsdpc_status null_stream_create(fsdpc_device *device, const char *name, bool want_async,
                                       fsdpc_stream **out)
{
    (void)want_async;
    null_stream *stream = calloc(1, sizeof *stream);
    const char *kept = keep_name((null_device *)device, name);
    if (!stream || !kept) {
        free(stream);
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for stream '%s'", name);
    }
    stream->head = (fsdpc_stream){.device = device, .name = kept};
    *out = &stream->head;
    return FSDPC_OK;
}

static void null_stream_destroy(fsdpc_stream *stream)
{
    free(stream);
}

static fsdpc_status null_stream_submit(fsdpc_stream *base, fsdpc_stream_fn fn, void *arg)
{
    FSDPC_TRY(add_record(base->device, base, "submit", arg));
    if (!((null_device *)base->device)->run_host_work)
        return FSDPC_OK;
    null_stream *stream = (null_stream *)base;
    fsdpc_status status = fn(arg, base);
    if (status != FSDPC_OK && stream->error == FSDPC_OK) {
        stream->error = status;
        strncpy(stream->message, fsdpc_last_error(), sizeof stream->message - 1);
    }
    return FSDPC_OK;
}

static fsdpc_status null_stream_sync(fsdpc_stream *base)
{
    FSDPC_TRY(add_record(base->device, base, "sync", NULL));
    null_stream *stream = (null_stream *)base;
    fsdpc_status status = stream->error;
    stream->error = FSDPC_OK;
    return status == FSDPC_OK ? FSDPC_OK : fsdpc_fail(status, "%s", stream->message);
}

static fsdpc_status null_event_create(fsdpc_device *device, fsdpc_event **out)
{
    fsdpc_event *event = calloc(1, sizeof *event);
    if (!event)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for an event");
    event->device = device;
    *out = event;
    return FSDPC_OK;
}

static void null_event_destroy(fsdpc_event *event)
{
    free(event);
}

static fsdpc_status null_event_record(fsdpc_event *event, fsdpc_stream *stream)
{
    return add_record(event->device, stream, "record", event);
}

static fsdpc_status null_stream_wait(fsdpc_stream *stream, fsdpc_event *event)
{
    return add_record(stream->device, stream, "wait", event);
}

static fsdpc_status null_event_test(fsdpc_event *event)
{
    (void)event;
    return FSDPC_OK;
}

static fsdpc_status null_alloc(fsdpc_device *device, fsdpc_mem_kind kind, size_t bytes, void **out)
{
    return fsdpc_mem_alloc(device->mem, kind, bytes, out);
}

static void null_free(fsdpc_device *device, void *pointer)
{
    fsdpc_mem_free(device->mem, pointer);
}

static fsdpc_status null_copy(fsdpc_device *device, void *to, const void *from, size_t bytes,
                              fsdpc_stream *stream)
{
    (void)from, (void)bytes;
    return add_record(device, stream, "copy", to);
}

static fsdpc_status null_fill(fsdpc_device *device, void *to, int byte, size_t bytes,
                              fsdpc_stream *stream)
{
    (void)byte, (void)bytes;
    return add_record(device, stream, "fill", to);
}

static void null_destroy(fsdpc_device *base)
{
    null_device *device = (null_device *)base;
    for (name_entry *entry = device->names, *next; entry; entry = next) {
        next = entry->next;
        free(entry);
    }
    free(device->records);
    free(device);
}

static const fsdpc_device_ops null_ops = {
    .name = "null",
    .destroy = null_destroy,
    .stream_create = null_stream_create,
    .stream_destroy = null_stream_destroy,
    .stream_submit = null_stream_submit,
    .stream_sync = null_stream_sync,
    .event_create = null_event_create,
    .event_destroy = null_event_destroy,
    .event_record = null_event_record,
    .stream_wait = null_stream_wait,
    .event_test = null_event_test,
    .alloc = null_alloc,
    .free = null_free,
    .copy = null_copy,
    .fill = null_fill,
};

fsdpc_status fsdpc_device_null_create(fsdpc_mem *mem, bool run_host_work, fsdpc_device **out)
{
    null_device *device = calloc(1, sizeof *device);
    if (!device)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a device");
    device->head = (fsdpc_device){.ops = &null_ops, .mem = mem};
    device->run_host_work = run_host_work;
    fsdpc_status status = null_stream_create(&device->head, "main", false, &device->head.main);
    if (status != FSDPC_OK)
        null_destroy(&device->head);
    else
        *out = &device->head;
    return status;
}

const int64_t *fsdpc_device_null_flops(const fsdpc_device *device)
{
    return &((const null_device *)device)->flops;
}

void fsdpc_device_null_add_flops(fsdpc_device *device, double flops)
{
    if (device->ops == &null_ops)
        ((null_device *)device)->flops += (int64_t)flops;
}

size_t fsdpc_device_null_records(const fsdpc_device *device, const fsdpc_null_record **out)
{
    const null_device *null = (const null_device *)device;
    *out = null->records;
    return null->count;
}
