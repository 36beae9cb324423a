/* Ranks tell each other, over the control, what they were asked for and where their GPUs sit; so
 * all choose alike, and differences are named on every rank.
 */
#include "cuda/transport.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/comm_local_cuda.h"
#include "cuda/comm_nccl.h"
#include "cuda/control.h"
#include "cuda/device_cuda.h"

enum { NCCL, LOCAL_CUDA };

const char *const fsdpc_cuda_transports[] = {[NCCL] = "nccl", [LOCAL_CUDA] = "local_cuda", NULL};

typedef struct card {
    char asked[32], address[32];
} card;

static fsdpc_status asked_alike(const card *cards, int size)
{
    for (int r = 1; r < size; r++)
        if (strcmp(cards[r].asked, cards[0].asked) != 0)
            return fsdpc_fail(FSDPC_ERR_MISMATCH,
                              "ranks disagree on the transport: rank 0 asks for '%s', rank %d for "
                              "'%s'; set FSDPC_TRANSPORT alike on all ranks",
                              cards[0].asked, r, cards[r].asked);
    return FSDPC_OK;
}

static bool all_have_own(const card *cards, int size)
{
    for (int r = 1; r < size; r++)
        for (int other = 0; other < r; other++)
            if (strcmp(cards[r].address, cards[other].address) == 0)
                return false;
    return true;
}

static fsdpc_status choose(const char *asked, const card *cards, int size, const char **out)
{
    FSDPC_TRY(asked_alike(cards, size));
    if (strcmp(asked, "auto") == 0) {
        *out = fsdpc_cuda_transports[all_have_own(cards, size) ? NCCL : LOCAL_CUDA];
        return FSDPC_OK;
    }
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

static fsdpc_status exchange(const char *asked, const fsdpc_comm_config *config, card *mine,
                             card *cards)
{
    snprintf(mine->asked, sizeof mine->asked, "%s", asked);
    fsdpc_status status =
        cards ? fsdpc_device_cuda_address(config->device, mine->address, sizeof mine->address)
              : fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to choose a transport");
    FSDPC_TRY(fsdpc_comm_agree(config->control, status, "the choice of a transport"));
    return fsdpc_comm_run(config->control, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_GATHER,
                                                         .unit = -1,
                                                         .what = "the choice of a transport",
                                                         .dtype = FSDPC_U8,
                                                         .send = mine,
                                                         .recv = cards,
                                                         .numel = sizeof *mine});
}

fsdpc_status fsdpc_cuda_comm_create(const char *transport, const fsdpc_comm_config *config,
                                    fsdpc_comm **out)
{
    const char *chosen = NULL;
    FSDPC_TRY(fsdpc_control_check(config, transport));
    card mine = {0}, *cards = calloc((size_t)config->size, sizeof *cards);
    fsdpc_status status = exchange(transport, config, &mine, cards);
    if (status == FSDPC_OK)
        status = choose(transport, cards, config->size, &chosen);
    free(cards);
    FSDPC_TRY(status);
    return chosen == fsdpc_cuda_transports[NCCL] ? fsdpc_comm_nccl_create(config, out)
                                                 : fsdpc_comm_local_cuda_create(config, out);
}
