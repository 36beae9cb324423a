/* Closes descriptors that a forked child must not keep.
 *
 * A data loader's workers are forked from a rank. Without a guard, these workers would keep the
 * run's sockets and memory open after their parent dies. Communicators therefore register their
 * descriptors here, and every child closes them. Any thread may call these functions; the table is
 * one of the library's documented globals, because a fork handler takes no argument.
 */
#ifndef FSDPC_COMM_FORK_GUARD_H
#define FSDPC_COMM_FORK_GUARD_H

#include <stdint.h>

void fsdpc_fork_guard(int fd); /* closes it in forked children from now on; -1 is fine */
void fsdpc_fork_close(int fd); /* closes it in this process; -1 is fine */

/* Returns how many forks separate this process from the one that guarded the first descriptor.
 * Objects created under a different count belong to a parent process: the child must not use them,
 * and their descriptors are already closed. */
uint32_t fsdpc_fork_count(void);

#endif
