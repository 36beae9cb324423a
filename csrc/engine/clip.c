/* Clipping takes two steps: a small collective that computes the norm, and a scaling that needs no
 * extra pass.
 *
 * The norm costs one read of the gradient shards and an all-reduce of 70 integers. Per-parameter
 * norms use the same read and a single all-reduce of 70 integers per parameter. The scale is not
 * applied here: the optimizer applies it as it reads the gradients. If any gradient is NaN or
 * infinite, the norm is too, on every rank.
 *
 * On a remote device, neither step makes the host wait. Norms, their values and the clipping factor
 * stay in device memory. Each unit has a copy of the factor, for the optimizer's kernels. Ranks
 * combine norms in device memory if their communicator supports it.
 *
 * If only some ranks have read .grad, they have already applied the pending scale; the others apply
 * it to their sums. Either way, a rank contributes the same values to the all-reduce.
 */
#include "engine/clip.h"

#include "engine/grads.h"
#include "engine/unit_internal.h"
#include "ops/flat_ops.h"

/* A run of consecutive gradients in a shard with the same leaf size, read by a single kernel
 * pass. */
typedef struct grad_run {
    const unsigned char *at;
    size_t numel, leaf; /* numel is 0 before the first */
    fsdpc_dtype dtype;
} grad_run;

static fsdpc_status run_end(grad_run *run, double p, fsdpc_norm *norm, fsdpc_stream *stream)
{
    size_t numel = run->numel;
    run->numel = 0;
    if (numel == 0)
        return FSDPC_OK;
    return fsdpc_norm_add(norm, p, run->at, run->dtype, numel, run->leaf, stream);
}

/* Returns whether `next` begins where the run ends and can be joined to it without changing any
 * leaf. */
static bool run_goes_on(const grad_run *run, const grad_run *next)
{
    return run->numel > 0 && run->numel % run->leaf == 0 && run->leaf == next->leaf &&
           run->dtype == next->dtype &&
           next->at == run->at + run->numel * fsdpc_dtype_bytes(run->dtype);
}

/* Adds a unit's gradients to one norm, or each gradient to a separate norm. */
static fsdpc_status add_unit(fsdpc_unit *unit, double p, fsdpc_norm *norms, bool each)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    grad_run run = {0};
    for (int i = 0; i < unit->layout->n_params; i++) {
        const fsdpc_place *place = &unit->layout->params[i];
        fsdpc_local_shard local;
        void *grad;
        FSDPC_TRY(fsdpc_unit_grad(unit, i, false, &local, &grad));
        if (!grad || local.numel == 0)
            continue;
        grad_run next = {grad, local.numel, place->leaf_numel,
                         unit->groups[place->group].grad_dtype};
        if (run_goes_on(&run, &next)) {
            run.numel += next.numel;
            continue;
        }
        FSDPC_TRY(run_end(&run, p, norms, main));
        run = next;
        if (each)
            FSDPC_TRY(run_end(&run, p, &norms[i], main));
    }
    return run_end(&run, p, norms, main);
}

/* Like add_unit, but keeps the scale pending and applies it to the sums. */
static fsdpc_status add_unit_scaled(fsdpc_unit *unit, double p, fsdpc_norm *norms, bool each)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    size_t n = each ? (size_t)unit->layout->n_params : 1;
    double pending = unit->pending_scale;
    fsdpc_norm_scratch raw;
    fsdpc_status status = fsdpc_norm_scratch_init(&raw, unit->device, n);
    unit->pending_scale = 1; /* so reading applies no scale */
    if (status == FSDPC_OK)
        status = add_unit(unit, p, raw.at, each);
    for (size_t i = 0; status == FSDPC_OK && i < n; i++)
        status = fsdpc_norm_join(&norms[i], &raw.at[i], p, pending, main);
    unit->pending_scale = pending;
    fsdpc_norm_scratch_fini(&raw);
    return status;
}

static bool can_stay_pending(const fsdpc_unit *unit, double p)
{
    double pending = unit->pending_scale;
    return pending < 1 && !unit->clipped && fsdpc_norm_can_scale(p, pending);
}

