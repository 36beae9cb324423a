/* Sums gradients over replicas in low rank (PowerSGD, Vogels et al. 2019).
 *
 * A replica's matrix M is its gradient, plus what earlier sums left out. Replicas sum P = M Q, make
 * its columns orthonormal, and sum Q = M' P. Every replica's gradient is then P Q'. Only
 * low_rank_plan.h's matrices take part: reductions post the rest as usual.
 *
 * Only reduce.c uses this file, except for creating and destroying. A reduction over replicas goes
 * through `begin`, `post`, then `post_second` once the first operation is complete, and `finish`
 * once the second is. unit->low_rank_work is the operation in flight.
 */
#ifndef FSDPC_ENGINE_LOW_RANK_H
#define FSDPC_ENGINE_LOW_RANK_H

#include "engine/root_internal.h"

/* Creates what the unit needs if it has matrices; collective over its replicas. Sets
 * unit->low_rank. The unit must be in its root. */
fsdpc_status fsdpc_low_rank_create(fsdpc_unit *unit);
void fsdpc_low_rank_destroy(fsdpc_unit *unit);

/* Counts a sum over replicas that is about to be posted. Returns whether it is in low rank. */
bool fsdpc_low_rank_begin(fsdpc_unit *unit);
/* Replaces slices of a flat group's shard by those that the sum still has to cover exactly. */
void fsdpc_low_rank_keep_exact(const fsdpc_unit *unit, int group, const fsdpc_slice **slices_io,
                               size_t *n_io);
/* Adds this rank's gradients, and posts the first operation. `gradients`: a reduce buffer or a
 * partial, which is not read after the call. */
fsdpc_status fsdpc_low_rank_post(fsdpc_unit *unit, const fsdpc_buffer *gradients);
/* Returns whether the second operation is to be posted, after the first one. */
bool fsdpc_low_rank_awaits_second(const fsdpc_unit *unit);
fsdpc_status fsdpc_low_rank_post_second(fsdpc_unit *unit);
/* Writes the gradients of the matrices. Does nothing if the reduction was exact. */
fsdpc_status fsdpc_low_rank_finish(fsdpc_unit *unit);

/* Bytes that the two operations cover. */
size_t fsdpc_low_rank_first_bytes(const fsdpc_unit *unit);
size_t fsdpc_low_rank_second_bytes(const fsdpc_unit *unit);

#endif
