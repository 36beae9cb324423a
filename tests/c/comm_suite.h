/* Collectives of a communicator of several ranks: every kind, against sums done here. */
#ifndef FSDPC_TESTS_COMM_SUITE_H
#define FSDPC_TESTS_COMM_SUITE_H

#include "comm_ranks.h"

#include <math.h>

#include "comm/shm_internal.h"

static float contribution(int rank, size_t j)
{
    return (float)((double)((j * 37 + (size_t)rank * 101) % 1009) / 7.0 - 60.0);
}

/* The pairwise tree of the reduce kernel, in its simplest form. */
static double tree(const double *x, int n, bool wide)
{
    double level[RANKS_MAX];
    memcpy(level, x, (size_t)n * sizeof *x);
    for (; n > 1; n = (n + 1) / 2)
        for (int i = 0; i < (n + 1) / 2; i++) {
            double sum = 2 * i + 1 < n ? level[2 * i] + level[2 * i + 1] : level[2 * i];
            level[i] = wide ? sum : (double)(float)sum;
        }
    return level[0];
}

static int ranks_of_host; /* 0: there is one host */

/* Sums of hosts are made first. */
static double sum_of_ranks(const double *x, int n, bool wide)
{
    double hosts[RANKS_MAX];
    if (ranks_of_host == 0)
        return tree(x, n, wide);
    for (int r = 0; r < n; r += ranks_of_host)
        hosts[r / ranks_of_host] = tree(x + r, ranks_of_host, wide);
    return tree(hosts, n / ranks_of_host, wide);
}

static void put(void *data, fsdpc_dtype dtype, size_t j, double x)
{
    switch (dtype) {
    case FSDPC_F32:
        ((float *)data)[j] = (float)x;
        break;
    case FSDPC_F64:
        ((double *)data)[j] = x;
        break;
    case FSDPC_BF16:
        ((uint16_t *)data)[j] = fsdpc_f32_to_bf16((float)x);
        break;
    case FSDPC_F16:
        ((uint16_t *)data)[j] = fsdpc_f32_to_f16((float)x);
        break;
    case FSDPC_I32:
        ((int32_t *)data)[j] = (int32_t)x;
        break;
    case FSDPC_I64:
        ((int64_t *)data)[j] = (int64_t)x;
        break;
    case FSDPC_BOOL:
        ((uint8_t *)data)[j] = (int)x & 1;
        break;
    default:
        ((uint8_t *)data)[j] = (uint8_t)(int)(x + 100);
    }
}

static double get(const void *data, fsdpc_dtype dtype, size_t j)
{
    switch (dtype) {
    case FSDPC_F32:
        return (double)((const float *)data)[j];
    case FSDPC_F64:
        return ((const double *)data)[j];
    case FSDPC_BF16:
        return (double)fsdpc_bf16_to_f32(((const uint16_t *)data)[j]);
    case FSDPC_F16:
        return (double)fsdpc_f16_to_f32(((const uint16_t *)data)[j]);
    case FSDPC_I32:
        return ((const int32_t *)data)[j];
    case FSDPC_I64:
        return (double)((const int64_t *)data)[j];
    default:
        return ((const uint8_t *)data)[j];
    }
}

static double expected_all_reduce(fsdpc_red op, fsdpc_dtype dtype, int size, size_t j)
{
    double values[RANKS_MAX] = {0}, best;
    unsigned char one[8];
    for (int r = 0; r < size; r++) {
        put(one, dtype, 0, (double)contribution(r, j));
        values[r] = get(one, dtype, 0);
    }
    if (op == FSDPC_RED_SUM && fsdpc_dtype_is_float(dtype)) {
        put(one, dtype, 0, tree(values, size, dtype == FSDPC_F64));
        return get(one, dtype, 0);
    }
    best = values[0];
    for (int r = 1; r < size; r++) {
        if (op == FSDPC_RED_SUM)
            best += values[r];
        else if (op == FSDPC_RED_MAX)
            best = values[r] > best ? values[r] : best;
        else
            best = values[r] < best ? values[r] : best;
    }
    if (op == FSDPC_RED_SUM && dtype == FSDPC_U8)
        best = (uint8_t)(int)best;
    if (op == FSDPC_RED_SUM && dtype == FSDPC_BOOL)
        best = best != 0;
    return best;
}

static void fill(void *data, fsdpc_dtype dtype, int rank, size_t numel)
{
    for (size_t j = 0; j < numel; j++)
        put(data, dtype, j, (double)contribution(rank, j));
}

