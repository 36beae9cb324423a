/* How the rows of a matrix meet.
 *
 *     every rank     momentum, and its rows ahead ─┐                     ┌─► moves its rows
 *                                        rows meet │                     │ rows of the update
 *     chosen rank                                  └─► update of whole X ┘
 *
 * On one host, rows meet in reduce buffers, which are idle during a step and which peers can read.
 * Each rank writes its rows of a batch of matrices into its own buffer. The chosen rank copies them
 * from there and leaves the update in its own buffer, from which the others read their rows. A
 * barrier separates each of the three parts from the next one's reads or overwrites. A batch is as
 * many matrices as fit, so ranks wait for each other twice per batch, not per matrix. If ranks are
 * on several hosts or GPUs, a unit has no root, or the buffers are too small, matrices are computed
 * in rounds of one per rank. Rows are then broadcast by the ranks that have them.
 *
 * Matrices are ordered by cost before they are cut into batches or rounds, so that those of one
 * round take similar time.
 *
 * If anything fails, momentum is already ahead of parameters, so the caller aborts the run.
 */
#include "engine/optim_matrix.h"

#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "base/size.h"
#include "engine/root_internal.h"
#include "engine/unsharded.h"
#include "ops/flat_ops.h"

enum { BATCH = 256 }; /* matrices */

/* One matrix of this step. */
typedef struct matrix {
    const unit_states *states;
    int unit, param;          /* unit: its index in the optimizer, which is the same on all ranks */
    size_t first, rows, cols; /* its first element in the parameter, and its shape */
    double cost;
    size_t number; /* decides between equal costs */
    int owner;     /* the rank that computes it */
} matrix;

/* Elements of a matrix that one rank has; they are contiguous. */
typedef struct part {
    size_t first, numel; /* in the matrix */
    size_t shard_offset;
} part;

/* One rank's use of the buffers by a batch. */
typedef struct share {
    double cost;
    size_t rows, update; /* elements */
} share;

struct fsdpc_optim_matrix {
    matrix *matrices;
    size_t n, room;
    share *shares;   /* by rank */
    float *x, *work; /* one block */
    size_t x_numel, work_numel;
};

/* Where the rows of a batch, or its updates, are in every rank's memory. */
typedef struct meeting_place {
    const fsdpc_buffer *buffer;
    size_t offset, numel; /* bytes, elements */
} meeting_place;

/* ---- Shapes and checks ---- */

static size_t n_matrices(int ndim, const size_t *shape)
{
    return ndim == 3 ? shape[0] : 1;
}

static const size_t *matrix_shape(int ndim, const size_t *shape)
{
    return ndim == 3 ? shape + 1 : shape;
}

static fsdpc_status check(const fsdpc_optim *optim, int group, const char *name, int ndim,
                          fsdpc_dtype dtype)
{
    const char *rule = fsdpc_optim_kind_name(fsdpc_optim_kind_of(optim, group));
    if (ndim != 2 && ndim != 3)
        return fsdpc_fail(FSDPC_ERR_SHAPE,
                          "%s steps matrices and stacks of them, but parameter '%s' has %d "
                          "dimension%s: put it into a group of another optimizer",
                          rule, name, ndim, ndim == 1 ? "" : "s");
    return fsdpc_optim_check_plain(optim, group, name, dtype);
}

/* ---- Memory ---- */

static fsdpc_status make(fsdpc_optim *optim)
{
    if (!optim->matrix)
        optim->matrix = calloc(1, sizeof *optim->matrix);
    return optim->matrix ? FSDPC_OK : fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for an optimizer");
}

