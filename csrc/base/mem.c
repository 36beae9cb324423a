/* Allocates counted memory from size classes with free lists, on top of the system allocator.
 *
 * Every block is preceded by a 64-byte header that holds the requested size, the category and the
 * size class. Classes are multiples of 64 bytes up to 512, then eight steps per power of two. A
 * block is therefore at most an eighth larger than the request. A freed block goes to the last-in,
 * first-out free list of its class (warmest first) and leaves it only through reuse, trim or
 * destroy.
 *
 * Blocks below 4 MiB come from aligned_alloc. Each larger block is a separate mapping, aligned to 2
 * MiB, that requests huge pages; its header is in a separate page before it. Mappings are excluded
 * from core dumps, so a crashing rank does not write 100 GB to disk. The slack of a mapped block is
 * never touched, so it costs only address space.
 *
 * The counters use the requested bytes, rounded up to 64, instead of the class size, so
 * memory_plan() can compute them without knowing the classes. One mutex guards the free lists and
 * the counters.
 *
 * AddressSanitizer builds poison cached blocks and the slack after a block. They therefore detect
 * use-after-free and overruns even though the memory was never returned to the system.
 */
#include "base/mem.h"

#include <assert.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/size.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FSDPC_MEM_POISONS 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) && !defined(FSDPC_MEM_POISONS)
#define FSDPC_MEM_POISONS 1
#endif
#ifdef FSDPC_MEM_POISONS
#include <sanitizer/asan_interface.h>
#define POISON(pointer, bytes) ASAN_POISON_MEMORY_REGION(pointer, bytes)
#define UNPOISON(pointer, bytes) ASAN_UNPOISON_MEMORY_REGION(pointer, bytes)
#else
#define POISON(pointer, bytes) ((void)(pointer), (void)(bytes))
#define UNPOISON(pointer, bytes) ((void)(pointer), (void)(bytes))
#endif

enum {
    GRANULE_BYTES = FSDPC_MEM_ALIGN,
    LINEAR_CLASSES = 8, /* 64, 128, ... 512 */
    CLASS_COUNT = LINEAR_CLASSES + 8 * (62 - 9 + 1),
    HUGE_PAGE_BYTES = 2 << 20,
    MAPPED_FROM_BYTES = 4 << 20,
    HEAP_BLOCK_BYTES = (32 << 20) - (64 << 10), /* below 32 MiB with malloc's header */
    MAGIC_LIVE = 0x6d656d31,
    MAGIC_CACHED = 0x6d656d30,
};

typedef struct header {
    struct header *next; /* in a free list */
    size_t requested_bytes;
    uint32_t magic; /* distinguishes a live block from a freed or foreign one */
    uint16_t class_index;
    uint16_t kind;
    char reserved[GRANULE_BYTES - 24];
} header;

_Static_assert(sizeof(header) == GRANULE_BYTES, "a block starts right behind its header");

struct fsdpc_mem {
    pthread_mutex_t lock; /* guards all below */
    header *free_lists[CLASS_COUNT];
    fsdpc_mem_stats stats;
};

static unsigned class_of(size_t bytes)
{
    if (bytes <= LINEAR_CLASSES * GRANULE_BYTES)
        return bytes ? (unsigned)((bytes - 1) / GRANULE_BYTES) : 0;
    size_t last = bytes - 1;
    unsigned exponent = 63 - (unsigned)__builtin_clzll(last); /* >= 9 */
    unsigned step = (unsigned)(last >> (exponent - 3)) & 7;
    return LINEAR_CLASSES + (exponent - 9) * 8 + step;
}

static size_t class_bytes(unsigned class_index)
{
    if (class_index < LINEAR_CLASSES)
        return (class_index + 1) * (size_t)GRANULE_BYTES;
    unsigned exponent = 9 + (class_index - LINEAR_CLASSES) / 8;
    unsigned step = (class_index - LINEAR_CLASSES) % 8;
    return (size_t)(9 + step) << (exponent - 3);
}

static header *map_block(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t reserved = bytes + HUGE_PAGE_BYTES + page;
    char *start = mmap(NULL, reserved, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    char *end = start + reserved;
    char *block = (char *)fsdpc_round_up((size_t)(start + page), HUGE_PAGE_BYTES);
    if (block - page > start)
        munmap(start, (size_t)(block - page - start));
    if (block + bytes < end)
        munmap(block + bytes, (size_t)(end - (block + bytes)));
    madvise(block, bytes, MADV_HUGEPAGE);               /* only advice: no harm if */
    madvise(block - page, bytes + page, MADV_DONTDUMP); /* the kernel does not support it */
    return (header *)(block - sizeof(header));
}

static header *system_block(size_t bytes)
{
    if (bytes >= MAPPED_FROM_BYTES)
        return map_block(bytes);
    return aligned_alloc(GRANULE_BYTES, sizeof(header) + bytes);
}

static void system_release(header *block)
{
    size_t bytes = class_bytes(block->class_index);
    UNPOISON(block + 1, bytes);
    if (bytes < MAPPED_FROM_BYTES) {
        free(block);
        return;
    }
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    munmap((char *)(block + 1) - page, bytes + page);
}

/* The caller holds the lock. */
static void count_bytes(fsdpc_mem *mem, fsdpc_mem_kind kind, int64_t bytes)
{
    fsdpc_mem_stats *stats = &mem->stats;
    stats->now_bytes[kind] += (size_t)bytes; /* modulo 2^64, so a negative value subtracts */
    stats->peak_bytes[kind] = fsdpc_max_size(stats->peak_bytes[kind], stats->now_bytes[kind]);
    if (kind == FSDPC_MEM_PINNED)
        return;
    stats->total_now_bytes += (size_t)bytes;
    stats->total_peak_bytes = fsdpc_max_size(stats->total_peak_bytes, stats->total_now_bytes);
}

static header *take_cached(fsdpc_mem *mem, unsigned class_index)
{
    header *block = mem->free_lists[class_index];
    if (block) {
        mem->free_lists[class_index] = block->next;
        mem->stats.cached_bytes -= class_bytes(class_index);
    }
    return block;
}

fsdpc_status fsdpc_mem_create(fsdpc_mem **out)
{
    fsdpc_mem *mem = calloc(1, sizeof *mem);
    if (!mem)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for an allocator's own %zu bytes",
                          sizeof *mem);
    pthread_mutex_init(&mem->lock, NULL);
    *out = mem;
    return FSDPC_OK;
}

