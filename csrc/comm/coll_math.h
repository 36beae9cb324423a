/* Arithmetic for collectives whose contributions this rank can read. */
#ifndef FSDPC_COMM_COLL_MATH_H
#define FSDPC_COMM_COLL_MATH_H

#include "base/mem.h"
#include "comm/comm.h"

/* Computes out[j] by applying `red` to srcs[p][j] for all p. Floats are summed by
 * fsdpc_flat_reduce's tree, integers wrap around, and BOOLs are or-ed; MAX and MIN return NaN if
 * any contribution is NaN. */
fsdpc_status fsdpc_coll_combine(fsdpc_red red, fsdpc_dtype dtype, const void *const *srcs,
                                int n_srcs, size_t numel, void *out, fsdpc_stream *stream);

/* Returns where a rank's slice begins among the unsharded parameters. In a REDUCE_ALL, every rank
 * has the same slice. */
size_t fsdpc_coll_first(const fsdpc_coll *op, const fsdpc_slice *slice, int rank);

/* Reduces this rank's part of one slice into its shard; srcs[p] points to rank p's contribution.
 * n_srcs must be the number of ranks if the operation has several sums. */
fsdpc_status fsdpc_coll_reduce_part(const fsdpc_coll *op, const fsdpc_slice *slice,
                                    const void *const *srcs, int n_srcs, fsdpc_stream *stream);

/* Computes a rank's sums in a REDUCE_SCATTER or REDUCE_ALL; datas[p] points to the buffer of rank
 * p. */
fsdpc_status fsdpc_coll_reduce_slices(const fsdpc_coll *op, int rank, int size,
                                      const unsigned char *const *datas, fsdpc_stream *stream);

/* Returns how many bytes of these slices a rank sends to another host in a gather with a codec.
 * (Inline, as plugins compile coll_math.c in, and no codecs.) */
static inline size_t fsdpc_coll_gather_bytes(fsdpc_codec codec, fsdpc_dtype dtype,
                                             const fsdpc_slice *slices, size_t n_slices)
{
    size_t bytes = 0;
    for (size_t i = 0; i < n_slices; i++)
        bytes +=
            fsdpc_codec_bytes(codec, &(fsdpc_codec_rows){dtype, slices[i].row, slices[i].numel});
    return bytes;
}

/* Returns the number of bytes that one peer's contribution to a shard of this length occupies, if
 * contributions are received before they are summed. */
static inline size_t fsdpc_coll_contribution_bytes(size_t shard_numel, fsdpc_dtype dtype)
{
    return fsdpc_mem_counted(shard_numel * fsdpc_dtype_bytes(dtype));
}

enum { FSDPC_COLL_MAX_RANKS = 256 }; /* limit for groups whose ranks sum with these functions */

#endif
