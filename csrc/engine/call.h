/* A module's call as a unit: what both front doors do around forward, above the schedule.
 *
 *     begin_recomputed?  enter  -> forward ->  leave | failed            (a call)
 *     begin_backward  post_backward (sched.h)  end_backward              (its backward)
 *
 * A front door keeps the modules, tensors and graph of its own framework.  It passes facts that the
 * engine cannot see: whether gradients are recorded, whether its backward runs, and where its graph
 * is (`clock`).  This file decides the rest of a call: which of a unit's modules it is, which
 * weights a recomputation must see, and where random streams begin.
 */
#ifndef FSDPC_ENGINE_CALL_H
#define FSDPC_ENGINE_CALL_H

#include "engine/sched.h"

#define FSDPC_CALL_UNKNOWN UINT64_MAX

typedef struct fsdpc_call {
    bool grad;       /* gradients are recorded */
    bool recomputed; /* and the front door's backward runs */
    uint64_t clock;  /* a count that grows with the front door's graph; 0 if it keeps none */
    uint64_t ran_at; /* the clock at the first run of what is recomputed; FSDPC_CALL_UNKNOWN where
                        nothing is, or nobody knows */
    uint64_t *next_stream; /* of dropout, keyed in deterministic mode; NULL: not ours to key */
} fsdpc_call;

/* Of a recomputation: true where it has met no boundary yet (a checkpoint around the outermost
 * unit).  Then the front door begins the unit's backward, for weights of this generation, before it
 * enters. */
bool fsdpc_call_begins_backward(const fsdpc_unit *unit, const fsdpc_call *call,
                                uint64_t *generation_out);

/* On return the unit is FULL.  `first_out`: of its unit's modules it is the first to run in this
 * forward, so its inputs are where the unit's backward ends. */
fsdpc_status fsdpc_call_enter(fsdpc_unit *unit, const fsdpc_call *call, bool *first_out);

typedef enum fsdpc_left {
    FSDPC_LEFT_INSIDE,  /* an enclosing forward of the unit, or backward, goes on with the full */
    FSDPC_LEFT_KEPT,    /* the full stays for other modules of the unit, or for backward */
    FSDPC_LEFT_RESHARD, /* it was given up, unless somebody holds it */
} fsdpc_left;

fsdpc_status fsdpc_call_leave(fsdpc_unit *unit, fsdpc_left *left_out);

/* Instead of leave, after an exception.  The outermost call resets the root, so that the next one
 * starts clean; of a recomputation the running backward does. */
void fsdpc_call_failed(fsdpc_unit *unit);

/* Which weights the next recomputation must see, where the front door knows better. */
void fsdpc_call_set_seen(fsdpc_unit *unit, uint64_t generation);

/* Before the first unit of a backward begins, the front door arranges that end_backward is called
 * when the backward ends, also when it fails. */
bool fsdpc_call_wants_end(const fsdpc_unit *unit);
/* Idempotent (fsdpc_pre_backward). */
fsdpc_status fsdpc_call_begin_backward(fsdpc_unit *unit, uint64_t generation);
/* `status`: how it ended.  A failed one resets the root. */
fsdpc_status fsdpc_call_end_backward(fsdpc_root *root, fsdpc_status status);

#endif
