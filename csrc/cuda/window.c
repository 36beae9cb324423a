/* Slots of physical memory, and the ranges of addresses mapped onto them.
 *
 * A slot is one handle of the driver's, made as ncclMemAlloc makes its memory, so that NCCL may
 * register it: pinned on the device, exportable as a file descriptor and, where the machine lets
 * us, over a fabric, open to RDMA where the GPU says so, of the recommended granularity.  It counts
 * the windows mapped onto it and goes with the last one.
 *
 * A mapping is a reservation, one of its own for every address, with the whole of a slot beneath
 * it and access granted.  Access is of the mapping, not of the memory, so each is asked for it.
 *
 * Making something is a ladder of calls of the driver; what fails on one rung takes back those
 * below it, so that running out of memory leaves nothing behind.  A window that gets memory of its
 * own keeps what it had until the new memory is there, and is mapped back onto it if the driver
 * then fails.
 */
#include "cuda/window.h"

#include <stdlib.h>

#include "base/size.h"
#include "cuda/cuda_driver.h"
#include "cuda/cuda_queue.h"

struct fsdpc_cuda_windows {
    fsdpc_cu cu;
    fsdpc_mem *mem;
    int ordinal;
    fsdpc_cu_properties properties;
    size_t granule;
};

typedef struct shared_slot {
    fsdpc_cuda_windows *windows;
    fsdpc_cu_memory memory;
    fsdpc_cu_address address; /* its own */
    size_t bytes;
    fsdpc_mem_kind kind;
    int refs;
} shared_slot;

typedef struct cuda_window {
    fsdpc_window base; /* first */
    shared_slot *slot;
} cuda_window;

static fsdpc_status check(const fsdpc_cuda_windows *windows, fsdpc_cu_result result,
                          const char *what, size_t bytes)
{
    if (result == FSDPC_CU_SUCCESS)
        return FSDPC_OK;
    const char *text = NULL;
    (void)windows->cu.cuGetErrorString((int)result, &text);
    return fsdpc_fail(
        result == FSDPC_CU_OUT_OF_MEMORY ? FSDPC_ERR_NOMEM : FSDPC_ERR_INTERNAL,
        "the driver failed to %s %zu bytes for a window: %s (%d)%s", what, bytes,
        text ? text : "unknown error", (int)result,
        result == FSDPC_CU_OUT_OF_MEMORY ? "; use more ranks, or fewer units at a time" : "");
}

/* ---- What the driver offers ---- */

static bool has(const fsdpc_cuda_windows *windows, fsdpc_cu_attribute attribute)
{
    int value = 0;
    return windows->cu.cuDeviceGetAttribute(&value, (int)attribute, windows->ordinal) ==
               FSDPC_CU_SUCCESS &&
           value;
}

static fsdpc_status init(fsdpc_cuda_windows *windows)
{
    FSDPC_TRY(fsdpc_cuda_driver_calls(&windows->cu));
    if (!has(windows, FSDPC_CU_HAS_VIRTUAL_MEMORY))
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "GPU %d has no virtual memory management",
                          windows->ordinal);
    windows->properties = (fsdpc_cu_properties){
        .type = FSDPC_CU_ALLOCATION_PINNED,
        .handle_types = FSDPC_CU_HANDLE_POSIX_FD,
        .location = {FSDPC_CU_LOCATION_DEVICE, windows->ordinal},
    };
    if (has(windows, FSDPC_CU_HAS_FABRIC_HANDLES))
        windows->properties.handle_types |= FSDPC_CU_HANDLE_FABRIC;
    windows->properties.flags.rdma = has(windows, FSDPC_CU_HAS_RDMA_WITH_VIRTUAL_MEMORY);
    return check(windows,
                 windows->cu.cuMemGetAllocationGranularity(&windows->granule, &windows->properties,
                                                           FSDPC_CU_GRANULARITY_RECOMMENDED),
                 "tell the granularity of", 0);
}

fsdpc_status fsdpc_cuda_windows_create(fsdpc_mem *mem, int ordinal, fsdpc_cuda_windows **out)
{
    fsdpc_cuda_windows *windows = calloc(1, sizeof *windows);
    if (!windows)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a device's windows");
    windows->mem = mem;
    windows->ordinal = ordinal;
    fsdpc_status status = init(windows);
    if (status != FSDPC_OK)
        free(windows);
    else
        *out = windows;
    return status;
}

void fsdpc_cuda_windows_destroy(fsdpc_cuda_windows *windows)
{
    free(windows);
}

size_t fsdpc_cuda_windows_granule(const fsdpc_cuda_windows *windows)
{
    return windows->granule;
}

/* ---- Mappings ---- */

static fsdpc_status map_at(const shared_slot *slot, fsdpc_cu_address address)
{
    const fsdpc_cuda_windows *windows = slot->windows;
    fsdpc_cu_access access = {{FSDPC_CU_LOCATION_DEVICE, windows->ordinal},
                              FSDPC_CU_ACCESS_READ_WRITE};
    FSDPC_TRY(check(windows, windows->cu.cuMemMap(address, slot->bytes, 0, slot->memory, 0), "map",
                    slot->bytes));
    fsdpc_status status =
        check(windows, windows->cu.cuMemSetAccess(address, slot->bytes, &access, 1),
              "grant access to", slot->bytes);
    if (status != FSDPC_OK)
        (void)windows->cu.cuMemUnmap(address, slot->bytes);
    return status;
}

