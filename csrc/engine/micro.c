/* The sums form a stack, highest first: heights[0] is the height of the gradient shard, heights[k]
 * that of sums[k - 1]. A sum of height h covers 2^h leaves. The heights are the positions of the
 * set bits in the number of leaves so far, so they also determine the next leaf's position in the
 * tree.
 *
 * If a run's sum has the same height as the top of the stack, the reduction itself adds the run to
 * it. A new level is therefore opened only below higher ones, and each further merge takes one pass
 * over a shard. If a reduction leaves a single sum, that pass runs after the reduction. If it
 * leaves several, the next run may merge with the result, so the passes are part of the operation's
 * list of sums. Levels are allocated when first needed and kept, because every step needs the same
 * ones.
 *
 * It is simpler if all ranks of a micro-step count as a single leaf. They do if their number is a
 * power of two, which changes no bits, or if their contributions cannot be separated.
 *
 * A gradient shard that has been folded and divided ceases to be a tree node. Its height is then
 * FSDPC_MICRO_CLOSED, which differs from every other height, and the next tree begins above it.
 *
 * A reduction's target is chosen when it is posted, so the next post waits for it (reduce.c): a
 * unit has at most one reduction in flight.
 */
#include "engine/micro.h"

#include <math.h>
#include <stdlib.h>

#include "engine/grad_file.h"
#include "engine/root_internal.h"
#include "ops/flat_ops.h"

enum { FSDPC_MICRO_CLOSED = 64 };

static unsigned char *level_of(const fsdpc_unit *unit, const fsdpc_unit_group *group, int level)
{
    return level == 0 ? group->grad : unit->sums[level - 1] + group->grad_offset;
}

static bool is_power_of_two(int n)
{
    return (n & (n - 1)) == 0;
}

/* ---- The counter ---- */

/* Returns the group whose reduction produces the final sums. */
static const fsdpc_comm *last_group(const fsdpc_root *root)
{
    return root->replicate ? root->replicate : root->reduce_comm;
}

/* Returns whether each rank of a micro-step has its own position in the tree. */
static bool can_split(int ranks, int before, bool splits_sums)
{
    return is_power_of_two(before) && (is_power_of_two(ranks) || splits_sums);
}

int fsdpc_micro_leaves(int ranks, int before, bool splits_sums)
{
    return is_power_of_two(ranks) || !can_split(ranks, before, splits_sums) ? 1 : ranks;
}

static int leaves_of(const fsdpc_root *root)
{
    const fsdpc_comm *comm = last_group(root);
    return fsdpc_micro_leaves(comm->size, root->ranks / comm->size, comm->ops->splits_sums);
}

static uint64_t leaves_in(const fsdpc_micro_sums *stack)
{
    uint64_t leaves = 0;
    for (int i = 0; i < stack->n; i++)
        leaves += stack->heights[i] == FSDPC_MICRO_CLOSED ? 0 : (uint64_t)1 << stack->heights[i];
    return leaves;
}

/* One addition in a micro-step: adds leaves to a level, or one level to another. */
typedef struct act {
    int n_leaves; /* 0: the level `from` is added */
    int to, from;
    bool accumulate;
} act;

/* Gets the next act of a micro-step that has `left` leaves remaining; returns false if there is
 * none. */
static bool next_act(fsdpc_micro_sums *stack, int *left, act *out)
{
    int *heights = stack->heights, top = stack->n - 1;
    if (top > 0 && heights[top] == heights[top - 1]) {
        *out = (act){.to = top - 1, .from = top, .accumulate = true};
        heights[top - 1]++;
        stack->n--;
        return true;
    }
    if (*left == 0)
        return false;
    uint64_t at = leaves_in(stack);
    int height = 0;
    while (*left >> (height + 1) && !(at >> height & 1))
        height++;
    *left -= 1 << height;
    *out = (act){.n_leaves = 1 << height, .to = top};
    out->accumulate = top >= 0 && heights[top] == height;
    if (out->accumulate) {
        heights[top]++;
    } else {
        out->to = stack->n++;
        heights[out->to] = height;
    }
    return true;
}

int fsdpc_micro_most(int leaves, int n_steps)
{
    fsdpc_micro_sums stack = {0};
    int most = 1;
    for (int step = 0; step < n_steps; step++) {
        int left = leaves;
        for (act one; next_act(&stack, &left, &one);)
            most = stack.n > most ? stack.n : most;
    }
    return most;
}

/* ---- Warnings ---- */

/* Warns that the sums are correct but that their bits depend on how the batch is split. */
static void warn_once(const fsdpc_unit *unit, bool *warned, const char *why, const char *cure)
{
    if (!*warned)
        FSDPC_WARN(&unit->root->comm->log,
                   "deterministic mode: gradients of '%s' %s, so their sums depend on how ranks "
                   "split the batch: %s",
                   unit->name, why, cure);
    *warned = true;
}