static void all_reduce(rank_context *self, fsdpc_dtype dtype, fsdpc_red op, size_t numel,
                       bool in_place)
{
    size_t bytes = numel * fsdpc_dtype_bytes(dtype) + 8;
    void *send = malloc(bytes), *recv = in_place ? send : malloc(bytes);
    fill(send, dtype, self->rank, numel);
    EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_REDUCE,
                                                             .what = "sums",
                                                             .stream = self->stream,
                                                             .dtype = dtype,
                                                             .op = op,
                                                             .send = send,
                                                             .recv = recv,
                                                             .numel = numel}));
    size_t wrong = 0;
    for (size_t j = 0; j < numel; j++)
        wrong += get(recv, dtype, j) != expected_all_reduce(op, dtype, self->size, j);
    EXPECT(self, wrong == 0, "all_reduce %d of %s, %zu elements: %zu wrong", (int)op,
           fsdpc_dtype_name(dtype), numel, wrong);
    if (!in_place)
        free(recv);
    free(send);
}

static void all_gather(rank_context *self, fsdpc_dtype dtype, size_t numel, bool in_place)
{
    size_t element = fsdpc_dtype_bytes(dtype);
    unsigned char *recv = calloc(1, numel * element * (size_t)self->size + 8);
    unsigned char *send = in_place ? recv : malloc(numel * element + 8);
    fill(send, dtype, self->rank, numel);
    EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_GATHER,
                                                             .what = "pieces",
                                                             .stream = self->stream,
                                                             .dtype = dtype,
                                                             .send = send,
                                                             .recv = recv,
                                                             .numel = numel}));
    size_t wrong = 0;
    unsigned char one[8];
    for (int r = 0; r < self->size; r++) {
        for (size_t j = 0; j < numel; j++) {
            put(one, dtype, 0, (double)contribution(r, j));
            wrong += memcmp(recv + ((size_t)r * numel + j) * element, one, element) != 0;
        }
    }
    EXPECT(self, wrong == 0, "all_gather of %s, %zu elements: %zu wrong", fsdpc_dtype_name(dtype),
           numel, wrong);
    if (!in_place)
        free(send);
    free(recv);
}

static void broadcast(rank_context *self, fsdpc_dtype dtype, size_t numel, int root)
{
    size_t bytes = numel * fsdpc_dtype_bytes(dtype) + 8;
    void *recv = calloc(1, bytes), *truth = calloc(1, bytes);
    fill(recv, dtype, self->rank, numel);
    fill(truth, dtype, root, numel);
    EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BROADCAST,
                                                             .what = "root's",
                                                             .stream = self->stream,
                                                             .dtype = dtype,
                                                             .recv = recv,
                                                             .numel = numel,
                                                             .root = root}));
    EXPECT(self, memcmp(recv, truth, numel * fsdpc_dtype_bytes(dtype)) == 0,
           "broadcast of %s, %zu elements", fsdpc_dtype_name(dtype), numel);
    free(recv);
    free(truth);
}

static void copying_collectives(rank_context *self)
{
    static const fsdpc_dtype dtypes[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64,
                                         FSDPC_I32, FSDPC_I64,  FSDPC_U8,  FSDPC_BOOL};
    const size_t numels[] = {0, 1, (size_t)self->size - 1, 1001, 150001};
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        for (size_t n = 0; n < sizeof numels / sizeof *numels; n++) {
            for (int op = FSDPC_RED_SUM; op <= FSDPC_RED_MIN; op++)
                all_reduce(self, dtypes[d], (fsdpc_red)op, numels[n], (n + d) & 1);
            all_gather(self, dtypes[d], numels[n], n & 1);
            broadcast(self, dtypes[d], numels[n], (int)(n + d) % self->size);
        }
        EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}));
    }
}

static void extrema_carry_nan(rank_context *self)
{
    for (int op = FSDPC_RED_MAX; op <= FSDPC_RED_MIN; op++) {
        for (int which = 0; which < self->size; which++) {
            float x = self->rank == which ? NAN : (float)self->rank;
            EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_REDUCE,
                                                                     .dtype = FSDPC_F32,
                                                                     .op = (fsdpc_red)op,
                                                                     .send = &x,
                                                                     .recv = &x,
                                                                     .numel = 1}));
            EXPECT(self, x != x, "NaN of rank %d was lost: %g", which, (double)x);
        }
    }
}

/* A layout as the engine's: bands cut evenly, with gaps between them. */
enum { SLICES = 6 };

