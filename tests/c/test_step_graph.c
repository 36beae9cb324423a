/* Graphs of steps, as far as the host goes: what is counted, compared and refused.
 *
 * The device is the CPU with graphs that hold nothing: what is "captured" runs at once, and a
 * launch is only counted.
 */
#include "engine_fixture.h"

#include "engine/step_graph.h"

static fsdpc_device_ops graph_ops;
static fsdpc_graph graph;
static int launches, destroyed;

static fsdpc_status begin_capture(fsdpc_device *device)
{
    graph.device = device;
    return FSDPC_OK;
}

static fsdpc_status end_capture(fsdpc_device *device, fsdpc_graph **out)
{
    (void)device;
    if (out)
        *out = &graph;
    return FSDPC_OK;
}

static fsdpc_status count_launch(fsdpc_graph *launched)
{
    (void)launched;
    launches++;
    return FSDPC_OK;
}

static void count_destroyed(fsdpc_graph *gone)
{
    (void)gone;
    destroyed++;
}

static fsdpc_optim *make_optim(rig *r)
{
    const fsdpc_hyper hyper = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.9, .eps = 1e-8};
    fsdpc_optim *optim;
    CHECK_OK(fsdpc_optim_create(FSDPC_OPTIM_ADAMW, r->device, r->trace, &optim));
    for (int u = 0; u < r->n_units; u++) {
        for (int p = 0; p < r->units[u]->layout->n_params; p++)
            CHECK_OK(fsdpc_optim_add(optim, r->units[u], p, 0));
    }
    CHECK_OK(fsdpc_optim_set_hyper(optim, 0, &hyper));
    return optim;
}

static void open_model(rig *r)
{
    CHECK_OK(rig_open(r, 1, false));
    graph_ops = *r->device->ops;
    graph_ops.capture_begin = begin_capture;
    graph_ops.capture_end = end_capture;
    graph_ops.graph_launch = count_launch;
    graph_ops.graph_destroy = count_destroyed;
    r->device->ops = &graph_ops;
    CHECK_OK(rig_add_units(r, 2, false));
    CHECK_OK(rig_root(r));
}

static void whole_step(rig *r, fsdpc_optim *optim)
{
    CHECK_OK(rig_step(r));
    CHECK_OK(fsdpc_optim_step(optim));
    for (int u = 0; u < r->n_units; u++)
        fsdpc_unit_zero_grad(r->units[u]);
}

static int64_t count_of(const rig *r, fsdpc_optim *optim)
{
    int64_t count = 0;
    CHECK_OK(fsdpc_optim_step_count(optim, r->units[1], 0, &count));
    return count;
}

static void test_replays_count_as_steps(void)
{
    rig r;
    fsdpc_step_graph *step;
    launches = destroyed = 0;
    open_model(&r);
    fsdpc_optim *optim = make_optim(&r);
    whole_step(&r, optim);
    uint64_t generation = r.root->generation;
    whole_step(&r, optim);
    uint64_t generations = r.root->generation - generation;
    CHECK_OK(fsdpc_step_graph_begin(r.root, optim, &step));
    CHECK_FAILS(fsdpc_step_graph_replay(step), FSDPC_ERR_STATE, "whose capture failed, or goes on");
    whole_step(&r, optim);
    CHECK_OK(fsdpc_step_graph_end(step));
    CHECK(launches == 1 && count_of(&r, optim) == 3 && r.root->steps == 3);
    CHECK_OK(fsdpc_step_graph_replay(step));
    whole_step(&r, optim);
    CHECK_OK(fsdpc_step_graph_replay(step));
    CHECK(launches == 3 && count_of(&r, optim) == 6 && r.root->steps == 6);
    CHECK(r.root->generation == generation + 5 * generations);

    CHECK_OK(fsdpc_hold_begin(r.root));
    CHECK_FAILS(fsdpc_step_graph_replay(step), FSDPC_ERR_STATE, "inside hold() of 'root'");
    CHECK_OK(fsdpc_hold_end(r.root));
    const fsdpc_hyper other = {.lr = 1};
    CHECK_OK(fsdpc_optim_set_hyper(optim, 1, &other));
    CHECK_FAILS(fsdpc_step_graph_replay(step), FSDPC_ERR_STATE, "parameters were added");
    CHECK(launches == 3 && count_of(&r, optim) == 6);
    fsdpc_step_graph_destroy(step);
    fsdpc_step_graph_destroy(NULL);
    CHECK(destroyed == 1);
    fsdpc_optim_destroy(optim);
    rig_close(&r);
}

static void test_an_abandoned_step_was_none(void)
{
    rig r;
    fsdpc_step_graph *step;
    launches = 0;
    open_model(&r);
    fsdpc_optim *optim = make_optim(&r);
    whole_step(&r, optim);
    CHECK_OK(fsdpc_step_graph_begin(r.root, optim, &step));
    whole_step(&r, optim);
    CHECK_OK(rig_forward(&r, true));
    uint64_t seen = r.seen;
    fsdpc_step_graph_abandon(step, "nobody wants it");
    CHECK(launches == 0 && count_of(&r, optim) == 1 && r.root->steps == 1 && !r.device->capturing);
    CHECK_FAILS(fsdpc_pre_backward(r.units[0], seen), FSDPC_ERR_STATE, "changed between forward");
    CHECK_FAILS(fsdpc_step_graph_replay(step), FSDPC_ERR_STATE, "whose capture failed");
    whole_step(&r, optim);
    CHECK(count_of(&r, optim) == 2);
    fsdpc_step_graph_destroy(step);
    fsdpc_optim_destroy(optim);
    rig_close(&r);
}

static void test_what_cannot_begin_is_named(void)
{
    rig r;
    fsdpc_step_graph *step;
    open_model(&r);
    fsdpc_optim *optim = make_optim(&r);
    whole_step(&r, optim);
    r.units[1]->settings.deterministic = true;
    CHECK_FAILS(fsdpc_step_graph_begin(r.root, optim, &step), FSDPC_ERR_UNSUPPORTED,
                "in deterministic mode");
    r.units[1]->settings.deterministic = false;
    CHECK_OK(fsdpc_pre_forward(r.units[0], true));
    CHECK_FAILS(fsdpc_step_graph_begin(r.root, optim, &step), FSDPC_ERR_STATE, "inside forward");
    CHECK_OK(fsdpc_post_forward(r.units[0]));
    fsdpc_optim_destroy(optim);
    rig_close(&r);
}

int main(void)
{
    test_replays_count_as_steps();
    test_an_abandoned_step_was_none();
    test_what_cannot_begin_is_named();
    return check_report("test_step_graph");
}
