"""What csrc/cuda/driver_abi.h declares of CUDA's driver is what cuda.h declares."""

from __future__ import annotations

from pathlib import Path

import abi
import pytest

HEADER = "cuda.h"

pytestmark = pytest.mark.skipif(not abi.is_there(HEADER),
                                reason=f"there is no toolkit with {HEADER}")

SAME_ABI = r"""
SAME(FSDPC_CU_SUCCESS, CUDA_SUCCESS);
SAME(FSDPC_CU_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE);
SAME(FSDPC_CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME(FSDPC_CU_INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE);
SAME(FSDPC_CU_OPERATING_SYSTEM, CUDA_ERROR_OPERATING_SYSTEM);
SAME(FSDPC_CU_NOT_PERMITTED, CUDA_ERROR_NOT_PERMITTED);
SAME(FSDPC_CU_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
SAME(FSDPC_CU_HAS_VIRTUAL_MEMORY, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(FSDPC_CU_HAS_POSIX_FD_HANDLES,
     CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME(FSDPC_CU_HAS_RDMA_WITH_VIRTUAL_MEMORY,
     CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
SAME(FSDPC_CU_HAS_FABRIC_HANDLES, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);
SAME(FSDPC_CU_ALLOCATION_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(FSDPC_CU_HANDLE_POSIX_FD, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(FSDPC_CU_HANDLE_FABRIC, CU_MEM_HANDLE_TYPE_FABRIC);
SAME(FSDPC_CU_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(FSDPC_CU_GRANULARITY_RECOMMENDED, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
SAME(FSDPC_CU_ACCESS_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(sizeof(fsdpc_cu_result), sizeof(CUresult));
SAME(sizeof(fsdpc_cu_address), sizeof(CUdeviceptr));
SAME(sizeof(fsdpc_cu_memory), sizeof(CUmemGenericAllocationHandle));
SAME(sizeof(fsdpc_cu_properties), sizeof(CUmemAllocationProp));
SAME(offsetof(fsdpc_cu_properties, handle_types),
     offsetof(CUmemAllocationProp, requestedHandleTypes));
SAME(offsetof(fsdpc_cu_properties, location), offsetof(CUmemAllocationProp, location));
SAME(offsetof(fsdpc_cu_location, id), offsetof(CUmemLocation, id));
SAME(offsetof(fsdpc_cu_properties, flags.rdma),
     offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable));
SAME(sizeof(fsdpc_cu_access), sizeof(CUmemAccessDesc));
SAME(offsetof(fsdpc_cu_access, flags), offsetof(CUmemAccessDesc, flags));
/* Functions: a call that fits ours fits theirs. */
CUresult call(fsdpc_cu_memory *memory, fsdpc_cu_address *address, size_t *bytes, int *value,
              const char **text, const fsdpc_cu_properties *properties,
              const fsdpc_cu_access *access)
{
    const CUmemAllocationProp *theirs = (const void *)properties;
    cuGetErrorString(CUDA_SUCCESS, text);
    cuDeviceGetAttribute(value, (CUdevice_attribute)FSDPC_CU_HAS_FABRIC_HANDLES, 0);
    cuMemGetAllocationGranularity(
        bytes, theirs, (CUmemAllocationGranularity_flags)FSDPC_CU_GRANULARITY_RECOMMENDED);
    cuMemCreate(memory, *bytes, theirs, 0ULL);
    cuMemAddressReserve(address, *bytes, *bytes, 0ULL, 0ULL);
    cuMemMap(*address, *bytes, (size_t)0, *memory, 0ULL);
    cuMemSetAccess(*address, *bytes, (const CUmemAccessDesc *)access, (size_t)1);
    cuMemUnmap(*address, *bytes);
    cuMemAddressFree(*address, *bytes);
    return cuMemRelease(*memory);
}
"""


def test_it_is_the_header_s(tmp_path: Path) -> None:
    abi.check_compiles(tmp_path, HEADER, "driver_abi.h", SAME_ABI)
