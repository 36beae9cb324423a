/* Factors are stored transposed: P' is (rank, rows) and Q' is (rank, cols). All loops over a factor
 * then run along memory.
 *
 *     values += gradient            M; they hold what earlier sums left out
 *     Q' made orthonormal           it was the last sum's, or is zero, which makes it random
 *     P' = Q' M'    --all-reduce--> P' made orthonormal
 *     Q' = P' M     --all-reduce--> Q'
 *     gradient = P Q' x scale       rounded as exact sums are
 *     values -= P Q' / replicas     what this sum left out
 *
 * All of these are unscaled sums over replicas, so the divide factor may change between steps.
 *
 * Replicas must have equal bits. An operation gives all of them the same sums. From these, each
 * replica computes its gradients only by kernels with the same bits on every instruction set:
 * orthonormal.h and flat_ops.h. The two products with M need not be equal, since replicas sum them.
 *
 * A NaN or an infinity in M makes a whole row of P non-finite, and then every element of the
 * gradient. After such a sum, `values` and Q of the matrix begin at zero, because they would keep
 * the NaN.
 *
 * Operations read the unit's own two buffers and write to private memory, because the peers may
 * still read P while Q is being computed.
 */
#include "engine/low_rank.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "base/size.h"
#include "ops/flat_ops.h"
#include "ops/nn_ops.h"
#include "ops/orthonormal.h"

/* Addresses of one matrix's memory, in the order of the unit's parameters. */
typedef struct matrix {
    fsdpc_low_rank_matrix plan;
    float *values;          /* (rows, cols) */
    float *p, *q;           /* (rank, rows), (rank, cols): sums */
    float *p_sent, *q_sent; /* this replica's, in the buffers */
    size_t source;          /* of its gradients in a group's part of a buffer, in elements */
} matrix;

/* The operation in flight, or none. */
typedef enum stage { NONE, FIRST, SECOND } stage;

struct fsdpc_low_rank {
    matrix *matrices;
    size_t n;
    float *row;               /* as long as the longest one */
    fsdpc_slice *exact;       /* of all groups, end to end */
    size_t *n_exact;          /* by group */
    fsdpc_buffer *buffers[2]; /* P and Q; NULL: none */
    fsdpc_slice slices[2];    /* all of them */
    float *sums[2];
    stage stage;
    bool active;     /* the sum that was begun last is in low rank */
    bool accumulate; /* and adds to earlier gradients */
};

/* ---- Life ---- */

/* Returns the position of a local shard's gradients. A shard group of one rank sums the reduce
 * buffer, which has the layout of the unsharded parameters; partials have that of a shard. */
static size_t source_of(const fsdpc_unit *unit, int param, const fsdpc_local_shard *local)
{
    return unit->layout->ranks == 1 ? unit->layout->params[param].unsharded_offset
                                    : local->shard_offset;
}

static void take_matrix(fsdpc_low_rank *own, const fsdpc_low_rank_matrix *plan, size_t source,
                        matrix *at)
{
    matrix *m = &own->matrices[own->n++];
    *m = *at;
    m->plan = *plan;
    m->source = source;
    at->values += plan->rows * plan->cols;
    at->p += plan->rows * plan->rank;
    at->q += plan->cols * plan->rank;
    at->p_sent += plan->rows * plan->rank;
    at->q_sent += plan->cols * plan->rank;
}

/* Lists the matrices, and what else a group's shard contains. */
static void list_params(fsdpc_low_rank *own, const fsdpc_unit *unit)
{
    const fsdpc_low_rank_options *options = &unit->settings.low_rank;
    const fsdpc_low_rank_sizes *sizes = &unit->low_rank_sizes;
    int rank = fsdpc_unit_rank(unit);
    matrix at = {.values = unit->low_rank_state,
                 .q = unit->low_rank_state + sizes->values,
                 .p = unit->low_rank_state + sizes->values + sizes->q,
                 .p_sent = (float *)(void *)own->buffers[0]->data,
                 .q_sent = (float *)(void *)own->buffers[1]->data};
    fsdpc_slice *next = own->exact;
    own->sums[0] = at.p;
    own->sums[1] = at.q;
    own->row = at.p + sizes->p;
    for (int g = 0; g < unit->layout->n_groups; g++) { /* frozen ones may become trained */
        const fsdpc_slice *first = next;
        for (int i = 0; i < unit->layout->n_params; i++) {
            fsdpc_low_rank_matrix plan;
            fsdpc_local_shard local = fsdpc_layout_local_shard(unit->layout, i, rank);
            if (unit->layout->params[i].group != g || local.numel == 0)
                continue;
            size_t source = source_of(unit, i, &local);
            if (fsdpc_low_rank_takes(unit->layout, options, i, rank, &plan))
                take_matrix(own, &plan, source, &at);
            else
                *next++ = (fsdpc_slice){.unsharded_offset = source,
                                        .numel = local.numel,
                                        .shard_offset = local.shard_offset,
                                        .row = 1};
        }
        own->n_exact[g] = (size_t)(next - first);
    }
    own->slices[0] = (fsdpc_slice){.numel = (size_t)(at.p - own->sums[0]), .row = 1};
    own->slices[1] = (fsdpc_slice){.numel = (size_t)(at.q - own->sums[1]), .row = 1};
}

