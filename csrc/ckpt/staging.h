/* The staging copy for saves on a background thread.
 *
 * The copy has the layout of the file, and the shards then point to it.  Once it is done, the owner
 * may overwrite the originals.  Such a save blocks its caller only for the copy.  It bypasses the
 * caches, because the copy is not read soon, and a store that does not fetch its cache line first
 * saves a third of the traffic.
 */
#ifndef FSDPC_CKPT_STAGING_H
#define FSDPC_CKPT_STAGING_H

#include "ckpt/shards.h"

/* Computes the bytes that the copy needs; fails if a shard cannot be converted to its file's
 * dtype. */
fsdpc_status fsdpc_ckpt_staging_bytes(const fsdpc_ckpt_shard *shards, size_t n_shards,
                                      size_t *bytes_out);

/* Copies the shards to `memory`, which is 64-byte aligned, and makes them point there. */
void fsdpc_ckpt_staging(fsdpc_ckpt_shard *shards, size_t n_shards, void *memory);

#endif
