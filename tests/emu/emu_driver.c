/* The driver beneath an emulated device: always there, with one GPU (or as many as
 * EMU_GPUS says, all of them this processor), whose memory is gated.
 *
 * Stands in the emulated plugin for csrc/cuda/driver.c, which asks NVIDIA's. Programs that
 * must find device memory in their reach do not ask for a driver (C tests that look at it), or set
 * EMU_OPEN (Python, where torch's tensors of the CPU stand for those of the GPU).
 *
 * Virtual memory is the processor's: physical memory is a memfd, an address range a mapping that
 * nobody may touch, and mapping the one beneath the other is mmap, so what is written by one
 * address is there by all others. New memory is full of NaN. What CUDA forbids is refused and
 * counted: mapping other than the whole of a handle, mapping twice, reading without access or
 * writing without it (which end the process), freeing addresses that something
 * is mapped at. Handles of a fabric are announced and then not permitted, as in a container.
 *
 * Addresses come from one arena and are not used again. Of each granule mapped there a table says
 * how far it is to the first address of the same memory, its home, so that who has one of several
 * addresses finds the memory by a look (emu_home).
 */
#include "emu_driver.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda/driver.h"

enum { GRANULE = 4 << 10, THINGS_MAX = 4096, ARENA_GRANULES = 4 << 20 };

/* A reserved range of addresses, and what is mapped beneath it. */
typedef struct range {
    char *begin;
    size_t bytes;
    int file; /* -1: nothing mapped */
    bool open;
} range;

/* Physical memory; its handle is the descriptor. */
typedef struct physical {
    int file;
    size_t bytes;
    char *home; /* where it was mapped first */
    int mappings;
    bool released;
} physical;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static range ranges[THINGS_MAX];
static physical memories[THINGS_MAX];
static int n_ranges, n_memories, forbidden, calls_left = -1;
static bool hidden;
static int results[EMU_CALLS];
static char *arena;
static size_t arena_used;
static ptrdiff_t to_home[ARENA_GRANULES]; /* changed where nothing uses the memory */

/* ---- The tests' side ---- */

emu_driver_counts emu_driver_look(void)
{
    pthread_mutex_lock(&lock);
    emu_driver_counts counts = {.handles = n_memories, .ranges = n_ranges, .forbidden = forbidden};
    for (int i = 0; i < n_memories; i++)
        counts.bytes += memories[i].bytes;
    for (int i = 0; i < n_ranges; i++)
        counts.mappings += ranges[i].file >= 0;
    pthread_mutex_unlock(&lock);
    return counts;
}

void emu_driver_fail_after(int calls)
{
    calls_left = calls;
}

void emu_driver_hide_windows(int yes)
{
    hidden = yes;
}

void emu_driver_fail(emu_driver_call call, int result)
{
    results[call] = result;
}

__attribute__((no_sanitize("thread"))) const void *emu_home(const void *at)
{
    uintptr_t offset = (uintptr_t)at - (uintptr_t)arena;
    if (!arena || offset >= (size_t)ARENA_GRANULES * GRANULE)
        return at;
    return (const char *)at + to_home[offset / GRANULE];
}

int emu_driver_is_home(const void *at, size_t bytes)
{
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_ranges; i++)
        found |= ranges[i].begin == at && ranges[i].open && ranges[i].bytes >= bytes &&
                 emu_home(at) == at;
    pthread_mutex_unlock(&lock);
    return found;
}

/* ---- Things ---- */

static fsdpc_cu_result refuse(void)
{
    forbidden++;
    return FSDPC_CU_INVALID_VALUE;
}

/* Whether this call, which makes something, is to fail. */
static bool runs_out(void)
{
    return calls_left >= 0 && calls_left-- == 0;
}

static physical *memory_of(fsdpc_cu_memory handle)
{
    for (int i = 0; i < n_memories; i++)
        if (memories[i].file == (int)handle)
            return &memories[i];
    return NULL;
}

static range *range_of(fsdpc_cu_address address, size_t bytes)
{
    for (int i = 0; i < n_ranges; i++)
        if (ranges[i].begin == (char *)(uintptr_t)address && ranges[i].bytes == bytes)
            return &ranges[i];
    return NULL;
}

/* Once nothing names it any more. */
static void memory_end(physical *memory)
{
    if (!memory->released || memory->mappings > 0)
        return;
    close(memory->file);
    emu_give_memory(memory->bytes);
    *memory = memories[--n_memories];
}

