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

/* On the first rank of a host, once: the watch over the other hosts; it ends when this rank leaves.
 */
fsdpc_status fsdpc_comm_hosts_watch(fsdpc_comm *comm, const fsdpc_host_watch_config *config);

#endif
