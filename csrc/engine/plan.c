/* Sizes of groups and arrays. In the parameter buffer and the reduce buffers, groups begin at page
 * boundaries, so that pages can be protected; in partials, they begin at multiples of 64 bytes.
 */
#include "engine/plan.h"

enum { PAGE_ALIGN = 4096 };

fsdpc_status fsdpc_plan_group(const fsdpc_group *group, const fsdpc_unit_options *options,
                              fsdpc_group_plan *out)
{
    bool casts = fsdpc_dtype_is_float(group->dtype);
    fsdpc_group_plan plan = {
        .param_dtype = options->cast_params && casts ? options->param_dtype : group->dtype,
        .grad_dtype = group->dtype == FSDPC_F64 ? FSDPC_F64 : FSDPC_F32,
    };
    plan.reduce_dtype = options->cast_reduce && casts ? options->reduce_dtype : plan.param_dtype;
    size_t param_buffer, reduce;
    FSDPC_TRY(
        fsdpc_mul_size(group->unsharded_numel, fsdpc_dtype_bytes(plan.param_dtype), &param_buffer));
    FSDPC_TRY(
        fsdpc_mul_size(group->unsharded_numel, fsdpc_dtype_bytes(plan.reduce_dtype), &reduce));
    plan.param_buffer_bytes = fsdpc_round_up(param_buffer, PAGE_ALIGN);
    plan.reduce_bytes = fsdpc_round_up(reduce, PAGE_ALIGN);
    plan.partial_bytes = fsdpc_mem_counted(group->shard_numel * fsdpc_dtype_bytes(plan.grad_dtype));
    *out = plan;
    return FSDPC_OK;
}

fsdpc_array_plan fsdpc_plan_array(const fsdpc_offload *offload, bool offloaded, size_t numel,
                                  fsdpc_dtype dtype)
{
    size_t element = fsdpc_dtype_bytes(dtype);
    fsdpc_array_plan plan = {.bytes = numel * element};
    if (!offloaded) {
        plan.memory_bytes = fsdpc_mem_counted(plan.bytes);
    } else if (offload->host) {
        plan.where = FSDPC_PLAN_PINNED;
        plan.pinned_bytes = fsdpc_mem_counted(plan.bytes);
    } else {
        plan.where = FSDPC_PLAN_FILE;
        plan.memory_bytes = fsdpc_mem_counted(fsdpc_tier_kept(numel, offload->part) * element);
        plan.file_bytes = fsdpc_tier_file_bytes(numel, element, offload->part);
        plan.ring_bytes = fsdpc_tier_ring_bytes(numel, element, offload->part);
    }
    return plan;
}

size_t fsdpc_plan_host_bytes(const fsdpc_offload *offload, size_t numel, size_t element)
{
    numel = offload->gradients ? 0 : fsdpc_min_size(numel, FSDPC_HOST_CHUNK);
    return FSDPC_HOST_HEAD_BYTES + fsdpc_mem_counted(numel * element);
}
