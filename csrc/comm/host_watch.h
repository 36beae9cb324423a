/* The watch: what one host learns of failures, all hosts know.
 *
 * The first rank of every host has a thread that looks at the ranks of its host (fsdpc_comm_look).
 * It holds a TCP connection to the first host's, which passes on what it hears.  Whoever made the
 * connections has seen to it that both ends belong to the run.  The watch carries failures and who
 * is stopped; bytes of training never.  What it hears of a failure it tells the ranks of its host
 * (fsdpc_comm_tell), so that they end wherever they wait.
 *
 * A connection that closes without a goodbye is a rank that died.  If nothing that was sent arrives
 * for `silence_s`, the host is gone or cut off.  The kernel of the other host answers for that, so
 * a stopped process is not taken for a dead host.  Such a process gives a warning, and the deadline
 * of the waiting rank decides.
 */
#ifndef FSDPC_COMM_HOST_WATCH_H
#define FSDPC_COMM_HOST_WATCH_H

#include "comm/comm.h"

typedef struct fsdpc_host_watch_peer {
    int fd; /* a connected TCP socket; the watch's from here on */
    int first_rank, n_ranks;
    char host[64]; /* its name */
} fsdpc_host_watch_peer;

typedef struct fsdpc_host_watch_config {
    char host[64]; /* this one's name */
    double silence_s;
    int n_peers; /* the first host has all others for peers, these have the first */
    const fsdpc_host_watch_peer *peers;
} fsdpc_host_watch_config;

typedef struct fsdpc_host_watch fsdpc_host_watch;

/* `host` is the communicator of this host's ranks, and outlives the watch.  The peers' descriptors
 * are taken over, whatever comes of it. */
fsdpc_status fsdpc_host_watch_start(fsdpc_comm *host, const fsdpc_host_watch_config *config,
                                    fsdpc_host_watch **out);
/* Says goodbye, or why this host failed; NULL is fine. */
void fsdpc_host_watch_stop(fsdpc_host_watch *watch);

#endif
