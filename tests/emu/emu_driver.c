/* The driver beneath an emulated device: always there, with one GPU (or as many as
 * EMU_GPUS says, all of them this processor), whose memory is gated.
 *
 * Stands in the emulated plugin for csrc/cuda/cuda_driver.c, which asks NVIDIA's.  Programs that
 * must find device memory in their reach do not ask for a driver (C tests that look at it), or set
 * EMU_OPEN (Python, where torch's tensors of the CPU stand for those of the GPU).
 *
 * Virtual memory is the processor's: physical memory is a memfd, an address range a mapping that
 * nobody may touch, and mapping the one beneath the other is mmap, so what is written by one
 * address is there by all others.  New memory is full of NaN.  What CUDA forbids is refused and
 * counted: mapping other than the whole of a handle, mapping twice, reading without access
 * (which ends the process), freeing addresses that something is mapped at.  Handles of a fabric are
 * announced and then not permitted, as in a container.
 */
#include "emu_driver.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda/cuda_driver.h"

enum { GRANULE = 16 << 10, THINGS_MAX = 4096 };

static const size_t CAPACITY = (size_t)1 << 34; /* as the runtime tells it */

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
    int mappings;
    bool released;
} physical;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static range ranges[THINGS_MAX];
static physical memories[THINGS_MAX];
static int n_ranges, n_memories, forbidden, calls_left = -1;
static bool hidden;

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
    *memory = memories[--n_memories];
}

/* ---- The driver's calls, under the lock ---- */

static fsdpc_cu_result create(fsdpc_cu_memory *out, size_t bytes,
                              const fsdpc_cu_properties *properties)
{
    if (properties->handle_types & FSDPC_CU_HANDLE_FABRIC)
        return FSDPC_CU_NOT_PERMITTED;
    if (properties->type != FSDPC_CU_ALLOCATION_PINNED || bytes == 0 || bytes % GRANULE)
        return refuse();
    if (n_memories == THINGS_MAX || bytes > CAPACITY || runs_out())
        return FSDPC_CU_OUT_OF_MEMORY;
    int file = memfd_create("emulated device memory", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)bytes)) {
        if (file >= 0)
            close(file);
        return FSDPC_CU_OUT_OF_MEMORY;
    }
    char nans[GRANULE];
    memset(nans, 0xff, sizeof nans);
    for (size_t at = 0; at < bytes; at += GRANULE)
        if (pwrite(file, nans, sizeof nans, (off_t)at) != (ssize_t)sizeof nans) {
            close(file);
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
    char *found =
        mmap(NULL, bytes + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED)
        return FSDPC_CU_OUT_OF_MEMORY;
    size_t before = -(uintptr_t)found % GRANULE;
    char *begin = found + before;
    if (before > 0)
        munmap(found, before);
    munmap(begin + bytes, GRANULE - before);
    ranges[n_ranges++] = (range){.begin = begin, .bytes = bytes, .file = -1};
    *out = (uintptr_t)begin;
    return FSDPC_CU_SUCCESS;
}

static fsdpc_cu_result map(fsdpc_cu_address address, size_t bytes, size_t offset,
                           fsdpc_cu_memory handle)
{
    range *beneath = range_of(address, bytes);
    physical *memory = memory_of(handle);
    if (!beneath || beneath->file >= 0 || !memory || memory->bytes != bytes || offset)
        return refuse();
    if (runs_out())
        return FSDPC_CU_OUT_OF_MEMORY;
    beneath->file = memory->file;
    memory->mappings++;
    return FSDPC_CU_SUCCESS;
}

static fsdpc_cu_result set_access(fsdpc_cu_address address, size_t bytes,
                                  const fsdpc_cu_access *access)
{
    range *beneath = range_of(address, bytes);
    if (!beneath || beneath->file < 0 || access->flags != FSDPC_CU_ACCESS_READ_WRITE)
        return refuse();
    if (runs_out() || emu_map(beneath->begin, bytes, beneath->file))
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
    munmap(beneath->begin, bytes);
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
    const char *wanted = getenv("FSDPC_EMU_WINDOWS");
    bool off = hidden || (wanted && strcmp(wanted, "0") == 0);
    *value = attribute != FSDPC_CU_HAS_VIRTUAL_MEMORY || !off;
    return device == 0 ? FSDPC_CU_SUCCESS : FSDPC_CU_INVALID_VALUE;
}

static fsdpc_cu_result
cuMemGetAllocationGranularity(size_t *bytes, const fsdpc_cu_properties *properties, int option)
{
    (void)properties;
    *bytes = GRANULE;
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
