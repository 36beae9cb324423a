/* The watch: when one host detects a failure, it tells all the others.
 *
 * The first rank of every host has a thread that monitors its host's ranks (fsdpc_comm_look). That
 * thread has a TCP connection to the first host's thread, which forwards the messages it receives.
 * The caller makes the connections and ensures that both ends belong to the run. The watch reports
 * failures and stopped ranks, and never carries training data. When it learns of a failure, it
 * informs its host's ranks (fsdpc_comm_tell), so that they stop wherever they are waiting.
 *
 * If a connection closes without a goodbye, the rank at the other end has died. If sent data is not
 * acknowledged for `silence_s`, the host is down or unreachable. Acknowledgements come from the
 * other host's kernel, so a stopped process does not count as a dead host. A stopped process only
 * causes a warning; the run fails if the waiting rank's deadline passes.
 */
#ifndef FSDPC_COMM_HOST_WATCH_H
#define FSDPC_COMM_HOST_WATCH_H

#include "comm/comm.h"

typedef struct fsdpc_host_watch_peer {
    int fd; /* a connected TCP socket, which the watch takes over */
    int first_rank, n_ranks;
    char host[64]; /* its name */
} fsdpc_host_watch_peer;

typedef struct fsdpc_host_watch_config {
    char host[64]; /* the name of this host */
    double silence_s;
    int n_peers; /* the first host's peers are all others; their only peer is the first */
    const fsdpc_host_watch_peer *peers;
} fsdpc_host_watch_config;

typedef struct fsdpc_host_watch fsdpc_host_watch;

/* `host` is the communicator of this host's ranks, and outlives the watch. The function takes
 * ownership of the peers' descriptors, even on failure. */
fsdpc_status fsdpc_host_watch_start(fsdpc_comm *host, const fsdpc_host_watch_config *config,
                                    fsdpc_host_watch **out);
/* Sends a goodbye or the reason for this host's failure, and ends the watch. `watch` may be
 * NULL. */
void fsdpc_host_watch_stop(fsdpc_host_watch *watch);

#endif
