/* Makes unsharded parameters readable, and reshards them. Only the schedule uses this file. */
#ifndef FSDPC_ENGINE_GATHER_H
#define FSDPC_ENGINE_GATHER_H

#include "engine/root_internal.h"

fsdpc_status fsdpc_gather_post(fsdpc_unit *unit, bool in_backward); /* SHARDED -> GATHERING */
fsdpc_status fsdpc_gather_wait(fsdpc_unit *unit, bool in_backward); /* -> FULL, posting if needed */

/* Writes this rank's slices of a unit's unsharded parameters from its masters. */
fsdpc_status fsdpc_gather_copy_in(fsdpc_unit *unit);

/* Sets *equal_io to false, in main-stream order, if the masters differ from the parameter buffer.
 * Unless `equal_io` is in device memory, the host waits for the result. */
fsdpc_status fsdpc_gather_compare(const fsdpc_unit *unit, bool *equal_io);

#endif
