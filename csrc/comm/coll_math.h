/* Arithmetic of collectives, once all contributions can be read by this rank. */
#ifndef FSDPC_COMM_COLL_MATH_H
#define FSDPC_COMM_COLL_MATH_H

#include "comm/comm.h"

/* out[j] = red over srcs[p][j].  Floats are summed by fsdpc_flat_reduce's tree, integers wrap,
 * BOOL's sum is "any"; MAX and MIN give NaN where any contribution is NaN. */
fsdpc_status fsdpc_coll_combine(fsdpc_red red, fsdpc_dtype dtype, const void *const *srcs,
                                int n_srcs, size_t numel, void *out, fsdpc_stream *stream);

/* Where rank `rank`'s part of a slice begins in the full, and how many elements it has.  It has all
 * of a REDUCE_ALL's, and none if the slice is whole on another rank. */
size_t fsdpc_coll_part(const fsdpc_coll *op, const fsdpc_slice *slice, int rank, size_t *first_out);

/* This rank's part of one slice into its shard: srcs[p] is where rank p's contribution begins.
 * The n_srcs are all ranks, if the operation has several sums. */
fsdpc_status fsdpc_coll_reduce_part(const fsdpc_coll *op, const fsdpc_slice *slice,
                                    const void *const *srcs, int n_srcs, fsdpc_stream *stream);

/* The sums of rank `rank` in a REDUCE_SCATTER or REDUCE_ALL: datas[p] is where rank p's buffer
 * begins. */
fsdpc_status fsdpc_coll_reduce_slices(const fsdpc_coll *op, int rank, int size,
                                      const unsigned char *const *datas, fsdpc_stream *stream);

enum { FSDPC_COLL_MAX_RANKS = 256 }; /* of one group whose ranks sum by these functions */

#endif
