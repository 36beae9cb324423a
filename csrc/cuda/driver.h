/* Determines whether a GPU is available, and why not, and looks up calls that only the driver
 * provides.
 *
 * The driver's library is opened by name, never linked, so the plugin loads on any machine. CUDA's
 * runtime is linked statically and finds the same library by itself.
 */
#ifndef FSDPC_CUDA_DRIVER_H
#define FSDPC_CUDA_DRIVER_H

#include "base/status.h"
#include "cuda/driver_abi.h"

/* Sets *count_out to the number of GPUs, at least 1. Returns FSDPC_ERR_UNSUPPORTED, with the
 * reason, if there are none. */
fsdpc_status fsdpc_cuda_driver_open(int *count_out);

/* Looks up the driver's own calls once the driver has started. Returns FSDPC_ERR_UNSUPPORTED if any
 * of them is missing. */
fsdpc_status fsdpc_cuda_driver_calls(fsdpc_cu *out);

/* Returns the driver's CUDA version as 1000 * major + 10 * minor, or 0 without a driver. */
int fsdpc_cuda_driver_version(void);

#endif
