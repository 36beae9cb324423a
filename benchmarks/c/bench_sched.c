/* What the schedule costs the host: a step of units over a null communicator and a null device of
 * world 8, so that nothing is computed or communicated.
 *
 * A step of a unit is gather, reshard, gather, a target and a mark for each gradient, reduction,
 * reshard. Prints microseconds a unit and step for units of few and many parameters, against the
 * budget of 10 us + 0.3 us a parameter, and for models of 1 to 1000 units.
 */
#include "engine_fixture.h"

#include "base/wait.h"

enum { WORLD = 8, WARM = 3, RUNS = 15, UNITS_MAX = 1001 };

typedef struct model {
    rig r;
    fsdpc_unit *units[UNITS_MAX];
    bool encloses[UNITS_MAX];
    int n_units, n_params;
} model;

static void model_init(model *m, int n_units, int n_params)
{
    static char names[256][8];
    fsdpc_param_spec specs[256];
    CHECK_OK(rig_open(&m->r, WORLD, true));
    m->n_units = n_units;
    m->n_params = n_params;
    for (int p = 0; p < n_params; p++) {
        snprintf(names[p], sizeof names[p], "p%d", p);
        specs[p] = p % 3 ? rig_spec(names[p], FSDPC_F32, 2, 16, 16, 0)
                         : rig_spec(names[p], FSDPC_F32, 1, 64, 0, 0);
    }
    for (int u = 0; u < n_units; u++) {
        fsdpc_unit_options options = rig_options(&m->r, "unit");
        options.reshard_after_forward = u > 0;
        CHECK_OK(fsdpc_unit_create(specs, n_params, &options, &m->units[u]));
        m->encloses[u] = u == 0;
    }
    CHECK_OK(fsdpc_root_create(m->units, m->encloses, n_units, &m->r.root));
}

static void model_fini(model *m)
{
    fsdpc_root_destroy(m->r.root);
    m->r.root = NULL;
    for (int u = 0; u < m->n_units; u++)
        fsdpc_unit_destroy(m->units[u]);
    rig_close(&m->r);
}

static void give_all(model *m, int u)
{
    void *data;
    fsdpc_dtype dtype;
    bool accumulate;
    for (int p = 0; p < m->n_params; p++) {
        CHECK_OK(fsdpc_grad_target_of(m->units[u], p, &data, &dtype, &accumulate));
    }
}

static void step(model *m)
{
    CHECK_OK(fsdpc_pre_forward(m->units[0], true));
    for (int u = 1; u < m->n_units; u++) {
        CHECK_OK(fsdpc_pre_forward(m->units[u], true));
        CHECK_OK(fsdpc_post_forward(m->units[u]));
    }
    CHECK_OK(fsdpc_post_forward(m->units[0]));
    uint64_t seen = m->r.root->generation;
    CHECK_OK(fsdpc_pre_backward(m->units[0], seen));
    for (int u = m->n_units - 1; u > 0; u--) {
        CHECK_OK(fsdpc_pre_backward(m->units[u], seen));
        give_all(m, u);
        CHECK_OK(fsdpc_post_backward(m->units[u]));
    }
    give_all(m, 0);
    CHECK_OK(fsdpc_backward_end(m->r.root));
    for (int u = 0; u < m->n_units; u++)
        fsdpc_unit_zero_grad(m->units[u]);
}

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void measure(int n_units, int n_params)
{
    static model m;
    int64_t times[RUNS];
    m = (model){0};
    model_init(&m, n_units, n_params);
    for (int i = 0; i < WARM; i++)
        step(&m);
    for (int i = 0; i < RUNS; i++) {
        int64_t begin = fsdpc_clock_ns();
        step(&m);
        times[i] = fsdpc_clock_ns() - begin;
    }
    qsort(times, RUNS, sizeof *times, compare);
    double unit = 1e-3 / n_units;
    printf("%5d units of %3d parameters: %7.2f us a unit (best %.2f), budget %.1f\n", n_units,
           n_params, (double)times[RUNS / 2] * unit, (double)times[0] * unit, 10 + 0.3 * n_params);
    model_fini(&m);
}

int main(void)
{
    static const int params[] = {2, 9, 40, 200}, units[] = {1, 10, 100, 1000};
    for (size_t i = 0; i < 4; i++)
        measure(32, params[i]);
    for (size_t i = 0; i < 4; i++)
        measure(units[i], 9);
    return check_report("bench_sched");
}
