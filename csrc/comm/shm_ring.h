/* Fingerprints of posted operations, kept in the control page's slots to show whether all ranks
 * have posted the same operations. */
#ifndef FSDPC_COMM_SHM_RING_H
#define FSDPC_COMM_SHM_RING_H

#include "comm/shm_control.h"

typedef struct fsdpc_shm_fingerprint {
    uint64_t kind, bytes, epoch, detail, chain;
} fsdpc_shm_fingerprint;

/* Appends an entry to `mine` for operation `sequence` and makes it visible; returns the new
 * chain. */
uint64_t fsdpc_shm_ring_post(fsdpc_shm_slot *mine, uint64_t sequence, uint64_t chain,
                             const fsdpc_coll *op, size_t bytes, uint64_t object);

/* Compares operation `sequence`, which both ranks have posted. If the entry was overwritten
 * meanwhile, the comparison passes: a later chain still covers it. */
bool fsdpc_shm_ring_same(const fsdpc_shm_slot *mine, const fsdpc_shm_slot *peer, uint64_t sequence);

/* Describes a rank's post of operation `sequence`, for use in messages. */
void fsdpc_shm_ring_describe(const fsdpc_shm_slot *slot, int rank, uint64_t sequence, char *text,
                             size_t bytes);

/* Reports FSDPC_ERR_MISMATCH, naming the first difference that is still in the ring.
 */
fsdpc_status fsdpc_shm_ring_differ(const fsdpc_shm_slot *mine, int my_rank,
                                   const fsdpc_shm_slot *peer, int peer_rank, uint64_t sequence);

#endif
