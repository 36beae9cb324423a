/* Process groups: communicators for the collectives of another library, on one host.
 *
 * A group is created by its ranks, which meet through `address` and `secret`, or as part of a group
 * that contains them all. It has collectives (comm.h) and messages (shm_p2p.h), and shares nothing
 * with the engine's communicators, so neither ever waits for the other.
 *
 * Threads. Any thread may call. One lock covers a group and its parts; a waiting thread holds it,
 * except while it sleeps. Every wait advances the operations of all these groups, so ranks may wait
 * for operations of different groups in different orders.
 *
 * Callers must not hold Python's GIL, because the interrupt callback takes it.
 */
#ifndef FSDPC_COMM_GROUP_H
#define FSDPC_COMM_GROUP_H

#include "comm/shm_p2p.h"

typedef struct fsdpc_group fsdpc_group;

/* An operation in flight: a collective or a message. The caller's storage, kept until it is done or
 * dropped. */
typedef struct fsdpc_group_work {
    fsdpc_group *group; /* NULL: idle */
    bool is_message;
    union {
        fsdpc_work coll;
        fsdpc_p2p_work message;
    };
} fsdpc_group_work;

/* Both are collective over the new group's ranks. */
fsdpc_status fsdpc_group_create(const fsdpc_comm_config *config, fsdpc_group **out);
/* `members` are ranks of `whole`, in their order in the part; all pass the same id, which no other
 * part of `whole` has. */
fsdpc_status fsdpc_group_part(fsdpc_group *whole, const int *members, int n, uint64_t id,
                              fsdpc_group **out);
/* Leaves the group, without waiting for peers. Drop its operations in flight first. */
void fsdpc_group_destroy(fsdpc_group *group);

const fsdpc_comm *fsdpc_group_comm(const fsdpc_group *group);
/* The deadline of later waits, in seconds. */
void fsdpc_group_set_timeout(fsdpc_group *group, double timeout_s);

fsdpc_status fsdpc_group_post(fsdpc_group *group, const fsdpc_coll *op, fsdpc_group_work *work);
fsdpc_status fsdpc_group_send(fsdpc_group *group, int peer, uint64_t tag, const void *data,
                              size_t bytes, fsdpc_group_work *work);
/* `peer` may be FSDPC_P2P_ANY. */
fsdpc_status fsdpc_group_recv(fsdpc_group *group, int peer, uint64_t tag, void *data, size_t bytes,
                              fsdpc_group_work *work);
/* FSDPC_IN_PROGRESS: not done yet. An idle work is done. */
fsdpc_status fsdpc_group_test(fsdpc_group_work *work);
fsdpc_status fsdpc_group_wait(fsdpc_group_work *work);
/* Forgets an operation; the group no longer uses its memory. A receive that is not done is
 * cancelled, and a send is finished from a copy. If a collective is not done, the group fails on all
 * ranks. */
void fsdpc_group_drop(fsdpc_group_work *work);
void fsdpc_group_abort(fsdpc_group *group, const char *reason);

#endif
