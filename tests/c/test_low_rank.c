/* Sums in low rank by ranks that are threads: bits of replicas, and the order of operations. What is
 * computed is checked by tests/dist/test_powersgd.py.
 */
#include "engine_fixture.h"

#include <math.h>
#include <sched.h>

#include "base/crc32c.h"
#include "engine/reduce.h"

enum { UNITS = 3, STEPS = 5, SHARD_OF = 2 };

typedef struct plan {
    fsdpc_low_rank_options options;
    bool sharded; /* a mesh of 2 x 2; else only replicas */
} plan;

static fsdpc_status open_units(rig *r, const plan *given, fsdpc_comm **row, fsdpc_comm **column)
{
    static const char *const names[UNITS] = {"root", "a", "b"};
    const fsdpc_param_spec specs[] = {rig_spec("w", FSDPC_F32, 2, 24, 16, 0),
                                      rig_spec("v", FSDPC_F32, 3, 6, 4, 6),
                                      rig_spec("bias", FSDPC_F32, 1, 70, 0, 0)};
    int width = given->sharded ? SHARD_OF : 1;
    FSDPC_TRY(fsdpc_comm_split(r->comm, r->rank / width, r->rank, row));
    FSDPC_TRY(fsdpc_comm_split(r->comm, r->rank % width, r->rank, column));
    for (int u = 0; u < UNITS; u++) {
        fsdpc_unit_options options = rig_options(r, names[u]);
        options.mesh = (fsdpc_mesh){.shard = *row, .replicate = *column};
        FSDPC_TRY(rig_add(r, &options, specs, 3));
        fsdpc_unit_settings settings = *fsdpc_unit_settings_of(r->units[u]);
        settings.low_rank = given->options;
        FSDPC_TRY(fsdpc_unit_configure(r->units[u], &settings));
    }
    return rig_root(r);
}

static fsdpc_status close_units(rig *r, fsdpc_comm *row, fsdpc_comm *column)
{
    rig_close_units(r);
    fsdpc_comm_destroy(column);
    fsdpc_comm_destroy(row);
    return FSDPC_OK;
}

/* The largest difference of this rank's rows from the mean of all ranks' gradients. */
static fsdpc_status look(rig *r, uint32_t *bits_io, double *worst_io)
{
    for (int u = 0; u < UNITS; u++)
        for (int p = 0; p < 3; p++) {
            fsdpc_local_shard local;
            void *grad;
            FSDPC_TRY(fsdpc_unit_grad(r->units[u], p, false, &local, &grad));
            *bits_io = fsdpc_crc32c(*bits_io, grad, local.numel * sizeof(float));
            for (size_t i = 0; i < local.numel; i++) {
                double mean = 0;
                for (int rank = 0; rank < r->world; rank++)
                    mean += rig_gradient(rank, r->step - 1, u, p, local.first + i) / r->world;
                *worst_io = fmax(*worst_io, fabs(((float *)grad)[i] - mean));
            }
        }
    return FSDPC_OK;
}

/* Steps of ranks that are late by turns. */
static fsdpc_status steps(rig *r)
{
    fsdpc_comm *row, *column;
    const plan *given = r->arg;
    FSDPC_TRY(open_units(r, given, &row, &column));
    uint32_t bits = 0;
    for (int step = 0; step < STEPS; step++) {
        for (int u = 0; u < UNITS; u++)
            fsdpc_unit_zero_grad(r->units[u]);
        for (int i = 0; step % r->world == r->rank && i < 1000; i++)
            sched_yield();
        FSDPC_TRY(rig_step(r));
        double worst = 0;
        FSDPC_TRY(look(r, &bits, &worst));
        r->result[2 + step] = worst;
    }
    r->result[0] = bits;
    return close_units(r, row, column);
}

static plan plan_of(int rank, bool sharded)
{
    return (plan){.options = {.rank = rank,
                              .start_step = 2,
                              .warm_start = true,
                              .error_feedback = true,
                              .min_rate = 0.1},
                  .sharded = sharded};
}

