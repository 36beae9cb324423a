/* Pieces whose memory the host cannot touch, by way of host memory.
 *
 * csrc/ckpt knows memory and files alone.  On a remote device a save is given a copy of the pieces,
 * made before anything of it runs, and a load reads into memory of the host, which goes to the
 * device when all of it was read.  Either takes as much host memory as the pieces have bytes, once.
 */
#include "py/py_ckpt.h"

#include "base/size.h"

static size_t piece_bytes(const fsdpc_ckpt_piece *piece)
{
    return piece->data ? piece->numel * fsdpc_dtype_bytes(piece->memory_dtype) : 0;
}

fsdpc_status fsdpc_py_ckpt_mirror(fsdpc_runtime *runtime, const fsdpc_ckpt_piece *pieces, size_t n,
                                  fsdpc_ckpt_piece *mirrored, void **host_out)
{
    size_t bytes = 0;
    for (size_t i = 0; i < n; i++)
        bytes += fsdpc_round_up(piece_bytes(&pieces[i]), 64);
    void *host;
    FSDPC_TRY(fsdpc_mem_alloc(runtime->mem, FSDPC_MEM_OTHER, bytes, &host));
    unsigned char *at = host;
    for (size_t i = 0; i < n; i++) {
        mirrored[i] = pieces[i];
        if (pieces[i].data)
            mirrored[i].data = at;
        at += fsdpc_round_up(piece_bytes(&pieces[i]), 64);
    }
    *host_out = host;
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
