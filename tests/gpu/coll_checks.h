/* Collectives of a GPU's transport, on all streams and over its control.
 *
 * Contributions are small integers, so that sums are exact in every dtype and order.
 */
#ifndef FSDPC_TESTS_GPU_COLL_CHECKS_H
#define FSDPC_TESTS_GPU_COLL_CHECKS_H

#include "nccl_rig.h"

enum { FULL_BYTES = 1 << 16, TURNS = 6 };

/* What rank `rank` has at element j in a turn: 0 to 6. */
static inline double value(int rank, size_t j, int turn)
{
    return (double)((j * 5 + (size_t)rank * 3 + (size_t)turn) % 7);
}

static inline double sum(int size, size_t j, int turn)
{
    double all = 0;
    for (int r = 0; r < size; r++)
        all += value(r, j, turn);
    return all;
}

static inline double as_held(double x, fsdpc_dtype dtype)
{
    return dtype == FSDPC_BOOL ? x != 0 : x;
}

/* Memory of the GPU with a rank's values, written on the main stream and not waited for. */
static inline void put(const gpu_rank *r, void *to, fsdpc_dtype dtype, size_t first, size_t numel,
                       int turn)
{
    unsigned char *host = malloc(numel * fsdpc_dtype_bytes(dtype) + 1);
    for (size_t j = 0; j < numel; j++)
        element_set(host, j, dtype, as_held(value(r->self->rank, first + j, turn), dtype));
    EXPECT_OK(r->self, fsdpc_device_copy(r->device, to, host, numel * fsdpc_dtype_bytes(dtype),
                                         (fsdpc_stream *)&r->plain));
    free(host);
}

static inline unsigned char *fetch(const gpu_rank *r, const void *from, size_t bytes)
{
    unsigned char *host = malloc(bytes + 1);
    EXPECT_OK(r->self, fsdpc_device_copy(r->device, host, from, bytes, NULL));
    return host;
}

/* ---- Gathers ---- */

enum { BANDS = 3 };

/* A band, an empty one, another band. */
static inline size_t bands(int size, size_t numel, fsdpc_slice *out)
{
    size_t n = (size_t)size;
    out[0] = (fsdpc_slice){.numel = numel};
    out[1] = (fsdpc_slice){.unsharded_offset = n * numel, .shard_offset = numel};
    out[2] =
        (fsdpc_slice){.unsharded_offset = n * numel, .numel = 2 * numel + 1, .shard_offset = numel};
    return n * (3 * numel + 1);
}

static inline int owner_of(const fsdpc_slice *slices, size_t j)
{
    for (int i = 0; i < BANDS; i++) {
        const fsdpc_slice *s = &slices[i];
        if (j < s->unsharded_offset)
            continue;
        if (s->numel && (i == BANDS - 1 || j < slices[i + 1].unsharded_offset))
            return (int)((j - s->unsharded_offset) / s->numel);
    }
    return -1;
}

static inline void publish(gpu_rank *r, fsdpc_param_buffer *param_buffer, const fsdpc_slice *slices,
                           unsigned char *own, fsdpc_dtype dtype, size_t offset, int turn)
{
    fsdpc_epoch_note all, note = {.bits = FSDPC_EPOCH_CHANGED, .unit = turn};
    EXPECT_OK(r->self, fsdpc_param_buffer_arrive(param_buffer, &note));
    EXPECT_OK(r->self, fsdpc_param_buffer_epoch_wait(param_buffer, "root", &all));
    for (int i = 0; i < BANDS; i++) {
        const fsdpc_slice *s = &slices[i];
        size_t first = s->unsharded_offset + (size_t)r->self->rank * s->numel;
        size_t element = fsdpc_dtype_bytes(dtype);
        unsigned char *to = param_buffer->offsets_only
                                ? own + s->shard_offset * element
                                : param_buffer->write + offset + first * element;
        put(r, to, dtype, first, s->numel, turn);
    }
    rank_mark(r);
    EXPECT_OK(r->self, fsdpc_param_buffer_copied_in(param_buffer));
    EXPECT_OK(r->self, fsdpc_param_buffer_copy_in_wait(param_buffer, "root"));
}

/* Where this rank publishes: the parameter buffer's, or nowhere if the parameter buffer has memory
 * for all. */
