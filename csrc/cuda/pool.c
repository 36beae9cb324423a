/* Implements size classes on top of cudaMalloc or cudaHostAlloc.
 *
 * Up to 1 MiB, each power of two is divided into eight classes. Larger sizes are multiples of 2
 * MiB, the granularity in which the driver maps memory. A block never changes its class and is
 * never split: every training step requests the same sizes, so more elaborate schemes gain nothing.
 *
 * Two chained hash tables hold live blocks by address and free blocks by class; the free block with
 * the lowest address is used first.
 *
 * A block counts its holds, and each hold lists its blocks. A held block that has been freed is
 * `parked`: it stays in the table of live blocks, but has no owner. While a hold is being created,
 * it includes every live block; a block that is freed and has no other hold can be reused by the
 * capture.
 */
#include "cuda/pool.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/size.h"
#include "cuda/error.h"

enum { BUCKETS = 1024, SMALLEST = 512, SMALL_MAX = 1 << 20, LARGE_STEP = 2 << 20 };

typedef struct block {
    struct block *next;
    void *pointer;
    size_t class_bytes, counted_bytes;
    fsdpc_mem_kind kind;
    int keeps;
    bool parked;
} block;

struct fsdpc_cuda_keep {
    block **blocks;
    size_t count, capacity;
};

struct fsdpc_cuda_pool {
    fsdpc_mem *mem;
    bool pinned;
    pthread_mutex_t lock;
    block *live[BUCKETS], *spare[BUCKETS];
    size_t held_bytes[FSDPC_MEM_COUNT]; /* as counted */
    fsdpc_cuda_keep *making;            /* NULL: no capture is in progress */
    block *capture_spare[BUCKETS];      /* freed during the capture, without another hold */
};

static size_t class_of(size_t bytes)
{
    if (bytes > SMALL_MAX)
        return fsdpc_round_up(bytes, LARGE_STEP);
    size_t step = SMALLEST / 8;
    while (step * 16 < bytes)
        step *= 2;
    return fsdpc_round_up(fsdpc_max_size(bytes, SMALLEST), fsdpc_max_size(step, SMALLEST));
}

static size_t bucket_of(uintptr_t key)
{
    return (size_t)((uint64_t)(key / SMALLEST) * 0x9E3779B97F4A7C15u >> 54);
}

fsdpc_status fsdpc_cuda_pool_create(fsdpc_mem *mem, bool pinned, fsdpc_cuda_pool **out)
{
    fsdpc_cuda_pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a pool of device memory");
    pool->mem = mem;
    pool->pinned = pinned;
    pthread_mutex_init(&pool->lock, NULL);
    *out = pool;
    return FSDPC_OK;
}

static void release_chains(const fsdpc_cuda_pool *pool, block **chains)
{
    for (size_t b = 0; b < BUCKETS; b++) {
        for (block *it = chains[b], *next; it; it = next) {
            next = it->next;
            (void)(pool->pinned ? cudaFreeHost(it->pointer) : cudaFree(it->pointer));
            free(it);
        }
        chains[b] = NULL;
    }
}

