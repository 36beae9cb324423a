/* The ranks of several hosts: a communicator over one of each host and a link between them. */
#ifndef FSDPC_COMM_COMM_HOSTS_H
#define FSDPC_COMM_COMM_HOSTS_H

#include "comm/comm.h"
#include "comm/link.h"
#include "comm/host_watch.h"

/* Collective.  `config` has rank and size of the world; every host has as many ranks, which follow
 * each other.  `host` are those of this host (shm, of one rank too), `link` connects all ranks
 * of the world.  Both are taken over, whatever comes of it. */
fsdpc_status fsdpc_comm_hosts_create(const fsdpc_comm_config *config, fsdpc_comm *host,
                                     fsdpc_link *link, fsdpc_comm **out);

/* The ranks of a world: over the memory of one host, or of several and a link, which is taken over
 * whatever comes of it.  Without an address peers pretend, and so does the link: for measuring this
 * rank alone. */
fsdpc_status fsdpc_comm_world_create(const fsdpc_comm_config *config, int hosts, fsdpc_link *link,
                                     fsdpc_comm **out);

/* Bytes that a reduction of a buffer takes beside it on each rank of a group over hosts of so many
 * lanes, for sums on their way.  They are kept with the buffer, and counted as REDUCE. */
size_t fsdpc_comm_hosts_room_bytes(fsdpc_coll_kind kind, fsdpc_dtype dtype, size_t buffer_bytes,
                                   int hosts, int lanes);

/* On the first rank of a host, once: the watch over the other hosts; it ends when this rank leaves.
 */
fsdpc_status fsdpc_comm_hosts_watch(fsdpc_comm *comm, const fsdpc_host_watch_config *config);

#endif