static fsdpc_status make_work(fsdpc_optim *optim, size_t x_numel, size_t work_numel)
{
    fsdpc_optim_matrix *own = optim->matrix;
    void *block;
    if (x_numel <= own->x_numel && work_numel <= own->work_numel)
        return FSDPC_OK;
    x_numel = fsdpc_max_size(x_numel, own->x_numel);
    work_numel = fsdpc_max_size(work_numel, own->work_numel);
    FSDPC_TRY(fsdpc_device_alloc(optim->device, FSDPC_MEM_STAGING,
                                 (x_numel + work_numel) * sizeof(float), &block));
    fsdpc_device_free(optim->device, own->x);
    own->x = block;
    own->work = own->x + x_numel;
    own->x_numel = x_numel;
    own->work_numel = work_numel;
    return FSDPC_OK;
}

static fsdpc_status make_lists(fsdpc_optim_matrix *own, size_t n, int ranks)
{
    share *shares = realloc(own->shares, (size_t)ranks * sizeof *shares);
    own->shares = shares ? shares : own->shares;
    if (shares && n <= own->room)
        return FSDPC_OK;
    matrix *matrices = realloc(own->matrices, n * sizeof *matrices);
    own->matrices = matrices ? matrices : own->matrices;
    if (!shares || !matrices)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for steps of %zu matrices", n);
    own->room = n;
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_matrix_prepare(fsdpc_optim *optim)
{
    size_t x = 0, work = 0, n = 0;
    int ranks = 1;
    for (int u = 0; u < optim->n_units; u++) {
        const unit_states *states = &optim->units[u];
        const fsdpc_unit *unit = states->unit;
        for (int p = 0; p < unit->layout->n_params; p++) {
            const fsdpc_place *place = &unit->layout->params[p];
            if (place->group >= unit->n_trained || !fsdpc_optim_steps_matrix(optim, states, p))
                continue;
            int group = states->params[p].group;
            FSDPC_TRY(check(optim, group, place->name, place->ndim, place->dtype));
            FSDPC_TRY(fsdpc_optim_check_memory(optim, states, p));
            const fsdpc_matrix_rule *rule = fsdpc_matrix_rule_of(fsdpc_optim_kind_of(optim, group));
            const size_t *shape = matrix_shape(place->ndim, place->shape);
            x = fsdpc_max_size(x, shape[0] * shape[1]);
            work = fsdpc_max_size(work, rule->work(shape[0], shape[1]));
            n += n_matrices(place->ndim, place->shape);
            ranks = unit->layout->ranks > ranks ? unit->layout->ranks : ranks;
        }
    }
    if (n == 0)
        return FSDPC_OK;
    FSDPC_TRY(make(optim));
    FSDPC_TRY(make_lists(optim->matrix, n, ranks));
    return make_work(optim, x, work);
}

void fsdpc_optim_matrix_destroy(fsdpc_optim *optim)
{
    if (!optim->matrix)
        return;
    fsdpc_device_free(optim->device, optim->matrix->x);
    free(optim->matrix->matrices);
    free(optim->matrix->shares);
    free(optim->matrix);
    optim->matrix = NULL;
}

/* ---- The three parts of a step ---- */

static part part_of(const matrix *m, int rank)
{
    fsdpc_local_shard local = fsdpc_layout_local_shard(m->states->unit->layout, m->param, rank);
    size_t begin = fsdpc_max_size(m->first, local.first);
    size_t end = fsdpc_min_size(m->first + m->rows * m->cols, local.first + local.numel);
    if (begin >= end)
        return (part){0};
    return (part){begin - m->first, end - begin, local.shard_offset + begin - local.first};
}

static part own_part(const matrix *m)
{
    return part_of(m, fsdpc_unit_rank(m->states->unit));
}

/* Updates the momentum of this rank's rows, and writes the rows of the matrix to `to`. */
static fsdpc_status write_rows(const fsdpc_optim *optim, const matrix *m, part rows, float *to)
{
    const unit_states *states = m->states;
    const fsdpc_place *place = &states->unit->layout->params[m->param];
    const param_states *own = &states->params[m->param];
    const fsdpc_unit_group *group = &states->unit->groups[place->group];
    float *momentum = states->states[place->group * FSDPC_OPTIM_MAX_STATES];
    fsdpc_step_args args = {
        .kind = fsdpc_optim_kind_of(optim, own->group),
        .hyper = optim->hypers[own->group],
        .param = to,
        .param_dtype = FSDPC_F32,
        .grad = group->grad + rows.shard_offset * fsdpc_dtype_bytes(group->grad_dtype),
        .grad_dtype = group->grad_dtype,
        .states = {momentum + (rows.shard_offset - own->skips[0])},
        .state_dtype = FSDPC_F32,
        .numel = rows.numel,
        .grad_scale = states->scale,
        .grad_scale_at = states->scale_at,
        .step = own->steps,
    };
    return rows.numel ? fsdpc_flat_step(&args, fsdpc_device_main(optim->device)) : FSDPC_OK;
}

static fsdpc_status update(const fsdpc_optim *optim, int group, size_t rows, size_t cols, float *x)
{
    const fsdpc_matrix_args args = {.hyper = &optim->hypers[group],
                                    .rows = rows,
                                    .cols = cols,
                                    .x = x,
                                    .work = optim->matrix->work};
    if (optim->device->flat == fsdpc_flat_ops_null())
        return FSDPC_OK;
    return fsdpc_matrix_rule_of(fsdpc_optim_kind_of(optim, group))
        ->update(&args, fsdpc_device_main(optim->device));
}

static fsdpc_status update_matrix(const fsdpc_optim *optim, const matrix *m)
{
    int group = m->states->params[m->param].group;
    return update(optim, group, m->rows, m->cols, optim->matrix->x);
}

/* Moves this rank's rows of the parameter by the update of the whole matrix. */
static fsdpc_status move_rows(const fsdpc_optim *optim, const matrix *m, const float *whole)
{
    fsdpc_unit *unit = m->states->unit;
    const fsdpc_place *place = &unit->layout->params[m->param];
    const param_states *own = &m->states->params[m->param];
    const fsdpc_unit_group *group = &unit->groups[place->group];
    const fsdpc_slice *band = &group->plan->bands[place->band];
    part rows = own_part(m);
    fsdpc_step_args args = {
        .kind = fsdpc_optim_kind_of(optim, own->group),
        .hyper = optim->hypers[own->group],
        .given = true,
        .param = fsdpc_unit_stepped(unit, group, band, rows.shard_offset),
        .param_dtype = place->dtype,
        .grad = whole + rows.first,
        .grad_dtype = FSDPC_F32,
        .state_dtype = FSDPC_F32,
        .copy_in_dtype = group->param_dtype,
        .numel = rows.numel,
        .grad_scale = 1,
        .step = own->steps,
    };
    if (rows.numel == 0)
        return FSDPC_OK;
    if (unit->root && !unit->root->unsharded->at_use)
        args.copy_in = fsdpc_unsharded_own_slice(unit, group, band, rows.shard_offset);
    return fsdpc_flat_step(&args, fsdpc_device_main(optim->device));
}

/* ---- Buffers ---- */

static bool is_idle(const fsdpc_unit *unit)
{
    return unit->own_buffer && unit->own_buffer->peers && unit->buffer != unit->own_buffer &&
           !unit->settings.rank_dependent && unit->reduction == FSDPC_REDUCTION_NONE;
}

static void take_larger(fsdpc_buffer *found[2], fsdpc_buffer *buffer)
{
    if (!found[0] || buffer->bytes > found[0]->bytes) {
        found[1] = found[0];
        found[0] = buffer;
    } else if (!found[1] || buffer->bytes > found[1]->bytes) {
        found[1] = buffer;
    }
}

/* Finds room for rows [0] and updates [1] in the two largest idle buffers, or in halves of the only
 * one. All ranks make the same choice, as buffers are filled and posted in the same order. */
static fsdpc_status find_places(fsdpc_root *root, const fsdpc_comm *comm, meeting_place places[2])
{
    fsdpc_buffer *found[2] = {NULL, NULL};
    if (!root || root->reduce_comm != comm || root->device->remote)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_loan_move(&root->lender, NULL, SIZE_MAX));
    for (int i = 0; i < root->pooled.n; i++)
        if (root->pool[i] && root->pool[i]->peers && !root->pool_filling[i] &&
            !root->pool_reducing[i])
            take_larger(found, root->pool[i]);
    for (int i = 0; i < root->n_units; i++)
        if (is_idle(root->units[i]))
            take_larger(found, root->units[i]->own_buffer);
    for (int i = 0; i < 2; i++) {
        const fsdpc_buffer *buffer = found[1] ? found[1 - i] : found[0];
        size_t bytes = buffer ? buffer->bytes / (found[1] ? 1 : 2) / FSDPC_MEM_ALIGN : 0;
        bytes *= FSDPC_MEM_ALIGN;
        places[i] =
            (meeting_place){buffer, found[1] ? 0 : (size_t)i * bytes, bytes / sizeof(float)};
        if (found[i])
            FSDPC_TRY(fsdpc_buffer_idle_wait(found[i], root->units[0]->name));
    }
    return FSDPC_OK;
}