void fsdpc_mem_destroy(fsdpc_mem *mem)
{
    if (!mem)
        return;
    fsdpc_mem_trim(mem);
    pthread_mutex_destroy(&mem->lock);
    free(mem);
}

fsdpc_status fsdpc_mem_alloc(fsdpc_mem *mem, fsdpc_mem_kind kind, size_t bytes, void **out)
{
    bool possible = bytes <= SIZE_MAX / 4;
    unsigned class_index = possible ? class_of(bytes) : 0;
    header *block = NULL;
    if (possible) {
        pthread_mutex_lock(&mem->lock);
        block = take_cached(mem, class_index);
        pthread_mutex_unlock(&mem->lock);
    }
    bool from_system = possible && !block;
    if (from_system) {
        block = system_block(class_bytes(class_index));
        if (!block) { /* trimming cached blocks of other classes may free enough */
            fsdpc_mem_trim(mem);
            block = system_block(class_bytes(class_index));
        }
    }
    if (!block) {
        fsdpc_mem_stats stats;
        fsdpc_mem_stats_read(mem, &stats);
        return fsdpc_fail(FSDPC_ERR_NOMEM,
                          "no memory for %zu bytes of category '%s' (%zu bytes are held now); use "
                          "more ranks, a smaller batch or activation checkpointing",
                          bytes, fsdpc_mem_kind_name(kind), stats.total_now_bytes);
    }
    block->next = NULL;
    block->requested_bytes = bytes;
    block->magic = MAGIC_LIVE;
    block->class_index = (uint16_t)class_index;
    block->kind = (uint16_t)kind;
    POISON(block + 1, class_bytes(class_index));
    UNPOISON(block + 1, bytes);
    pthread_mutex_lock(&mem->lock);
    count_bytes(mem, kind, (int64_t)fsdpc_mem_counted(bytes));
    mem->stats.system_allocs += from_system;
    pthread_mutex_unlock(&mem->lock);
    *out = block + 1;
    return FSDPC_OK;
}

void fsdpc_mem_free(fsdpc_mem *mem, void *pointer)
{
    if (!pointer)
        return;
    header *block = (header *)pointer - 1;
    pthread_mutex_lock(&mem->lock);
    assert(block->magic == MAGIC_LIVE && "freed twice, or not a block of fsdpc_mem_alloc");
    block->magic = MAGIC_CACHED;
    POISON(pointer, class_bytes(block->class_index));
    count_bytes(mem, (fsdpc_mem_kind)block->kind,
                -(int64_t)fsdpc_mem_counted(block->requested_bytes));
    block->next = mem->free_lists[block->class_index];
    mem->free_lists[block->class_index] = block;
    mem->stats.cached_bytes += class_bytes(block->class_index);
    pthread_mutex_unlock(&mem->lock);
}

void fsdpc_mem_count(fsdpc_mem *mem, fsdpc_mem_kind kind, int64_t bytes)
{
    pthread_mutex_lock(&mem->lock);
    count_bytes(mem, kind, bytes);
    pthread_mutex_unlock(&mem->lock);
}

void fsdpc_mem_count_system_alloc(fsdpc_mem *mem)
{
    pthread_mutex_lock(&mem->lock);
    mem->stats.system_allocs++;
    pthread_mutex_unlock(&mem->lock);
}

void fsdpc_mem_stats_read(fsdpc_mem *mem, fsdpc_mem_stats *out)
{
    pthread_mutex_lock(&mem->lock);
    *out = mem->stats;
    pthread_mutex_unlock(&mem->lock);
}

void fsdpc_mem_peak_reset(fsdpc_mem *mem)
{
    pthread_mutex_lock(&mem->lock);
    memcpy(mem->stats.peak_bytes, mem->stats.now_bytes, sizeof mem->stats.peak_bytes);
    mem->stats.total_peak_bytes = mem->stats.total_now_bytes;
    pthread_mutex_unlock(&mem->lock);
}

void fsdpc_mem_trim(fsdpc_mem *mem)
{
    header *lists[CLASS_COUNT];
    pthread_mutex_lock(&mem->lock);
    memcpy(lists, mem->free_lists, sizeof lists);
    memset(mem->free_lists, 0, sizeof mem->free_lists);
    mem->stats.cached_bytes = 0;
    pthread_mutex_unlock(&mem->lock);
    for (int i = 0; i < CLASS_COUNT; i++) {
        for (header *block = lists[i], *next; block; block = next) {
            next = block->next;
            system_release(block);
        }
    }
}

void fsdpc_mem_keep_heap(void)
{
    void *volatile block = malloc(HEAP_BLOCK_BYTES); /* volatile: compilers drop an unused pair */
    free(block);
}
