/* Copies shards through host memory if the host cannot access the device's memory.
 *
 * csrc/ckpt only knows files and host memory. On a remote device, a save first copies all shards to
 * the host and then saves the copy. A load reads into host memory and copies it to the device once
 * everything has been read. Both need as much host memory as the shards occupy.
 *
 * Saves happen repeatedly, and training waits for their copies. Saves therefore use pinned host
 * memory, if enough is available. Copies into pinned memory run at bus speed (55 GB/s on an H200,
 * against 6 GB/s into ordinary memory), and the device keeps the memory for the next save. Loads do
 * not pin, because pinning takes longer than the copy.
 */
#include "bind/engine/ckpt.h"

#include "base/size.h"

static size_t shard_bytes(const fsdpc_ckpt_shard *shard)
{
    return shard->data ? shard->numel * fsdpc_dtype_bytes(shard->memory_dtype) : 0;
}

static fsdpc_status mirror_alloc(fsdpc_runtime *runtime, bool repeats, size_t bytes,
                                 fsdpc_py_ckpt_host *out)
{
    if (repeats) {
        fsdpc_status status =
            fsdpc_device_alloc(runtime->device, FSDPC_MEM_PINNED, bytes, &out->memory);
        out->pinned = status == FSDPC_OK;
        if (status != FSDPC_ERR_NOMEM)
            return status;
    }
    return fsdpc_mem_alloc(runtime->mem, FSDPC_MEM_OTHER, bytes, &out->memory);
}

void fsdpc_py_ckpt_unmirror(fsdpc_runtime *runtime, fsdpc_py_ckpt_host *host)
{
    if (host->pinned)
        fsdpc_device_free(runtime->device, host->memory);
    else
        fsdpc_mem_free(runtime->mem, host->memory);
    *host = (fsdpc_py_ckpt_host){0};
}

fsdpc_status fsdpc_py_ckpt_mirror(fsdpc_runtime *runtime, const fsdpc_ckpt_shard *shards, size_t n,
                                  bool repeats, fsdpc_ckpt_shard *mirrored, fsdpc_py_ckpt_host *out)
{
    size_t bytes = 0;
    for (size_t i = 0; i < n; i++)
        bytes += fsdpc_round_up(shard_bytes(&shards[i]), 64);
    FSDPC_TRY(mirror_alloc(runtime, repeats, bytes, out));
    unsigned char *at = out->memory;
    for (size_t i = 0; i < n; i++) {
        mirrored[i] = shards[i];
        if (shards[i].data)
            mirrored[i].data = at;
        at += fsdpc_round_up(shard_bytes(&shards[i]), 64);
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_py_ckpt_copy(fsdpc_runtime *runtime, const fsdpc_ckpt_shard *to,
                                const fsdpc_ckpt_shard *from, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (from[i].data)
            FSDPC_TRY(fsdpc_device_copy(runtime->device, to[i].data, from[i].data,
                                        shard_bytes(&from[i]), runtime->compute));
    return fsdpc_stream_sync(runtime->compute);
}