/* Computes one norm of all gradients in a shard group's units, or one norm per parameter. */
static fsdpc_status group_norms(fsdpc_unit *const *units, int n_units, fsdpc_comm *comm, double p,
                                fsdpc_norm *norms, bool each)
{
    fsdpc_stream *main = fsdpc_device_main(units[0]->device);
    size_t n = 0;
    for (int i = 0; i < n_units; i++) {
        if (units[i]->mesh.shard != comm)
            continue;
        bool scaled = can_stay_pending(units[i], p);
        FSDPC_TRY((scaled ? add_unit_scaled : add_unit)(units[i], p, norms + n, each));
        n += each ? (size_t)units[i]->layout->n_params : 0;
    }
    return fsdpc_norm_all_reduce(norms, each ? n : 1, p, comm, main);
}

/* Adds the norms of one shard group to the total. `params_out`: receives per-parameter norms, for
 * which `norms` has space; or NULL. */
static fsdpc_status group_total(fsdpc_unit *const *units, int n_units, fsdpc_comm *comm, double p,
                                fsdpc_norm *norms, fsdpc_norm *total_io, fsdpc_norm *params_out)
{
    fsdpc_device *device = units[0]->device;
    fsdpc_stream *main = fsdpc_device_main(device);
    FSDPC_TRY(group_norms(units, n_units, comm, p, norms, params_out != NULL));
    if (!params_out)
        return fsdpc_norm_join(total_io, norms, p, 1, main);
    for (int i = 0; i < n_units; i++) {
        for (int param = 0; param < units[i]->layout->n_params; param++, params_out++) {
            if (units[i]->mesh.shard != comm)
                continue;
            FSDPC_TRY(fsdpc_device_copy(device, params_out, norms, sizeof *norms, main));
            FSDPC_TRY(fsdpc_norm_join(total_io, norms++, p, 1, main));
        }
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_clip_norms(fsdpc_unit *const *units, int n_units, double p, fsdpc_norm *total_io,
                              fsdpc_norm *params_out)
{
    FSDPC_TRY(fsdpc_norm_check(p));
    size_t n_params = 0;
    for (int i = 0; i < n_units; i++)
        n_params += (size_t)units[i]->layout->n_params;
    for (int i = 0; i < n_units; i++) {
        fsdpc_comm *comm = units[i]->mesh.shard;
        bool seen = false;
        for (int j = 0; j < i && !seen; j++)
            seen = units[j]->mesh.shard == comm;
        if (seen)
            continue;
        fsdpc_norm_scratch norms;
        fsdpc_status status =
            fsdpc_norm_scratch_init(&norms, units[0]->device, params_out ? n_params : 1);
        if (status == FSDPC_OK)
            status = group_total(units, n_units, comm, p, norms.at, total_io, params_out);
        fsdpc_norm_scratch_fini(&norms);
        FSDPC_TRY(status);
    }
    return FSDPC_OK;
}

double fsdpc_clip_scale(fsdpc_unit *const *units, int n_units, double norm, double max_norm)
{
    double factor = FSDPC_CLIP_FACTOR(norm, max_norm);
    if (factor != 1)
        fsdpc_clip_multiply(units, n_units, factor);
    return factor;
}

fsdpc_status fsdpc_clip_scale_remote(fsdpc_unit *const *units, int n_units, const double *norm,
                                     double max_norm, fsdpc_stream *stream)
{
    fsdpc_clip_args args = {.norm = norm, .max_norm = max_norm};
    for (int i = 0; i < n_units; i++) {
        if (!units[i]->grad_live)
            continue;
        args.pending |= (uint64_t)units[i]->clipped << args.n;
        args.factors[args.n++] = units[i]->clip_factor;
        units[i]->clipped = true;
        if (args.n == FSDPC_CLIP_FACTORS) {
            FSDPC_TRY(fsdpc_flat_clip(&args, stream));
            args.n = 0;
            args.pending = 0;
        }
    }
    return args.n > 0 ? fsdpc_flat_clip(&args, stream) : FSDPC_OK;
}

void fsdpc_clip_multiply(fsdpc_unit *const *units, int n_units, double factor)
{
    for (int i = 0; i < n_units; i++) {
        if (units[i]->grad_live)
            units[i]->pending_scale *= factor;
    }
}