/* Warns only on rank 0, about conditions that are the same on all ranks. */
static void warn_one_rank(const fsdpc_unit *unit, bool *warned, const char *why, const char *cure)
{
    *warned |= unit->root->comm->world_rank != 0;
    warn_once(unit, warned, why, cure);
}

#define WHOLE_LOSS                                                                                 \
    "call set_gradient_divide_factor(ranks x micro-steps) on every sharded module, and leave the " \
    "loss whole"

static void warn_of_ranks(const fsdpc_unit *unit)
{
    const fsdpc_comm *comm = last_group(unit->root);
    if (!can_split(comm->size, unit->root->ranks / comm->size, comm->ops->splits_sums))
        warn_one_rank(unit, &unit->root->warned_ranks,
                      "are summed over shard groups or hosts whose size is not a power of two",
                      "take powers of two, or one host without replicas");
}

static bool is_divided_by_ranks(const fsdpc_unit *unit)
{
    return unit->settings.divide_factor == fsdpc_mesh_ranks(&unit->mesh);
}

/* Returns whether gradients were divided by the number of micro-steps before they were summed. fp16
 * then flushes small ones to zero; formats with wider exponents do not. */
static bool is_divided_in_half(const fsdpc_unit *unit)
{
    if (unit->micro.n == 0 || !is_divided_by_ranks(unit))
        return false;
    bool half = false;
    for (int g = 0; g < unit->n_trained; g++)
        half |=
            unit->groups[g].param_dtype == FSDPC_F16 || unit->groups[g].reduce_dtype == FSDPC_F16;
    return half;
}

/* ---- A micro-step ---- */

static fsdpc_status make_level(fsdpc_unit *unit, int level)
{
    if (level == 0 || unit->sums[level - 1])
        return FSDPC_OK;
    void *memory;
    /* zeroed because the sums also cover padding, whose values are never read */
    FSDPC_TRY(fsdpc_device_alloc_zeroed(unit->device, FSDPC_MEM_GRAD, unit->grad_bytes, &memory));
    unit->sums[level - 1] = memory;
    return FSDPC_OK;
}

/* Converts the acts to each group's list of sums for the operation. */
static fsdpc_status list_sums(fsdpc_unit *unit, const act *acts, int n)
{
    for (int g = 0; g < unit->n_trained; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        if (!group->sums)
            group->sums = calloc(FSDPC_COLL_MAX_SUMS, sizeof *group->sums);
        if (!group->sums)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the sums of '%s'", unit->name);
        for (int i = 0; i < n; i++)
            group->sums[i] = (fsdpc_coll_sum){
                .n_ranks = acts[i].n_leaves,
                .from = acts[i].n_leaves ? NULL : level_of(unit, group, acts[i].from),
                .shard = level_of(unit, group, acts[i].to),
                .accumulate = acts[i].accumulate};
    }
    return FSDPC_OK;
}

/* Returns the fold's scale. Division by a power of two is exact, so the reductions do it
 * themselves. For any other divisor, the sums are not divided until the fold. */
static double fold_scale_of(const fsdpc_unit *unit)
{
    int exponent;
    bool exact = frexp(unit->settings.divide_factor, &exponent) == 0.5;
    return exact ? 1 : 1 / unit->settings.divide_factor;
}

fsdpc_status fsdpc_micro_begin(fsdpc_unit *unit)
{
    warn_of_ranks(unit);
    double fold_scale = fold_scale_of(unit);
    if (unit->micro.n > 0 && fold_scale != unit->fold_scale)
        FSDPC_TRY(fsdpc_micro_fold(unit));
    unit->fold_scale = fold_scale;
    fsdpc_micro_sums after = unit->micro;
    int left = leaves_of(unit->root), n = 0, runs = 0;
    act acts[FSDPC_COLL_MAX_SUMS];
    for (; next_act(&after, &left, &acts[n]); n++) {
        assert(n + 1 < FSDPC_COLL_MAX_SUMS);
        runs += acts[n].n_leaves > 0;
        FSDPC_TRY(make_level(unit, acts[n].to));
    }
    unit->sum_to = acts[0].to;
    unit->sum_adds = acts[0].accumulate;
    unit->n_sums = runs > 1 ? n : 0;
    if (runs > 1)
        FSDPC_TRY(list_sums(unit, acts, n));
    bool to_shard = false;
    for (int i = 0; i < (runs > 1 ? n : 1); i++)
        to_shard |= acts[i].to == 0;
    return to_shard ? fsdpc_grad_file_open(unit, unit->micro.n > 0) : FSDPC_OK;
}