static void test_replicas(void)
{
    for (int world = 2; world <= RIG_RANKS; world++)
        for (int sharded = 0; sharded <= (world == RIG_RANKS); sharded++)
            for (int rank = 2; rank <= 16; rank += 14) {
                rig rigs[RIG_RANKS];
                plan given = plan_of(rank, sharded);
                rigs_run(rigs, world, steps, &given);
                for (int p = 0; p < world; p++) {
                    CHECK(rigs[p].result[0] == rigs[sharded ? p % SHARD_OF : 0].result[0]);
                    for (int step = 0; step < STEPS; step++) {
                        double worst = rigs[p].result[2 + step];
                        bool exact = step < 2 || rank == 16; /* no matrix has a higher rank */
                        CHECK_NOTE(exact == (worst < 1e-5), "rank %d, %d columns, step %d: %g", p,
                                   rank, step, worst);
                    }
                }
                rigs_close(rigs, world);
            }
}

/* ---- order ---- */

static _Atomic int posted; /* by rank 0: it is about to post its second reduction */

static fsdpc_status one_is_late(rig *r)
{
    fsdpc_comm *row, *column;
    FSDPC_TRY(open_units(r, r->arg, &row, &column));
    FSDPC_TRY(rig_forward(r, true));
    FSDPC_TRY(fsdpc_pre_backward(r->units[0], r->seen));
    fsdpc_trace_reset(r->trace);
    while (r->rank == 1 && !atomic_load(&posted))
        sched_yield();
    FSDPC_TRY(rig_backward_of(r, 2));
    for (int i = 0; i < 1000; i++) /* polling posts nothing */
        FSDPC_TRY(fsdpc_reduce_progress(r->root));
    FSDPC_TRY(fsdpc_pre_backward(r->units[1], r->seen));
    FSDPC_TRY(rig_give_all(r, 1));
    if (r->rank == 0)
        atomic_store(&posted, 1);
    FSDPC_TRY(fsdpc_post_backward(r->units[1]));
    FSDPC_TRY(rig_give_all(r, 0));
    FSDPC_TRY(fsdpc_backward_end(r->root));
    rig_note_reductions(r);
    return close_units(r, row, column);
}

static void test_order(void)
{
    static const double expected[] = {2, 12, 12, 1, 11, 11, 0, 10, 10};
    for (int sharded = 0; sharded < 2; sharded++) {
        rig rigs[RIG_RANKS];
        plan given = plan_of(2, sharded);
        given.options.start_step = 0;
        atomic_store(&posted, 0);
        rigs_run(rigs, RIG_RANKS, one_is_late, &given);
        for (int p = 0; p < RIG_RANKS; p++)
            for (int i = 0; i < 9; i++)
                CHECK_NOTE(rigs[p].result[i] == expected[i], "rank %d, post %d: %g, not %g", p, i,
                           rigs[p].result[i], expected[i]);
        rigs_close(rigs, RIG_RANKS);
    }
}

/* ---- shapes ---- */

static void test_matrices(void)
{
    const fsdpc_param_spec specs[] = {
        rig_spec("a", FSDPC_F32, 2, 40, 30, 0), rig_spec("vector", FSDPC_F32, 1, 9999, 0, 0),
        rig_spec("empty", FSDPC_F32, 2, 0, 7, 0), rig_spec("b", FSDPC_F32, 3, 8, 4, 5),
        rig_spec("thin", FSDPC_F32, 2, 900, 3, 0)};
    const fsdpc_low_rank_options options = {.rank = 4, .min_rate = 1.5}, none = {.min_rate = 1.5};
    for (int ranks = 1; ranks <= 3; ranks++) {
        fsdpc_layout *layout;
        size_t rows = 0, most = 0;
        CHECK_OK(fsdpc_layout_create(specs, 5, ranks, false, &layout));
        for (int r = 0; r < ranks; r++)
            for (int i = 0; i < 5; i++) {
                fsdpc_low_rank_matrix m = {0};
                CHECK(fsdpc_low_rank_takes(layout, &options, i, r, &m) == (i == 0));
                CHECK(i > 0 || (m.cols == 30 && m.rank == 4));
                rows += m.rows;
                most = fsdpc_max_size(most, m.rows);
            }
        fsdpc_low_rank_sizes sizes = fsdpc_low_rank_sizes_of(layout, &options);
        CHECK(rows == 40 && sizes.values == most * 30 && sizes.p == most * 4);
        CHECK(sizes.q == 120 && sizes.row == 30);
        CHECK(fsdpc_low_rank_sizes_of(layout, &none).values == 0);
        fsdpc_layout_destroy(layout);
    }
}

int main(void)
{
    test_matrices();
    test_replicas();
    test_order();
    return check_report("low_rank");
}
