/* Creation takes several driver calls. If a call fails, the earlier calls are undone, so running
 * out of memory leaks nothing.
 */
#include "cuda/driver_memory.h"

#include "cuda/driver.h"
#include "cuda/wait.h"

static bool is_refusal(fsdpc_cu_result result)
{
    return result == FSDPC_CU_INVALID_VALUE || result == FSDPC_CU_INVALID_DEVICE ||
           result == FSDPC_CU_OPERATING_SYSTEM || result == FSDPC_CU_NOT_PERMITTED ||
           result == FSDPC_CU_NOT_SUPPORTED;
}

fsdpc_status fsdpc_driver_memory_check(const fsdpc_driver_memory *driver, fsdpc_cu_result result,
                                       const char *what, size_t bytes)
{
    if (result == FSDPC_CU_SUCCESS)
        return FSDPC_OK;
    const char *text = NULL;
    (void)driver->cu.cuGetErrorString((int)result, &text);
    text = text ? text : "unknown error";
    if (is_refusal(result))
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "the driver does not %s memory for a window: %s (%d)", what, text,
                          (int)result);
    bool unsharded = result == FSDPC_CU_OUT_OF_MEMORY;
    return fsdpc_fail(unsharded ? FSDPC_ERR_NOMEM : FSDPC_ERR_INTERNAL,
                      "the driver failed to %s %zu bytes for a window: %s (%d)%s", what, bytes,
                      text, (int)result,
                      unsharded ? "; use more ranks, or fewer units at a time" : "");
}

/* ---- Driver features ---- */

static bool has(const fsdpc_driver_memory *driver, fsdpc_cu_attribute attribute)
{
    int value = 0;
    return driver->cu.cuDeviceGetAttribute(&value, (int)attribute, driver->device->ordinal) ==
               FSDPC_CU_SUCCESS &&
           value;
}

fsdpc_status fsdpc_driver_memory_init(fsdpc_driver_memory *driver, fsdpc_device *device)
{
    *driver = (fsdpc_driver_memory){.device = device,
                                    .properties = {
                                        .type = FSDPC_CU_ALLOCATION_PINNED,
                                        .handle_types = FSDPC_CU_HANDLE_POSIX_FD,
                                        .location = {FSDPC_CU_LOCATION_DEVICE, device->ordinal},
                                    }};
    FSDPC_TRY(fsdpc_cuda_driver_calls(&driver->cu));
    if (!has(driver, FSDPC_CU_HAS_VIRTUAL_MEMORY) || !has(driver, FSDPC_CU_HAS_POSIX_FD_HANDLES))
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "GPU %d has no virtual memory that NCCL could register", device->ordinal);
    if (has(driver, FSDPC_CU_HAS_FABRIC_HANDLES))
        driver->properties.handle_types |= FSDPC_CU_HANDLE_FABRIC;
    driver->properties.flags.rdma = has(driver, FSDPC_CU_HAS_RDMA_WITH_VIRTUAL_MEMORY);
    return fsdpc_driver_memory_check(
        driver,
        driver->cu.cuMemGetAllocationGranularity(&driver->granule, &driver->properties,
                                                 FSDPC_CU_GRANULARITY_RECOMMENDED),
        "tell the granularity of", 0);
}

/* ---- Memory ---- */

/* A container or a kernel setting may forbid fabric handles even if the GPU supports them. */
static fsdpc_status create(fsdpc_driver_memory *driver, size_t bytes, fsdpc_cu_memory *out)
{
    fsdpc_cu_result result = driver->cu.cuMemCreate(out, bytes, &driver->properties, 0);
    if (is_refusal(result) && driver->properties.handle_types & FSDPC_CU_HANDLE_FABRIC) {
        driver->properties.handle_types &= ~FSDPC_CU_HANDLE_FABRIC;
        result = driver->cu.cuMemCreate(out, bytes, &driver->properties, 0);
    }
    return fsdpc_driver_memory_check(driver, result, "get", bytes);
}

fsdpc_status fsdpc_driver_memory_create(fsdpc_driver_memory *driver, size_t bytes,
                                        fsdpc_cu_memory *out)
{
    fsdpc_status status = create(driver, bytes, out);
    if (status != FSDPC_ERR_NOMEM || driver->device->capturing)
        return status;
    FSDPC_TRY(fsdpc_cuda_make_room(driver->device));
    return create(driver, bytes, out);
}

void fsdpc_driver_memory_release(const fsdpc_driver_memory *driver, fsdpc_cu_memory memory)
{
    (void)driver->cu.cuMemRelease(memory);
}

/* ---- Mappings ---- */

static fsdpc_cu_result grant(const fsdpc_driver_memory *driver, size_t bytes,
                             fsdpc_cu_address address)
{
    fsdpc_cu_access granted = {{FSDPC_CU_LOCATION_DEVICE, driver->device->ordinal},
                               FSDPC_CU_ACCESS_READ_WRITE};
    return driver->cu.cuMemSetAccess(address, bytes, &granted, 1);
}

fsdpc_status fsdpc_driver_memory_map_at(const fsdpc_driver_memory *driver, fsdpc_cu_memory memory,
                                        size_t bytes, fsdpc_cu_address address)
{
    FSDPC_TRY(fsdpc_driver_memory_check(driver, driver->cu.cuMemMap(address, bytes, 0, memory, 0),
                                        "map", bytes));
    fsdpc_cu_result result = grant(driver, bytes, address);
    if (result != FSDPC_CU_SUCCESS)
        (void)driver->cu.cuMemUnmap(address, bytes);
    return fsdpc_driver_memory_check(driver, result, "grant access to", bytes);
}

fsdpc_status fsdpc_driver_memory_map(const fsdpc_driver_memory *driver, fsdpc_cu_memory memory,
                                     size_t bytes, fsdpc_cu_address *out)
{
    fsdpc_cu_address address;
    FSDPC_TRY(fsdpc_driver_memory_check(
        driver, driver->cu.cuMemAddressReserve(&address, bytes, driver->granule, 0, 0),
        "reserve addresses of", bytes));
    fsdpc_status status = fsdpc_driver_memory_map_at(driver, memory, bytes, address);
    if (status != FSDPC_OK)
        (void)driver->cu.cuMemAddressFree(address, bytes);
    else
        *out = address;
    return status;
}

void fsdpc_driver_memory_unmap(const fsdpc_driver_memory *driver, size_t bytes,
                               fsdpc_cu_address address)
{
    (void)driver->cu.cuMemUnmap(address, bytes);
    (void)driver->cu.cuMemAddressFree(address, bytes);
}
