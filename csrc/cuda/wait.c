/* Bounded waits for a GPU.
 *
 * A collective with a dead peer never finishes. If the device has a peer check, a wait therefore
 * polls an event through that check. Without one, CUDA itself waits.
 */
#include "cuda/wait.h"

#include <sched.h>

#include "base/wait.h"
#include "cuda/error.h"
#include "cuda/pool.h"

fsdpc_status fsdpc_cuda_may_wait(const fsdpc_device *device)
{
    if (!device->capturing)
        return FSDPC_OK;
    return fsdpc_fail(
        FSDPC_ERR_STATE,
        "the host asks for a value of the GPU inside a captured step, where nothing "
        "is computed yet: read losses, norms and tensors after it, or after a replay");
}

static fsdpc_status poll_synced(void *arg)
{
    cudaError_t error = cudaEventQuery(((const fsdpc_cuda_stream *)arg)->synced);
    if (error == cudaErrorNotReady) {
        (void)cudaGetLastError();
        return FSDPC_IN_PROGRESS;
    }
    return fsdpc_cuda_check(error, "run what a stream holds");
}

static fsdpc_status held_for_ever(void)
{
    return fsdpc_fail(FSDPC_ERR_STATE,
                      "operations of a communicator that failed hold the GPU, and nothing more "
                      "runs on it: end this process");
}

/* Polls a stream of a lost device briefly, because a stream that is not blocked may still
 * finish. */
static fsdpc_status has_run(fsdpc_cuda_stream *stream)
{
    const int64_t patience_ns = 200000000;
    int64_t until = fsdpc_clock_ns() + patience_ns;
    fsdpc_status status = poll_synced(stream);
    for (; status == FSDPC_IN_PROGRESS && fsdpc_clock_ns() < until; status = poll_synced(stream))
        sched_yield();
    return status == FSDPC_IN_PROGRESS ? held_for_ever() : status;
}

fsdpc_status fsdpc_cuda_wait_stream(fsdpc_cuda_stream *stream)
{
    const fsdpc_peer_check *peer_check = &stream->head.device->peer_check;
    bool lost = fsdpc_cuda_is_lost(stream->head.device);
    if (!peer_check->wait_for && !lost)
        return fsdpc_cuda_check(cudaStreamSynchronize(stream->queue.raw),
                                "run what a stream holds");
    if (!stream->synced)
        FSDPC_CUDA_TRY(cudaEventCreateWithFlags(&stream->synced, cudaEventDisableTiming),
                       "create an event");
    FSDPC_CUDA_TRY(cudaEventRecord(stream->synced, stream->queue.raw), "record an event");
    return lost ? has_run(stream) : peer_check->wait_for(peer_check->arg, poll_synced, stream);
}

fsdpc_status fsdpc_cuda_wait(fsdpc_device *device)
{
    FSDPC_TRY(fsdpc_cuda_may_wait(device));
    return fsdpc_cuda_is_lost(device) ? held_for_ever()
                                      : fsdpc_cuda_wait_stream(((fsdpc_cuda_device *)device)->main);
}

/* Waits only for the main stream, because work on other streams that used a block is ordered before
 * the block is freed (pool.h). */
fsdpc_status fsdpc_cuda_make_room(fsdpc_device *device)
{
    if (device->reclaim)
        device->reclaim(device->reclaim_arg);
    return fsdpc_cuda_pool_trim(((fsdpc_cuda_device *)device)->pool, fsdpc_cuda_wait, device);
}
