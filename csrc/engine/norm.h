/* A p-norm as it is added up, over tensors and ranks, and its value.
 *
 * For finite p above 0 it is an exact sum of |x|^p over leaves (ops/exact_sum.h), whose bits depend
 * on no cut and no order.  For p = INFINITY it is the largest |x|, as the bits of a double: these
 * are ordered as integers, with a NaN above infinity.  Either way it is FSDPC_NORM_WORDS integers
 * that begin as zeros.  Ranks combine theirs by one integer all-reduce, many norms at a time.
 *
 * Norms lie in the memory of the device whose gradients they measure, so that adding, joining and
 * combining them waits for nothing; only fsdpc_norm_read does.
 *
 * A power that fp64 cannot hold is infinity or 0: norms of large p want elements near 1.
 */
#ifndef FSDPC_ENGINE_NORM_H
#define FSDPC_ENGINE_NORM_H

#include "comm/comm.h"
#include "ops/flat_norm.h"

/* FSDPC_ERR_VALUE unless p is a number above 0, or INFINITY. */
fsdpc_status fsdpc_norm_check(double p);

/* -- memory ------------------------------------------------------------------------------------ */

/* Norms in a device's memory; a single one of the host's is in the struct, which must not move. */
typedef struct fsdpc_norm_room {
    fsdpc_device *device;
    fsdpc_norm here, *at;
} fsdpc_norm_room;

/* n zeros. */
fsdpc_status fsdpc_norm_room_init(fsdpc_norm_room *room, fsdpc_device *device, size_t n);
void fsdpc_norm_room_fini(fsdpc_norm_room *room);

/* -- on a stream ------------------------------------------------------------------------------- */

/* Adds elements; they begin at a leaf (layout.h). */
fsdpc_status fsdpc_norm_add(fsdpc_norm *norm, double p, const void *x, fsdpc_dtype dtype,
                            size_t numel, size_t leaf, fsdpc_stream *stream);

/* Is the norm of elements times `factor` known exactly?  For powers of two, and p of 1, 2 and
 * INFINITY. */
bool fsdpc_norm_can_scale(double p, double factor);

/* Adds `from` as if its elements were multiplied by `factor`: 1, or one that it can be scaled by.
 */
fsdpc_status fsdpc_norm_join(fsdpc_norm *into, const fsdpc_norm *from, double p, double factor,
                             fsdpc_stream *stream);

/* Collective: n norms become those over all ranks, by one all-reduce. */
fsdpc_status fsdpc_norm_all_reduce(fsdpc_norm *norms, size_t n, double p, fsdpc_comm *comm,
                                   fsdpc_stream *stream);

/* *out = its value, in the device's memory too.  A remote device is waited for if p is none of 1, 2
 * and INFINITY: such a root is the host's. */
fsdpc_status fsdpc_norm_put(const fsdpc_norm *norm, double p, double *out, fsdpc_stream *stream);

/* -- in the host ------------------------------------------------------------------------------- */

/* Brings n norms into the host's memory; waits. */
fsdpc_status fsdpc_norm_fetch(fsdpc_norm *out, const fsdpc_norm *norms, size_t n,
                              fsdpc_device *device);

double fsdpc_norm_value(const fsdpc_norm *norm, double p); /* of one in the host's memory */

/* The value of one in the device's memory; waits. */
fsdpc_status fsdpc_norm_read(const fsdpc_norm *norm, double p, fsdpc_device *device, double *out);

#endif
