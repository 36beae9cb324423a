/* Faults in memory that has a name: one line on stderr before the process dies.
 *
 * Memory that must not be written (fulls), or not be touched at all (in no-alias mode, fulls that
 * were given up), is mapped so.  Its owner announces the range here.  When a thread faults inside
 * one, the handler writes rank, unit and parameter.  It then passes the fault on to the previous
 * handler: Python's faulthandler, a sanitizer, or the end of the process.
 *
 * The first range installs the handler, for SIGSEGV and SIGBUS, and nothing removes it.  Any thread
 * may announce and withdraw.  Nothing here costs anything until a fault.
 */
#ifndef FSDPC_BASE_FAULT_H
#define FSDPC_BASE_FAULT_H

#include <stddef.h>

/* What lies at `address`, for the line.  Runs inside a signal handler: reads memory, calls nothing.
 */
typedef const char *(*fsdpc_fault_name_fn)(const void *owner, const void *address);

typedef struct fsdpc_fault_range {
    const void *begin;
    size_t bytes;
    int rank;
    const char *unit; /* borrowed, as `owner` is: both outlive the range */
    const void *owner;
    fsdpc_fault_name_fn name;
} fsdpc_fault_range;

enum { FSDPC_FAULT_RANGES = 4096 }; /* more are merely not named */

void fsdpc_fault_watch(const fsdpc_fault_range *range);
void fsdpc_fault_unwatch(const void *begin, const void *owner);

#endif
