/* Counted memory.
 *
 * All memory of the engine and the tensors is allocated here and counted by category, so that
 * memory_stats() and memory_plan() report the same bytes. One fsdpc_mem belongs to a context and
 * is safe to use from any thread.
 *
 * fsdpc_mem_alloc returns 64-byte aligned memory; blocks of 4 MiB or more are 2 MiB aligned, with
 * huge pages requested. Freed blocks are kept in free lists by size class and reused: in steady
 * state, a training step requests no memory from the system, as `system_allocs` shows.
 *
 * The counters include the requested bytes, rounded up to 64 (0 counts as 0), but not the header or
 * the slack of the size class. The contents of a new block are undefined.
 */
#ifndef FSDPC_BASE_MEM_H
#define FSDPC_BASE_MEM_H

#include <stdint.h>

#include "base/size.h"
#include "base/status.h"

/* X(name, text) */
#define FSDPC_MEM_TABLE(X)                                                                         \
    X(UNSHARDED, "unsharded")   /* parameter buffers; counted once per host */                     \
    X(MASTER, "master")         /* shards in the original dtype */                                 \
    X(GRAD, "grad")             /* gradient shards */                                              \
    X(STATE, "state")           /* optimizer states */                                             \
    X(REDUCE, "reduce")         /* reduce buffers */                                               \
    X(STAGING, "staging")       /* on the way to or from a disk */                                 \
    X(PINNED, "pinned")         /* host memory that a GPU can access too */                        \
    X(ACTIVATION, "activation") /* tensors of the tape and the user */                             \
    X(OTHER, "other")

typedef enum fsdpc_mem_kind {
#define X(name, text) FSDPC_MEM_##name,
    FSDPC_MEM_TABLE(X)
#undef X
        FSDPC_MEM_COUNT
} fsdpc_mem_kind;

enum { FSDPC_MEM_ALIGN = 64 };

/* Returns the number of bytes that the counters add for a block of this size. */
static inline size_t fsdpc_mem_counted(size_t bytes)
{
    return fsdpc_round_up(bytes, FSDPC_MEM_ALIGN);
}

typedef struct fsdpc_mem fsdpc_mem;

typedef struct fsdpc_mem_stats {
    size_t now_bytes[FSDPC_MEM_COUNT];
    size_t peak_bytes[FSDPC_MEM_COUNT];       /* per category */
    size_t total_now_bytes, total_peak_bytes; /* without PINNED, which is not this device's
                                               * memory */
    size_t cached_bytes;                      /* free blocks kept for reuse */
    uint64_t system_allocs;                   /* memory requests to the system since create */
} fsdpc_mem_stats;

fsdpc_status fsdpc_mem_create(fsdpc_mem **out);
void fsdpc_mem_destroy(
    fsdpc_mem *mem); /* NULL is fine; blocks that are still allocated stay with their owners */

/* bytes == 0 returns a valid pointer that must also be freed. */
fsdpc_status fsdpc_mem_alloc(fsdpc_mem *mem, fsdpc_mem_kind kind, size_t bytes, void **out);
void fsdpc_mem_free(fsdpc_mem *mem, void *pointer); /* NULL is fine */

/* Counts memory allocated elsewhere, such as mappings; a negative `bytes` subtracts. */
void fsdpc_mem_count(fsdpc_mem *mem, fsdpc_mem_kind kind, int64_t bytes);
/* Counts one request that another pool, such as a device's, made to its system allocator. */
void fsdpc_mem_count_system_alloc(fsdpc_mem *mem);

void fsdpc_mem_stats_read(fsdpc_mem *mem, fsdpc_mem_stats *out);
void fsdpc_mem_peak_reset(fsdpc_mem *mem);
void fsdpc_mem_trim(fsdpc_mem *mem); /* returns cached blocks to the system */

/* Lets malloc keep up to 64 MiB of free memory at the top of its heap and serve blocks of up to 32
 * MiB from the heap. glibc does so itself once a block of that size is freed, but not if the user
 * set MALLOC_TRIM_THRESHOLD_ or the like. */
void fsdpc_mem_keep_heap(void);

static inline const char *fsdpc_mem_kind_name(fsdpc_mem_kind kind)
{
    static const char *const names[] = {
#define X(name, text) text,
        FSDPC_MEM_TABLE(X)
#undef X
    };
    return (unsigned)kind < FSDPC_MEM_COUNT ? names[kind] : "unknown category";
}

#endif
