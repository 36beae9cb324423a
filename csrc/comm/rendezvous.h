/* Connects the ranks of one host, with one Unix socket per pair of ranks.
 *
 * Names are abstract (not in any file system) and consist of the uid, the run and the rank. Peers
 * must belong to this user and know the run's secret; others are rejected. All descriptors are
 * non-blocking, and are closed on exec and in forked children. The sockets also pass memory
 * descriptors when groups, parameter buffers and reduce buffers are created.
 */
#ifndef FSDPC_COMM_RENDEZVOUS_H
#define FSDPC_COMM_RENDEZVOUS_H

#include "comm/comm.h"

/* A launcher may pass its ranks a file (config->news_fd) that begins with this line. The launcher
 * adds a line for every rank that has ended, e.g. "rank 1 ended (exit code 3)". Ranks that are
 * still waiting for each other read the file, because a rank that ended before meeting the others
 * will never arrive. */
#define FSDPC_RENDEZVOUS_NEWS "fsdpc news 1\n"

/* Creates a listening socket for one rank of the run `address`; the launcher passes it to that
 * rank. */
fsdpc_status fsdpc_rendezvous_listen(const char *address, int rank, int *fd_out);

/* Collective. Sets sockets_out[p] and pids_out[p] for every peer p (-1 and our pid for our own
 * rank). Like every other wait, it names late ranks and ends at `config`'s deadline. */
fsdpc_status fsdpc_rendezvous_meet(const fsdpc_comm_config *config, int *sockets_out,
                                   int32_t *pids_out);

/* Sends one message, with a descriptor unless `passed_fd` is -1. Returns FSDPC_IN_PROGRESS if the
 * call would block. */
fsdpc_status fsdpc_socket_send(int fd, const void *message, size_t bytes, int passed_fd);
/* Receives one message of exactly `bytes` bytes; *passed_out is -1 if it carries no descriptor.
 * Returns FSDPC_IN_PROGRESS if no message has arrived, or FSDPC_ERR_PEER if the other side is gone
 * or sent a different message. */
fsdpc_status fsdpc_socket_recv(int fd, void *message, size_t bytes, int *passed_out);

#endif
