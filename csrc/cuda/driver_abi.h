/* The part of the driver's interface that we use: virtual memory, which the runtime does not
 * provide.
 *
 * These declarations make the plugin the same wherever it is built, with or without cuda.h;
 * tests/gpu/test_driver_abi.py checks them against a real header.
 */
#ifndef FSDPC_CUDA_DRIVER_ABI_H
#define FSDPC_CUDA_DRIVER_ABI_H

#include <stddef.h>

typedef enum fsdpc_cu_result {
    FSDPC_CU_SUCCESS = 0,
    FSDPC_CU_INVALID_VALUE = 1,
    FSDPC_CU_OUT_OF_MEMORY = 2,
    FSDPC_CU_INVALID_DEVICE = 101,
    FSDPC_CU_OPERATING_SYSTEM = 304,
    FSDPC_CU_NOT_PERMITTED = 800,
    FSDPC_CU_NOT_SUPPORTED = 801,
} fsdpc_cu_result;

typedef enum fsdpc_cu_attribute {
    FSDPC_CU_HAS_VIRTUAL_MEMORY = 102,
    FSDPC_CU_HAS_POSIX_FD_HANDLES = 103,
    FSDPC_CU_HAS_RDMA_WITH_VIRTUAL_MEMORY = 110,
    FSDPC_CU_HAS_FABRIC_HANDLES = 128,
} fsdpc_cu_attribute;

enum {
    FSDPC_CU_ALLOCATION_PINNED = 1,
    FSDPC_CU_HANDLE_POSIX_FD = 1,
    FSDPC_CU_HANDLE_FABRIC = 8,
    FSDPC_CU_LOCATION_DEVICE = 1,
    FSDPC_CU_GRANULARITY_RECOMMENDED = 1,
    FSDPC_CU_ACCESS_READ_WRITE = 3,
};

typedef unsigned long long fsdpc_cu_address;
typedef unsigned long long fsdpc_cu_memory; /* a handle to physical memory */

typedef struct fsdpc_cu_location {
    int type, id;
} fsdpc_cu_location;

typedef struct fsdpc_cu_properties {
    int type, handle_types;
    fsdpc_cu_location location;
    void *unused;
    struct {
        unsigned char compression, rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
} fsdpc_cu_properties;

typedef struct fsdpc_cu_access {
    fsdpc_cu_location location;
    int flags;
} fsdpc_cu_access;

/* X(name, parameters); every function returns an fsdpc_cu_result. */
#define FSDPC_CU_SYMBOLS(X)                                                                        \
    X(cuDeviceGetAttribute, (int *value, int attribute, int device))                               \
    X(cuMemGetAllocationGranularity,                                                               \
      (size_t * bytes, const fsdpc_cu_properties *properties, int option))                         \
    X(cuMemCreate, (fsdpc_cu_memory * memory, size_t bytes, const fsdpc_cu_properties *properties, \
                    unsigned long long flags))                                                     \
    X(cuMemRelease, (fsdpc_cu_memory memory))                                                      \
    X(cuMemAddressReserve, (fsdpc_cu_address * address, size_t bytes, size_t alignment,            \
                            fsdpc_cu_address wish, unsigned long long flags))                      \
    X(cuMemAddressFree, (fsdpc_cu_address address, size_t bytes))                                  \
    X(cuMemMap, (fsdpc_cu_address address, size_t bytes, size_t offset, fsdpc_cu_memory memory,    \
                 unsigned long long flags))                                                        \
    X(cuMemUnmap, (fsdpc_cu_address address, size_t bytes))                                        \
    X(cuMemSetAccess,                                                                              \
      (fsdpc_cu_address address, size_t bytes, const fsdpc_cu_access *access, size_t count))       \
    X(cuGetErrorString, (int error, const char **text))

typedef struct fsdpc_cu {
#define X(name, parameters) fsdpc_cu_result(*name) parameters;
    FSDPC_CU_SYMBOLS(X)
#undef X
} fsdpc_cu;

#endif
