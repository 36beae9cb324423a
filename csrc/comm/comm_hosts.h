/* The multi-host communicator: combines one communicator per host and a transport between hosts. */
#ifndef FSDPC_COMM_COMM_HOSTS_H
#define FSDPC_COMM_COMM_HOSTS_H

#include "comm/comm.h"
#include "comm/transport.h"
#include "comm/host_watch.h"

/* Collective. `config` contains the world rank and size; every host has the same number of
 * consecutive ranks. `host` is this host's communicator (shm, even for one rank), `transport`
 * connects all ranks of the world. The function takes ownership of both, even on failure. */
fsdpc_status fsdpc_comm_hosts_create(const fsdpc_comm_config *config, fsdpc_comm *host,
                                     fsdpc_transport *transport, fsdpc_comm **out);

/* Connects the ranks of a world, over shared memory on one host or over a transport between
 * several. The function takes ownership of the transport, even on failure. Without an address, it
 * simulates the peers and the transport, so that this rank can be benchmarked on its own. */
fsdpc_status fsdpc_comm_world_create(const fsdpc_comm_config *config, int hosts,
                                     fsdpc_transport *transport, fsdpc_comm **out);

/* Returns the number of extra bytes that each rank needs for sums in transit when a multi-host
 * group reduces a buffer. This memory is kept with the buffer and counted as REDUCE. */
size_t fsdpc_comm_hosts_staging_bytes(fsdpc_coll_kind kind, fsdpc_dtype dtype, fsdpc_codec codec,
                                      size_t buffer_bytes, size_t n_slices, int hosts,
                                      int local_size);

/* Returns the length of the residual of a rank's messages (ops/codec.h) in a reduction of slices of
 * `numel` elements; 0 on one host. */
size_t fsdpc_comm_hosts_residual_numel(fsdpc_coll_kind kind, size_t numel, int hosts,
                                       int local_size);

/* Bytes per message from a local rank to its peer on every other host. */
typedef struct fsdpc_hosts_messages {
    size_t note;   /* in every epoch */
    size_t header; /* before the data of every operation */
} fsdpc_hosts_messages;

fsdpc_hosts_messages fsdpc_comm_hosts_messages(void);

/* Starts watching the other hosts. Call it once, on the first rank of each host; the watch ends
 * when that rank leaves.
 */
fsdpc_status fsdpc_comm_hosts_watch(fsdpc_comm *comm, const fsdpc_host_watch_config *config);

#endif
