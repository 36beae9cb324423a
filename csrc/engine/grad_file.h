/* Checksums of gradient shards that lie in a file.
 *
 * The engine writes them through memory: it opens them before, and seals them once what they hold
 * is complete.  In between, and while somebody else may write them, they have no checksum.  All
 * of these do nothing where the shards lie in memory.
 */
#ifndef FSDPC_ENGINE_GRAD_FILE_H
#define FSDPC_ENGINE_GRAD_FILE_H

#include "engine/unit_internal.h"

/* Before the shards are written; `keep`: to what is there, which is compared with its checksums. */
fsdpc_status fsdpc_grad_file_open(const fsdpc_unit *unit, bool keep);
void fsdpc_grad_file_seal(const fsdpc_unit *unit); /* after */

/* Before this rank's rows of a parameter are read; `write`: or written, by somebody else. */
fsdpc_status fsdpc_grad_file_check(const fsdpc_unit *unit, int param, bool write);
/* Before a pass reads the shards, which compares them: not what somebody else may have written. */
void fsdpc_grad_file_release(const fsdpc_unit *unit);

#endif
