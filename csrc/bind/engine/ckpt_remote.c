/* Pieces whose memory the host cannot touch, by way of host memory.
 *
 * csrc/ckpt knows memory and files alone.  On a remote device a save is given a copy of the pieces,
 * made before anything of it runs, and a load reads into memory of the host, which goes to the
 * device when all of it was read.  Either takes as much host memory as the pieces have bytes, once.
 *
 * Saves repeat, and training stands still while they copy.  So theirs is pinned memory, if there is
 * as much, which copies fill at the rate of the bus (55 GB/s on an H200, ordinary memory 6) and which
 * the device keeps for the next one.  Pinning memory takes longer than the copy, so loads do not.
 */
#include "bind/engine/ckpt.h"

#include "base/size.h"

static size_t piece_bytes(const fsdpc_ckpt_piece *piece)
{
    return piece->data ? piece->numel * fsdpc_dtype_bytes(piece->memory_dtype) : 0;
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

fsdpc_status fsdpc_py_ckpt_mirror(fsdpc_runtime *runtime, const fsdpc_ckpt_piece *pieces, size_t n,
                                  bool repeats, fsdpc_ckpt_piece *mirrored, fsdpc_py_ckpt_host *out)
{
    size_t bytes = 0;
    for (size_t i = 0; i < n; i++)
        bytes += fsdpc_round_up(piece_bytes(&pieces[i]), 64);
    FSDPC_TRY(mirror_alloc(runtime, repeats, bytes, out));
    unsigned char *at = out->memory;
    for (size_t i = 0; i < n; i++) {
        mirrored[i] = pieces[i];
        if (pieces[i].data)
            mirrored[i].data = at;
        at += fsdpc_round_up(piece_bytes(&pieces[i]), 64);
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_py_ckpt_copy(fsdpc_runtime *runtime, const fsdpc_ckpt_piece *to,
                                const fsdpc_ckpt_piece *from, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (from[i].data)
            FSDPC_TRY(fsdpc_device_copy(runtime->device, to[i].data, from[i].data,
                                        piece_bytes(&from[i]), runtime->compute));
    return fsdpc_stream_sync(runtime->compute);
}