static const float *peer_at(const meeting_place *place, int rank)
{
    return (const float *)(const void *)(place->buffer->peers[rank] + place->offset);
}

static float *own_at(const meeting_place *place)
{
    return (float *)(void *)(place->buffer->data + place->offset);
}

static bool fits(const fsdpc_optim_matrix *own, int ranks, const meeting_place places[2])
{
    for (size_t i = 0; i < own->n; i++) {
        const matrix *m = &own->matrices[i];
        if (m->rows * m->cols > places[1].numel)
            return false;
        for (int r = 0; r < ranks; r++)
            if (part_of(m, r).numel > places[0].numel)
                return false;
    }
    return true;
}

/* ---- A step in buffers ---- */

static void clear_shares(fsdpc_optim_matrix *own, int ranks)
{
    memset(own->shares, 0, (size_t)ranks * sizeof *own->shares);
}

/* Assigns the matrices from `begin` on to ranks, and returns the end of the batch. */
static size_t fill_batch(fsdpc_optim_matrix *own, size_t begin, int ranks,
                         const meeting_place places[2])
{
    size_t end = begin;
    clear_shares(own, ranks);
    for (; end < own->n && end < begin + BATCH; end++) {
        matrix *m = &own->matrices[end];
        bool room = true;
        m->owner = 0;
        for (int r = 0; r < ranks; r++) {
            room &= own->shares[r].rows + part_of(m, r).numel <= places[0].numel;
            m->owner = own->shares[r].cost < own->shares[m->owner].cost ? r : m->owner;
        }
        share *of_owner = &own->shares[m->owner];
        if (!room || of_owner->update + m->rows * m->cols > places[1].numel)
            break;
        of_owner->cost += m->cost;
        of_owner->update += m->rows * m->cols;
        for (int r = 0; r < ranks; r++)
            own->shares[r].rows += part_of(m, r).numel;
    }
    return end;
}

