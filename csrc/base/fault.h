/* Reports a fault in named memory with one line on stderr before the process dies.
 *
 * Unsharded parameters may be mapped read-only or, in no-alias mode, become inaccessible when they
 * are resharded. The owner of such memory announces the range here. When a thread faults inside a
 * range, the handler prints the rank, unit and parameter. It then passes the fault on to the
 * previous handler: Python's faulthandler, a sanitizer, or the default action.
 *
 * The handler for SIGSEGV and SIGBUS is installed when the first range is announced and is never
 * removed. Any thread may announce and withdraw ranges. This adds no overhead until a fault occurs.
 */
#ifndef FSDPC_BASE_FAULT_H
#define FSDPC_BASE_FAULT_H

#include <stddef.h>

/* Returns the name of the object at `address`, for the message. Runs inside a signal handler, so it
 * may read memory but must not call functions.
 */
typedef const char *(*fsdpc_fault_name_fn)(const void *owner, const void *address);

typedef struct fsdpc_fault_range {
    const void *begin;
    size_t bytes;
    int rank;
    const char *unit; /* borrowed, like `owner`: both outlive the range */
    const void *owner;
    fsdpc_fault_name_fn name;
} fsdpc_fault_range;

enum { FSDPC_FAULT_RANGES = 4096 }; /* faults in further ranges are not named */

void fsdpc_fault_announce(const fsdpc_fault_range *range);
void fsdpc_fault_withdraw(const void *begin, const void *owner);

#endif
