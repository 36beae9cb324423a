/* A common interface to exact sums and maxima, on any device.
 *
 * The maximum is stored as its bit pattern. An empty norm is therefore all zeros for both kinds,
 * and an integer all-reduce works for both. Unused words stay zero.
 *
 * A norm can be scaled only by powers of two (ops/flat_norm_rules_body.h). With other factors,
 * libm's pow does not guarantee that scaling its argument scales the result exactly.
 */
#include "engine/norm.h"

#include <math.h>
#include <stdlib.h>

#include "ops/flat_ops.h"

fsdpc_status fsdpc_norm_check(double p)
{
    if (p > 0)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_VALUE,
                      "norm_type %g is not supported: give 1, 2, inf or another number above 0", p);
}

/* -- memory ------------------------------------------------------------------------------------ */

fsdpc_status fsdpc_norm_scratch_init(fsdpc_norm_scratch *scratch, fsdpc_device *device, size_t n)
{
    *scratch = (fsdpc_norm_scratch){.device = device};
    if (!device->remote && n <= 1) {
        scratch->at = &scratch->here;
        return FSDPC_OK;
    }
    if (!device->remote) {
        scratch->at = calloc(n, sizeof *scratch->at);
        return scratch->at
                   ? FSDPC_OK
                   : fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the norms of %zu parameters", n);
    }
    fsdpc_stream *main = fsdpc_device_main(device);
    void *memory = NULL;
    FSDPC_TRY(fsdpc_device_alloc(device, FSDPC_MEM_OTHER, n * sizeof *scratch->at, &memory));
    scratch->at = memory;
    return fsdpc_device_fill(device, memory, 0, n * sizeof *scratch->at, main);
}

void fsdpc_norm_scratch_fini(fsdpc_norm_scratch *scratch)
{
    if (scratch->device->remote)
        fsdpc_device_free(scratch->device, scratch->at);
    else if (scratch->at != &scratch->here)
        free(scratch->at);
}

/* -- on a stream
 * -------------------------------------------------------------------------------- */

fsdpc_status fsdpc_norm_add(fsdpc_norm *norm, double p, const void *x, fsdpc_dtype dtype,
                            size_t numel, size_t leaf, fsdpc_stream *stream)
{
    if (p == 2)
        return fsdpc_flat_sumsq(x, dtype, numel, leaf, &norm->sum, stream);
    if (p < (double)INFINITY)
        return fsdpc_flat_sumpow(x, dtype, numel, leaf, p, &norm->sum, stream);
    return fsdpc_flat_absmax(x, dtype, numel, &norm->magnitude, stream);
}

bool fsdpc_norm_can_scale(double p, double factor)
{
    int exponent;
    bool power_of_two = frexp(factor, &exponent) == 0.5;
    return power_of_two && abs(exponent) < 500 && (p == 1 || p == 2 || isinf(p));
}

fsdpc_status fsdpc_norm_join(fsdpc_norm *into, const fsdpc_norm *from, double p, double factor,
                             fsdpc_stream *stream)
{
    int exponent;
    frexp(factor, &exponent);
    fsdpc_norm_join_args args = {.into = into, .from = from, .p = p, .exponent = exponent - 1};
    return fsdpc_flat_norm_join(&args, stream);
}

fsdpc_status fsdpc_norm_all_reduce(fsdpc_norm *norms, size_t n, double p, fsdpc_comm *comm,
                                   fsdpc_stream *stream)
{
    if (comm->size == 1)
        return FSDPC_OK;
    for (size_t i = 0; i < n; i++) { /* settles carries, so that words can be added */
        fsdpc_norm_join_args args = {.into = &norms[i], .p = p};
        FSDPC_TRY(fsdpc_flat_norm_join(&args, stream));
    }
    fsdpc_coll op = {.kind = FSDPC_COLL_ALL_REDUCE,
                     .unit = -1,
                     .what = "gradient norm",
                     .dtype = FSDPC_I64,
                     .op = isinf(p) ? FSDPC_RED_MAX : FSDPC_RED_SUM,
                     .send = norms,
                     .recv = norms,
                     .numel = n * FSDPC_NORM_WORDS};
    fsdpc_trace_add(comm->trace, FSDPC_TRACE_COLLECTIVE, -1, n * sizeof *norms, 0, 0);
    return fsdpc_comm_run_ahead(comm, &op, stream);
}

fsdpc_status fsdpc_norm_put(const fsdpc_norm *norm, double p, double *out, fsdpc_stream *stream)
{
    fsdpc_device *device = stream->device;
    if (p == 1 || p == 2 || isinf(p))
        return fsdpc_flat_norm_value(norm, p, out, stream);
    double value = 0;
    FSDPC_TRY(fsdpc_norm_read(norm, p, device, &value));
    return fsdpc_device_copy(device, out, &value, sizeof value, stream);
}

/* -- on the host
 * -------------------------------------------------------------------------------- */

fsdpc_status fsdpc_norm_fetch(fsdpc_norm *out, const fsdpc_norm *norms, size_t n,
                              fsdpc_device *device)
{
    return fsdpc_device_copy(device, out, norms, n * sizeof *norms, NULL);
}

double fsdpc_norm_value(const fsdpc_norm *norm, double p)
{
    if (isinf(p))
        return norm->magnitude;
    double sum = fsdpc_exact_sum_value(&norm->sum);
    return p == 2 ? sqrt(sum) : p == 1 ? sum : pow(sum, 1 / p);
}

fsdpc_status fsdpc_norm_read(const fsdpc_norm *norm, double p, fsdpc_device *device, double *out)
{
    fsdpc_norm here;
    if (device->remote) {
        FSDPC_TRY(fsdpc_norm_fetch(&here, norm, 1, device));
        norm = &here;
    }
    *out = fsdpc_norm_value(norm, p);
    return FSDPC_OK;
}
