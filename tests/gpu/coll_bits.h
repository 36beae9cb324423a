/* Collectives whose order of sums is promised, to the bit: rough numbers on the GPU and on the CPU.
 */
#ifndef FSDPC_TESTS_GPU_COLL_BITS_H
#define FSDPC_TESTS_GPU_COLL_BITS_H

#include "base/size.h"
#include "coll_checks.h"
#include "comm/coll_math.h"

enum { FILLS = 40 }; /* that keep the main stream busy */

/* What rank `rank` has at element j: of all magnitudes, so that sums depend on their order, and
 * zeros, infinities and NaNs of both signs. */
static inline double rough(int rank, size_t j)
{
    static const double odd[] = {0.0, -0.0, INFINITY, -INFINITY, NAN, -NAN};
    uint64_t bits = (j * 0x9e3779b97f4a7c15u) ^ ((uint64_t)(rank + 1) * 0xd1b54a32d192ed03u);
    bits ^= bits >> 29;
    double x = ((double)(bits % 20011) - 10005) / (double)(1 + bits / 20011 % 127);
    return bits % 11 ? x : odd[bits / 11 % 6];
}

/* All ranks' contributions, one after the other, of `bytes` each. */
static inline unsigned char *rough_all(int size, fsdpc_dtype dtype, size_t bytes)
{
    unsigned char *all = malloc((size_t)size * bytes + 1);
    for (int p = 0; p < size; p++)
        for (size_t j = 0; j < bytes / fsdpc_dtype_bytes(dtype); j++)
            element_set(all + (size_t)p * bytes, j, dtype, rough(p, j));
    return all;
}

/* Elements that have other bits; a sum's NaN is any. */
static inline size_t bits_differ(const unsigned char *a, const unsigned char *b, size_t numel,
                                 fsdpc_dtype dtype, bool sums)
{
    size_t wrong = 0, element = fsdpc_dtype_bytes(dtype);
    for (size_t j = 0; j < numel; j++)
        wrong += memcmp(a + j * element, b + j * element, element) != 0 &&
                 !(sums && isnan(element_of(a, j, dtype)) && isnan(element_of(b, j, dtype)));
    return wrong;
}

/* The main stream works, for a while, in spare memory of the size that NCCL's transport needs for a
 * tree. */
static inline void spoil_spare(gpu_rank *r, const fsdpc_slice *slices, fsdpc_dtype dtype)
{
    const fsdpc_slice *last = &slices[BANDS - 1];
    size_t sent = (last->shard_offset + last->numel) * fsdpc_dtype_bytes(dtype);
    size_t bytes = (size_t)(r->self->size - 1) * fsdpc_round_up(sent, 64);
    void *spare;
    EXPECT_OK(r->self, fsdpc_device_alloc(r->device, FSDPC_MEM_OTHER, bytes, &spare));
    for (int i = 0; i < FILLS; i++)
        EXPECT_OK(r->self, fsdpc_device_fill(r->device, spare, 0x11, bytes, &r->plain));
    fsdpc_device_free(r->device, spare);
}

