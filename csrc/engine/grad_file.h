/* Checksums of gradient shards in a file.
 *
 * The engine writes the shards in memory: it opens them before writing and seals them when they are
 * complete. The shards have no checksum while they are open, or while other code may write to them.
 * These functions do nothing for shards that are not in a file.
 */
#ifndef FSDPC_ENGINE_GRAD_FILE_H
#define FSDPC_ENGINE_GRAD_FILE_H

#include "engine/unit_internal.h"

/* Call before writing the shards. `keep`: the write adds to the contents, which are verified
 * first. */
fsdpc_status fsdpc_grad_file_open(const fsdpc_unit *unit, bool keep);
void fsdpc_grad_file_seal(const fsdpc_unit *unit); /* after that */

/* Call before reading this rank's rows of a parameter or, with `write` set, before other code
 * writes them. */
fsdpc_status fsdpc_grad_file_check(const fsdpc_unit *unit, int param, bool write);
/* Call before a pass reads and verifies the shards; shards that other code may have written are not
 * verified. */
void fsdpc_grad_file_release(const fsdpc_unit *unit);

#endif
