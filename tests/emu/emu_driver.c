/* The driver beneath an emulated device: always there, with one GPU (or as many as
 * EMU_GPUS says, all of them this processor), whose memory is gated.
 *
 * Stands in the emulated plugin for csrc/cuda/cuda_driver.c, which asks NVIDIA's.  Programs that
 * must find device memory in their reach do not ask for a driver (C tests that look at it), or set
 * EMU_OPEN (Python, where torch's tensors of the CPU stand for those of the GPU).
 */
#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "cuda/cuda_driver.h"

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