void fsdpc_cuda_pool_destroy(fsdpc_cuda_pool *pool)
{
    if (!pool)
        return;
    release_chains(pool, pool->live);
    release_chains(pool, pool->spare);
    release_chains(pool, pool->capture_spare);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

/* Removes the block with this address from its chain; returns NULL if there is none. */
static block *take(block **chain, const void *pointer)
{
    for (block **transport = chain; *transport; transport = &(*transport)->next) {
        block *it = *transport;
        if (it->pointer == pointer) {
            *transport = it->next;
            return it;
        }
    }
    return NULL;
}

/* Takes the free block with the lowest address in the class. A step that starts with the same free
 * blocks as the previous one therefore gets the same addresses. */
static block *take_lowest(block **chain, size_t class_bytes)
{
    const void *lowest = NULL;
    for (const block *it = *chain; it; it = it->next) {
        if (it->class_bytes == class_bytes && (!lowest || it->pointer < lowest))
            lowest = it->pointer;
    }
    return lowest ? take(chain, lowest) : NULL;
}

/* Lists this process's memory by kind, so that the message shows where memory can be saved. */
static fsdpc_status no_memory(fsdpc_cuda_pool *pool, fsdpc_mem_kind kind, size_t bytes)
{
    size_t free_bytes = 0, total = 0;
    char held[256] = ", nothing";
    if (pool->pinned)
        return fsdpc_fail(
            FSDPC_ERR_NOMEM,
            "no host memory to pin for %zu bytes (%s), with %zu pinned already: use more "
            "ranks or hosts, or leave a class out of the offload policy",
            bytes, fsdpc_mem_kind_name(kind), pool->held_bytes[kind]);
    (void)cudaMemGetInfo(&free_bytes, &total);
    (void)cudaGetLastError();
    for (size_t k = 0, at = 0; k < FSDPC_MEM_COUNT && at < sizeof held; k++) {
        if (pool->held_bytes[k] > 0)
            at += (size_t)snprintf(held + at, sizeof held - at, ", %s %zu",
                                   fsdpc_mem_kind_name((fsdpc_mem_kind)k), pool->held_bytes[k]);
    }
    return fsdpc_fail(FSDPC_ERR_NOMEM,
                      "no device memory for %zu bytes (%s): %zu of %zu are free, and this process "
                      "holds %s; use a smaller batch, more ranks, or reshard_after_forward=True",
                      bytes, fsdpc_mem_kind_name(kind), free_bytes, total, held + 2);
}

static fsdpc_status make_block(fsdpc_cuda_pool *pool, fsdpc_mem_kind kind, size_t class_bytes,
                               block **out)
{
    block *made = calloc(1, sizeof *made);
    if (!made)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to note a block of device memory");
    made->class_bytes = class_bytes;
    fsdpc_mem_count_system_alloc(pool->mem);
    cudaError_t error = pool->pinned
                            ? cudaHostAlloc(&made->pointer, class_bytes, cudaHostAllocPortable)
                            : cudaMalloc(&made->pointer, class_bytes);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        free(made);
        return error == cudaErrorMemoryAllocation ? no_memory(pool, kind, class_bytes)
                                                  : fsdpc_cuda_check(error, "allocate memory");
    }
    *out = made;
    return FSDPC_OK;
}

static void count(fsdpc_cuda_pool *pool, fsdpc_mem_kind kind, int64_t bytes)
{
    pool->held_bytes[kind] += (size_t)bytes;
    fsdpc_mem_count(pool->mem, kind, bytes);
}

static fsdpc_status take_or_make(fsdpc_cuda_pool *pool, fsdpc_mem_kind kind, size_t class_bytes,
                                 block **out)
{
    *out = take_lowest(&pool->spare[bucket_of(class_bytes)], class_bytes);
    return *out ? FSDPC_OK : make_block(pool, kind, class_bytes, out);
}

static void push(block **chain, block *it)
{
    it->next = *chain;
    *chain = it;
}

/* The free blocks are removed from the pool before the wait, which runs without the lock. The wait
 * may need progress on another thread, and does not cover blocks that the other thread frees
 * meanwhile. */