static size_t random_slices(unsigned *seed, int size, fsdpc_slice *slices, size_t *shard_numel_out)
{
    size_t at = (size_t)rand_r(seed) % 5, shard = 0;
    for (int i = 0; i < SLICES; i++) {
        size_t numel =
            rand_r(seed) % 4 == 0 ? (size_t)rand_r(seed) % 3 : (size_t)rand_r(seed) % 900;
        slices[i] = (fsdpc_slice){.unsharded_offset = at, .numel = numel, .shard_offset = shard};
        at += numel * (size_t)size + (size_t)rand_r(seed) % 70;
        shard += numel + (size_t)rand_r(seed) % 3;
    }
    *shard_numel_out = shard;
    return at;
}

typedef struct reduction {
    fsdpc_slice slices[SLICES];
    size_t unsharded_numel, shard_numel, offset;
    fsdpc_dtype dtype, shard_dtype;
    float scale;
    bool all; /* REDUCE_ALL */
    bool accumulate;
} reduction;

static void check_shard(rank_context *self, const reduction *r, const void *shard)
{
    size_t wrong = 0;
    for (int i = 0; i < SLICES; i++) {
        const fsdpc_slice *slice = &r->slices[i];
        size_t first = slice->unsharded_offset + (r->all ? 0 : (size_t)self->rank * slice->numel);
        for (size_t j = 0; j < slice->numel; j++) {
            double values[RANKS_MAX];
            unsigned char one[8];
            for (int p = 0; p < self->size; p++) {
                put(one, r->dtype, 0, (double)contribution(p, first + j));
                values[p] = get(one, r->dtype, 0);
            }
            bool wide = r->dtype == FSDPC_F64;
            double sum = sum_of_ranks(values, self->size, wide);
            sum = wide ? sum * (double)r->scale : (double)((float)sum * r->scale);
            put(one, r->dtype, 0, sum);
            sum = get(one, r->dtype, 0) + (r->accumulate ? 1 : 0);
            put(one, r->shard_dtype, 0, sum);
            double got = get(shard, r->shard_dtype, slice->shard_offset + j);
            wrong += got != get(one, r->shard_dtype, 0);
        }
    }
    EXPECT(self, wrong == 0, "%s of %s: %zu wrong", r->all ? "all_reduce" : "reduce_scatter",
           fsdpc_dtype_name(r->dtype), wrong);
}

static void reduce_once(rank_context *self, fsdpc_buffer *buffer, unsigned *seed, fsdpc_dtype dtype)
{
    static const size_t offsets[] = {0, 64, 4096};
    reduction r = {.dtype = dtype,
                   .shard_dtype = dtype == FSDPC_F64 ? FSDPC_F64 : FSDPC_F32,
                   .offset = offsets[(unsigned)rand_r(seed) % 3],
                   .scale = rand_r(seed) & 1 ? 1.0f : 0.25f,
                   .all = rand_r(seed) & 1,
                   .accumulate = rand_r(seed) & 1};
    r.unsharded_numel = random_slices(seed, self->size, r.slices, &r.shard_numel);
    fill(buffer->data + r.offset, dtype, self->rank, r.unsharded_numel);
    void *shard = calloc(r.shard_numel + 1, fsdpc_dtype_bytes(r.shard_dtype));
    for (size_t j = 0; j < r.shard_numel; j++)
        put(shard, r.shard_dtype, j, 1);
    fsdpc_work work = {0};
    EXPECT_OK(self, fsdpc_comm_post(self->comm,
                                    &(fsdpc_coll){.kind = r.all ? FSDPC_COLL_REDUCE_ALL
                                                                : FSDPC_COLL_REDUCE_SCATTER,
                                                  .what = "grads",
                                                  .dtype = dtype,
                                                  .stream = self->stream,
                                                  .slices = r.slices,
                                                  .n_slices = SLICES,
                                                  .buffer = buffer,
                                                  .offset = r.offset,
                                                  .shard = shard,
                                                  .shard_dtype = r.shard_dtype,
                                                  .scale = r.scale,
                                                  .round_dtype = dtype,
                                                  .accumulate = r.accumulate},
                                    &work));
    EXPECT_OK(self, fsdpc_comm_wait(&work));
    EXPECT_OK(self, fsdpc_comm_wait(&work)); /* idle work is done */
    check_shard(self, &r, shard);
    free(shard);
}