/* Ranks whose lists of matrices differ fail here. */
static fsdpc_status meet(fsdpc_comm *comm, const matrix *first, size_t n)
{
    uint32_t hash = 0;
    for (size_t i = 0; i < n; i++) {
        const size_t key[] = {(size_t)first[i].unit, (size_t)first[i].param, first[i].first,
                              (size_t)first[i].owner};
        hash = fsdpc_crc32c(hash, key, sizeof key);
    }
    return fsdpc_optim_meet(comm, "an optimizer's matrices", hash);
}

static fsdpc_status step_batch(const fsdpc_optim *optim, fsdpc_comm *comm, matrix *first, size_t n,
                               const meeting_place places[2])
{
    fsdpc_optim_matrix *own = optim->matrix;
    float *rows = own_at(&places[0]), *updates = own_at(&places[1]);
    for (size_t i = 0; i < n; i++) {
        part mine = own_part(&first[i]);
        FSDPC_TRY(write_rows(optim, &first[i], mine, rows));
        rows += mine.numel;
    }
    FSDPC_TRY(meet(comm, first, n));
    clear_shares(own, comm->size);
    for (size_t i = 0; i < n; i++) {
        const matrix *m = &first[i];
        bool ours = m->owner == comm->rank;
        for (int r = 0; r < comm->size; r++) {
            part of_peer = part_of(m, r);
            if (ours && of_peer.numel)
                memcpy(own->x + of_peer.first, peer_at(&places[0], r) + own->shares[r].rows,
                       of_peer.numel * sizeof(float));
            own->shares[r].rows += of_peer.numel;
        }
        if (!ours)
            continue;
        FSDPC_TRY(update_matrix(optim, m));
        memcpy(updates, own->x, m->rows * m->cols * sizeof(float));
        updates += m->rows * m->cols;
    }
    FSDPC_TRY(meet(comm, first, n));
    for (size_t i = 0; i < n; i++) {
        const matrix *m = &first[i];
        size_t *at = &own->shares[m->owner].update;
        FSDPC_TRY(move_rows(optim, m, peer_at(&places[1], m->owner) + *at));
        *at += m->rows * m->cols;
    }
    return FSDPC_OK;
}

