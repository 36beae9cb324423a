/* The driver's physical memory and its mappings, from which windows are built.
 *
 * Memory is pinned on the GPU. A mapping is an address range that is mapped to an entire allocation
 * and may be accessed. An allocation whose handle was released remains valid as long as it is
 * mapped.
 *
 * Every call returns FSDPC_ERR_NOMEM if memory runs out, FSDPC_ERR_UNSUPPORTED if the driver or a
 * container forbids the call, and FSDPC_ERR_INTERNAL for other failures, mostly faults in earlier
 * work. A failed call leaves nothing allocated.
 */
#ifndef FSDPC_CUDA_DRIVER_MEMORY_H
#define FSDPC_CUDA_DRIVER_MEMORY_H

#include <stdbool.h>

#include "cuda/driver_abi.h"
#include "device/device.h"

/* Describes one GPU's driver memory; needs no cleanup. */
typedef struct fsdpc_driver_memory {
    fsdpc_cu cu;
    fsdpc_device *device;
    fsdpc_cu_properties properties;
    size_t granule; /* sizes are multiples of this */
} fsdpc_driver_memory;

/* Uses ncclMemAlloc's settings, including network and fabric access if the machine allows it, so
 * that NCCL can register the memory. */
fsdpc_status fsdpc_driver_memory_init(fsdpc_driver_memory *driver, fsdpc_device *device);

/* Converts the `result` of a call through driver->cu to a status with the message "the driver
 * failed to <what> <bytes> bytes". */
fsdpc_status fsdpc_driver_memory_check(const fsdpc_driver_memory *driver, fsdpc_cu_result result,
                                       const char *what, size_t bytes);

/* If GPU memory is full, the device first makes room (wait.h), unless it is capturing. */
fsdpc_status fsdpc_driver_memory_create(fsdpc_driver_memory *driver, size_t bytes,
                                        fsdpc_cu_memory *out);
void fsdpc_driver_memory_release(const fsdpc_driver_memory *driver, fsdpc_cu_memory memory);

/* Maps the memory into a reserved range that has no mapping. */
fsdpc_status fsdpc_driver_memory_map_at(const fsdpc_driver_memory *driver, fsdpc_cu_memory memory,
                                        size_t bytes, fsdpc_cu_address address);
/* Maps into a new range. */
fsdpc_status fsdpc_driver_memory_map(const fsdpc_driver_memory *driver, fsdpc_cu_memory memory,
                                     size_t bytes, fsdpc_cu_address *out);
/* Also releases the range. */
void fsdpc_driver_memory_unmap(const fsdpc_driver_memory *driver, size_t bytes,
                               fsdpc_cu_address address);

#endif