/* Sums in tree order, to the bit, whoever takes them; two at a time on two streams, ever larger. */
static inline void trees(gpu_rank *r)
{
    enum { AT_ONCE = 2, SHARD_NUMEL = 4096 };
    static const fsdpc_dtype dtypes[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
    rank_context *self = r->self;
    fsdpc_stream on_cpu = {.device = self->device, .name = "inline"};
    fsdpc_buffer *filled[AT_ONCE];
    void *shards;
    for (int i = 0; i < AT_ONCE; i++)
        EXPECT_OK(self, fsdpc_buffer_create(r->comm, FULL_BYTES, &filled[i]));
    EXPECT_OK(self,
              fsdpc_device_alloc(r->device, FSDPC_MEM_GRAD, AT_ONCE * SHARD_NUMEL * 8, &shards));
    for (int turn = 0; turn < 2 * TURNS; turn++) {
        fsdpc_dtype dtype = dtypes[turn % 4], wide = dtype == FSDPC_F64 ? dtype : FSDPC_F32;
        fsdpc_slice slices[AT_ONCE][BANDS];
        for (int i = 0; i < AT_ONCE; i++)
            bands(self->size, 16 * (size_t)turn + 40 * (size_t)i, slices[i]);
        unsigned char *all = rough_all(self->size, dtype, FULL_BYTES);
        const unsigned char *datas[RANKS_MAX];
        for (int p = 0; p < self->size; p++)
            datas[p] = all + (size_t)p * FULL_BYTES;
        fsdpc_coll op = {.kind = turn & 1 ? FSDPC_COLL_REDUCE_ALL : FSDPC_COLL_REDUCE_SCATTER,
                         .what = "tree",
                         .dtype = dtype,
                         .n_slices = BANDS,
                         .shard_dtype = wide,
                         .scale = 1.0 / 3,
                         .round_dtype = turn & 2 ? wide : dtype,
                         .accumulate = turn % 3 == 0,
                         .tree = true};
        fsdpc_work works[AT_ONCE] = {0};
        EXPECT_OK(self,
                  fsdpc_device_fill(r->device, shards, 0, AT_ONCE * SHARD_NUMEL * 8, &r->plain));
        for (int i = 0; i < AT_ONCE; i++)
            EXPECT_OK(self, fsdpc_device_copy(r->device, filled[i]->data, datas[self->rank],
                                              FULL_BYTES, &r->plain));
        rank_mark(r);
        spoil_spare(r, slices[0], dtype);
        for (int i = 0; i < AT_ONCE; i++) {
            op.offset = i ? 512 : 0;
            op.buffer = filled[i];
            op.shard = (unsigned char *)shards + i * SHARD_NUMEL * 8;
            op.stream = i ? r->reduces : r->gathers;
            op.slices = slices[i];
            EXPECT_OK(self, fsdpc_comm_post(r->comm, &op, &works[i]));
        }
        spoil_spare(r, slices[0], dtype);
        for (int i = 0; i < AT_ONCE; i++) {
            EXPECT_OK(self, fsdpc_comm_wait(&works[i]));
            EXPECT_OK(self, fsdpc_buffer_idle_wait(filled[i], "tree"));
            unsigned char *want = calloc(SHARD_NUMEL, 8);
            op.offset = i ? 512 : 0;
            op.slices = slices[i];
            op.shard = want;
            EXPECT_OK(self, fsdpc_coll_reduce_slices(&op, self->rank, self->size, datas, &on_cpu));
            unsigned char *got =
                fetch(r, (unsigned char *)shards + i * SHARD_NUMEL * 8, SHARD_NUMEL * 8);
            size_t wrong =
                bits_differ(got, want, SHARD_NUMEL * 8 / fsdpc_dtype_bytes(wide), wide, true);
            EXPECT(self, wrong == 0, "%s of %s as a tree, turn %d: %zu have other bits",
                   fsdpc_coll_name(op.kind), fsdpc_dtype_name(dtype), turn, wrong);
            free(got);
            free(want);
        }
        free(all);
    }
    for (int i = 0; i < AT_ONCE; i++)
        fsdpc_buffer_destroy(filled[i]);
    fsdpc_device_free(r->device, shards);
}

/* Of floats to the bit, whoever joins them, and of NaN; on other streams than the main one, which
 * still works in memory that it has given back. */
static inline void rough_values(gpu_rank *r)
{
    enum { NUMEL = 700, ROUGH_TURNS = 24 };
    static const fsdpc_dtype dtypes[] = {FSDPC_F32, FSDPC_F64, FSDPC_BF16, FSDPC_F16};
    rank_context *self = r->self;
    void *room;
    EXPECT_OK(self, fsdpc_device_alloc(r->device, FSDPC_MEM_OTHER, FULL_BYTES, &room));
    unsigned char *memory = room;
    fsdpc_stream on_cpu = {.device = self->device, .name = "inline"};
    for (int turn = 0; turn < ROUGH_TURNS; turn++) {
        fsdpc_dtype dtype = dtypes[turn % 4];
        size_t bytes = NUMEL * fsdpc_dtype_bytes(dtype);
        fsdpc_coll op = {.kind = FSDPC_COLL_ALL_REDUCE,
                         .what = "rough values",
                         .dtype = dtype,
                         .op = (fsdpc_red)(turn / 4 % 3),
                         .send = memory,
                         .recv = turn & 1 ? memory : memory + 8192,
                         .numel = NUMEL,
                         .stream = turn % 3 ? r->reduces : NULL};
        unsigned char *all = rough_all(self->size, dtype, bytes), *want = malloc(bytes);
        const void *srcs[RANKS_MAX];
        for (int p = 0; p < self->size; p++)
            srcs[p] = all + (size_t)p * bytes;
        EXPECT_OK(self, fsdpc_coll_combine(op.op, dtype, srcs, self->size, NUMEL, want, &on_cpu));
        EXPECT_OK(self, fsdpc_device_copy(r->device, memory, srcs[self->rank], bytes, &r->plain));
        rank_mark(r);
        void *given_back;
        EXPECT_OK(self, fsdpc_device_alloc(r->device, FSDPC_MEM_OTHER, bytes * (size_t)self->size,
                                           &given_back));
        for (int i = 0; i < FILLS; i++)
            EXPECT_OK(self, fsdpc_device_fill(r->device, given_back, 0x11,
                                              bytes * (size_t)self->size, &r->plain));
        fsdpc_device_free(r->device, given_back);
        EXPECT_OK(self, fsdpc_comm_run(r->comm, &op));
        unsigned char *got = fetch(r, op.recv, bytes);
        size_t wrong = bits_differ(got, want, NUMEL, dtype, op.op == FSDPC_RED_SUM);
        EXPECT(self, wrong == 0, "all_reduce %d of %s, turn %d: %zu have other bits", (int)op.op,
               fsdpc_dtype_name(dtype), turn, wrong);
        free(got);
        free(want);
        free(all);
    }
    fsdpc_device_free(r->device, room);
}

static inline void bits(gpu_rank *r)
{
    trees(r);
    rough_values(r);
}

#endif