/* Creates a state of zeros, unless the unit has one or needs none. */
static fsdpc_status create_state(fsdpc_unit *unit)
{
    fsdpc_low_rank_sizes sizes = {0};
    if (fsdpc_mesh_is_replicated(&unit->mesh))
        sizes = fsdpc_low_rank_sizes_of(unit->layout, &unit->settings.low_rank);
    if (memcmp(&sizes, &unit->low_rank_sizes, sizeof sizes) == 0)
        return FSDPC_OK;
    fsdpc_device_free(unit->device, unit->low_rank_state); /* of other options */
    unit->low_rank_state = NULL;
    unit->low_rank_sizes = (fsdpc_low_rank_sizes){0};
    if (sizes.values == 0)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_device_alloc_zeroed(unit->device, FSDPC_MEM_REDUCE,
                                        fsdpc_low_rank_state_bytes(&sizes),
                                        (void **)&unit->low_rank_state));
    unit->low_rank_sizes = sizes;
    return FSDPC_OK;
}

fsdpc_status fsdpc_low_rank_create(fsdpc_unit *unit)
{
    size_t n_params = (size_t)unit->layout->n_params, n_groups = (size_t)unit->layout->n_groups;
    FSDPC_TRY(create_state(unit));
    if (!unit->low_rank_state)
        return FSDPC_OK;
    fsdpc_low_rank *own = unit->low_rank = calloc(1, sizeof *own);
    if (!own)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for sums of unit '%s'", unit->name);
    own->matrices = calloc(n_params, sizeof *own->matrices);
    own->exact = calloc(n_params, sizeof *own->exact);
    own->n_exact = calloc(n_groups, sizeof *own->n_exact);
    if (!own->matrices || !own->exact || !own->n_exact)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for sums of %zu parameters", n_params);
    const size_t numels[] = {unit->low_rank_sizes.p, unit->low_rank_sizes.q};
    for (int i = 0; i < 2; i++)
        FSDPC_TRY(fsdpc_buffer_create(
            unit->root->replicate, fsdpc_mem_counted(numels[i] * sizeof(float)), &own->buffers[i]));
    list_params(own, unit);
    return FSDPC_OK;
}

fsdpc_status fsdpc_unit_low_rank_state(fsdpc_unit *unit, float **out, size_t *numel_out)
{
    const fsdpc_low_rank_options *options = &unit->settings.low_rank;
    FSDPC_TRY(create_state(unit));
    const fsdpc_low_rank_sizes *sizes = &unit->low_rank_sizes;
    size_t first = options->error_feedback ? 0 : sizes->values;
    *numel_out = sizes->values - first + (options->warm_start ? sizes->q : 0);
    *out = *numel_out ? unit->low_rank_state + first : NULL;
    return FSDPC_OK;
}

uint64_t *fsdpc_unit_low_rank_sums(fsdpc_unit *unit)
{
    return &unit->low_rank_sums;
}

void fsdpc_low_rank_destroy(fsdpc_unit *unit)
{
    fsdpc_low_rank *own = unit->low_rank;
    if (!own)
        return;
    fsdpc_buffer_destroy(own->buffers[0]);
    fsdpc_buffer_destroy(own->buffers[1]);
    free(own->matrices);
    free(own->exact);
    free(own->n_exact);
    free(own);
    unit->low_rank = NULL;
}

/* ---- Sums ---- */

bool fsdpc_low_rank_begin(fsdpc_unit *unit)
{
    fsdpc_low_rank *own = unit->low_rank;
    bool active = unit->low_rank_sums++ >= unit->settings.low_rank.start_step;
    if (own)
        own->active = active;
    return own && active;
}

