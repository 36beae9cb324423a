/* Defines a p-norm: how it is accumulated over tensors and ranks, and how its value is read.
 *
 * For finite p above 0, it is an exact sum of |x|^p over leaves (ops/exact_sum.h); its bits do not
 * depend on cuts or order. For p = INFINITY, it is the largest |x|, stored as the bits of a double,
 * which sort correctly as integers, with NaN above infinity. In both cases it is an array of
 * FSDPC_NORM_WORDS integers, initially zero. Ranks combine many norms with one integer all-reduce.
 *
 * Norms are in the memory of the device that holds the gradients, so that adding, joining and
 * combining them never waits; only fsdpc_norm_read does.
 *
 * A power that fp64 cannot represent becomes infinity or 0: norms with a large p need elements near
 * 1.
 */
#ifndef FSDPC_ENGINE_NORM_H
#define FSDPC_ENGINE_NORM_H

#include "comm/comm.h"
#include "ops/flat_norm.h"

/* Returns FSDPC_ERR_VALUE unless p is a positive number or INFINITY. */
fsdpc_status fsdpc_norm_check(double p);

/* -- memory ------------------------------------------------------------------------------------ */

/* Norms in a device's memory. A single norm on the host is stored inside the struct, which must not
 * be moved. */
typedef struct fsdpc_norm_scratch {
    fsdpc_device *device;
    fsdpc_norm here, *at;
} fsdpc_norm_scratch;

/* Creates n norms, all zero. */
fsdpc_status fsdpc_norm_scratch_init(fsdpc_norm_scratch *scratch, fsdpc_device *device, size_t n);
void fsdpc_norm_scratch_fini(fsdpc_norm_scratch *scratch);

/* -- on a stream ------------------------------------------------------------------------------- */

/* Adds elements, the first of which must begin a leaf (layout.h). */
fsdpc_status fsdpc_norm_add(fsdpc_norm *norm, double p, const void *x, fsdpc_dtype dtype,
                            size_t numel, size_t leaf, fsdpc_stream *stream);

/* Returns whether scaling a norm is exact, which requires that `factor` is a power of two and p is
 * 1, 2 or INFINITY. */
bool fsdpc_norm_can_scale(double p, double factor);

/* Adds `from` as if its elements were multiplied by `factor`, which must be 1 or satisfy
 * can_scale. */
fsdpc_status fsdpc_norm_join(fsdpc_norm *into, const fsdpc_norm *from, double p, double factor,
                             fsdpc_stream *stream);

/* Collective: combines n norms over all ranks with one all-reduce. */
fsdpc_status fsdpc_norm_all_reduce(fsdpc_norm *norms, size_t n, double p, fsdpc_comm *comm,
                                   fsdpc_stream *stream);

/* Writes the value of a norm to *out, which is also in device memory. If p is not 1, 2 or INFINITY,
 * waits for a remote device, since the host computes the root. */
fsdpc_status fsdpc_norm_put(const fsdpc_norm *norm, double p, double *out, fsdpc_stream *stream);

/* -- on the host
 * -------------------------------------------------------------------------------- */

/* Copies n norms to host memory, waiting for the device. */
fsdpc_status fsdpc_norm_fetch(fsdpc_norm *out, const fsdpc_norm *norms, size_t n,
                              fsdpc_device *device);

double fsdpc_norm_value(const fsdpc_norm *norm, double p); /* for a norm in host memory */

/* Reads the value of a norm in device memory, waiting for the device. */
fsdpc_status fsdpc_norm_read(const fsdpc_norm *norm, double p, fsdpc_device *device, double *out);

#endif