static inline unsigned char *own_slices(const gpu_rank *r, fsdpc_param_buffer *param_buffer)
{
    unsigned char *own = NULL;
    if (param_buffer->offsets_only)
        EXPECT_OK(r->self, fsdpc_param_buffer_own(param_buffer, FULL_BYTES, &own));
    return own;
}

static inline void gathers(gpu_rank *r)
{
    static const fsdpc_dtype dtypes[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
    rank_context *self = r->self;
    fsdpc_param_buffer *param_buffer;
    void *received; /* used if the parameter buffer has no memory */
    EXPECT_OK(self, fsdpc_param_buffer_create(r->comm, FULL_BYTES, &param_buffer));
    unsigned char *own = own_slices(r, param_buffer);
    EXPECT_OK(self, fsdpc_device_alloc(r->device, FSDPC_MEM_OTHER, FULL_BYTES, &received));
    for (int turn = 0; turn < TURNS; turn++) {
        fsdpc_dtype dtype = dtypes[turn % 4];
        fsdpc_slice slices[BANDS];
        size_t offset = turn & 1 ? 512 : 0, element = fsdpc_dtype_bytes(dtype);
        size_t numel = bands(self->size, turn ? 100 + (size_t)turn : 0, slices), wrong = 0;
        publish(r, param_buffer, slices, own, dtype, offset, turn);
        EXPECT_OK(self,
                  fsdpc_comm_run(r->comm, &(fsdpc_coll){.kind = FSDPC_COLL_GATHER,
                                                        .unit = turn,
                                                        .what = "embed",
                                                        .dtype = dtype,
                                                        .epoch = param_buffer->epoch,
                                                        .stream = turn % 3 ? r->gathers : NULL,
                                                        .slices = slices,
                                                        .n_slices = BANDS,
                                                        .param_buffer = param_buffer,
                                                        .send = own,
                                                        .recv = received,
                                                        .offset = offset}));
        unsigned char *unsharded =
            fetch(r, param_buffer->offsets_only ? received : param_buffer->read + offset,
                  numel * element);
        for (size_t j = 0; j < numel; j++)
            wrong += element_of(unsharded, j, dtype) != value(owner_of(slices, j), j, turn);
        EXPECT(self, wrong == 0, "gather of %s, turn %d: %zu of %zu wrong", fsdpc_dtype_name(dtype),
               turn, wrong, numel);
        free(unsharded);
    }
    fsdpc_device_free(r->device, received);
    fsdpc_param_buffer_destroy(param_buffer);
}

/* ---- Reductions ---- */

static inline void shard_check(const gpu_rank *r, const fsdpc_coll *op, int turn)
{
    int size = r->comm->size, rank = r->comm->rank;
    size_t wrong = 0;
    unsigned char *shard = fetch(r, op->shard, FULL_BYTES);
    for (int i = 0; i < BANDS; i++) {
        const fsdpc_slice *s = &op->slices[i];
        bool all = op->kind == FSDPC_COLL_REDUCE_ALL;
        size_t first = s->unsharded_offset + (all ? 0 : (size_t)rank * s->numel);
        for (size_t j = 0; j < s->numel; j++) {
            double expected = sum(size, first + j, turn) * op->scale;
            wrong += element_of(shard, s->shard_offset + j, op->shard_dtype) != expected;
        }
    }
    EXPECT(r->self, wrong == 0, "%s of %s, turn %d: %zu wrong", fsdpc_coll_name(op->kind),
           fsdpc_dtype_name(op->dtype), turn, wrong);
    free(shard);
}

static inline void reductions(gpu_rank *r)
{
    static const fsdpc_dtype dtypes[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
    rank_context *self = r->self;
    fsdpc_buffer *filled;
    void *shard;
    EXPECT_OK(self, fsdpc_buffer_create(r->comm, FULL_BYTES, &filled));
    EXPECT_OK(self, fsdpc_device_alloc(r->device, FSDPC_MEM_GRAD, FULL_BYTES, &shard));
    for (int turn = 0; turn < 2 * TURNS; turn++) {
        fsdpc_dtype dtype = dtypes[turn % 4];
        fsdpc_slice slices[BANDS];
        size_t offset = turn & 1 ? 512 : 0;
        size_t numel = bands(self->size, turn ? 90 + (size_t)turn : 0, slices);
        EXPECT_OK(self, fsdpc_buffer_idle_wait(filled, "layers.3"));
        put(r, filled->data + offset, dtype, 0, numel, turn);
        EXPECT_OK(self, fsdpc_device_fill(r->device, shard, 0, FULL_BYTES, &r->plain));
        fsdpc_coll op = {.kind = turn & 2 ? FSDPC_COLL_REDUCE_ALL : FSDPC_COLL_REDUCE_SCATTER,
                         .unit = 3,
                         .what = "layers.3",
                         .dtype = dtype,
                         .stream = turn % 5 ? r->reduces : NULL,
                         .slices = slices,
                         .n_slices = BANDS,
                         .buffer = filled,
                         .offset = offset,
                         .shard = shard,
                         .shard_dtype = dtype == FSDPC_F64 ? FSDPC_F64 : FSDPC_F32,
                         .scale = 0.5,
                         .round_dtype = dtype};
        fsdpc_work work = {0};
        rank_mark(r);
        EXPECT_OK(self, fsdpc_comm_post(r->comm, &op, &work));
        if (fsdpc_nccl_of(r->comm)->in_flight)
            EXPECT_FAILS(self, fsdpc_buffer_idle_wait(filled, "layers.3"), FSDPC_ERR_STATE,
                         "in flight");
        EXPECT_OK(self, fsdpc_comm_wait(&work));
        shard_check(r, &op, turn);
        if (turn % 4 == 0) { /* again, on top; the pattern of a second micro-step */
            op.accumulate = true;
            EXPECT_OK(self, fsdpc_buffer_idle_wait(filled, "layers.3"));
            put(r, filled->data + offset, dtype, 0, numel, turn);
            rank_mark(r);
            EXPECT_OK(self, fsdpc_comm_run(r->comm, &op));
            op.scale = 1;
            shard_check(r, &op, turn);
        }
    }
    fsdpc_device_free(r->device, shard);
    fsdpc_buffer_destroy(filled);
}

/* ---- Values ---- */

static inline double expected_value(const fsdpc_coll *op, int size, size_t j, int turn)
{
    double best = as_held(value(0, j, turn), op->dtype);
    if (op->op == FSDPC_RED_SUM)
        return as_held(sum(size, j, turn), op->dtype);
    for (int p = 1; p < size; p++) {
        double x = as_held(value(p, j, turn), op->dtype);
        best = (op->op == FSDPC_RED_MAX) == (x > best) ? x : best;
    }
    return best;
}

static inline void all_reduces(gpu_rank *r, void *memory)
{
    static const fsdpc_dtype dtypes[] = {FSDPC_F32, FSDPC_F64, FSDPC_BF16, FSDPC_F16,
                                         FSDPC_I32, FSDPC_I64, FSDPC_U8,   FSDPC_BOOL};
    rank_context *self = r->self;
    for (int turn = 0; turn < 24; turn++) {
        fsdpc_coll op = {.kind = FSDPC_COLL_ALL_REDUCE,
                         .what = "values",
                         .dtype = dtypes[turn % 8],
                         .op = (fsdpc_red)(turn / 8),
                         .send = memory,
                         .recv = turn & 1 ? memory : (unsigned char *)memory + 8192,
                         .numel = 1 + (size_t)turn * 40,
                         .stream = turn % 3 ? r->reduces : NULL};
        put(r, memory, op.dtype, 0, op.numel, turn);
        rank_mark(r);
        EXPECT_OK(self, fsdpc_comm_run(r->comm, &op));
        size_t wrong = 0;
        unsigned char *got = fetch(r, op.recv, op.numel * fsdpc_dtype_bytes(op.dtype));
        for (size_t j = 0; j < op.numel; j++) {
            double want = expected_value(&op, self->size, j, turn);
            wrong += element_of(got, j, op.dtype) != want;
        }
        EXPECT(self, wrong == 0, "all_reduce %d of %s: %zu wrong", (int)op.op,
               fsdpc_dtype_name(op.dtype), wrong);
        free(got);
    }
}

static inline void moves(gpu_rank *r, unsigned char *memory)
{
    rank_context *self = r->self;
    for (int turn = 0; turn < TURNS; turn++) {
        size_t numel = 1 + (size_t)turn * 60, wrong = 0;
        fsdpc_coll op = {.what = "pieces",
                         .dtype = turn & 1 ? FSDPC_F32 : FSDPC_BF16,
                         .numel = numel,
                         .stream = turn % 3 ? r->gathers : NULL,
                         .recv = memory};
        size_t bytes = numel * fsdpc_dtype_bytes(op.dtype);
        op.kind = FSDPC_COLL_ALL_GATHER;
        op.send = turn & 1 ? memory : memory + FULL_BYTES / 2;
        put(r, (void *)(uintptr_t)op.send, op.dtype, 0, numel, turn);
        rank_mark(r);
        EXPECT_OK(self, fsdpc_comm_run(r->comm, &op));
        unsigned char *got = fetch(r, memory, bytes * (size_t)self->size);
        for (size_t j = 0; j < numel * (size_t)self->size; j++)
            wrong += element_of(got, j, op.dtype) != value((int)(j / numel), j % numel, turn);
        free(got);
        op.kind = FSDPC_COLL_BROADCAST;
        op.root = turn % self->size;
        put(r, memory, op.dtype, 0, numel, turn);
        rank_mark(r);
        EXPECT_OK(self, fsdpc_comm_run(r->comm, &op));
        got = fetch(r, memory, bytes);
        for (size_t j = 0; j < numel; j++)
            wrong += element_of(got, j, op.dtype) != value(op.root, j, turn);
        free(got);
        EXPECT(self, wrong == 0, "all_gather and broadcast, turn %d: %zu wrong", turn, wrong);
    }
}

static inline void values(gpu_rank *r)
{
    rank_context *self = r->self;
    void *memory;
    EXPECT_OK(self, fsdpc_device_alloc(r->device, FSDPC_MEM_OTHER, FULL_BYTES, &memory));
    all_reduces(r, memory);
    moves(r, memory);
    int64_t here = self->rank + 1;
    fsdpc_coll op = {.kind = FSDPC_COLL_ALL_REDUCE,
                     .what = "counts",
                     .dtype = FSDPC_I64,
                     .send = &here,
                     .recv = &here,
                     .numel = 1};
    EXPECT_OK(self, fsdpc_comm_run(r->comm, &op)); /* over the control */
    EXPECT(self, here == self->size * (self->size + 1) / 2, "a sum on the host: %d", (int)here);
    op.recv = memory;
    EXPECT_FAILS(self, fsdpc_comm_run(r->comm, &op), FSDPC_ERR_UNSUPPORTED, "one side");
    EXPECT_OK(self, fsdpc_comm_run(r->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}));
    fsdpc_device_free(r->device, memory);
}

/* ---- Together ---- */

/* Both channels at once, waited for in another order on every rank. */
static inline void pipelined(gpu_rank *r)
{
    enum { DEPTH = 4, NUMEL = 300 };
    rank_context *self = r->self;
    fsdpc_param_buffer *param_buffer;
    fsdpc_buffer *buffers[DEPTH];
    void *shard, *unsharded;
    EXPECT_OK(self, fsdpc_param_buffer_create(r->comm, FULL_BYTES, &param_buffer));
    unsigned char *own = own_slices(r, param_buffer);
    EXPECT_OK(self, fsdpc_device_alloc(r->device, FSDPC_MEM_OTHER, FULL_BYTES, &unsharded));
    EXPECT_OK(self, fsdpc_device_alloc(r->device, FSDPC_MEM_GRAD, DEPTH * NUMEL * 4, &shard));
    for (int d = 0; d < DEPTH; d++)
        EXPECT_OK(self, fsdpc_buffer_create(r->comm, 4 * NUMEL * RANKS_MAX, &buffers[d]));
    fsdpc_slice slice = {.numel = NUMEL};
    for (int turn = 0; turn < TURNS; turn++) {
        fsdpc_work works[2 * DEPTH] = {0};
        for (int d = 0; d < DEPTH; d++) {
            EXPECT_OK(self, fsdpc_buffer_idle_wait(buffers[d], "ahead"));
            put(r, buffers[d]->data, FSDPC_F32, 0, NUMEL * (size_t)self->size, turn + d);
            rank_mark(r);
            fsdpc_coll op = {.kind = FSDPC_COLL_GATHER,
                             .what = "ahead",
                             .slices = &slice,
                             .n_slices = 1,
                             .stream = r->gathers,
                             .param_buffer = param_buffer,
                             .send = own,
                             .recv = unsharded};
            EXPECT_OK(self, fsdpc_comm_post(r->comm, &op, &works[2 * d]));
            op.kind = FSDPC_COLL_REDUCE_SCATTER;
            op.buffer = buffers[d];
            op.stream = r->reduces;
            op.shard = (float *)shard + d * NUMEL;
            op.scale = 1;
            EXPECT_OK(self, fsdpc_comm_post(r->comm, &op, &works[2 * d + 1]));
        }
        for (int n = 0; n < 2 * DEPTH; n++)
            EXPECT_OK(self, fsdpc_comm_wait(&works[(n * 3 + self->rank) % (2 * DEPTH)]));
        unsigned char *got = fetch(r, shard, DEPTH * NUMEL * 4);
        size_t wrong = 0, first = (size_t)self->rank * NUMEL;
        for (int d = 0; d < DEPTH; d++)
            for (size_t j = 0; j < NUMEL; j++)
                wrong += element_of(got, (size_t)d * NUMEL + j, FSDPC_F32) !=
                         sum(self->size, first + j, turn + d);
        EXPECT(self, wrong == 0, "pipelined, turn %d: %zu wrong", turn, wrong);
        free(got);
    }
    for (int d = 0; d < DEPTH; d++)
        fsdpc_buffer_destroy(buffers[d]);
    fsdpc_device_free(r->device, unsharded);
    fsdpc_device_free(r->device, shard);
    fsdpc_param_buffer_destroy(param_buffer);
}

/* Rows and columns of a mesh, 2 x 2 for four ranks: a scatter within the row, its sums over the
 * column. */
static inline void splits(gpu_rank *r)
{
    enum { NUMEL = 198 };
    rank_context *self = r->self;
    fsdpc_comm *row = NULL, *column = NULL, *few = NULL;
    fsdpc_buffer *grads, *partial;
    int wide = self->size == 4 ? 2 : self->size;
    EXPECT_OK(self, fsdpc_comm_split(r->comm, self->rank / wide, self->rank, &row));
    EXPECT_OK(self, fsdpc_comm_split(r->comm, self->rank % wide, self->rank, &column));
    EXPECT_OK(self, fsdpc_comm_split(r->comm, self->rank == 0 ? 0 : -1, 0, &few));
    EXPECT(self, (few != NULL) == (self->rank == 0), "a negative colour gives no group");
    EXPECT_OK(self, fsdpc_buffer_create(row, NUMEL * 2 * 4, &grads));
    EXPECT_OK(self, fsdpc_buffer_create(column, NUMEL * 2 * 4, &partial));
    size_t own = NUMEL * 2 / (size_t)row->size;
    const fsdpc_slice band = {.numel = own};
    void *shard;
    EXPECT_OK(self, fsdpc_device_alloc(r->device, FSDPC_MEM_GRAD, NUMEL * 2 * 4, &shard));
    for (int turn = 0; turn < TURNS; turn++) {
        EXPECT_OK(self, fsdpc_buffer_idle_wait(grads, "grads"));
        EXPECT_OK(self, fsdpc_buffer_idle_wait(partial, "grads"));
        put(r, grads->data, FSDPC_F32, 0, NUMEL * 2, turn);
        rank_mark(r);
        fsdpc_coll op = {.kind = FSDPC_COLL_REDUCE_SCATTER,
                         .what = "grads",
                         .slices = &band,
                         .n_slices = 1,
                         .stream = r->reduces,
                         .buffer = grads,
                         .shard = partial->data,
                         .scale = 1};
        EXPECT_OK(self, fsdpc_comm_run(row, &op));
        op.kind = FSDPC_COLL_REDUCE_ALL;
        op.buffer = partial;
        op.shard = shard;
        op.scale = 0.25;
        EXPECT_OK(self, fsdpc_comm_run(column, &op));
        unsigned char *got = fetch(r, shard, own * 4);
        size_t wrong = 0, first = (size_t)row->rank * own;
        for (size_t j = 0; j < own; j++)
            wrong += element_of(got, j, FSDPC_F32) != sum(self->size, first + j, turn) / 4;
        EXPECT(self, wrong == 0, "rows and columns, turn %d: %zu wrong", turn, wrong);
        free(got);
    }
    fsdpc_device_free(r->device, shard);
    fsdpc_buffer_destroy(grads);
    fsdpc_buffer_destroy(partial);
    fsdpc_comm_destroy(few);
    fsdpc_comm_destroy(row);
    fsdpc_comm_destroy(column);
}

static inline void collectives(gpu_rank *r)
{
    gathers(r);
    reductions(r);
    values(r);
    pipelined(r);
    splits(r);
}

#endif