/* ---- The driver's calls, under the lock ---- */

/* A want of memory is still there when it is requested again at once. */
static bool memory_runs_out(void)
{
    static _Thread_local bool again;
    bool refused = again || runs_out();
    again = refused && !again;
    return refused;
}

/* -1: the processor has no memory left. */
static int file_of_nans(size_t bytes)
{
    char nans[GRANULE];
    memset(nans, 0xff, sizeof nans);
    int file = memfd_create("emulated device memory", MFD_CLOEXEC);
    bool done = file >= 0 && ftruncate(file, (off_t)bytes) == 0;
    for (size_t at = 0; done && at < bytes; at += GRANULE)
        done = pwrite(file, nans, sizeof nans, (off_t)at) == (ssize_t)sizeof nans;
    if (!done && file >= 0)
        close(file);
    return done ? file : -1;
}

static fsdpc_cu_result create(fsdpc_cu_memory *out, size_t bytes,
                              const fsdpc_cu_properties *properties)
{
    if (properties->handle_types & FSDPC_CU_HANDLE_FABRIC)
        return FSDPC_CU_NOT_PERMITTED;
    if (properties->type != FSDPC_CU_ALLOCATION_PINNED || bytes == 0 || bytes % GRANULE)
        return refuse();
    if (results[EMU_CREATE])
        return (fsdpc_cu_result)results[EMU_CREATE];
    if (n_memories == THINGS_MAX || memory_runs_out() || emu_take_memory(bytes))
        return FSDPC_CU_OUT_OF_MEMORY;
    int file = file_of_nans(bytes);
    if (file < 0) {
        emu_give_memory(bytes);
        return FSDPC_CU_OUT_OF_MEMORY;
    }
    memories[n_memories++] = (physical){.file = file, .bytes = bytes};
    *out = (fsdpc_cu_memory)file;
    return FSDPC_CU_SUCCESS;
}

static fsdpc_cu_result reserve(fsdpc_cu_address *out, size_t bytes)
{
    if (bytes == 0 || bytes % GRANULE)
        return refuse();
    if (n_ranges == THINGS_MAX || runs_out())
        return FSDPC_CU_OUT_OF_MEMORY;
    size_t most = (size_t)ARENA_GRANULES * GRANULE;
    if (!arena) {
        char *found =
            mmap(NULL, most, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found == MAP_FAILED)
            return FSDPC_CU_OUT_OF_MEMORY;
        arena = found;
    }
    if (bytes > most - arena_used)
        return FSDPC_CU_OUT_OF_MEMORY;
    char *begin = arena + arena_used;
    arena_used += bytes;
    ranges[n_ranges++] = (range){.begin = begin, .bytes = bytes, .file = -1};
    *out = (uintptr_t)begin;
    return FSDPC_CU_SUCCESS;
}

static void point_home(const range *mapped, ptrdiff_t distance)
{
    size_t first = (size_t)(mapped->begin - arena) / GRANULE;
    for (size_t i = 0; i < mapped->bytes / GRANULE; i++)
        to_home[first + i] = distance;
}

static fsdpc_cu_result map(fsdpc_cu_address address, size_t bytes, size_t offset,
                           fsdpc_cu_memory handle)
{
    range *beneath = range_of(address, bytes);
    physical *memory = memory_of(handle);
    if (!beneath || beneath->file >= 0 || !memory || memory->bytes != bytes || offset)
        return refuse();
    if (results[EMU_MAP])
        return (fsdpc_cu_result)results[EMU_MAP];
    if (runs_out())
        return FSDPC_CU_OUT_OF_MEMORY;
    beneath->file = memory->file;
    memory->mappings++;
    if (!memory->home)
        memory->home = beneath->begin;
    point_home(beneath, memory->home - beneath->begin);
    return FSDPC_CU_SUCCESS;
}

static fsdpc_cu_result set_access(fsdpc_cu_address address, size_t bytes,
                                  const fsdpc_cu_access *access)
{
    range *beneath = range_of(address, bytes);
    if (!beneath || beneath->file < 0 || access->flags != FSDPC_CU_ACCESS_READ_WRITE)
        return refuse();
    if (runs_out() || emu_map(beneath->begin, bytes, beneath->file, true))
        return FSDPC_CU_OUT_OF_MEMORY;
    beneath->open = true;
    return FSDPC_CU_SUCCESS;
}