static fsdpc_status map_anywhere(const shared_slot *slot, fsdpc_cu_address *out)
{
    const fsdpc_cuda_windows *windows = slot->windows;
    fsdpc_cu_address address;
    FSDPC_TRY(check(windows,
                    windows->cu.cuMemAddressReserve(&address, slot->bytes, windows->granule, 0, 0),
                    "reserve addresses of", slot->bytes));
    fsdpc_status status = map_at(slot, address);
    if (status != FSDPC_OK)
        (void)windows->cu.cuMemAddressFree(address, slot->bytes);
    else
        *out = address;
    return status;
}

static void unmap(const shared_slot *slot, fsdpc_cu_address address)
{
    (void)slot->windows->cu.cuMemUnmap(address, slot->bytes);
    (void)slot->windows->cu.cuMemAddressFree(address, slot->bytes);
}

/* ---- Slots ---- */

/* A container or a kernel setting may forbid handles of a fabric although the GPU has them. */
static fsdpc_cu_result memory_create(fsdpc_cuda_windows *windows, size_t bytes,
                                     fsdpc_cu_memory *out)
{
    fsdpc_cu_result result = windows->cu.cuMemCreate(out, bytes, &windows->properties, 0);
    bool refused = result == FSDPC_CU_NOT_PERMITTED || result == FSDPC_CU_NOT_SUPPORTED;
    if (!refused || !(windows->properties.handle_types & FSDPC_CU_HANDLE_FABRIC))
        return result;
    windows->properties.handle_types &= ~FSDPC_CU_HANDLE_FABRIC;
    return windows->cu.cuMemCreate(out, bytes, &windows->properties, 0);
}

static fsdpc_status slot_create(fsdpc_cuda_windows *windows, fsdpc_mem_kind kind, size_t bytes,
                                shared_slot **out)
{
    shared_slot *made = calloc(1, sizeof *made);
    if (!made)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to note a slot");
    made->windows = windows;
    made->kind = kind;
    made->bytes = fsdpc_round_up(fsdpc_max_size(bytes, 1), windows->granule);
    made->refs = 1;
    fsdpc_mem_count_system_alloc(windows->mem);
    fsdpc_status status;
    FSDPC_TRY_GOTO(
        status,
        check(windows, memory_create(windows, made->bytes, &made->memory), "get", made->bytes),
        free_slot);
    FSDPC_TRY_GOTO(status, map_anywhere(made, &made->address), release);
    fsdpc_mem_count(windows->mem, kind, (int64_t)made->bytes);
    *out = made;
    return FSDPC_OK;

release:
    (void)windows->cu.cuMemRelease(made->memory);
free_slot:
    free(made);
    return status;
}

static void slot_release(shared_slot *slot)
{
    if (--slot->refs > 0)
        return;
    unmap(slot, slot->address);
    (void)slot->windows->cu.cuMemRelease(slot->memory);
    fsdpc_mem_count(slot->windows->mem, slot->kind, -(int64_t)slot->bytes);
    free(slot);
}

/* ---- Windows ---- */

static fsdpc_status slot_of(fsdpc_device *device, fsdpc_mem_kind kind, size_t bytes,
                            const fsdpc_window *like, shared_slot **out)
{
    if (!like)
        return slot_create(((fsdpc_cuda_device *)device)->windows, kind, bytes, out);
    shared_slot *shared = ((const cuda_window *)like)->slot;
    if (bytes > shared->bytes)
        return fsdpc_fail(FSDPC_ERR_INTERNAL, "a window of %zu bytes onto a slot of %zu", bytes,
                          shared->bytes);
    shared->refs++;
    *out = shared;
    return FSDPC_OK;
}

fsdpc_status fsdpc_cuda_window_create(fsdpc_device *device, fsdpc_mem_kind kind, size_t bytes,
                                      const fsdpc_window *like, fsdpc_window **out)
{
    cuda_window *window = calloc(1, sizeof *window);
    if (!window)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to note a window");
    fsdpc_cu_address address;
    fsdpc_status status;
    FSDPC_TRY_GOTO(status, slot_of(device, kind, bytes, like, &window->slot), free_window);
    FSDPC_TRY_GOTO(status, map_anywhere(window->slot, &address), release);
    window->base = (fsdpc_window){.device = device,
                                  .bytes = bytes,
                                  .address = (unsigned char *)(uintptr_t)address,
                                  .memory = (unsigned char *)(uintptr_t)window->slot->address};
    *out = &window->base;
    return FSDPC_OK;

release:
    slot_release(window->slot);
free_window:
    free(window);
    return status;
}

fsdpc_status fsdpc_cuda_window_part(fsdpc_window *base)
{
    cuda_window *window = (cuda_window *)base;
    shared_slot *old = window->slot, *own;
    if (old->refs == 1)
        return FSDPC_OK;
    fsdpc_cu_address address = (fsdpc_cu_address)(uintptr_t)base->address;
    FSDPC_TRY(slot_create(old->windows, old->kind, old->bytes, &own)); /* all that is reserved */
    fsdpc_status status =
        check(old->windows, old->windows->cu.cuMemUnmap(address, old->bytes), "unmap", old->bytes);
    if (status == FSDPC_OK) {
        status = map_at(own, address);
        if (status != FSDPC_OK)
            (void)map_at(old, address);
    }
    if (status != FSDPC_OK) {
        slot_release(own);
        return status;
    }
    window->slot = own;
    base->memory = (unsigned char *)(uintptr_t)own->address;
    slot_release(old);
    return FSDPC_OK;
}

void fsdpc_cuda_window_destroy(fsdpc_window *base)
{
    cuda_window *window = (cuda_window *)base;
    unmap(window->slot, (fsdpc_cu_address)(uintptr_t)base->address);
    slot_release(window->slot);
    free(window);
}
