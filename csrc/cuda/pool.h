/* A pool of device memory, or pinned host memory that the device can access, counted and reused.
 *
 * Blocks come from cudaMalloc, which may stop the whole device, so they are kept when freed and
 * handed out again by size class. A steady-state step makes no CUDA allocations (system_allocs
 * counts them), so it is also legal inside a graph capture. If CUDA runs out of memory, the
 * allocating caller returns the free blocks to it and tries once more (wait.h).
 *
 * Order. A freed block may be reused at once. That is safe for work on the device's main stream,
 * which runs in order: the block's previous user runs before the next one. If another stream's work
 * uses a block, an event orders that work before the free. Otherwise the block lives as long as the
 * engine, as shards, buffers and windows do.
 *
 * Holds. A graph uses the captured memory whenever it is launched. From keep_begin to keep_end, the
 * pool records the blocks that the capture may use: all blocks that are live at the start or
 * acquired before the end. During the capture, only the capture may reuse freed blocks, and nothing
 * is allocated from CUDA. Afterwards, a held block that is freed is not reused until its last hold
 * is released; meanwhile it counts as OTHER.
 *
 * Any thread may call these functions.
 */
#ifndef FSDPC_CUDA_POOL_H
#define FSDPC_CUDA_POOL_H

#include "device/device.h"

typedef struct fsdpc_cuda_pool fsdpc_cuda_pool;
typedef struct fsdpc_cuda_keep fsdpc_cuda_keep;

/* `mem` does the counting; borrowed. */
fsdpc_status fsdpc_cuda_pool_create(fsdpc_mem *mem, bool pinned, fsdpc_cuda_pool **out);
void fsdpc_cuda_pool_destroy(fsdpc_cuda_pool *pool); /* frees all blocks, including live ones */
fsdpc_status fsdpc_cuda_pool_alloc(fsdpc_cuda_pool *pool, fsdpc_mem_kind kind, size_t bytes,
                                   void **out); /* 512-byte aligned; not NULL even for 0 bytes */
/* NULL and pointers from another pool are ignored. */
void fsdpc_cuda_pool_free(fsdpc_cuda_pool *pool, void *pointer);
/* Returns free blocks to CUDA after waiting until they are no longer used, because cudaFree might
 * not wait. If the wait fails, the blocks are kept, and its error is returned. Not allowed inside a
 * capture. */
fsdpc_status fsdpc_cuda_pool_trim(fsdpc_cuda_pool *pool, fsdpc_status (*wait)(fsdpc_device *),
                                  fsdpc_device *device);

/* Only one hold may be open at a time. */
fsdpc_status fsdpc_cuda_pool_keep_begin(fsdpc_cuda_pool *pool, fsdpc_cuda_keep **out);
void fsdpc_cuda_pool_keep_end(fsdpc_cuda_pool *pool);
void fsdpc_cuda_pool_keep_release(fsdpc_cuda_pool *pool, fsdpc_cuda_keep *keep); /* NULL is fine */

/* Allocates host memory, outside any pool, that the device can read, write, and copy without
 * staging. */
fsdpc_status fsdpc_cuda_pinned_alloc(size_t bytes, void **out);
void fsdpc_cuda_pinned_free(void *pointer); /* NULL is fine */

#endif
