/* One piece of physical memory a rank, mapped by all.
 *
 * Making goes in three moves, each of which all ranks get through or none: the own part is made,
 * mapped and exported; descriptors are handed over; the peers' parts are imported and mapped.
 * Handles and descriptors are let go of at once, as the mappings alone keep the memory.
 *
 * Peers may only read, where the driver knows such access.  What is UNSUPPORTED (driver_memory.h)
 * lets ranks go on by another way; any other failure does not.
 */
#include "cuda/shared_memory.h"

#include <stdlib.h>
#include <unistd.h>

#include "base/log.h"
#include "base/size.h"
#include "cuda/device_cuda.h"
#include "cuda/driver_memory.h"

enum { COUNT_ALIGN = 64 };

struct fsdpc_cuda_shared {
    fsdpc_driver_memory driver;
    fsdpc_device *device;
    fsdpc_log log; /* the control's */
    fsdpc_mem_kind kind;
    size_t bytes;        /* as counted */
    size_t mapped_bytes; /* of every part */
    int rank, size;
    int pid;                     /* in a forked child nothing of CUDA may be touched */
    const unsigned char **parts; /* NULL: not mapped */
    int *fds;                    /* on their way; -1: none */
};

/* ---- The three moves ---- */

static fsdpc_status map(fsdpc_cuda_shared *shared, fsdpc_cu_memory memory, int rank, int access)
{
    fsdpc_cu_address address;
    FSDPC_TRY(
        fsdpc_driver_memory_map(&shared->driver, memory, shared->mapped_bytes, access, &address));
    shared->parts[rank] = (const unsigned char *)(uintptr_t)address;
    return FSDPC_OK;
}

static fsdpc_status make_own(fsdpc_cuda_shared *shared)
{
    fsdpc_driver_memory *driver = &shared->driver;
    fsdpc_cu_memory memory;
    FSDPC_TRY(fsdpc_driver_memory_init(driver, shared->device, false, "that ranks share"));
    shared->mapped_bytes = fsdpc_round_up(fsdpc_max_size(shared->bytes, 1), driver->granule);
    fsdpc_mem_count_system_alloc(shared->device->mem);
    FSDPC_TRY(fsdpc_driver_memory_create(driver, shared->mapped_bytes, &memory));
    fsdpc_status status = map(shared, memory, shared->rank, FSDPC_CU_ACCESS_READ_WRITE);
    if (status == FSDPC_OK && shared->size > 1)
        status = fsdpc_driver_memory_check(
            driver,
            driver->cu.cuMemExportToShareableHandle(&shared->fds[shared->rank], memory,
                                                    FSDPC_CU_HANDLE_POSIX_FD, 0),
            "export", shared->mapped_bytes);
    fsdpc_driver_memory_release(driver, memory);
    FSDPC_TRY(status);
    return fsdpc_device_fill(shared->device, fsdpc_cuda_shared_own(shared), 0, shared->mapped_bytes,
                             NULL);
}

static fsdpc_status hand_over(fsdpc_comm *control, fsdpc_cuda_shared *shared, const char *what)
{
    int own = shared->fds[shared->rank];
    if (!control->ops->pass) /* on all ranks alike */
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "ranks over '%s' cannot hand over memory",
                          control->ops->name);
    fsdpc_status status = control->ops->pass(control, what, own, shared->fds);
    for (int p = 0; status != FSDPC_OK && p < shared->size; p++)
        shared->fds[p] = -1; /* closed already */
    shared->fds[shared->rank] = own;
    return status;
}

