/* Functions that report failures to the peers, and pass the memory of objects that all ranks create
 * together.
 */
#ifndef FSDPC_COMM_SHM_PEERS_H
#define FSDPC_COMM_SHM_PEERS_H

#include "comm/shm_internal.h"

/* ---- Failure ---- */

/* Checks whether the group was poisoned, here or by a peer. A function that starts an operation
 * makes this check first. A poll checks only after it finds that it must wait longer, so that an
 * operation completes if all its ranks have done their part. */
fsdpc_status fsdpc_shm_health(fsdpc_shm_comm *self);
/* Adopts a poison message, if there is one, and returns its error. */
fsdpc_status fsdpc_shm_adopt_poison(fsdpc_shm_comm *self);
/* For the table. */
void fsdpc_shm_abort(fsdpc_comm *comm, fsdpc_status status, const char *reason);
/* Sends this thread's last error to the peers and returns `status`. May be called from any
 * thread. */
fsdpc_status fsdpc_shm_tell(fsdpc_shm_comm *self, fsdpc_status status);
/* Does the same on the driving thread, and also closes this communicator and those that share its
 * world. */
fsdpc_status fsdpc_shm_fail(fsdpc_shm_comm *self, fsdpc_status status);
/* Returns FSDPC_ERR_PEER if a member died or left. */
fsdpc_status fsdpc_shm_peers_check(fsdpc_shm_comm *self);
/* For waits: does so, and also finds that the group is poisoned, every 20 ms at most. */
fsdpc_status fsdpc_shm_peers_look(fsdpc_shm_comm *self);
/* Returns whether this rank is waiting for rank p of its group. */
bool fsdpc_shm_is_late(const fsdpc_shm_comm *self, int p);
fsdpc_status fsdpc_shm_look(fsdpc_comm *comm, char *note, size_t bytes); /* for the table */
void fsdpc_shm_be_told(fsdpc_comm *comm, fsdpc_status status, const char *text);
int fsdpc_shm_end_fd(fsdpc_comm *comm, int rank);
/* After a failure, ends the operations in flight with `status` and no longer touches them. */
void fsdpc_shm_pending_drop(fsdpc_shm_comm *self, fsdpc_status status);
/* Returns a parameter buffer in which `rank` is in a later epoch than this rank, or NULL if there
 * is none. */
const fsdpc_shm_param_buffer *fsdpc_shm_param_buffer_ahead(const fsdpc_shm_comm *self, int rank);

/* ---- Creating together ---- */

/* Begins creating the same object on all ranks; returns the tag for passing its memory. */
fsdpc_status fsdpc_shm_creation_begin(fsdpc_shm_comm *self, const char *what, size_t bytes,
                                      uint64_t *tag_out);
/* These wrappers of the world's functions take group ranks. */
fsdpc_status fsdpc_shm_give_all(fsdpc_shm_comm *self, uint64_t tag, fsdpc_shm_segment *segment,
                                fsdpc_status status);
fsdpc_status fsdpc_shm_given_all(fsdpc_shm_comm *self);
fsdpc_status fsdpc_shm_take_from(fsdpc_shm_comm *self, int from, uint64_t tag, size_t bytes,
                                 fsdpc_shm_segment **out);
/* Shares a segment that rank 0 has created, with `status`. *segment is NULL, with status OK, if
 * rank 0 failed: the agreement that follows reports it. */
fsdpc_status fsdpc_shm_share_first(fsdpc_shm_comm *self, uint64_t tag, size_t bytes,
                                   fsdpc_status status, fsdpc_shm_segment **segment);

#endif
