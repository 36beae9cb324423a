/* Determines why no GPU is available, in this order: no driver library, a driver that does not
 * start, a driver too old for the linked runtime, no visible GPU.
 */
#include "cuda/driver.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stddef.h>

typedef int (*init_fn)(unsigned flags);
typedef int (*text_fn)(int error, const char **text);

/* The runtime keeps the library open anyway, so repeated calls are cheap. */
static void *open_driver(void)
{
    return dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
}

static fsdpc_status start_driver(void *library)
{
    init_fn init;
    text_fn text_of;
    *(void **)&init = dlsym(library, "cuInit");
    *(void **)&text_of = dlsym(library, "cuGetErrorString");
    if (!init || !text_of)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "libcuda.so.1 has no cuInit: it is not NVIDIA's driver");
    int error = init(0);
    if (error == 0)
        return FSDPC_OK;
    const char *text = NULL;
    text_of(error, &text);
    return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "NVIDIA's driver does not start: %s (%d)",
                      text ? text : "unknown error", error);
}

fsdpc_status fsdpc_cuda_driver_open(int *count_out)
{
    void *library = open_driver();
    if (!library)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "no NVIDIA driver: %s; install one, or run on device 'cpu'", dlerror());
    FSDPC_TRY(start_driver(library));
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "%s: the driver is for CUDA %d.%d, this plugin needs %d.%d; update the "
                          "driver",
                          cudaGetErrorString(error), fsdpc_cuda_driver_version() / 1000,
                          fsdpc_cuda_driver_version() % 1000 / 10, CUDART_VERSION / 1000,
                          CUDART_VERSION % 1000 / 10);
    }
    if (count == 0)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "no GPU is visible; look at nvidia-smi and CUDA_VISIBLE_DEVICES");
    *count_out = count;
    return FSDPC_OK;
}

fsdpc_status fsdpc_cuda_driver_calls(fsdpc_cu *out)
{
    void *library = open_driver();
    if (!library)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "no NVIDIA driver: %s", dlerror());
    fsdpc_cu calls = {0};
#define X(name, parameters)                                                                        \
    *(void **)&calls.name = dlsym(library, #name);                                                 \
    if (!calls.name)                                                                               \
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "NVIDIA's driver has no " #name ": update it");
    FSDPC_CU_SYMBOLS(X)
#undef X
    *out = calls;
    return FSDPC_OK;
}

int fsdpc_cuda_driver_version(void)
{
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}
