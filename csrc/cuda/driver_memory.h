/* Physical memory of the driver's and mappings of it: what windows are made of.
 *
 * Memory is pinned on the GPU.  A mapping is a range of addresses with the whole of a memory
 * beneath it and access granted.  A memory whose handle was released lives as long as it is mapped.
 *
 * Every call gives FSDPC_ERR_NOMEM if there is too little, FSDPC_ERR_UNSUPPORTED if the driver or a
 * container forbids it, and FSDPC_ERR_INTERNAL for all else, above all a fault of earlier work.
 * One that fails leaves nothing behind.
 */
#ifndef FSDPC_CUDA_DRIVER_MEMORY_H
#define FSDPC_CUDA_DRIVER_MEMORY_H

#include <stdbool.h>

#include "cuda/driver_abi.h"
#include "device/device.h"

/* A GPU's.  In the caller's storage, with nothing to undo. */
typedef struct fsdpc_driver_memory {
    fsdpc_cu cu;
    fsdpc_device *device;
    fsdpc_cu_properties properties;
    size_t granule; /* sizes are multiples of it */
} fsdpc_driver_memory;

/* As ncclMemAlloc makes its memory, for networks and fabrics too as far as the machine lets us, so
 * that NCCL may register it. */
fsdpc_status fsdpc_driver_memory_init(fsdpc_driver_memory *driver, fsdpc_device *device);

/* `result` of a call of driver->cu, as a status: "the driver failed to <what> <bytes> bytes". */
fsdpc_status fsdpc_driver_memory_check(const fsdpc_driver_memory *driver, fsdpc_cu_result result,
                                       const char *what, size_t bytes);

/* Where the GPU is full, the device makes room first (wait.h), unless it captures. */
fsdpc_status fsdpc_driver_memory_create(fsdpc_driver_memory *driver, size_t bytes,
                                        fsdpc_cu_memory *out);
void fsdpc_driver_memory_release(const fsdpc_driver_memory *driver, fsdpc_cu_memory memory);

/* Beneath a range that is reserved and has nothing beneath it. */
fsdpc_status fsdpc_driver_memory_map_at(const fsdpc_driver_memory *driver, fsdpc_cu_memory memory,
                                        size_t bytes, fsdpc_cu_address address);
/* With a new range. */
fsdpc_status fsdpc_driver_memory_map(const fsdpc_driver_memory *driver, fsdpc_cu_memory memory,
                                     size_t bytes, fsdpc_cu_address *out);
/* Gives the range back too. */
void fsdpc_driver_memory_unmap(const fsdpc_driver_memory *driver, size_t bytes,
                               fsdpc_cu_address address);

#endif