static fsdpc_status map_peers(fsdpc_cuda_shared *shared)
{
    const fsdpc_driver_memory *driver = &shared->driver;
    for (int p = 0; p < shared->size; p++) {
        fsdpc_cu_memory memory;
        if (p == shared->rank)
            continue;
        void *fd = (void *)(uintptr_t)shared->fds[p]; /* NOLINT(performance-no-int-to-ptr) */
        FSDPC_TRY(fsdpc_driver_memory_check(
            driver,
            driver->cu.cuMemImportFromShareableHandle(&memory, fd, FSDPC_CU_HANDLE_POSIX_FD),
            "import", shared->mapped_bytes));
        fsdpc_status status = map(shared, memory, p, FSDPC_CU_ACCESS_READ);
        fsdpc_driver_memory_release(driver, memory);
        FSDPC_TRY(status);
    }
    return FSDPC_OK;
}

/* ---- Life ---- */

static fsdpc_status shared_new(const fsdpc_comm *control, fsdpc_device *device, size_t bytes,
                               fsdpc_cuda_shared **out)
{
    size_t n = (size_t)control->size;
    fsdpc_cuda_shared *shared = calloc(1, sizeof *shared);
    const unsigned char **parts = calloc(n, sizeof *parts);
    int *fds = calloc(n, sizeof *fds);
    if (!shared || !parts || !fds) {
        free(shared);
        free(parts);
        free(fds);
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to note what ranks share");
    }
    *shared = (fsdpc_cuda_shared){.device = device,
                                  .log = control->log,
                                  .bytes = fsdpc_round_up(bytes, COUNT_ALIGN),
                                  .rank = control->rank,
                                  .size = control->size,
                                  .pid = (int)getpid(),
                                  .parts = parts,
                                  .fds = fds};
    for (size_t p = 0; p < n; p++)
        fds[p] = -1;
    *out = shared;
    return FSDPC_OK;
}

static void free_all(fsdpc_cuda_shared *shared)
{
    for (int p = 0; p < shared->size; p++)
        if (shared->parts[p])
            fsdpc_driver_memory_unmap(&shared->driver, shared->mapped_bytes,
                                      (fsdpc_cu_address)(uintptr_t)shared->parts[p]);
    free(shared->parts);
    free(shared->fds);
    free(shared);
}

fsdpc_status fsdpc_cuda_shared_create(fsdpc_comm *control, fsdpc_device *device,
                                      fsdpc_mem_kind kind, size_t bytes, const char *what,
                                      fsdpc_cuda_shared **out)
{
    fsdpc_cuda_shared *shared = NULL;
    fsdpc_status status = shared_new(control, device, bytes, &shared);
    if (status == FSDPC_OK)
        status = make_own(shared);
    status = fsdpc_comm_agree(control, status, what);
    if (status == FSDPC_OK && control->size > 1) {
        status = hand_over(control, shared, what);
        if (status == FSDPC_OK)
            status = fsdpc_comm_agree(control, map_peers(shared), what);
    }
    for (int p = 0; shared && p < shared->size; p++)
        if (shared->fds[p] >= 0)
            close(shared->fds[p]);
    if (status != FSDPC_OK) {
        if (shared)
            free_all(shared);
        return status;
    }
    shared->kind = kind;
    fsdpc_mem_count(device->mem, kind, (int64_t)shared->bytes);
    *out = shared;
    return FSDPC_OK;
}

void fsdpc_cuda_shared_destroy(fsdpc_cuda_shared *shared)
{
    if (!shared)
        return;
    if (shared->pid != (int)getpid())
        return;
    if (fsdpc_device_cuda_wait(shared->device) != FSDPC_OK) {
        FSDPC_WARN(&shared->log,
                   "%zu bytes that ranks share stay taken: the GPU may still use them (%s)",
                   shared->mapped_bytes, fsdpc_last_error());
        return;
    }
    fsdpc_mem_count(shared->device->mem, shared->kind, -(int64_t)shared->bytes);
    free_all(shared);
}

unsigned char *fsdpc_cuda_shared_own(const fsdpc_cuda_shared *shared)
{
    return (unsigned char *)(uintptr_t)shared->parts[shared->rank];
}

const unsigned char *const *fsdpc_cuda_shared_parts(const fsdpc_cuda_shared *shared)
{
    return shared->parts;
}
