/* Descriptors that a forked child must not keep.
 *
 * A data loader's workers are forks of a rank.  They would hold sockets and memory of the run open
 * after their parent died, so descriptors of communicators are registered here and closed in every
 * child.  Any thread may call; the table is one of the library's documented globals, because a fork
 * handler takes no argument.
 */
#ifndef FSDPC_COMM_FORK_GUARD_H
#define FSDPC_COMM_FORK_GUARD_H

#include <stdint.h>

void fsdpc_fork_guard(int fd); /* from now on closed in forked children; -1 is fine */
void fsdpc_fork_close(int fd); /* closes it here; -1 is fine */

/* Forks between the first guarded descriptor's process and this one. Objects made under another
 * count belong to a parent: they must not be used, and their descriptors are closed already. */
uint32_t fsdpc_fork_count(void);

#endif
