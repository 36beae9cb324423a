/* What every file of the shm communicator says to the peers: that something failed, and where the
 * memory lies that all create together.
 */
#ifndef FSDPC_COMM_SHM_PEERS_H
#define FSDPC_COMM_SHM_PEERS_H

#include "comm/shm_internal.h"

/* ---- Failure ---- */

/* Poisoned, here or by a peer?  A function that begins something checks first.  A poll checks only
 * after it has found that it must wait longer, so that an operation whose ranks have all done their
 * part still completes. */
fsdpc_status fsdpc_shm_health(fsdpc_shm_comm *self);
/* Takes over the poison that somebody told, if there is any: the error to return. */
fsdpc_status fsdpc_shm_adopt_poison(fsdpc_shm_comm *self);
void fsdpc_shm_abort(fsdpc_comm *comm, const char *reason); /* the slot */
/* Tells the peers this thread's last error, from any thread; returns `status`. */
fsdpc_status fsdpc_shm_tell(fsdpc_shm_comm *self, fsdpc_status status);
/* The same on the driving thread, whose own communicator is closed by it, and those that share the
 * world with it. */
fsdpc_status fsdpc_shm_fail(fsdpc_shm_comm *self, fsdpc_status status);
/* FSDPC_ERR_PEER if a member died or left. */
fsdpc_status fsdpc_shm_peers_check(fsdpc_shm_comm *self);
/* Whether the wait that goes on is for this rank of the group. */
bool fsdpc_shm_is_late(const fsdpc_shm_comm *self, int p);
fsdpc_status fsdpc_shm_look(fsdpc_comm *comm, char *note, size_t bytes); /* the slots */
void fsdpc_shm_be_told(fsdpc_comm *comm, fsdpc_status status, const char *text);
int fsdpc_shm_end_fd(fsdpc_comm *comm, int rank);
/* After a failure: works in flight end with `status` and are not touched again. */
void fsdpc_shm_pending_drop(fsdpc_shm_comm *self, fsdpc_status status);
/* A wire on which `rank` is in a later epoch than we are, or NULL. */
const fsdpc_shm_wire *fsdpc_shm_wire_ahead(const fsdpc_shm_comm *self, int rank);

/* ---- Creating together ---- */

/* All ranks are about to create the same thing; gives the tag to hand its memory over with. */
fsdpc_status fsdpc_shm_creation_begin(fsdpc_shm_comm *self, const char *what, size_t bytes,
                                      uint64_t *tag_out);
/* Group-rank forms of the world's calls. */
fsdpc_status fsdpc_shm_give_all(fsdpc_shm_comm *self, uint64_t tag, fsdpc_shm_segment *segment,
                                fsdpc_status status);
fsdpc_status fsdpc_shm_given_all(fsdpc_shm_comm *self);
fsdpc_status fsdpc_shm_take_from(fsdpc_shm_comm *self, int from, uint64_t tag, size_t bytes,
                                 fsdpc_shm_segment **out);

#endif
