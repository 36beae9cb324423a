/* Device memory, counted and kept for reuse; or pinned memory of the host, which the device reaches.
 *
 * Blocks come from cudaMalloc, which may stop the whole device, so they are kept when freed and
 * handed out again by size class.  A steady-state step asks CUDA for nothing (system_allocs
 * counts), so it is also legal inside a graph capture.  If CUDA has no memory left, the allocating
 * caller gives the free blocks back to it and tries once more (wait.h).
 *
 * Order.  A freed block may be handed out at once.  That is right for work on the device's main
 * stream, which runs in order: the old user of the block comes before the new one.  If work of
 * another stream uses a block, an event orders it before the free.  Or the block lives as long as
 * the engine does, as shards, buffers and windows do.
 *
 * Holds.  A graph runs on the memory that was captured, whenever it is launched.  From hold_begin
 * to hold_end the pool takes note of what the capture may use: all blocks that are live when it
 * begins or are acquired until it ends.  Inside, freed blocks serve the capture alone, and CUDA
 * gets no requests.  Afterwards a held block that is freed serves nobody until the last hold of it
 * is released; meanwhile it counts as OTHER.
 *
 * Any thread may call.
 */
#ifndef FSDPC_CUDA_POOL_H
#define FSDPC_CUDA_POOL_H

#include "device/device.h"

typedef struct fsdpc_cuda_pool fsdpc_cuda_pool;
typedef struct fsdpc_cuda_hold fsdpc_cuda_hold;

/* `mem` counts; borrowed. */
fsdpc_status fsdpc_cuda_pool_create(fsdpc_mem *mem, bool pinned, fsdpc_cuda_pool **out);
void fsdpc_cuda_pool_destroy(fsdpc_cuda_pool *pool); /* gives everything back, live blocks too */
fsdpc_status fsdpc_cuda_pool_alloc(fsdpc_cuda_pool *pool, fsdpc_mem_kind kind, size_t bytes,
                                   void **out); /* 512-byte aligned; 0 bytes give a pointer too */
/* NULL is fine, and so is another pool's. */
void fsdpc_cuda_pool_free(fsdpc_cuda_pool *pool, void *pointer);
/* Gives free blocks back to CUDA behind a wait until nothing uses them any more: cudaFree need not
 * wait by itself.  Where that fails they stay, and its error is returned.  Not inside a capture. */
fsdpc_status fsdpc_cuda_pool_trim(fsdpc_cuda_pool *pool, fsdpc_status (*wait)(fsdpc_device *),
                                  fsdpc_device *device);

/* One at a time. */
fsdpc_status fsdpc_cuda_pool_hold_begin(fsdpc_cuda_pool *pool, fsdpc_cuda_hold **out);
void fsdpc_cuda_pool_hold_end(fsdpc_cuda_pool *pool);
void fsdpc_cuda_pool_hold_release(fsdpc_cuda_pool *pool, fsdpc_cuda_hold *hold); /* NULL is fine */

/* Host memory outside any pool that the device reads and writes, and copies without staging. */
fsdpc_status fsdpc_cuda_pinned_alloc(size_t bytes, void **out);
void fsdpc_cuda_pinned_free(void *pointer); /* NULL is fine */

#endif
