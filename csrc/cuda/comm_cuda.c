/* Connects ranks on GPUs: they exchange their GPUs' addresses over the control, and then start
 * NCCL.
 *
 * NCCL 2.30 and newer lets ranks share a GPU if an environment variable is set before its first
 * init. This file sets that variable if ranks share a GPU. With an older NCCL, every rank fails,
 * and the message names the ranks and the GPU.
 */
#include "cuda/comm_cuda.h"

#include <stdlib.h>
#include <string.h>

#include "cuda/comm_nccl.h"
#include "cuda/device_cuda.h"
#include "cuda/nccl_env.h"
#include "cuda/nccl_load.h"

enum { SHARING_VERSION = 23000 }; /* of NCCL */

typedef struct gpu_address {
    char text[32];
} gpu_address;

/* Collective. *all_out receives the address of each rank's GPU; the caller frees it. */
static fsdpc_status addresses_tell(const fsdpc_control_config *config, gpu_address **all_out)
{
    fsdpc_comm *control = config->control;
    gpu_address mine = {0}, *all = calloc((size_t)control->size, sizeof *all);
    fsdpc_status status =
        all ? fsdpc_device_cuda_address(config->comm.device, mine.text, sizeof mine.text)
            : fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to learn where GPUs are");
    status = fsdpc_comm_agree(control, status, "where GPUs are");
    if (status == FSDPC_OK)
        status = fsdpc_comm_run(control, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_GATHER,
                                                       .unit = -1,
                                                       .what = "where GPUs are",
                                                       .dtype = FSDPC_U8,
                                                       .send = &mine,
                                                       .recv = all,
                                                       .numel = sizeof mine});
    if (status != FSDPC_OK)
        free(all);
    else
        *all_out = all;
    return status;
}

/* Returns the lowest rank that shares a GPU with a lower rank on its host, and stores the lower
 * rank in *peer_out. Returns 0 if every rank has its own GPU.
 */
static int sharer(const gpu_address *all, const fsdpc_comm *control, int *peer_out)
{
    for (int r = 1; r < control->size; r++)
        for (int other = r - r % control->host_size; other < r; other++)
            if (strcmp(all[r].text, all[other].text) == 0) {
                *peer_out = other;
                return r;
            }
    return 0;
}

/* Allows ranks to share a GPU. */
static fsdpc_status allow_sharing(const fsdpc_control_config *config, const char *address, int rank,
                                  int peer)
{
    fsdpc_nccl nccl;
    FSDPC_TRY(fsdpc_nccl_open(config->library_path, fsdpc_control_hosts(config) > 1, NULL, &nccl));
    if (nccl.version < SHARING_VERSION)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "ranks %d and %d share GPU %s, which NCCL %d.%d.%d does not let them: "
                          "install 2.30 or newer (pip's nvidia-nccl-cu13), or start as many ranks "
                          "on a host as it has GPUs",
                          peer, rank, address, nccl.version / 10000, nccl.version / 100 % 100,
                          nccl.version % 100);
    return fsdpc_nccl_allow_sharing();
}

fsdpc_status fsdpc_cuda_comm_create(const fsdpc_control_config *config, fsdpc_comm **out)
{
    gpu_address *all;
    int peer;
    FSDPC_TRY(fsdpc_control_check(config));
    FSDPC_TRY(addresses_tell(config, &all));
    int rank = sharer(all, config->control, &peer);
    fsdpc_status status = FSDPC_OK;
    if (rank > 0) {
        status = allow_sharing(config, all[rank].text, rank, peer);
        status = fsdpc_comm_agree(config->control, status, "NCCL for ranks that share a GPU");
    }
    free(all);
    return status == FSDPC_OK ? fsdpc_comm_nccl_create(config, out) : status;
}