void fsdpc_micro_target(const fsdpc_unit *unit, const fsdpc_unit_group *group, fsdpc_coll *op)
{
    op->shard = level_of(unit, group, unit->sum_to);
    op->accumulate = unit->sum_adds;
    op->sums = unit->n_sums ? group->sums : NULL;
    op->n_sums = unit->n_sums;
    op->scale = unit->fold_scale == 1 ? 1 / unit->settings.divide_factor : 1;
    op->round_dtype = group->grad_dtype;
}

/* Adds a level's sum to the level above it. */
static fsdpc_status merge(const fsdpc_unit *unit, int level)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    if (level == 1)
        FSDPC_TRY(fsdpc_grad_file_open(unit, true));
    for (int g = 0; g < unit->n_trained; g++) {
        const fsdpc_unit_group *group = &unit->groups[g];
        FSDPC_TRY(fsdpc_flat_accumulate(level_of(unit, group, level - 1), group->grad_dtype,
                                        level_of(unit, group, level), group->grad_dtype,
                                        group->plan->shard_numel, main));
    }
    return FSDPC_OK;
}

/* Counts a micro-step. If a backward reduces a unit twice, the two reductions are different
 * leaves. */
static void count_micro_step(fsdpc_unit *unit)
{
    uint64_t backwards = unit->root->model->backwards;
    if (unit->n_micro > 0 && unit->micro_backward == backwards)
        warn_one_rank(unit, &unit->root->warned_twice,
                      "are reduced twice in a backward, because a forward uses that unit twice",
                      "do not shard that module itself, so that it belongs to an enclosing unit");
    else
        unit->n_micro++;
    unit->micro_backward = backwards;
}

fsdpc_status fsdpc_micro_added(fsdpc_unit *unit)
{
    if (unit->folded)
        warn_once(unit, &unit->root->warned_folded, "were read between micro-steps",
                  "call set_requires_gradient_sync(False) on the model for all backwards of a step "
                  "but the last");
    else if (is_divided_in_half(unit))
        warn_once(unit, &unit->root->warned_half, "are fp16 and divided by micro-steps too early",
                  WHOLE_LOSS);
    unit->folded = false;
    count_micro_step(unit);
    int left = leaves_of(unit->root);
    act one;
    while (next_act(&unit->micro, &left, &one))
        if (one.n_leaves == 0 && unit->n_sums == 0)
            FSDPC_TRY(merge(unit, one.from));
    return FSDPC_OK;
}

/* ---- The fold ---- */

/* Turns the bottom sum into the gradient, or adds it to the previously folded sum. */
static fsdpc_status finish(const fsdpc_unit *unit, int bottom)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    if (bottom > 0)
        FSDPC_TRY(fsdpc_grad_file_open(unit, true));
    for (int g = 0; g < unit->n_trained; g++) {
        const fsdpc_unit_group *group = &unit->groups[g];
        bool wide = group->reduce_dtype == FSDPC_F32 || group->reduce_dtype == FSDPC_F64;
        if (wide && bottom == 0 && unit->fold_scale == 1)
            continue;
        const void *sum = level_of(unit, group, bottom);
        FSDPC_TRY(fsdpc_flat_reduce(
            &(fsdpc_reduce_args){.srcs = &sum,
                                 .n_srcs = 1,
                                 .dtype = group->grad_dtype,
                                 .numel = group->plan->shard_numel,
                                 .scale = unit->fold_scale,
                                 .round_dtype = wide ? group->grad_dtype : group->reduce_dtype,
                                 .out = group->grad,
                                 .out_dtype = group->grad_dtype,
                                 .accumulate = bottom > 0},
            main));
    }
    fsdpc_grad_file_seal(unit);
    return FSDPC_OK;
}

fsdpc_status fsdpc_micro_fold(fsdpc_unit *unit)
{
    fsdpc_micro_sums *stack = &unit->micro;
    if (stack->n == 0 || unit->folded)
        return FSDPC_OK;
    /* If a tree was cut short, the user has already been warned and must fix that first. */
    if (!is_power_of_two(unit->n_micro) && is_divided_by_ranks(unit) && !unit->root->warned_folded)
        warn_one_rank(unit, &unit->root->warned_divided,
                      "are divided by ranks, not by ranks x micro-steps, and the number of "
                      "micro-steps is not a power of two",
                      WHOLE_LOSS);
    int bottom = stack->heights[0] == FSDPC_MICRO_CLOSED ? 1 : 0;
    for (; stack->n > bottom + 1; stack->n--) {
        FSDPC_TRY(merge(unit, stack->n - 1));
        stack->heights[stack->n - 2]++;
    }
    unit->folded = true;
    FSDPC_TRY(finish(unit, bottom));
    if (bottom > 0 || unit->fold_scale != 1)
        *stack = (fsdpc_micro_sums){.heights = {FSDPC_MICRO_CLOSED}, .n = 1};
    return FSDPC_OK;
}
