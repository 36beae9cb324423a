/* libfsdpc_cuda.so: the table passed to the core, and the library's only exported symbol.
 *
 * Opening the plugin uses neither the driver nor NCCL.
 */
#include <cuda_runtime_api.h>
#include <stdio.h>

#include "cuda/attention_cudnn.h"
#include "cuda/driver.h"
#include "cuda/queue.h"
#include "cuda/device_cuda.h"
#include "cuda/gemm_cublaslt.h"
#include "guest/guest.h"
#include "cuda/nccl_load.h"
#include "cuda/comm_cuda.h"

static void describe(char *text, size_t bytes)
{
    int count = 0, driver = fsdpc_cuda_driver_version();
    if (fsdpc_cuda_driver_open(&count) != FSDPC_OK) {
        snprintf(text, bytes, "CUDA %d.%d, no GPU: %s", CUDART_VERSION / 1000,
                 CUDART_VERSION % 1000 / 10, fsdpc_last_error());
        return;
    }
    char products[64], attention[320];
    fsdpc_cuda_products_describe(products, sizeof products);
    fsdpc_cuda_attentions_describe(attention, sizeof attention);
    snprintf(text, bytes,
             "CUDA %d.%d, driver for %d.%d, %d GPU(s), products by %s, attention by %s",
             CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, driver / 1000, driver % 1000 / 10,
             count, products, attention);
}

/* Device option "cudnn": the FSDPC_CUDNN setting for attention (base/env.h). */
static fsdpc_status device_create(fsdpc_mem *mem, int ordinal, const fsdpc_plugin_option *options,
                                  fsdpc_device **out)
{
    int count;
    FSDPC_TRY(fsdpc_cuda_driver_open(&count));
    if (ordinal < 0 || ordinal >= count)
        return fsdpc_fail(FSDPC_ERR_INDEX, "no GPU %d: this process sees %d, counted from 0",
                          ordinal, count);
    const char *cudnn = fsdpc_plugin_option_get(options, "cudnn");
    FSDPC_TRY(fsdpc_device_cuda_create(mem, ordinal, out));
    ((fsdpc_cuda_device *)*out)->cudnn = cudnn ? cudnn[0] - '0' : 0;
    return FSDPC_OK;
}

/* Communicator option "library": path of the preferred NCCL library. */
static fsdpc_status comm_create(const fsdpc_comm_config *config, fsdpc_comm *control,
                                const fsdpc_plugin_option *options, fsdpc_comm **out)
{
    return fsdpc_cuda_comm_create(
        &(fsdpc_control_config){*config, control, fsdpc_plugin_option_get(options, "library")},
        out);
}

static const fsdpc_plugin plugin = {
    .layout = FSDPC_PLUGIN_LAYOUT,
    .name = "cuda",
    .describe = describe,
    .device_count = fsdpc_cuda_driver_open,
    .device_create = device_create,
    .comm_library = fsdpc_nccl_describe,
    .comm_create = comm_create,
};

__attribute__((visibility("default"))) const fsdpc_plugin *
fsdpc_plugin_open(const fsdpc_plugin_host *host);

const fsdpc_plugin *fsdpc_plugin_open(const fsdpc_plugin_host *host)
{
    fsdpc_guest_init(host);
    return &plugin;
}
