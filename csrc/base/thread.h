/* Starts a library thread.
 *
 * All library threads start here. Each thread has a name (top and gdb show 15 characters) and
 * blocks the user's signals, so that Ctrl-C always reaches Python's main thread. Signals that
 * report a fault in the thread itself stay unblocked, because a handler must see them.
 */
#ifndef FSDPC_BASE_THREAD_H
#define FSDPC_BASE_THREAD_H

#include <pthread.h>

#include "base/status.h"

fsdpc_status fsdpc_thread_start(const char *name, void *(*main_fn)(void *), void *arg,
                                pthread_t *out);

#endif
