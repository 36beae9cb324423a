/* Sizes of groups and units.  Groups begin on a page in wire and reduce buffers, so that pages can
 * be protected, and at 64 bytes in partials.
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

fsdpc_status fsdpc_plan_unit(const fsdpc_param_spec *specs, int n_specs, int ranks,
                             const fsdpc_unit_options *options, fsdpc_unit_plan *out)
{
    fsdpc_layout *layout = NULL;
    FSDPC_TRY(fsdpc_layout_create(specs, n_specs, ranks, options->first_owner, &layout));
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
        sum.contribution_bytes =
            fsdpc_max_size(sum.contribution_bytes, fsdpc_round_up(sent, COUNT_ALIGN));
        sum.partial_contribution_bytes =
            fsdpc_max_size(sum.partial_contribution_bytes, plan.partial_bytes);
        sum.wire_bytes += plan.wire_bytes;
        sum.published_bytes += fsdpc_round_up(published, COUNT_ALIGN);
        sum.reduce_bytes += plan.reduce_bytes;
        sum.master_bytes += fsdpc_round_up(plan.master_bytes, COUNT_ALIGN);
        sum.grad_bytes += fsdpc_round_up(plan.grad_bytes, COUNT_ALIGN);
        sum.partial_bytes += plan.partial_bytes;
        /* States are as wide as gradients: fp32, or fp64 for fp64 parameters. */
        sum.state_bytes += fsdpc_round_up(plan.grad_bytes, COUNT_ALIGN);
    }
    fsdpc_layout_destroy(layout);
    if (status == FSDPC_OK)
        *out = sum;
    return status;
}
