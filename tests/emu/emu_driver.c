/* The driver beneath an emulated device: always there, with one GPU, whose memory is gated.
 *
 * Stands in the emulated plugin for csrc/cuda/cuda_driver.c, which asks NVIDIA's.  Programs that
 * must find device memory in their reach (C tests that look at it) do not ask for a driver.
 */
#include <cuda_runtime_api.h>

#include "cuda/cuda_driver.h"

fsdpc_status fsdpc_cuda_driver_open(int *count_out)
{
    emu_gate_memory();
    *count_out = 1;
    return FSDPC_OK;
}

int fsdpc_cuda_driver_version(void)
{
    return CUDART_VERSION;
}
