/* The trace ring: the engine's actions, in order.
 *
 * Tests check it, `fsdpc.schedule` and the profiler read it, and a hang report prints the most
 * recent events. Each context has one ring, and the thread that drives the engine writes its
 * events. Host waits are recorded only while a profile is running.
 */
#ifndef FSDPC_BASE_TRACE_H
#define FSDPC_BASE_TRACE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

/* X(name, text) */
#define FSDPC_TRACE_TABLE(X)                                                                       \
    X(EPOCH, "epoch")     /* begins: arrival */                                                    \
    X(COPY_IN, "copy_in") /* slices written to the parameter buffer */                             \
    X(GATHER, "gather")   /* posted */                                                             \
    X(GATHER_DONE, "gather_done")                                                                  \
    X(FORWARD, "forward") /* compute of a unit begins */                                           \
    X(FORWARD_END, "forward_end")                                                                  \
    X(BACKWARD, "backward")                                                                        \
    X(BACKWARD_END, "backward_end")                                                                \
    X(RESHARD, "reshard")                                                                          \
    X(REDUCE, "reduce")         /* posted */                                                       \
    X(ALL_REDUCE, "all_reduce") /* over replicas, posted */                                        \
    X(REDUCE_DONE, "reduce_done")                                                                  \
    X(COLLECTIVE, "collective") /* norms, the user's, agreement */                                 \
    X(OPTIM, "optim")           /* a step begins; with a unit: it was stepped later */             \
    X(OPTIM_END, "optim_end")                                                                      \
    X(WAIT, "wait") /* begins; `what` names its cause */                                           \
    X(WAIT_END, "wait_end")

typedef enum fsdpc_trace_kind {
#define X(name, text) FSDPC_TRACE_##name,
    FSDPC_TRACE_TABLE(X)
#undef X
        FSDPC_TRACE_KIND_COUNT
} fsdpc_trace_kind;

typedef struct fsdpc_trace_event {
    int64_t ns;
    uint64_t epoch;
    uint64_t bytes;
    const char *what; /* for WAIT: static text; else NULL */
    int32_t unit;     /* -1: none */
    uint8_t kind;
    uint8_t in_backward;
} fsdpc_trace_event;

typedef struct fsdpc_trace fsdpc_trace;

fsdpc_status fsdpc_trace_create(size_t capacity, fsdpc_trace **out);
void fsdpc_trace_destroy(fsdpc_trace *trace);
/* Timestamps events with the value at `clock` (borrowed) instead of nanoseconds. */
void fsdpc_trace_set_clock(fsdpc_trace *trace, const int64_t *clock);
void fsdpc_trace_add(fsdpc_trace *trace, fsdpc_trace_kind kind, int unit, uint64_t bytes,
                     uint64_t epoch, int in_backward); /* NULL trace: does nothing */
/* Changes the capacity to `capacity` events, keeping the newest; if `waits` is true, waits are
 * recorded too. */
fsdpc_status fsdpc_trace_resize(fsdpc_trace *trace, size_t capacity, bool waits);
size_t fsdpc_trace_capacity(const fsdpc_trace *trace);
/* Records a wait if waits are being recorded. */
void fsdpc_trace_wait(fsdpc_trace *trace, const char *what, int unit);
void fsdpc_trace_wait_end(fsdpc_trace *trace, int unit);
size_t fsdpc_trace_length(const fsdpc_trace *trace); /* events held now */
const fsdpc_trace_event *fsdpc_trace_at(const fsdpc_trace *trace,
                                        size_t index); /* 0 is the oldest */
void fsdpc_trace_reset(fsdpc_trace *trace);
/* Describes the last `events` events as text, oldest first ("gather of unit 2 in epoch 7, 3.1 s
 * ago; ..."); returns how many fit. */
int fsdpc_trace_tail(const fsdpc_trace *trace, int events, char *text, size_t bytes);
const char *fsdpc_trace_kind_name(fsdpc_trace_kind kind);

#endif