/* ---- A step by broadcasts ---- */

static fsdpc_status broadcast(fsdpc_comm *comm, const matrix *m, int root, float *at, size_t numel)
{
    const fsdpc_coll op = {.kind = FSDPC_COLL_BROADCAST,
                           .unit = m->states->unit->id,
                           .what = m->states->unit->layout->params[m->param].name,
                           .dtype = FSDPC_F32,
                           .stream = fsdpc_device_main(m->states->unit->device),
                           .recv = at,
                           .numel = numel,
                           .root = root};
    return numel && comm->size > 1 ? fsdpc_comm_run(comm, &op) : FSDPC_OK;
}

/* One matrix per rank. A rank collects its own one in x, and lets the others pass through `work`. */
static fsdpc_status step_round(const fsdpc_optim *optim, fsdpc_comm *comm, matrix *first, size_t n)
{
    fsdpc_optim_matrix *own = optim->matrix;
    for (size_t i = 0; i < n; i++) {
        matrix *m = &first[i];
        m->owner = (int)i;
        float *whole = m->owner == comm->rank ? own->x : own->work;
        part mine = own_part(m);
        FSDPC_TRY(write_rows(optim, m, mine, whole + mine.first));
        for (int r = 0; r < comm->size; r++) {
            part of_peer = part_of(m, r);
            FSDPC_TRY(broadcast(comm, m, r, whole + of_peer.first, of_peer.numel));
        }
    }
    if ((size_t)comm->rank < n)
        FSDPC_TRY(update_matrix(optim, &first[comm->rank]));
    for (size_t i = 0; i < n; i++) {
        const matrix *m = &first[i];
        float *whole = m->owner == comm->rank ? own->x : own->work;
        FSDPC_TRY(broadcast(comm, m, m->owner, whole, m->rows * m->cols));
        FSDPC_TRY(move_rows(optim, m, whole));
    }
    return FSDPC_OK;
}

/* ---- A step ---- */

static int by_cost(const void *a, const void *b)
{
    const matrix *x = a, *y = b;
    if (x->cost != y->cost)
        return x->cost > y->cost ? -1 : 1;
    return x->number < y->number ? -1 : 1;
}

/* Lists the matrices that are stepped on `comm`, the most expensive first. Returns a root that has
 * some of them, or NULL. */
