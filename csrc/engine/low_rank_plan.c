/* Computes only from a layout. torch's powerSGD_hook chooses the same matrices if the shard group
 * has one rank, except that it may also approximate vectors if `min_rate` is below 1.
 */
#include "engine/low_rank_plan.h"

#include "base/size.h"

fsdpc_status fsdpc_low_rank_check(const fsdpc_low_rank_options *options, const fsdpc_layout *layout,
                                  const fsdpc_mesh *mesh, const char *unit, bool exact)
{
    const char *why = NULL;
    if (options->rank == 0 || fsdpc_mesh_ranks(mesh) == 1)
        return FSDPC_OK;
    for (int g = 0; g < layout->n_trained; g++)
        if (layout->groups[g].dtype == FSDPC_F64)
            why = "its gradients are float64";
    if (!fsdpc_mesh_is_replicated(mesh))
        why = "its mesh has no replicas";
    else if (mesh->shard->device->remote)
        why = "that works on CPUs only";
    else if (exact)
        why = "deterministic mode, steps inside backward and error_feedback of codecs need exact "
              "sums";
    if (!why)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                      "unit '%s' cannot sum over replicas in low rank, because %s: leave PowerSGD "
                      "out",
                      unit, why);
}

bool fsdpc_low_rank_takes(const fsdpc_layout *layout, const fsdpc_low_rank_options *options,
                          int param, int rank, fsdpc_low_rank_matrix *out)
{
    const fsdpc_place *place = &layout->params[param];
    const fsdpc_local_shard local = fsdpc_layout_local_shard(layout, param, rank);
    if (options->rank == 0 || place->ndim < 2 || place->group >= layout->n_trained ||
        local.numel == 0)
        return false;
    fsdpc_low_rank_matrix found = {.param = param,
                                   .group = place->group,
                                   .cols = place->numel / place->shape[0],
                                   .shard_offset = local.shard_offset};
    if (local.first % found.cols || local.numel % found.cols) /* rows are cut (layout.h) */
        return false;
    found.rows = local.numel / found.cols;
    found.rank = fsdpc_min_size(fsdpc_min_size(found.rows, found.cols), (size_t)options->rank);
    double sent = (double)found.rank * (double)(found.rows + found.cols);
    if ((double)local.numel <= options->min_rate * sent)
        return false;
    *out = found;
    return true;
}

fsdpc_low_rank_sizes fsdpc_low_rank_sizes_of(const fsdpc_layout *layout,
                                             const fsdpc_low_rank_options *options)
{
    fsdpc_low_rank_sizes most = {0};
    for (int r = 0; r < layout->ranks; r++) {
        fsdpc_low_rank_sizes sizes = {0};
        fsdpc_low_rank_matrix m;
        for (int i = 0; i < layout->n_params; i++) {
            if (!fsdpc_low_rank_takes(layout, options, i, r, &m))
                continue;
            sizes.values += m.rows * m.cols;
            sizes.p += m.rows * m.rank;
            sizes.q += m.cols * m.rank;
            most.row = fsdpc_max_size(most.row, m.cols);
        }
        most.values = fsdpc_max_size(most.values, sizes.values);
        most.p = fsdpc_max_size(most.p, sizes.p);
        most.q = fsdpc_max_size(most.q, sizes.q);
    }
    return most;
}