static void reductions(rank_context *self)
{
    static const fsdpc_dtype dtypes[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
    fsdpc_buffer *buffers[2];
    unsigned seed = 7;
    for (int b = 0; b < 2; b++)
        EXPECT_OK(self, fsdpc_buffer_create(self->comm, 400000, &buffers[b]));
    for (int n = 0; n < 40; n++) {
        fsdpc_buffer *buffer = buffers[n < 20 ? n & 1 : 0]; /* alone, only buffer_idle orders it */
        EXPECT_OK(self, fsdpc_buffer_idle_wait(buffer, "grads"));
        reduce_once(self, buffer, &seed, dtypes[n % 4]);
    }
    for (int b = 0; b < 2; b++)
        fsdpc_buffer_destroy(buffers[b]);
}

/* The first rank's contribution alone, the others added to what is there, and both added up. */
static void several_sums(rank_context *self)
{
    enum { N = 300 };
    fsdpc_buffer *buffer;
    EXPECT_OK(self, fsdpc_buffer_create(self->comm, 4 * N * (size_t)self->size, &buffer));
    for (int j = 0; j < N * self->size; j++)
        ((float *)buffer->data)[j] = (float)(self->rank + 1);
    float first[N], rest[N];
    for (int j = 0; j < N; j++)
        rest[j] = 100;
    const fsdpc_coll_sum sums[] = {{.n_ranks = 1, .shard = first},
                                   {.n_ranks = self->size - 1, .shard = rest, .accumulate = true},
                                   {.from = rest, .shard = first, .accumulate = true}};
    const fsdpc_slice slice = {.numel = N};
    fsdpc_coll op = {.kind = FSDPC_COLL_REDUCE_SCATTER,
                     .what = "sums",
                     .stream = self->stream,
                     .slices = &slice,
                     .n_slices = 1,
                     .buffer = buffer,
                     .scale = 2,
                     .sums = sums,
                     .n_sums = 3,
                     .tree = true};
    fsdpc_work work = {0};
    fsdpc_status status = fsdpc_comm_post(self->comm, &op, &work);
    if (self->comm->ops->splits_sums) {
        EXPECT_OK(self, status);
        EXPECT_OK(self, fsdpc_comm_wait(&work));
        float others = 100 + 2 * (float)(self->size * (self->size + 1) / 2 - 1);
        EXPECT(self, rest[0] == others && rest[N - 1] == others, "the others' are %g", rest[0]);
        EXPECT(self, first[N - 1] == others + 2, "all are %g", first[N - 1]);
    } else {
        EXPECT(self, status == FSDPC_ERR_VALUE, "several sums are refused: %d", (int)status);
    }
    fsdpc_buffer_destroy(buffer);
}

/* Several in flight, and ranks that wait for them in different orders. */
static void pipelined(rank_context *self)
{
    enum { DEPTH = 5, N = 40000 };
    static const fsdpc_slice none;
    fsdpc_buffer *buffers[DEPTH];
    fsdpc_work works[2 * DEPTH] = {0};
    float *shards = calloc(DEPTH * N, sizeof *shards), *sums = malloc(DEPTH * N * sizeof *sums);
    fsdpc_slice slice = none;
    slice.numel = N;
    for (int b = 0; b < DEPTH; b++)
        EXPECT_OK(self, fsdpc_buffer_create(self->comm, N * 4 * (size_t)self->size, &buffers[b]));
    for (int b = 0; b < DEPTH; b++) {
        for (size_t j = 0; j < (size_t)(N * self->size); j++)
            ((float *)buffers[b]->data)[j] = (float)(b + self->rank);
        for (size_t j = 0; j < N; j++)
            sums[b * N + (int)j] = (float)(self->rank * b);
        fsdpc_coll op = {.kind = FSDPC_COLL_REDUCE_SCATTER,
                         .what = "deep",
                         .unit = b,
                         .stream = self->stream,
                         .slices = &slice,
                         .n_slices = 1,
                         .buffer = buffers[b],
                         .shard = shards + b * N,
                         .scale = 1};
        EXPECT_OK(self, fsdpc_comm_post(self->comm, &op, &works[2 * b]));
        fsdpc_coll sum = {.kind = FSDPC_COLL_ALL_REDUCE,
                          .what = "wide",
                          .stream = b & 1 ? self->stream : NULL,
                          .send = sums + b * N,
                          .recv = sums + b * N,
                          .numel = N};
        EXPECT_OK(self, fsdpc_comm_post(self->comm, &sum, &works[2 * b + 1]));
    }
    for (int w = 0; w < 2 * DEPTH; w++)
        EXPECT_OK(self, fsdpc_comm_wait(&works[self->rank & 1 ? w : 2 * DEPTH - 1 - w]));
    int pairs = self->size * (self->size - 1) / 2;
    for (int b = 0; b < DEPTH; b++) {
        EXPECT(self, shards[b * N + 17] == (float)(b * self->size + pairs), "reduction %d", b);
        EXPECT(self, sums[b * N + N - 1] == (float)(b * pairs), "sum %d", b);
        fsdpc_buffer_destroy(buffers[b]);
    }
    free(shards);
    free(sums);
}

/* More gathers than the ring holds, at different paces: nobody waits, nothing is mistaken. */
static void run_ahead(rank_context *self)
{
    fsdpc_param_buffer *param_buffer;
    fsdpc_slice slice = {.numel = 16};
    EXPECT_OK(self, fsdpc_param_buffer_create(self->comm, 4096, &param_buffer));
    for (int n = 0; n < 3 * FSDPC_SHM_RING + self->rank; n++) {
        if (n < 3 * FSDPC_SHM_RING)
            EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_GATHER,
                                                                     .unit = n % 9,
                                                                     .what = "ahead",
                                                                     .param_buffer = param_buffer,
                                                                     .slices = &slice,
                                                                     .n_slices = 1}));
    }
    EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}));
    fsdpc_param_buffer_destroy(param_buffer);
}

