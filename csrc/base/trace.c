/* The trace ring is preallocated and overwrites its oldest events first.
 *
 * Adding an event takes one clock read and one 40-byte store; nothing is allocated after create,
 * unless a profile needs more space. With capacity 0, tracing is off.
 */
#include "base/trace.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/size.h"
#include "base/wait.h"

struct fsdpc_trace {
    size_t capacity;
    uint64_t added;       /* since create or reset; the next event goes to added % capacity */
    const int64_t *clock; /* NULL: the system's */
    bool waits;           /* are noted */
    fsdpc_trace_event *events;
};

static const char *const kind_names[] = {
#define X(name, text) [FSDPC_TRACE_##name] = text,
    FSDPC_TRACE_TABLE(X)
#undef X
};

const char *fsdpc_trace_kind_name(fsdpc_trace_kind kind)
{
    return (unsigned)kind < FSDPC_TRACE_KIND_COUNT ? kind_names[kind] : "unknown event";
}

static fsdpc_status make_events(size_t capacity, fsdpc_trace_event **out)
{
    size_t bytes;
    FSDPC_TRY(fsdpc_mul_size(capacity, sizeof(fsdpc_trace_event), &bytes));
    fsdpc_trace_event *events = calloc(1, bytes ? bytes : 1);
    if (!events)
        return fsdpc_fail(FSDPC_ERR_NOMEM,
                          "no memory for a trace of %zu events; set FSDPC_TRACE lower", capacity);
    *out = events;
    return FSDPC_OK;
}

fsdpc_status fsdpc_trace_create(size_t capacity, fsdpc_trace **out)
{
    fsdpc_trace_event *events = NULL;
    FSDPC_TRY(make_events(capacity, &events));
    fsdpc_trace *trace = calloc(1, sizeof *trace);
    if (!trace) {
        free(events);
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a trace");
    }
    trace->capacity = capacity;
    trace->events = events;
    *out = trace;
    return FSDPC_OK;
}

void fsdpc_trace_destroy(fsdpc_trace *trace)
{
    if (trace)
        free(trace->events);
    free(trace);
}

fsdpc_status fsdpc_trace_resize(fsdpc_trace *trace, size_t capacity, bool waits)
{
    fsdpc_trace_event *events = NULL;
    FSDPC_TRY(make_events(capacity, &events));
    size_t held = fsdpc_trace_length(trace), kept = held < capacity ? held : capacity;
    for (size_t i = 0; i < kept; i++)
        events[i] = *fsdpc_trace_at(trace, held - kept + i);
    free(trace->events);
    trace->events = events;
    trace->capacity = capacity;
    trace->added = kept;
    trace->waits = waits;
    return FSDPC_OK;
}

size_t fsdpc_trace_capacity(const fsdpc_trace *trace)
{
    return trace->capacity;
}

void fsdpc_trace_set_clock(fsdpc_trace *trace, const int64_t *clock)
{
    trace->clock = clock;
}

static void add(fsdpc_trace *trace, fsdpc_trace_event event)
{
    if (trace->capacity == 0)
        return;
    event.ns = trace->clock ? *trace->clock : fsdpc_clock_ns();
    trace->events[trace->added++ % trace->capacity] = event;
}

void fsdpc_trace_add(fsdpc_trace *trace, fsdpc_trace_kind kind, int unit, uint64_t bytes,
                     uint64_t epoch, int in_backward)
{
    if (trace)
        add(trace, (fsdpc_trace_event){
                       .epoch = epoch,
                       .bytes = bytes,
                       .unit = unit,
                       .kind = (uint8_t)kind,
                       .in_backward = in_backward != 0,
                   });
}

void fsdpc_trace_wait(fsdpc_trace *trace, const char *what, int unit)
{
    if (trace && trace->waits)
        add(trace, (fsdpc_trace_event){.what = what, .unit = unit, .kind = FSDPC_TRACE_WAIT});
}

void fsdpc_trace_wait_end(fsdpc_trace *trace, int unit)
{
    if (trace && trace->waits)
        add(trace, (fsdpc_trace_event){.unit = unit, .kind = FSDPC_TRACE_WAIT_END});
}

size_t fsdpc_trace_length(const fsdpc_trace *trace)
{
    if (!trace)
        return 0;
    return trace->added < trace->capacity ? (size_t)trace->added : trace->capacity;
}

const fsdpc_trace_event *fsdpc_trace_at(const fsdpc_trace *trace, size_t index)
{
    size_t length = fsdpc_trace_length(trace);
    if (index >= length)
        return NULL;
    return &trace->events[(trace->added - length + index) % trace->capacity];
}

void fsdpc_trace_reset(fsdpc_trace *trace)
{
    if (trace)
        trace->added = 0;
}

int fsdpc_trace_tail(const fsdpc_trace *trace, int events, char *text, size_t bytes)
{
    size_t length = fsdpc_trace_length(trace), used = 0;
    int64_t now = fsdpc_clock_ns();
    int shown = 0;
    text[0] = 0;
    size_t first = length > (size_t)events ? length - (size_t)events : 0;
    for (size_t i = first; i < length; i++) {
        const fsdpc_trace_event *e = fsdpc_trace_at(trace, i);
        char unit[32] = "", epoch[40] = "";
        if (e->unit >= 0)
            snprintf(unit, sizeof unit, " of unit %d", e->unit);
        if (e->epoch > 0)
            snprintf(epoch, sizeof epoch, " in epoch %llu", (unsigned long long)e->epoch);
        int n = snprintf(text + used, bytes - used, "%s%s%s%s%s, %.3g s ago", shown ? "; " : "",
                         kind_names[e->kind], unit, epoch, e->in_backward ? " (backward)" : "",
                         (double)(now - e->ns) * 1e-9);
        if (n < 0 || (size_t)n >= bytes - used) {
            text[used] = 0; /* drop an event that does not fit completely */
            break;
        }
        used += (size_t)n;
        shown++;
    }
    return shown;
}