fsdpc_status fsdpc_cuda_pool_trim(fsdpc_cuda_pool *pool, fsdpc_status (*wait)(fsdpc_device *),
                                  fsdpc_device *device)
{
    block *free_ones[BUCKETS];
    pthread_mutex_lock(&pool->lock);
    memcpy(free_ones, pool->spare, sizeof free_ones);
    memset(pool->spare, 0, sizeof pool->spare);
    pthread_mutex_unlock(&pool->lock);
    fsdpc_status status = wait(device);
    if (status == FSDPC_OK) {
        release_chains(pool, free_ones);
        return FSDPC_OK;
    }
    pthread_mutex_lock(&pool->lock);
    for (size_t b = 0; b < BUCKETS; b++) {
        for (block *it = free_ones[b], *next; it; it = next) {
            next = it->next;
            push(&pool->spare[b], it);
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return status;
}

/* Parks a freed block that graphs still use. */
static void park(fsdpc_cuda_pool *pool, block *it)
{
    it->parked = true;
    push(&pool->live[bucket_of((uintptr_t)it->pointer)], it);
    count(pool, FSDPC_MEM_OTHER, (int64_t)it->counted_bytes);
}

static fsdpc_status add_kept(fsdpc_cuda_keep *keep, block *it)
{
    if (keep->count == keep->capacity) {
        size_t capacity = keep->capacity ? 2 * keep->capacity : 256;
        block **blocks = realloc(keep->blocks, capacity * sizeof *blocks);
        if (!blocks)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to note what a graph uses");
        keep->blocks = blocks;
        keep->capacity = capacity;
    }
    keep->blocks[keep->count++] = it;
    it->keeps++;
    return FSDPC_OK;
}

/* Takes a block that the capture itself freed, or any other free block if there is none. */
static fsdpc_status take_for_capture(fsdpc_cuda_pool *pool, size_t class_bytes, block **out)
{
    size_t bucket = bucket_of(class_bytes);
    *out = take_lowest(&pool->capture_spare[bucket], class_bytes);
    if (*out)
        return FSDPC_OK;
    block *it = take_lowest(&pool->spare[bucket], class_bytes);
    if (!it)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "a captured step asks for %zu bytes of device memory that no step before "
                          "it did: run a step or two of these shapes before capturing one",
                          class_bytes);
    fsdpc_status status = add_kept(pool->making, it);
    if (status != FSDPC_OK) {
        push(&pool->spare[bucket], it);
        return status;
    }
    *out = it;
    return FSDPC_OK;
}

fsdpc_status fsdpc_cuda_pool_alloc(fsdpc_cuda_pool *pool, fsdpc_mem_kind kind, size_t bytes,
                                   void **out)
{
    size_t class_bytes = class_of(fsdpc_min_size(bytes, SIZE_MAX / 2));
    pthread_mutex_lock(&pool->lock);
    block *it;
    fsdpc_status status = pool->making ? take_for_capture(pool, class_bytes, &it)
                                       : take_or_make(pool, kind, class_bytes, &it);
    if (status == FSDPC_OK) {
        it->kind = kind;
        it->counted_bytes = fsdpc_mem_counted(bytes);
        push(&pool->live[bucket_of((uintptr_t)it->pointer)], it);
        *out = it->pointer;
        count(pool, kind, (int64_t)it->counted_bytes);
    }
    pthread_mutex_unlock(&pool->lock);
    return status;
}

void fsdpc_cuda_pool_free(fsdpc_cuda_pool *pool, void *pointer)
{
    if (!pointer)
        return;
    pthread_mutex_lock(&pool->lock);
    block *it = take(&pool->live[bucket_of((uintptr_t)pointer)], pointer);
    if (it) {
        count(pool, it->kind, -(int64_t)it->counted_bytes);
        if (it->keeps == 0)
            push(&pool->spare[bucket_of(it->class_bytes)], it);
        else if (pool->making && it->keeps == 1)
            push(&pool->capture_spare[bucket_of(it->class_bytes)], it);
        else
            park(pool, it);
    }
    pthread_mutex_unlock(&pool->lock);
}

/* -- holds ------------------------------------------------------------------------------------- */

fsdpc_status fsdpc_cuda_pool_keep_begin(fsdpc_cuda_pool *pool, fsdpc_cuda_keep **out)
{
    fsdpc_cuda_keep *keep = calloc(1, sizeof *keep);
    if (!keep)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to note what a graph uses");
    fsdpc_status status = FSDPC_OK;
    pthread_mutex_lock(&pool->lock);
    for (size_t b = 0; b < BUCKETS; b++) {
        for (block *it = pool->live[b]; it && status == FSDPC_OK; it = it->next)
            status = it->parked ? FSDPC_OK : add_kept(keep, it);
    }
    if (status == FSDPC_OK)
        pool->making = keep;
    pthread_mutex_unlock(&pool->lock);
    if (status != FSDPC_OK) {
        fsdpc_cuda_pool_keep_release(pool, keep);
        return status;
    }
    *out = keep;
    return FSDPC_OK;
}

void fsdpc_cuda_pool_keep_end(fsdpc_cuda_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->making = NULL;
    for (size_t b = 0; b < BUCKETS; b++) {
        while (pool->capture_spare[b]) {
            block *it = pool->capture_spare[b];
            pool->capture_spare[b] = it->next;
            park(pool, it);
        }
    }
    pthread_mutex_unlock(&pool->lock);
}

void fsdpc_cuda_pool_keep_release(fsdpc_cuda_pool *pool, fsdpc_cuda_keep *keep)
{
    if (!keep)
        return;
    pthread_mutex_lock(&pool->lock);
    for (size_t i = 0; i < keep->count; i++) {
        block *it = keep->blocks[i];
        if (--it->keeps > 0 || !it->parked)
            continue;
        it->parked = false;
        (void)take(&pool->live[bucket_of((uintptr_t)it->pointer)], it->pointer);
        push(&pool->spare[bucket_of(it->class_bytes)], it);
        count(pool, FSDPC_MEM_OTHER, -(int64_t)it->counted_bytes);
    }
    pthread_mutex_unlock(&pool->lock);
    free(keep->blocks);
    free(keep);
}

fsdpc_status fsdpc_cuda_pinned_alloc(size_t bytes, void **out)
{
    void *pointer;
    FSDPC_CUDA_TRY(cudaHostAlloc(&pointer, bytes, cudaHostAllocPortable), "pin host memory");
    *out = pointer;
    return FSDPC_OK;
}

void fsdpc_cuda_pinned_free(void *pointer)
{
    if (pointer)
        (void)cudaFreeHost(pointer);
}
