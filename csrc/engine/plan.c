/* Sizes of groups and units.  Groups begin at page boundaries in wire and reduce buffers, so that
 * pages can be protected, and at multiples of 64 bytes in partials.
 */
#include "engine/plan.h"

#include "base/size.h"

enum { COUNT_ALIGN = 64, PAGE_ALIGN = 4096 };

fsdpc_status fsdpc_plan_group(const fsdpc_group *group, const fsdpc_unit_options *options,
                              fsdpc_group_plan *out)
{
    fsdpc_group_plan plan = {
        .wire_dtype = options->cast_params ? options->param_dtype : group->dtype,
        .grad_dtype = group->dtype == FSDPC_F64 ? FSDPC_F64 : FSDPC_F32,
    };
    plan.reduce_dtype = options->cast_reduce ? options->reduce_dtype : plan.wire_dtype;
    size_t wire, reduce;
    FSDPC_TRY(fsdpc_mul_size(group->full_numel, fsdpc_dtype_bytes(plan.wire_dtype), &wire));
    FSDPC_TRY(fsdpc_mul_size(group->full_numel, fsdpc_dtype_bytes(plan.reduce_dtype), &reduce));
    plan.wire_bytes = fsdpc_round_up(wire, PAGE_ALIGN);
    plan.reduce_bytes = fsdpc_round_up(reduce, PAGE_ALIGN);
    plan.master_bytes = group->shard_numel * fsdpc_dtype_bytes(group->dtype);
    plan.grad_bytes = group->shard_numel * fsdpc_dtype_bytes(plan.grad_dtype);
    plan.partial_bytes = fsdpc_round_up(plan.grad_bytes, COUNT_ALIGN);
    *out = plan;
    return FSDPC_OK;
}

size_t fsdpc_plan_host_bytes(const fsdpc_offload *offload, size_t numel, size_t element)
{
    numel = offload->gradients ? 0 : fsdpc_min_size(numel, FSDPC_HOST_CHUNK);
    return FSDPC_HOST_HEAD_BYTES + fsdpc_round_up(numel * element, COUNT_ALIGN);
}

/* Plans one array over all elements of a group: its bytes in memory and elsewhere. */
static void plan_array(const fsdpc_group *group, size_t element, bool offloaded,
                       const fsdpc_offload *offload, fsdpc_unit_plan *sum, size_t *memory,
                       size_t *file)
{
    size_t numel = group->shard_numel;
    double part = offload->part;
    if (!offloaded || offload->host) {
        *(offloaded ? file : memory) += fsdpc_round_up(numel * element, COUNT_ALIGN);
        return;
    }
    *memory += fsdpc_round_up(fsdpc_tier_kept(numel, part) * element, COUNT_ALIGN);
    *file += fsdpc_tier_file_bytes(numel, element, part);
    sum->ring_bytes = fsdpc_max_size(sum->ring_bytes, fsdpc_tier_ring_bytes(numel, element, part));
}

static void plan_shards(const fsdpc_group *group, const fsdpc_group_plan *plan,
                        const fsdpc_unit_options *options, fsdpc_dtype state_dtype,
                        fsdpc_unit_plan *sum)
{
    const fsdpc_offload *offload = &options->offload;
    size_t wide = fsdpc_dtype_bytes(plan->grad_dtype);
    size_t state = group->dtype == FSDPC_F64 ? wide : fsdpc_dtype_bytes(state_dtype);
    plan_array(group, fsdpc_dtype_bytes(group->dtype), offload->masters, offload, sum,
               &sum->master_bytes, &sum->master_file_bytes);
    if (group->frozen)
        return;
    plan_array(group, wide, offload->gradients, offload, sum, &sum->grad_bytes,
               &sum->grad_file_bytes);
    plan_array(group, state, offload->states, offload, sum, &sum->state_bytes,
               &sum->state_file_bytes);
    if (fsdpc_offload_steps_on_host(offload))
        sum->ring_bytes = fsdpc_max_size(
            sum->ring_bytes,
            FSDPC_HOST_CHUNKS * fsdpc_plan_host_bytes(offload, group->shard_numel, wide));
}

fsdpc_status fsdpc_plan_unit(const fsdpc_param_spec *specs, int n_specs, int ranks,
                             const fsdpc_unit_options *options, fsdpc_dtype state_dtype,
                             fsdpc_unit_plan *out)
{
    fsdpc_layout *layout = NULL;
    FSDPC_TRY(fsdpc_layout_create(specs, n_specs, ranks, &options->layout, &layout));
    fsdpc_unit_plan sum = {0};
    fsdpc_status status = FSDPC_OK;
    for (int g = 0; status == FSDPC_OK && g < layout->n_groups; g++) {
        const fsdpc_group *group = &layout->groups[g];
        fsdpc_group_plan plan;
        status = fsdpc_plan_group(group, options, &plan);
        if (status != FSDPC_OK)
            break;
        size_t published = group->shard_numel * fsdpc_dtype_bytes(plan.wire_dtype);
        size_t sent = group->shard_numel * fsdpc_dtype_bytes(plan.reduce_dtype);
        sum.wire_bytes += plan.wire_bytes;
        sum.published_bytes += fsdpc_round_up(published, COUNT_ALIGN);
        plan_shards(group, &plan, options, state_dtype, &sum);
        if (fsdpc_plan_shares_masters(group, plan.wire_dtype, &options->offload))
            sum.shared_master_bytes += fsdpc_round_up(plan.master_bytes, COUNT_ALIGN);
        if (group->frozen)
            continue;
        sum.contribution_bytes =
            fsdpc_max_size(sum.contribution_bytes, fsdpc_round_up(sent, COUNT_ALIGN));
        sum.partial_contribution_bytes =
            fsdpc_max_size(sum.partial_contribution_bytes, plan.partial_bytes);
        sum.reduce_bytes += plan.reduce_bytes;
        sum.partial_bytes += plan.partial_bytes;
    }
    fsdpc_layout_destroy(layout);
    if (status == FSDPC_OK)
        *out = sum;
    return status;
}