static fsdpc_cu_result unmap(fsdpc_cu_address address, size_t bytes)
{
    range *beneath = range_of(address, bytes);
    if (!beneath || beneath->file < 0)
        return refuse();
    physical *memory = memory_of((fsdpc_cu_memory)beneath->file);
    if (beneath->open)
        emu_unmap(beneath->begin, bytes);
    beneath->open = false;
    beneath->file = -1;
    memory->mappings--;
    memory_end(memory);
    return FSDPC_CU_SUCCESS;
}

static fsdpc_cu_result give_back(fsdpc_cu_address address, size_t bytes)
{
    range *beneath = range_of(address, bytes);
    if (!beneath || beneath->file >= 0)
        return refuse();
    *beneath = ranges[--n_ranges];
    return FSDPC_CU_SUCCESS;
}

static fsdpc_cu_result release(fsdpc_cu_memory handle)
{
    physical *memory = memory_of(handle);
    if (!memory || memory->released)
        return refuse();
    memory->released = true;
    memory_end(memory);
    return FSDPC_CU_SUCCESS;
}

/* ---- The driver's names ---- */

#define LOCKED(call)                                                                               \
    pthread_mutex_lock(&lock);                                                                     \
    fsdpc_cu_result result = call;                                                                 \
    pthread_mutex_unlock(&lock);                                                                   \
    return result

static fsdpc_cu_result cuDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = attribute != FSDPC_CU_HAS_VIRTUAL_MEMORY || !hidden;
    int count;
    (void)cudaGetDeviceCount(&count);
    return device < count ? FSDPC_CU_SUCCESS : FSDPC_CU_INVALID_VALUE;
}

static fsdpc_cu_result
cuMemGetAllocationGranularity(size_t *bytes, const fsdpc_cu_properties *properties, int option)
{
    (void)properties;
    const char *wanted = getenv("EMU_GRANULE"); /* a multiple of it */
    *bytes = wanted ? strtoul(wanted, NULL, 10) : GRANULE;
    return option == FSDPC_CU_GRANULARITY_RECOMMENDED ? FSDPC_CU_SUCCESS : FSDPC_CU_INVALID_VALUE;
}

static fsdpc_cu_result cuMemCreate(fsdpc_cu_memory *memory, size_t bytes,
                                   const fsdpc_cu_properties *properties, unsigned long long flags)
{
    (void)flags;
    LOCKED(create(memory, bytes, properties));
}

static fsdpc_cu_result cuMemRelease(fsdpc_cu_memory memory)
{
    LOCKED(release(memory));
}

static fsdpc_cu_result cuMemAddressReserve(fsdpc_cu_address *address, size_t bytes,
                                           size_t alignment, fsdpc_cu_address wish,
                                           unsigned long long flags)
{
    (void)alignment;
    (void)wish;
    (void)flags;
    LOCKED(reserve(address, bytes));
}

static fsdpc_cu_result cuMemAddressFree(fsdpc_cu_address address, size_t bytes)
{
    LOCKED(give_back(address, bytes));
}

static fsdpc_cu_result cuMemMap(fsdpc_cu_address address, size_t bytes, size_t offset,
                                fsdpc_cu_memory memory, unsigned long long flags)
{
    (void)flags;
    LOCKED(map(address, bytes, offset, memory));
}

static fsdpc_cu_result cuMemUnmap(fsdpc_cu_address address, size_t bytes)
{
    LOCKED(unmap(address, bytes));
}

static fsdpc_cu_result cuMemSetAccess(fsdpc_cu_address address, size_t bytes,
                                      const fsdpc_cu_access *access, size_t count)
{
    (void)count;
    LOCKED(set_access(address, bytes, access));
}

static fsdpc_cu_result cuGetErrorString(int error, const char **text)
{
    *text = error == FSDPC_CU_OUT_OF_MEMORY ? "out of memory" : "emulated error";
    return FSDPC_CU_SUCCESS;
}

/* ---- The plugin's side ---- */

fsdpc_status fsdpc_cuda_driver_calls(fsdpc_cu *out)
{
    *out = (fsdpc_cu){
#define X(name, parameters) .name = name,
        FSDPC_CU_SYMBOLS(X)
#undef X
    };
    return FSDPC_OK;
}

fsdpc_status fsdpc_cuda_driver_open(int *count_out)
{
    if (!getenv("EMU_OPEN"))
        emu_gate_memory();
    (void)cudaGetDeviceCount(count_out);
    return FSDPC_OK;
}

int fsdpc_cuda_driver_version(void)
{
    return CUDART_VERSION;
}
