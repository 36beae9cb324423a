/* Slots of physical memory, and the address ranges mapped onto them.
 *
 * A slot is one block of the driver's memory, created so that NCCL can register it. It counts the
 * windows mapped onto it and is freed with the last one. A mapping is a separate address range,
 * mapped to the entire slot.
 *
 * A window that is separated from its slot keeps its old memory until new memory is allocated. If
 * the driver then fails, the window is mapped onto the old memory again.
 */
#include "cuda/window.h"

#include <stdlib.h>

#include "base/size.h"
#include "cuda/wait.h"
#include "cuda/driver_memory.h"

struct fsdpc_cuda_windows {
    fsdpc_driver_memory driver;
    fsdpc_mem *mem;
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

/* ---- Mappings ---- */

static fsdpc_status map(const shared_slot *slot, fsdpc_cu_address *out)
{
    return fsdpc_driver_memory_map(&slot->windows->driver, slot->memory, slot->bytes, out);
}

static fsdpc_status map_at(const shared_slot *slot, fsdpc_cu_address address)
{
    return fsdpc_driver_memory_map_at(&slot->windows->driver, slot->memory, slot->bytes, address);
}

static void unmap(const shared_slot *slot, fsdpc_cu_address address)
{
    fsdpc_driver_memory_unmap(&slot->windows->driver, slot->bytes, address);
}

/* ---- Slots ---- */

static fsdpc_status slot_create(fsdpc_cuda_windows *windows, fsdpc_mem_kind kind, size_t bytes,
                                shared_slot **out)
{
    shared_slot *made = calloc(1, sizeof *made);
    if (!made)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to note a slot");
    made->windows = windows;
    made->kind = kind;
    made->bytes = fsdpc_round_up(fsdpc_max_size(bytes, 1), windows->driver.granule);
    made->refs = 1;
    fsdpc_mem_count_system_alloc(windows->mem);
    fsdpc_status status;
    FSDPC_TRY_GOTO(status, fsdpc_driver_memory_create(&windows->driver, made->bytes, &made->memory),
                   free_slot);
    FSDPC_TRY_GOTO(status, map(made, &made->address), release);
    fsdpc_mem_count(windows->mem, kind, (int64_t)made->bytes);
    *out = made;
    return FSDPC_OK;

release:
    fsdpc_driver_memory_release(&windows->driver, made->memory);
free_slot:
    free(made);
    return status;
}

static void slot_release(shared_slot *slot)
{
    if (--slot->refs > 0)
        return;
    unmap(slot, slot->address);
    fsdpc_driver_memory_release(&slot->windows->driver, slot->memory);
    fsdpc_mem_count(slot->windows->mem, slot->kind, -(int64_t)slot->bytes);
    free(slot);
}

/* ---- A device's windows ---- */

/* Creates one window as a test, because a container or a virtual GPU may reject features that the
 * driver's attributes report. A shortage of memory does not mean that windows are unsupported. */
static fsdpc_status try_one(fsdpc_cuda_windows *windows)
{
    shared_slot *slot;
    fsdpc_status status = slot_create(windows, FSDPC_MEM_OTHER, 1, &slot);
    if (status == FSDPC_OK)
        slot_release(slot);
    return status == FSDPC_ERR_NOMEM ? FSDPC_OK : status;
}

fsdpc_status fsdpc_cuda_windows_create(fsdpc_device *device, fsdpc_cuda_windows **out)
{
    fsdpc_cuda_windows *windows = calloc(1, sizeof *windows);
    if (!windows)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a device's windows");
    windows->mem = device->mem;
    fsdpc_status status = fsdpc_driver_memory_init(&windows->driver, device);
    if (status == FSDPC_OK)
        status = try_one(windows);
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
    return windows->driver.granule;
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
    FSDPC_TRY_GOTO(status, map(window->slot, &address), release);
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
    FSDPC_TRY(slot_create(old->windows, old->kind, old->bytes, &own)); /* the whole reservation */
    const fsdpc_driver_memory *driver = &old->windows->driver;
    fsdpc_status status = fsdpc_driver_memory_check(
        driver, driver->cu.cuMemUnmap(address, old->bytes), "unmap", old->bytes);
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

/* Memory that a kernel still uses is not unmapped: the resulting fault would make the GPU unusable
 * for the whole process. */
fsdpc_status fsdpc_cuda_window_destroy(fsdpc_window *base)
{
    FSDPC_TRY(fsdpc_cuda_wait(base->device));
    cuda_window *window = (cuda_window *)base;
    unmap(window->slot, (fsdpc_cu_address)(uintptr_t)base->address);
    slot_release(window->slot);
    free(window);
    return FSDPC_OK;
}
