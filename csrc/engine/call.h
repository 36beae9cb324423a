/* A call of a unit's module: the steps that both frontends perform around its forward, on top of
 * the schedule.
 *
 *     begin_recomputed? enter  -> forward ->  leave | failed            (a call)
 *     begin_backward  post_backward (sched.h)  end_backward              (its backward)
 *
 * A frontend manages its framework's modules, tensors and graph. It passes information that the
 * engine cannot see: whether gradients are recorded, whether backward is running, and how far its
 * graph has grown (`clock`). This file decides everything else about a call: which of a unit's
 * modules runs, which weights a recomputation must see, and where random streams begin.
 */
#ifndef FSDPC_ENGINE_CALL_H
#define FSDPC_ENGINE_CALL_H

#include "engine/sched.h"

#define FSDPC_CALL_UNKNOWN UINT64_MAX

typedef struct fsdpc_call {
    bool grad;       /* gradients are recorded */
    bool recomputed; /* and the frontend's backward is running */
    uint64_t clock;  /* a counter that grows with the frontend's graph; 0 if it has no counter */
    uint64_t ran_at; /* the clock when the recomputed part first ran; FSDPC_CALL_UNKNOWN if that is
                      * unknown or nothing is recomputed */
    uint64_t *next_stream; /* next dropout stream, keyed in deterministic mode; NULL: the engine
                            * does not key it */
} fsdpc_call;

/* Returns true if this is a recomputation that has not passed a boundary yet (a checkpoint around
 * the outermost unit). The frontend must then begin the unit's backward with this generation before
 * it calls enter. */
bool fsdpc_call_begins_backward(const fsdpc_unit *unit, const fsdpc_call *call,
                                uint64_t *generation_out);

/* On return the unit is FULL. `first_out`: this module is the first of its unit to run in this
 * forward, so the unit's backward ends at the module's inputs. */
fsdpc_status fsdpc_call_enter(fsdpc_unit *unit, const fsdpc_call *call, bool *first_out);

typedef enum fsdpc_left {
    FSDPC_LEFT_INSIDE, /* an enclosing forward or backward of the unit still uses the unsharded
                          parameters */
    FSDPC_LEFT_KEPT, /* unsharded parameters stay for other modules of the unit, or for backward */
    FSDPC_LEFT_RESHARD, /* it was resharded, unless it is held */
} fsdpc_left;

fsdpc_status fsdpc_call_leave(fsdpc_unit *unit, fsdpc_left *left_out);

/* Replaces leave after an exception. A failed outermost call resets the root, so that the next call
 * starts from a clean state; during a recomputation, the enclosing backward does that. */
void fsdpc_call_failed(fsdpc_unit *unit);

/* Overrides the generation that the next recomputation must see. */
void fsdpc_call_set_seen(fsdpc_unit *unit, uint64_t generation);

/* Returns whether the frontend must arrange, before a backward's first unit begins, for
 * end_backward to be called when the backward ends or fails. */
bool fsdpc_call_wants_end(const fsdpc_unit *unit);
/* Idempotent (fsdpc_pre_backward). */
fsdpc_status fsdpc_call_begin_backward(fsdpc_unit *unit, uint64_t generation);
/* `status`: the result of the backward. A failure resets the root. */
fsdpc_status fsdpc_call_end_backward(fsdpc_root *root, fsdpc_status status);

#endif