/* What another transport moves: no memory is named, nothing of ours is touched. */
static void agreements(rank_context *self)
{
    fsdpc_slice slice = {.numel = 1000};
    for (int kind = FSDPC_COLL_GATHER; kind <= FSDPC_COLL_BARRIER; kind++)
        EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = (fsdpc_coll_kind)kind,
                                                                 .what = "elsewhere",
                                                                 .agree_only = true,
                                                                 .stream = self->stream,
                                                                 .slices = &slice,
                                                                 .n_slices = 1,
                                                                 .numel = 1000}));
    EXPECT_OK(self, fsdpc_comm_agree(self->comm, FSDPC_OK, "all is well"));
    fsdpc_status status = FSDPC_OK;
    if (self->rank == self->size - 1)
        status = fsdpc_fail(FSDPC_ERR_KEY, "no door %d", self->rank);
    char expected[64];
    snprintf(expected, sizeof expected, "no door %d", self->size - 1);
    EXPECT_FAILS(self, fsdpc_comm_agree(self->comm, status, "doors"), FSDPC_ERR_KEY, expected);
}

/* 2 x 2 grids: rows and columns, a third split that leaves some out, use of all of them at once. */
static void splits(rank_context *self)
{
    fsdpc_comm *row = NULL, *column = NULL, *few = NULL;
    EXPECT_OK(self, fsdpc_comm_split(self->comm, self->rank / 2, self->rank, &row));
    EXPECT_OK(self, fsdpc_comm_split(self->comm, self->rank % 2, -self->rank, &column));
    EXPECT_OK(self, fsdpc_comm_split(self->comm, self->rank == 1 ? 0 : -1, 0, &few));
    EXPECT(self, (few != NULL) == (self->rank == 1), "a negative colour gives no group");
    EXPECT(self, row->rank == self->rank % 2 && row->size <= 2, "row");
    EXPECT(self, column->rank == (column->size - 1) - self->rank / 2, "columns are ordered by key");
    for (int n = 0; n < 20; n++) {
        int64_t x = self->rank, y = self->rank;
        EXPECT_OK(self, fsdpc_comm_run(row, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_REDUCE,
                                                          .dtype = FSDPC_I64,
                                                          .send = &x,
                                                          .recv = &x,
                                                          .numel = 1}));
        EXPECT_OK(self, fsdpc_comm_run(column, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_REDUCE,
                                                             .dtype = FSDPC_I64,
                                                             .send = &y,
                                                             .recv = &y,
                                                             .numel = 1}));
        int left = self->rank / 2 * 2, below = 0;
        for (int r = self->rank % 2; r < self->size; r += 2)
            below += r;
        EXPECT(self, x == left + (left + 1 < self->size ? left + 1 : 0), "row sum %d", (int)x);
        EXPECT(self, y == below, "column sum %d", (int)y);
    }
    fsdpc_buffer *buffer;
    EXPECT_OK(self, fsdpc_buffer_create(column, 1000, &buffer));
    fsdpc_buffer_destroy(buffer);
    fsdpc_comm_destroy(few);
    fsdpc_comm_destroy(row);
    fsdpc_comm_destroy(column);
    EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}));
}

static inline void everything(rank_context *self)
{
    copying_collectives(self);
    extrema_carry_nan(self);
    reductions(self);
    if (self->size > 1)
        several_sums(self);
    pipelined(self);
    run_ahead(self);
    agreements(self);
    splits(self);
}

#endif