void fsdpc_low_rank_keep_exact(const fsdpc_unit *unit, int group, const fsdpc_slice **slices_io,
                               size_t *n_io)
{
    const fsdpc_low_rank *own = unit->low_rank;
    if (!own || !own->active)
        return;
    *slices_io = own->exact;
    for (int g = 0; g < group; g++)
        *slices_io += own->n_exact[g];
    *n_io = own->n_exact[group];
}

size_t fsdpc_low_rank_first_bytes(const fsdpc_unit *unit)
{
    return unit->low_rank->slices[0].numel * sizeof(float);
}

size_t fsdpc_low_rank_second_bytes(const fsdpc_unit *unit)
{
    return unit->low_rank->slices[1].numel * sizeof(float);
}

/* Makes a factor's columns orthonormal; `of` is 0 for P and 1 for Q. */
static void orthonormalize(const fsdpc_unit *unit, const matrix *m, int of)
{
    const uint64_t key[] = {unit->settings.low_rank.seed, (uint64_t)unit->id,
                            (uint64_t)m->plan.param, unit->low_rank_sums, (uint64_t)of};
    const uint64_t seed = (uint64_t)fsdpc_crc32c(0, key, sizeof key) << 32;
    if (unit->device->flat != fsdpc_flat_ops_null())
        fsdpc_orthonormalize(of ? m->q : m->p, m->plan.rank, of ? m->plan.cols : m->plan.rows,
                             seed);
}

/* Multiplies an orthonormal factor by M: P' = Q' M', or Q' = P' M. */
static fsdpc_status multiply(const fsdpc_unit *unit, const matrix *m, int to)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    const size_t rows = m->plan.rows, cols = m->plan.cols;
    const fsdpc_gemm_args args = {.m = m->plan.rank,
                                  .n = to ? cols : rows,
                                  .k = to ? rows : cols,
                                  .dtype = FSDPC_F32,
                                  .c_dtype = FSDPC_F32,
                                  .a = to ? m->p : m->q,
                                  .lda = to ? rows : cols,
                                  .b = m->values,
                                  .ldb = cols,
                                  .trans_b = !to,
                                  .c = to ? m->q_sent : m->p_sent,
                                  .ldc = to ? cols : rows,
                                  .batch = 1};
    return fsdpc_nn_ops_of(main)->gemm(&args, main);
}

static fsdpc_status post(fsdpc_unit *unit, int i)
{
    fsdpc_low_rank *own = unit->low_rank;
    const fsdpc_root *root = unit->root;
    const fsdpc_coll op = {.kind = FSDPC_COLL_REDUCE_ALL,
                           .unit = unit->id,
                           .what = unit->name,
                           .dtype = FSDPC_F32,
                           .epoch = root->steps,
                           .stream = root->reduce_stream,
                           .slices = &own->slices[i],
                           .n_slices = 1,
                           .buffer = own->buffers[i],
                           .shard = own->sums[i],
                           .shard_dtype = FSDPC_F32,
                           .scale = 1,
                           .round_dtype = FSDPC_F32};
    own->stage = i ? SECOND : FIRST;
    if (own->slices[i].numel == 0) /* this rank and its replicas have no matrices */
        return FSDPC_OK;
    return fsdpc_comm_post(root->replicate, &op, &unit->low_rank_work);
}

/* M = gradient, plus what earlier sums left out */
static fsdpc_status take_gradient(const fsdpc_unit *unit, const matrix *m,
                                  const fsdpc_buffer *gradients)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    const fsdpc_unit_group *group = &unit->groups[m->plan.group];
    const bool partial = gradients == unit->partial;
    const fsdpc_dtype dtype = partial ? group->grad_dtype : group->reduce_dtype;
    const unsigned char *from = gradients->data +
                                (partial ? group->grad_offset : group->reduce_offset) +
                                m->source * fsdpc_dtype_bytes(dtype);
    const size_t numel = m->plan.rows * m->plan.cols;
    return unit->settings.low_rank.error_feedback
               ? fsdpc_flat_accumulate(m->values, FSDPC_F32, from, dtype, numel, main)
               : fsdpc_flat_cast(m->values, FSDPC_F32, from, dtype, numel, main);
}

