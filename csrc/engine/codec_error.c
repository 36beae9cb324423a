/* All decisions depend only on numbers that all ranks share: the count of backwards, the settings,
 * and sums that an all-reduce has given to every rank. Backwards are counted rather than optimizer
 * steps, which a frontend may take without the engine. A change of a gather's codec marks the unit's
 * masters as changed. The next copy-in, in which all ranks take part, then rounds them in the new
 * way.
 */
#include "engine/codec_error.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm_hosts.h"

enum { WORDS = sizeof(fsdpc_exact_sum) / sizeof(int64_t) };

/* ---- Residuals ---- */

/* Returns the length of a group's residual in one stage, or 0. */
static size_t residual_numel(const fsdpc_unit *unit, const fsdpc_unit_group *group,
                             fsdpc_stage stage)
{
    const fsdpc_comm *shard = unit->mesh.shard, *replicate = unit->mesh.replicate;
    bool replicas = fsdpc_mesh_is_replicated(&unit->mesh), first = stage == FSDPC_STAGE_FIRST;
    const fsdpc_comm *comm = first && (shard->size > 1 || !replicas) ? shard : replicate;
    if (!first && (!replicas || shard->size == 1))
        return 0;
    if (group->reduce_dtype == FSDPC_F64 || group->grad_dtype == FSDPC_F64)
        return 0;
    return fsdpc_comm_hosts_residual_numel(
        comm == shard ? FSDPC_COLL_REDUCE_SCATTER : FSDPC_COLL_REDUCE_ALL, group->plan->shard_numel,
        comm->size / comm->host_size, comm->host_size);
}

/* Creates a residual of zeros, unless the group has one or needs none. */
static fsdpc_status create_residual(fsdpc_unit *unit, fsdpc_unit_group *group, fsdpc_stage stage)
{
    fsdpc_codec_error *error = &group->errors[stage];
    bool trained = group - unit->groups < unit->n_trained;
    if (error->residual || !trained || !unit->settings.error_feedback ||
        unit->settings.reduce_codec == FSDPC_CODEC_EXACT)
        return FSDPC_OK;
    size_t bytes = residual_numel(unit, group, stage) * sizeof(float);
    if (bytes == 0)
        return FSDPC_OK;
    void *residual;
    FSDPC_TRY(fsdpc_device_alloc(unit->device, FSDPC_MEM_STATE, bytes, &residual));
    error->residual = residual;
    return fsdpc_device_fill(unit->device, residual, 0, bytes, fsdpc_device_main(unit->device));
}

fsdpc_status fsdpc_unit_residual(fsdpc_unit *unit, int group, fsdpc_stage stage, float **out,
                                 size_t *numel_out)
{
    FSDPC_TRY(create_residual(unit, &unit->groups[group], stage));
    *out = unit->groups[group].errors[stage].residual;
    *numel_out = residual_numel(unit, &unit->groups[group], stage);
    return FSDPC_OK;
}

/* ---- Measuring ---- */

fsdpc_coded_report fsdpc_unit_coded_report(const fsdpc_unit *unit, fsdpc_coded which)
{
    return unit->coded[which].report;
}

static bool measures(const fsdpc_unit *unit)
{
    int every = unit->settings.error_every;
    return every > 0 && unit->root && unit->root->backwards_ended % (uint64_t)every == 0;
}

static fsdpc_codec codec_of(const fsdpc_unit *unit, fsdpc_coded which)
{
    return which == FSDPC_CODED_GATHER ? unit->gather_codec : unit->settings.reduce_codec;
}

fsdpc_codec fsdpc_codec_now(const fsdpc_unit *unit, fsdpc_coded which)
{
    bool exact = unit->coded[which].report.exact && !measures(unit);
    return exact ? FSDPC_CODEC_EXACT : codec_of(unit, which);
}

/* Sets where an operation's squares are to be added, if this backward is measured. */
static const fsdpc_codec_error *to_measure(fsdpc_unit *unit, fsdpc_coded which,
                                           fsdpc_codec_error *error)
{
    bool now = measures(unit) && codec_of(unit, which) != FSDPC_CODEC_EXACT;
    error->left_out = now ? &unit->coded[which].left_out : NULL;
    error->meant = now ? &unit->coded[which].meant : NULL;
    return now || error->residual ? error : NULL;
}

const fsdpc_codec_error *fsdpc_gather_error(fsdpc_unit *unit)
{
    return to_measure(unit, FSDPC_CODED_GATHER, &unit->gather_error);
}

