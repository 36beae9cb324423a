/* Makes the staging copy for saves on a background thread.
 *
 * The copy has the same layout as the file, and afterwards the shards point to it. When the copy is
 * complete, the owner may overwrite the originals. A background save therefore blocks its caller
 * only during the copy. The copy bypasses the caches because it will not be read soon. A store that
 * does not fetch its cache line first also saves a third of the memory traffic.
 */
#ifndef FSDPC_CKPT_STAGING_H
#define FSDPC_CKPT_STAGING_H

#include "ckpt/shards.h"

/* Computes the size of the copy in bytes; fails if a shard cannot be converted to its file's
 * dtype. */
fsdpc_status fsdpc_ckpt_staging_bytes(const fsdpc_ckpt_shard *shards, size_t n_shards,
                                      size_t *bytes_out);

/* Copies the shards to `memory`, which must be 64-byte aligned, and makes them point to the
 * copies. */
void fsdpc_ckpt_staging(fsdpc_ckpt_shard *shards, size_t n_shards, void *memory);

#endif