fsdpc_status fsdpc_low_rank_post(fsdpc_unit *unit, const fsdpc_buffer *gradients)
{
    fsdpc_low_rank *own = unit->low_rank;
    own->accumulate = unit->grad_live;
    FSDPC_TRY(fsdpc_buffer_idle_wait(own->buffers[0], unit->name));
    for (size_t i = 0; i < own->n; i++) {
        const matrix *m = &own->matrices[i];
        FSDPC_TRY(take_gradient(unit, m, gradients));
        if (!unit->settings.low_rank.warm_start)
            FSDPC_TRY(fsdpc_device_fill(unit->device, m->q, 0,
                                        m->plan.rank * m->plan.cols * sizeof(float),
                                        fsdpc_device_main(unit->device)));
        orthonormalize(unit, m, 1);
        FSDPC_TRY(multiply(unit, m, 0));
    }
    return post(unit, 0);
}

bool fsdpc_low_rank_awaits_second(const fsdpc_unit *unit)
{
    return unit->low_rank && unit->low_rank->stage == FIRST;
}

fsdpc_status fsdpc_low_rank_post_second(fsdpc_unit *unit)
{
    fsdpc_low_rank *own = unit->low_rank;
    FSDPC_TRY(fsdpc_buffer_idle_wait(own->buffers[1], unit->name));
    for (size_t i = 0; i < own->n; i++) {
        orthonormalize(unit, &own->matrices[i], 0);
        FSDPC_TRY(multiply(unit, &own->matrices[i], 1));
    }
    return post(unit, 1);
}

/* ---- The gradient ---- */

/* to = scale x from [+ to], rounded through `round` */
static fsdpc_status scale_to(const float *from, size_t numel, double scale, fsdpc_dtype round,
                             void *to, fsdpc_dtype dtype, bool accumulate, fsdpc_stream *stream)
{
    return fsdpc_flat_reduce(&(fsdpc_reduce_args){.srcs = (const void *const[]){from},
                                                  .n_srcs = 1,
                                                  .dtype = FSDPC_F32,
                                                  .numel = numel,
                                                  .scale = scale,
                                                  .round_dtype = round,
                                                  .out = to,
                                                  .out_dtype = dtype,
                                                  .accumulate = accumulate},
                             stream);
}

/* Computes one row of P Q', writes it to the gradient, and subtracts it from M. */
static fsdpc_status write_row(const fsdpc_unit *unit, const matrix *m, size_t row)
{
    const fsdpc_low_rank *own = unit->low_rank;
    const fsdpc_unit_group *group = &unit->groups[m->plan.group];
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    const size_t cols = m->plan.cols, at = m->plan.shard_offset + row * cols;
    for (size_t k = 0; k < m->plan.rank; k++)
        FSDPC_TRY(scale_to(m->q + k * cols, cols, m->p[k * m->plan.rows + row], FSDPC_F32, own->row,
                           FSDPC_F32, k > 0, main));
    if (!unit->forget)
        FSDPC_TRY(scale_to(own->row, cols, 1 / unit->settings.divide_factor, group->reduce_dtype,
                           group->grad + at * fsdpc_dtype_bytes(group->grad_dtype),
                           group->grad_dtype, own->accumulate, main));
    if (!unit->settings.low_rank.error_feedback)
        return FSDPC_OK;
    return scale_to(own->row, cols, -1.0 / unit->root->replicate->size, FSDPC_F32,
                    m->values + row * cols, FSDPC_F32, true, main);
}

static bool is_finite(const float *x, size_t numel)
{
    for (size_t i = 0; i < numel; i++)
        if (!isfinite(x[i]))
            return false;
    return true;
}

/* Forgets a NaN or an infinity. All replicas find the same in Q. */
static fsdpc_status recover(const fsdpc_unit *unit, const matrix *m)
{
    const size_t values = m->plan.rows * m->plan.cols, q = m->plan.rank * m->plan.cols;
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    if (is_finite(m->q, q))
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_device_fill(unit->device, m->values, 0, values * sizeof(float), main));
    return fsdpc_device_fill(unit->device, m->q, 0, q * sizeof(float), main);
}

fsdpc_status fsdpc_low_rank_finish(fsdpc_unit *unit)
{
    fsdpc_low_rank *own = unit->low_rank;
    if (!own || own->stage == NONE)
        return FSDPC_OK;
    own->stage = NONE;
    own->active = false;
    if (unit->device->flat == fsdpc_flat_ops_null())
        return FSDPC_OK;
    for (size_t i = 0; i < own->n; i++) {
        const matrix *m = &own->matrices[i];
        for (size_t row = 0; row < m->plan.rows; row++)
            FSDPC_TRY(write_row(unit, m, row));
        FSDPC_TRY(recover(unit, m));
    }
    return FSDPC_OK;
}
