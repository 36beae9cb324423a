/* Messages between two ranks of a shm group.
 *
 * A message has a tag. A receive takes the oldest message with its tag from its peer, or from any
 * peer. Messages cannot have fingerprints, because only two ranks know of them and they may be
 * received in another order than they were sent.
 *
 * fsdpc_p2p_work is the caller's storage, in use from the post until `state` is DONE. A send may be
 * posted before its receive, and is done when all its bytes are in shared memory.
 *
 * One thread at a time uses the mailboxes of a group.
 */
#ifndef FSDPC_COMM_SHM_P2P_H
#define FSDPC_COMM_SHM_P2P_H

#include "comm/shm_internal.h"

enum { FSDPC_P2P_ANY = -1 };

typedef struct fsdpc_p2p fsdpc_p2p;

typedef struct fsdpc_p2p_work {
    bool receives;
    int peer; /* of the group; in a receive, FSDPC_P2P_ANY until a message was found */
    uint64_t tag;
    unsigned char *data;
    size_t bytes;

    enum { FSDPC_P2P_IDLE, FSDPC_P2P_POSTED, FSDPC_P2P_DONE } state;
    size_t moved; /* sends: bytes so far, of the header too */
    size_t sent;  /* receives: the bytes of the message; an error unless equal to `bytes` */
    bool copied;  /* sends: dropped by the caller, so the mailboxes own work and bytes */
    struct fsdpc_p2p_work *next;
} fsdpc_p2p_work;

/* Creates the mailboxes of a shm group; collective. Destroy them before the communicator. */
fsdpc_status fsdpc_p2p_create(fsdpc_comm *comm, fsdpc_p2p **out);
void fsdpc_p2p_destroy(fsdpc_p2p *p2p);

fsdpc_status fsdpc_p2p_post(fsdpc_p2p *p2p, fsdpc_p2p_work *work);
/* Moves what can be moved, in both directions. */
fsdpc_status fsdpc_p2p_progress(fsdpc_p2p *p2p);
/* FSDPC_MISMATCH: the message has another size. */
fsdpc_status fsdpc_p2p_test(fsdpc_p2p *p2p, fsdpc_p2p_work *work);
fsdpc_status fsdpc_p2p_wait(fsdpc_p2p *p2p, fsdpc_p2p_work *work);
/* Stops using the storage and bytes of a work that is not done. A receive is cancelled, and its
 * message remains for another receive. A send is finished from a copy. Without memory for what has
 * arrived or for the copy, the group fails. */
void fsdpc_p2p_drop(fsdpc_p2p *p2p, fsdpc_p2p_work *work);

#endif
