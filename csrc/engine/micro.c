/* A stack of sums, highest first: heights[0] belongs to the gradient shard, heights[k] to
 * sums[k - 1].  n_sums counts the stack.
 *
 * A micro-step whose sum would merge at once (the top has height 0) is added by the reduction
 * itself.  So a new level is opened only above a sum of two or more; merging further is one pass
 * over a shard.  Levels are allocated when first needed and stay, as every step needs the same
 * ones.
 *
 * A posted reduction has its target chosen already, so the next post waits for it (reduce.c): a
 * unit has one reduction in flight.
 */
#include "engine/micro.h"

#include "engine/grad_file.h"
#include "engine/root_internal.h"
#include "ops/flat_ops.h"

static unsigned char *level_of(const fsdpc_unit *unit, const fsdpc_unit_group *group, int level)
{
    return level == 0 ? group->grad : unit->sums[level - 1] + group->grad_offset;
}

/* Adds level k to level k - 1. */
static fsdpc_status merge_top(fsdpc_unit *unit)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    int top = unit->n_sums - 1;
    if (top == 1)
        FSDPC_TRY(fsdpc_grad_file_open(unit, true));
    for (int g = 0; g < unit->layout->n_groups; g++) {
        const fsdpc_unit_group *group = &unit->groups[g];
        FSDPC_TRY(fsdpc_flat_accumulate(level_of(unit, group, top - 1), group->grad_dtype,
                                        level_of(unit, group, top), group->grad_dtype,
                                        group->plan->shard_numel, main));
    }
    unit->heights[top - 1]++;
    unit->n_sums--;
    return FSDPC_OK;
}

fsdpc_status fsdpc_micro_target(fsdpc_unit *unit, unsigned char **base_out, bool *accumulate_out)
{
    int top = unit->n_sums - 1;
    *accumulate_out = top >= 0 && unit->heights[top] == 0;
    int level = *accumulate_out ? top : top + 1;
    if (level > 0 && !unit->sums[level - 1]) {
        void *memory;
        /* Zeroed because padding is summed too, though nobody reads it. */
        FSDPC_TRY(
            fsdpc_device_alloc_zeroed(unit->device, FSDPC_MEM_GRAD, unit->grad_bytes, &memory));
        unit->sums[level - 1] = memory;
    }
    *base_out = level > 0 ? unit->sums[level - 1] : NULL;
    return FSDPC_OK;
}

/* Were gradients divided by the number of micro-steps before they were summed?  fp16 then rounds
 * small ones away; formats with wider exponents do not. */
static bool is_divided_in_half(const fsdpc_unit *unit)
{
    if (unit->n_sums == 0 || unit->settings.divide_factor != fsdpc_mesh_ranks(&unit->mesh))
        return false;
    bool half = false;
    for (int g = 0; g < unit->layout->n_groups; g++)
        half |=
            unit->groups[g].wire_dtype == FSDPC_F16 || unit->groups[g].reduce_dtype == FSDPC_F16;
    return half;
}

/* The sums are correct, but other splits of the batch give other bits. */
static void warn_once(const fsdpc_unit *unit, bool *warned, const char *why, const char *cure)
{
    if (!*warned)
        FSDPC_WARN(&unit->root->comm->log,
                   "deterministic mode: gradients of '%s' %s, so their sums depend on how ranks "
                   "split the batch: call %s",
                   unit->name, why, cure);
    *warned = true;
}

fsdpc_status fsdpc_micro_added(fsdpc_unit *unit)
{
    if (unit->folded)
        warn_once(unit, &unit->root->warned_folded, "were read between micro-steps",
                  "set_requires_gradient_sync(False) on the model for all backwards of a step but "
                  "the last");
    else if (is_divided_in_half(unit))
        warn_once(unit, &unit->root->warned_half, "are fp16 and divided by micro-steps too early",
                  "set_gradient_divide_factor(ranks x micro-steps) on every sharded module, and "
                  "leave the loss whole");
    int top = unit->n_sums - 1;
    unit->folded = false;
    if (top >= 0 && unit->heights[top] == 0)
        unit->heights[top] = 1;
    else
        unit->heights[unit->n_sums++] = 0;
    while (unit->n_sums > 1 && unit->heights[unit->n_sums - 1] == unit->heights[unit->n_sums - 2])
        FSDPC_TRY(merge_top(unit));
    return FSDPC_OK;
}

fsdpc_status fsdpc_micro_fold(fsdpc_unit *unit)
{
    if (unit->n_sums == 0 || unit->folded)
        return FSDPC_OK;
    while (unit->n_sums > 1)
        FSDPC_TRY(merge_top(unit));
    unit->folded = true;
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    for (int g = 0; g < unit->layout->n_groups; g++) {
        const fsdpc_unit_group *group = &unit->groups[g];
        if (group->reduce_dtype == FSDPC_F32 || group->reduce_dtype == FSDPC_F64)
            continue;
        const void *self = group->grad;
        FSDPC_TRY(fsdpc_flat_reduce(&(fsdpc_reduce_args){.srcs = &self,
                                                         .n_srcs = 1,
                                                         .dtype = group->grad_dtype,
                                                         .numel = group->plan->shard_numel,
                                                         .scale = 1,
                                                         .round_dtype = group->reduce_dtype,
                                                         .out = group->grad,
                                                         .out_dtype = group->grad_dtype},
                                    main));
    }
    fsdpc_grad_file_seal(unit);
    return FSDPC_OK;
}
