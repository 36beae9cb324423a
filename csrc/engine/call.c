/* Calls of units.
 *
 * A forward with gradients that runs during backward is a recomputation (activation checkpointing).
 * It must see the same weights as the original run. A boundary on the tape records the generation
 * of those weights. Without a boundary, the unit records the generation that its forwards saw and
 * when, on the frontend's clock, they first saw it. Any computation that first ran before that time
 * saw an older generation. A forward without gradients inside a recomputation (a checkpoint inside
 * a checkpoint, a teacher model) begins an epoch like any other forward. That epoch may bring in
 * newer weights, so such a forward's generation is checked too.
 *
 * A unit with several modules stays gathered until all of them have run in the same epoch. If a
 * method of a unit calls its forward, the unit stays gathered until the method returns (sched.c).
 *
 * In deterministic mode dropout keys its random numbers by contribution = forward * ranks + rank,
 * not by rank. Dropout masks therefore do not depend on how a batch is split over ranks and
 * micro-steps. A step's streams begin at the next multiple of 2^40, regardless of how many were
 * used; each contribution has 2^20 streams. Only forwards with gradients are counted, so a
 * micro-step must have exactly one.
 */
#include "engine/call.h"

#include "engine/root_internal.h"

static uint64_t generation_of(const fsdpc_unit *unit, const fsdpc_call *call)
{
    return call->ran_at < unit->seen_from ? FSDPC_GENERATION_PAST : unit->seen_generation;
}

bool fsdpc_call_begins_backward(const fsdpc_unit *unit, const fsdpc_call *call,
                                uint64_t *generation_out)
{
    *generation_out = generation_of(unit, call);
    return !unit->root->model->in_backward;
}

static void key_streams(const fsdpc_unit *unit, uint64_t *next_stream)
{
    fsdpc_root *root = unit->root;
    if (!unit->settings.deterministic || root->model->forward_depth != 1 ||
        root->model->in_backward)
        return;
    uint64_t step = root->steps + 1;
    if (root->streams_step != step) {
        root->streams_step = step;
        root->step_streams = ((*next_stream >> 40) + 1) << 40;
        root->step_forwards = 0;
    }
    const fsdpc_mesh *mesh = &unit->mesh;
    uint64_t rank = (uint64_t)mesh->shard->rank;
    if (mesh->replicate)
        rank += (uint64_t)mesh->replicate->rank * (uint64_t)mesh->shard->size;
    uint64_t contribution = root->step_forwards++ * (uint64_t)fsdpc_mesh_size(mesh) + rank;
    *next_stream = root->step_streams + (contribution << 20);
}

static void note_generation(fsdpc_unit *unit, const fsdpc_call *call)
{
    uint64_t now = unit->root->generation;
    if (unit->seen_generation != now)
        unit->seen_from = call->clock;
    unit->seen_generation = now;
}

/* Returns how many of the unit's modules have already run in this epoch. */
static int count_run(fsdpc_unit *unit)
{
    if (unit->settings.n_modules == 1)
        return 0;
    if (unit->run_epoch != unit->root->param_buffer->epoch)
        unit->runs = 0;
    unit->run_epoch = unit->root->param_buffer->epoch;
    int before = unit->runs;
    unit->runs = (unit->runs + 1) % unit->settings.n_modules;
    unit->stays = unit->runs > 0;
    return before;
}

fsdpc_status fsdpc_call_enter(fsdpc_unit *unit, const fsdpc_call *call, bool *first_out)
{
    bool again = call->ran_at != FSDPC_CALL_UNKNOWN;
    if (call->recomputed && again)
        FSDPC_TRY(fsdpc_unit_check_generation(unit, generation_of(unit, call)));
    FSDPC_TRY(fsdpc_pre_forward(unit, call->grad));
    *first_out = true;
    if (call->recomputed)
        return FSDPC_OK;
    if (call->grad && call->next_stream)
        key_streams(unit, call->next_stream);
    fsdpc_status status = FSDPC_OK;
    if (again)
        status = fsdpc_unit_check_generation(unit, generation_of(unit, call));
    else
        note_generation(unit, call);
    if (status != FSDPC_OK)
        fsdpc_call_failed(unit);
    else
        *first_out = count_run(unit) == 0;
    return status;
}

fsdpc_status fsdpc_call_leave(fsdpc_unit *unit, fsdpc_left *left_out)
{
    FSDPC_TRY(fsdpc_post_forward(unit));
    if (unit->running > 0 || unit->root->model->in_backward)
        *left_out = FSDPC_LEFT_INSIDE;
    else
        *left_out = fsdpc_reshards_after_forward(unit) ? FSDPC_LEFT_RESHARD : FSDPC_LEFT_KEPT;
    return FSDPC_OK;
}

void fsdpc_call_failed(fsdpc_unit *unit)
{
    fsdpc_root *root = unit->root;
    unit->running -= unit->running > 0;
    root->model->forward_depth -= root->model->forward_depth > 0;
    if (root->model->forward_depth == 0 && !root->model->in_backward)
        fsdpc_root_reset(root);
}

void fsdpc_call_set_seen(fsdpc_unit *unit, uint64_t generation)
{
    unit->seen_generation = generation;
}

bool fsdpc_call_wants_end(const fsdpc_unit *unit)
{
    return !unit->root->model->end_asked;
}

fsdpc_status fsdpc_call_begin_backward(fsdpc_unit *unit, uint64_t generation)
{
    unit->root->model->end_asked = true;
    return fsdpc_pre_backward(unit, generation);
}

fsdpc_status fsdpc_call_end_backward(fsdpc_root *root, fsdpc_status status)
{
    root->model->end_asked = false;
    if (status == FSDPC_OK)
        status = fsdpc_backward_end(root);
    if (status != FSDPC_OK)
        fsdpc_root_reset(root);
    return status;
}