static fsdpc_root *list_matrices(const fsdpc_optim *optim, const fsdpc_comm *comm)
{
    fsdpc_optim_matrix *own = optim->matrix;
    fsdpc_root *root = NULL;
    own->n = 0;
    for (int u = 0; u < optim->n_units; u++) {
        const unit_states *states = &optim->units[optim->order[u]];
        const fsdpc_layout *layout = states->unit->layout;
        for (int p = 0; states->unit->mesh.shard == comm && p < layout->n_params; p++) {
            const fsdpc_place *place = &layout->params[p];
            if (!states->params[p].stepping || !fsdpc_optim_steps_matrix(optim, states, p) ||
                place->numel == 0)
                continue;
            const size_t *shape = matrix_shape(place->ndim, place->shape);
            const fsdpc_matrix_rule *rule =
                fsdpc_matrix_rule_of(fsdpc_optim_kind_of(optim, states->params[p].group));
            for (size_t i = 0; i < n_matrices(place->ndim, place->shape); i++, own->n++)
                own->matrices[own->n] = (matrix){.states = states,
                                                 .unit = optim->order[u],
                                                 .param = p,
                                                 .first = i * shape[0] * shape[1],
                                                 .rows = shape[0],
                                                 .cols = shape[1],
                                                 .cost = rule->cost(shape[0], shape[1]),
                                                 .number = own->n};
            root = states->unit->root;
        }
    }
    qsort(own->matrices, own->n, sizeof *own->matrices, by_cost);
    return root;
}

static fsdpc_status step_on(const fsdpc_optim *optim, fsdpc_comm *comm)
{
    fsdpc_optim_matrix *own = optim->matrix;
    meeting_place places[2] = {{NULL, 0, 0}, {NULL, 0, 0}};
    fsdpc_root *root = list_matrices(optim, comm);
    size_t ranks = (size_t)comm->size;
    if (ranks > 1 && own->n > 0)
        FSDPC_TRY(find_places(root, comm, places));
    if (!places[0].buffer || !fits(own, comm->size, places)) {
        for (size_t i = 0; i < own->n; i += ranks)
            FSDPC_TRY(
                step_round(optim, comm, &own->matrices[i], fsdpc_min_size(ranks, own->n - i)));
        return FSDPC_OK;
    }
    for (size_t i = 0, end; i < own->n; i = end) {
        end = fill_batch(own, i, comm->size, places);
        FSDPC_TRY(step_batch(optim, comm, &own->matrices[i], end - i, places));
    }
    return meet(comm, NULL, 0); /* the buffers' next contents are gradients */
}

fsdpc_status fsdpc_optim_matrix_step(fsdpc_optim *optim)
{
    return optim->matrix ? fsdpc_optim_each_shard_group(optim, step_on) : FSDPC_OK;
}

fsdpc_status fsdpc_optim_matrix_alone(fsdpc_optim *optim, int group, const fsdpc_step_args *given,
                                      const char *name, int ndim, const size_t *shape,
                                      fsdpc_stream *stream)
{
    const fsdpc_optim_kind kind = fsdpc_optim_kind_of(optim, group);
    FSDPC_TRY(check(optim, group, name, ndim, given->param_dtype));
    const size_t *own = matrix_shape(ndim, shape);
    const size_t numel = own[0] * own[1];
    FSDPC_TRY(make(optim));
    FSDPC_TRY(make_work(optim, numel, fsdpc_matrix_rule_of(kind)->work(own[0], own[1])));
    for (size_t i = 0; numel && i < n_matrices(ndim, shape); i++) {
        fsdpc_step_args args = *given, move;
        args.kind = kind;
        args.hyper = optim->hypers[group];
        args.numel = numel;
        move = args;
        args.param = optim->matrix->x;
        args.param_dtype = FSDPC_F32;
        args.grad = (const char *)given->grad + i * numel * fsdpc_dtype_bytes(given->grad_dtype);
        args.states[0] = (float *)given->states[0] + i * numel;
        FSDPC_TRY(fsdpc_flat_step(&args, stream));
        FSDPC_TRY(update(optim, group, own[0], own[1], optim->matrix->x));
        move.given = true;
        move.param = (char *)given->param + i * numel * fsdpc_dtype_bytes(given->param_dtype);
        move.grad = optim->matrix->x;
        move.grad_dtype = FSDPC_F32;
        move.grad_scale = 1;
        FSDPC_TRY(fsdpc_flat_step(&move, stream));
    }
    return FSDPC_OK;
}