fsdpc_status fsdpc_reduce_error(fsdpc_unit *unit, fsdpc_unit_group *group, fsdpc_stage stage,
                                const fsdpc_codec_error **out)
{
    FSDPC_TRY(create_residual(unit, group, stage));
    *out = to_measure(unit, FSDPC_CODED_REDUCE, &group->errors[stage]);
    return FSDPC_OK;
}

static fsdpc_status add_over(fsdpc_comm *comm, int64_t *words, size_t n)
{
    if (!comm || comm->size == 1)
        return FSDPC_OK;
    return fsdpc_comm_run(comm, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_REDUCE,
                                              .unit = -1,
                                              .what = "errors of codecs",
                                              .dtype = FSDPC_I64,
                                              .op = FSDPC_RED_SUM,
                                              .send = words,
                                              .recv = words,
                                              .numel = n});
}

/* Moves an exact sum to words that can be added. */
static void take(fsdpc_exact_sum *sum, fsdpc_exact_sum *to)
{
    fsdpc_exact_sum_normalize(sum);
    *to = *sum;
    memset(sum, 0, sizeof *sum);
}

/* Takes the sums of all ranks: sets the error of gathers or reductions, and whether they send exact
 * numbers now. */
static void judge(fsdpc_unit *unit, fsdpc_coded which, const fsdpc_exact_sum *left_out,
                  const fsdpc_exact_sum *meant)
{
    static const char *const names[] = {"gathers", "reductions"};
    fsdpc_coded_error *a = &unit->coded[which];
    double whole = fsdpc_exact_sum_value(meant);
    if (whole == 0)
        return;
    a->report.measured = true;
    a->report.error = sqrt(fsdpc_exact_sum_value(left_out) / whole);
    a->report.backwards = unit->root->backwards_ended;
    a->report.exact =
        unit->settings.error_budget > 0 && a->report.error > unit->settings.error_budget;
    if (!a->report.exact)
        return;
    unit->dirty |= which == FSDPC_CODED_GATHER;
    if (!a->said && unit->root->comm->world_rank == 0)
        FSDPC_WARN(&unit->root->comm->log,
                   "%s of unit '%s' have a relative error of %.3g with codec %s, and the budget is "
                   "%.3g: they send exact numbers, except in every %dth backward, which tries "
                   "again",
                   names[which], unit->name, a->report.error,
                   fsdpc_codec_name(codec_of(unit, which)), unit->settings.error_budget,
                   unit->settings.error_every);
    a->said = true;
}

/* Returns how many sums of errors all ranks are to add now. */
static size_t n_sums(const fsdpc_root *root)
{
    size_t n = 0;
    for (int i = 0; i < root->n_units && !root->captured; i++)
        n += measures(root->units[i]) ? FSDPC_CODED_COUNT * 2 : 0;
    return n;
}

bool fsdpc_codec_errors_due(const fsdpc_root *root)
{
    return n_sums(root) > 0;
}

fsdpc_status fsdpc_codec_errors_agree(const fsdpc_root *root)
{
    size_t n = n_sums(root);
    if (n == 0)
        return FSDPC_OK;
    fsdpc_exact_sum *sums = calloc(n, sizeof *sums), *at = sums;
    if (!sums)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for %zu sums of errors", n);
    for (int i = 0; i < root->n_units; i++) {
        fsdpc_unit *unit = root->units[i];
        for (int which = 0; which < FSDPC_CODED_COUNT && measures(unit); which++) {
            take(&unit->coded[which].left_out, at++);
            take(&unit->coded[which].meant, at++);
        }
    }
    fsdpc_status status = add_over(root->comm, (int64_t *)sums, n * WORDS);
    if (status == FSDPC_OK)
        status = add_over(root->replicate, (int64_t *)sums, n * WORDS);
    at = sums;
    for (int i = 0; i < root->n_units && status == FSDPC_OK; i++)
        for (int which = 0; which < FSDPC_CODED_COUNT && measures(root->units[i]); which++, at += 2)
            judge(root->units[i], which, at, at + 1);
    free(sums);
    return status;
}

void fsdpc_codec_errors_count(fsdpc_root *root)
{
    root->backwards_ended++;
    for (int i = 0; i < root->n_units; i++) {
        fsdpc_unit *unit = root->units[i];
        unit->dirty |= measures(unit) && unit->coded[FSDPC_CODED_GATHER].report.exact;
    }
}
