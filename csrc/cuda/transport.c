/* Ranks tell each other, over the control, which transport they want and where their GPUs sit.  So
 * all choose alike, and differences are named on every rank.
 *
 * From 2.30 on NCCL takes ranks that share a GPU, if its environment says so before its first init.
 * If such ranks request NCCL, this file sets that.  Ranks of several hosts have no other transport.
 */
#include "cuda/transport.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/comm_local_cuda.h"
#include "cuda/comm_nccl.h"
#include "cuda/control.h"
#include "cuda/device_cuda.h"
#include "cuda/nccl_load.h"

enum { NCCL, LOCAL_CUDA };
enum { SHARING_VERSION = 23000 }; /* of NCCL */

const char *const fsdpc_cuda_transports[] = {[NCCL] = "nccl", [LOCAL_CUDA] = "local_cuda", NULL};

typedef struct gpu {
    char asked[32], address[32];
} gpu;

static fsdpc_status asked_alike(const gpu *gpus, int size)
{
    for (int r = 1; r < size; r++)
        if (strcmp(gpus[r].asked, gpus[0].asked) != 0)
            return fsdpc_fail(FSDPC_ERR_MISMATCH,
                              "ranks disagree on the transport: rank 0 asks for '%s', rank %d for "
                              "'%s'; set FSDPC_TRANSPORT alike on all ranks",
                              gpus[0].asked, r, gpus[r].asked);
    return FSDPC_OK;
}

/* The lowest rank that has the GPU of a lower one on its host, its peer; 0 if all have their own.
 */
static int sharer(const gpu *gpus, const fsdpc_comm *control, int *peer_out)
{
    for (int r = 1; r < control->size; r++)
        for (int other = r - r % control->host_size; other < r; other++)
            if (strcmp(gpus[r].address, gpus[other].address) == 0) {
                *peer_out = other;
                return r;
            }
    return 0;
}

static fsdpc_status choose(const char *asked, const gpu *gpus, const fsdpc_control_config *config,
                           const char **out)
{
    int peer, hosts = fsdpc_control_hosts(config);
    FSDPC_TRY(asked_alike(gpus, config->comm.size));
    if (strcmp(asked, "auto") == 0) {
        bool local = hosts == 1 && sharer(gpus, config->control, &peer);
        *out = fsdpc_cuda_transports[local ? LOCAL_CUDA : NCCL];
        return FSDPC_OK;
    }
    if (hosts > 1 && strcmp(asked, fsdpc_cuda_transports[LOCAL_CUDA]) == 0)
        return fsdpc_fail(
            FSDPC_ERR_UNSUPPORTED,
            "%d ranks on %d hosts: local_cuda carries bytes through the memory of one "
            "host; unset FSDPC_TRANSPORT, or set it to nccl",
            config->comm.size, hosts);
    for (int i = 0; fsdpc_cuda_transports[i]; i++)
        if (strcmp(asked, fsdpc_cuda_transports[i]) == 0) {
            *out = fsdpc_cuda_transports[i];
            return FSDPC_OK;
        }
    return fsdpc_fail(FSDPC_ERR_VALUE,
                      "device 'cuda' has no transport '%s': FSDPC_TRANSPORT is auto, nccl or "
                      "local_cuda",
                      asked);
}

/* Lets NCCL take ranks that share a GPU. */
static fsdpc_status allow_sharing(const fsdpc_control_config *config, const gpu *gpus, int rank,
                                  int peer)
{
    fsdpc_nccl nccl;
    int hosts = fsdpc_control_hosts(config);
    FSDPC_TRY(fsdpc_nccl_open(config->library_path, hosts > 1, NULL, &nccl));
    if (nccl.version < SHARING_VERSION)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "ranks %d and %d share GPU %s, which NCCL %d.%d.%d does not let them: "
                          "install 2.30 or newer (pip's nvidia-nccl-cu13), or %s",
                          peer, rank, gpus[rank].address, nccl.version / 10000,
                          nccl.version / 100 % 100, nccl.version % 100,
                          hosts > 1 ? "start as many ranks on a host as it has GPUs"
                                    : "set FSDPC_TRANSPORT=local_cuda, which needs no NCCL");
    return fsdpc_nccl_allow_sharing();
}

static fsdpc_status create_nccl(const fsdpc_control_config *config, const gpu *gpus,
                                fsdpc_comm **out)
{
    int peer, rank = sharer(gpus, config->control, &peer);
    if (rank > 0) {
        fsdpc_status status = allow_sharing(config, gpus, rank, peer);
        FSDPC_TRY(fsdpc_comm_agree(config->control, status, "NCCL for ranks that share a GPU"));
    }
    return fsdpc_comm_nccl_create(config, out);
}

fsdpc_status fsdpc_cuda_comm_create(const char *transport, const fsdpc_control_config *config,
                                    fsdpc_comm **out)
{
    const char *chosen = NULL;
    gpu mine = {0};
    void *gpus;
    FSDPC_TRY(fsdpc_control_check(config, transport));
    snprintf(mine.asked, sizeof mine.asked, "%s", transport);
    fsdpc_status status =
        fsdpc_device_cuda_address(config->comm.device, mine.address, sizeof mine.address);
    FSDPC_TRY(fsdpc_control_tell(config->control, "the choice of a transport", status, &mine,
                                 sizeof mine, &gpus));
    status = choose(transport, gpus, config, &chosen);
    if (status == FSDPC_OK)
        status = chosen == fsdpc_cuda_transports[NCCL] ? create_nccl(config, gpus, out)
                                                       : fsdpc_comm_local_cuda_create(config, out);
    free(gpus);
    return status;
}
