/* Several ranks on one GPU: collectives, by way of the host, and what ranks learn of one at fault.
 */
#include "coll_bits.h"
#include "cuda/comm_local_cuda.h"
#include "cuda/control.h"
#include "cuda/local_cuda.h"
#include "cuda/transport.h"

#if defined(FSDPC_EMU)
#include "emu_driver.h"
#endif

/* The host had wire and buffers. */
static void check_memory(const gpu_rank *r)
{
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(fsdpc_local_of(r->comm)->host->mem, &stats);
    if (r->comm->rank == 0)
        EXPECT(r->self, stats.peak_bytes[FSDPC_MEM_WIRE] > 0, "no wire on the host");
    EXPECT(r->self, stats.peak_bytes[FSDPC_MEM_REDUCE] > 0, "no buffer on the host");
}

static void everything(rank_context *self)
{
    gpu_rank r;
    EXPECT_OK(self, rank_create_over(fsdpc_comm_local_cuda_create, &r, self, NULL));
    collectives(&r);
    bits(&r);
    check_memory(&r);
    rank_destroy(&r);
}

/* What one rank cannot say nobody goes on without. */
static void tells(rank_context *self)
{
    const int mine[2] = {self->rank, 10 * self->rank};
    const bool last = self->rank == self->size - 1;
    void *all = NULL;
    EXPECT_OK(self, fsdpc_control_tell(self->comm, "test", FSDPC_OK, mine, sizeof mine, &all));
    const int *told = all;
    for (int r = 0; r < self->size; r++)
        EXPECT(self, told[2 * r] == r && told[2 * r + 1] == 10 * r, "rank %d: %d, %d", r,
               told[2 * r], told[2 * r + 1]);
    free(all);
    all = NULL;
    fsdpc_status status = last ? fsdpc_fail(FSDPC_ERR_INTERNAL, "not today") : FSDPC_OK;
    EXPECT_FAILS(self, fsdpc_control_tell(self->comm, "test", status, mine, sizeof mine, &all),
                 FSDPC_ERR_INTERNAL, last ? "not today" : "rank 2: not today");
    EXPECT(self, !all, "written although it failed");
}

/* Work that a rank's main stream has not come to yet when it publishes, or posts: peers wait for
 * it.
 */
static void late_work(rank_context *self)
{
    enum { NUMEL = 500, BUSY_BYTES = 8 << 20, BUSY_FILLS = 12 };
    gpu_rank r;
    fsdpc_wire *wire;
    fsdpc_buffer *buffer;
    void *source, *received, *busy;
    fsdpc_slice slice = {.numel = NUMEL, .owner = -1};
    EXPECT_OK(self, rank_create_over(fsdpc_comm_local_cuda_create, &r, self, NULL));
    EXPECT_OK(self, fsdpc_wire_create(r.comm, FULL_BYTES, &wire));
    EXPECT_OK(self, fsdpc_buffer_create(r.comm, FULL_BYTES, &buffer));
    unsigned char *own = own_slices(&r, wire);
    EXPECT_OK(self, fsdpc_device_alloc(r.device, FSDPC_MEM_OTHER, FULL_BYTES, &source));
    EXPECT_OK(self, fsdpc_device_alloc(r.device, FSDPC_MEM_OTHER, FULL_BYTES, &received));
    EXPECT_OK(self, fsdpc_device_alloc(r.device, FSDPC_MEM_OTHER, BUSY_BYTES, &busy));
    size_t first = (size_t)self->rank * NUMEL, all = (size_t)self->size * NUMEL, wrong = 0;
    for (int turn = 0; turn < 2 * self->size; turn++) {
        bool publishes = turn % 2 == 0, is_late = turn / 2 == self->rank;
        fsdpc_epoch_note agreed, note = {.bits = FSDPC_EPOCH_CHANGED, .unit = turn};
        put(&r, source, FSDPC_F32, publishes ? first : 0, publishes ? NUMEL : all, turn);
        EXPECT_OK(self, fsdpc_stream_sync(&r.plain));
        EXPECT_OK(self, fsdpc_buffer_idle_wait(buffer, "late"));
        if (publishes) {
            EXPECT_OK(self, fsdpc_wire_arrive(wire, &note));
            EXPECT_OK(self, fsdpc_wire_epoch_wait(wire, "late", &agreed));
        }
        for (int i = 0; is_late && i < BUSY_FILLS; i++)
            EXPECT_OK(self, fsdpc_device_fill(r.device, busy, i, BUSY_BYTES, &r.plain));
        EXPECT_OK(self, fsdpc_device_copy(r.device, publishes ? own : buffer->data, source,
                                          (publishes ? NUMEL : all) * 4, &r.plain));
        if (publishes) {
            EXPECT_OK(self, fsdpc_wire_publish(wire));
            EXPECT_OK(self, fsdpc_wire_published_wait(wire, "late"));
        }
        fsdpc_coll gather = {.kind = FSDPC_COLL_GATHER,
                             .what = "late",
                             .slices = &slice,
                             .n_slices = 1,
                             .wire = wire,
                             .send = own,
                             .recv = received};
        fsdpc_coll reduce = {.kind = FSDPC_COLL_REDUCE_SCATTER,
                             .what = "late",
                             .slices = &slice,
                             .n_slices = 1,
                             .buffer = buffer,
                             .shard = received,
                             .scale = 1};
        EXPECT_OK(self, fsdpc_comm_run(r.comm, publishes ? &gather : &reduce));
        unsigned char *got = fetch(&r, received, FULL_BYTES);
        for (size_t j = 0; j < (publishes ? all : NUMEL); j++)
            wrong +=
                element_of(got, j, FSDPC_F32) !=
                (publishes ? value((int)(j / NUMEL), j, turn) : sum(self->size, first + j, turn));
        free(got);
    }
    EXPECT(self, wrong == 0, "%zu elements are those of earlier turns", wrong);
    fsdpc_device_free(r.device, source);
    fsdpc_device_free(r.device, received);
    fsdpc_device_free(r.device, busy);
    fsdpc_buffer_destroy(buffer);
    fsdpc_wire_destroy(wire);
    rank_destroy(&r);
}

/* A buffer is filled again as soon as it is idle: its peers' sums of what was there are done, also
 * of one whose main stream has other work before. */
static void refills(rank_context *self)
{
    enum { NUMEL = 4096, BUSY_BYTES = 8 << 20, BUSY_FILLS = 12, REFILLS = 4 };
    gpu_rank r;
    fsdpc_buffer *buffer;
    void *shard, *busy;
    size_t bytes = (size_t)NUMEL * (size_t)self->size * 4, wrong = 0;
    EXPECT_OK(self, rank_create_over(fsdpc_comm_local_cuda_create, &r, self, NULL));
    EXPECT_OK(self, fsdpc_buffer_create(r.comm, bytes, &buffer));
    EXPECT_OK(self, fsdpc_device_alloc(r.device, FSDPC_MEM_GRAD, NUMEL * 4, &shard));
    EXPECT_OK(self, fsdpc_device_alloc(r.device, FSDPC_MEM_OTHER, BUSY_BYTES, &busy));
    fsdpc_slice slice = {.numel = NUMEL, .owner = -1};
    fsdpc_coll op = {.kind = FSDPC_COLL_REDUCE_SCATTER,
                     .what = "again",
                     .slices = &slice,
                     .n_slices = 1,
                     .buffer = buffer,
                     .shard = shard,
                     .scale = 1};
    for (int turn = 0; turn < REFILLS; turn++) {
        unsigned char byte = (unsigned char)(0x38 + turn); /* of a float, all four */
        float x;
        memset(&x, byte, sizeof x);
        EXPECT_OK(self, fsdpc_buffer_idle_wait(buffer, "again"));
        EXPECT_OK(self, fsdpc_device_fill(r.device, buffer->data, byte, bytes, &r.plain));
        fsdpc_work work = {0};
        if (self->rank == 1)
            EXPECT_OK(self, fsdpc_comm_post(r.comm, &op, &work));
        for (int i = 0; i < (self->rank + 1) * BUSY_FILLS; i++)
            EXPECT_OK(self, fsdpc_device_fill(r.device, busy, i, BUSY_BYTES, &r.plain));
        if (self->rank == 0)
            EXPECT_OK(self, fsdpc_comm_post(r.comm, &op, &work));
        EXPECT_OK(self, fsdpc_comm_wait(&work));
        if (self->rank == 1) { /* who summed last sees what came in between */
            unsigned char *got = fetch(&r, shard, NUMEL * 4);
            for (size_t j = 0; j < NUMEL; j++)
                wrong += element_of(got, j, FSDPC_F32) != 2 * (double)x;
            free(got);
        }
    }
    EXPECT(self, wrong == 0, "%zu sums are of what was filled in later", wrong);
    fsdpc_device_free(r.device, shard);
    fsdpc_device_free(r.device, busy);
    fsdpc_buffer_destroy(buffer);
    rank_destroy(&r);
}

/* A gather of the same contents does not write what peers may be reading; of new ones it
 * does. */
static void contents(rank_context *self)
{
    enum { NUMEL = 64 };
    gpu_rank r;
    fsdpc_wire *wire;
    fsdpc_slice slices[BANDS];
    size_t numel = bands(self->size, NUMEL, slices);
    EXPECT_OK(self, rank_create_over(fsdpc_comm_local_cuda_create, &r, self, NULL));
    void *received;
    EXPECT_OK(self, fsdpc_wire_create(r.comm, FULL_BYTES, &wire));
    unsigned char *own = own_slices(&r, wire);
    EXPECT_OK(self, fsdpc_device_alloc(r.device, FSDPC_MEM_OTHER, FULL_BYTES, &received));
    for (int turn = 0; turn < TURNS; turn++) {
        if (turn % 2 == 0)
            publish(&r, wire, slices, own, FSDPC_F32, 0, turn);
        else /* spoilt behind the wire's back: were it written again, all would see it */
            EXPECT_OK(self, fsdpc_device_fill(r.device, own, 0xff, FULL_BYTES, NULL));
        EXPECT_OK(self, fsdpc_comm_run(r.comm, &(fsdpc_coll){.kind = FSDPC_COLL_GATHER,
                                                             .what = "embed",
                                                             .dtype = FSDPC_F32,
                                                             .slices = slices,
                                                             .n_slices = BANDS,
                                                             .wire = wire,
                                                             .send = own,
                                                             .recv = received}));
        size_t wrong = 0;
        unsigned char *full = fetch(&r, received, numel * 4);
        for (size_t j = 0; j < numel; j++)
            wrong +=
                element_of(full, j, FSDPC_F32) != value(owner_of(slices, j), j, turn - turn % 2);
        EXPECT(self, wrong == 0, "turn %d: %zu wrong", turn, wrong);
        free(full);
    }
    fsdpc_device_free(r.device, received);
    fsdpc_wire_destroy(wire);
    rank_destroy(&r);
}

/* The last rank gives up with a reduction in flight, or posts another one. */
static void fault(rank_context *self)
{
    bool disagrees = *(const bool *)self->arg, guilty = self->rank == self->size - 1;
    gpu_rank r;
    fsdpc_buffer *buffer;
    void *shard;
    EXPECT_OK(self, rank_create_over(fsdpc_comm_local_cuda_create, &r, self, NULL));
    EXPECT_OK(self, fsdpc_buffer_create(r.comm, 4096, &buffer));
    EXPECT_OK(self, fsdpc_device_alloc(r.device, FSDPC_MEM_GRAD, 4096, &shard));
    fsdpc_slice slice = {.numel = 64, .owner = -1};
    fsdpc_coll op = {.kind = FSDPC_COLL_REDUCE_SCATTER,
                     .unit = disagrees && guilty ? 4 : 3,
                     .what = "layers.3",
                     .slices = &slice,
                     .n_slices = 1,
                     .buffer = buffer,
                     .shard = shard,
                     .scale = 1};
    fsdpc_status status = FSDPC_OK;
    if (guilty && !disagrees)
        fsdpc_comm_abort(r.comm, "out of cheese");
    else
        status = fsdpc_comm_run(r.comm, &op);
    if (disagrees || !guilty)
        EXPECT(self,
               status < 0 &&
                   strstr(fsdpc_last_error(), disagrees ? "'layers.3' (unit 4" : "out of cheese"),
               "%s: %s", fsdpc_status_text(status), fsdpc_last_error());
    EXPECT_FAILS(self, fsdpc_comm_run(r.comm, &op), FSDPC_ERR_POISONED, "failed earlier");
    fsdpc_device_free(r.device, shard);
    fsdpc_buffer_destroy(buffer);
    rank_destroy(&r);
}

static fsdpc_status choose(const fsdpc_control_config *config, fsdpc_comm **out)
{
    return fsdpc_cuda_comm_create(config->comm.rank == 1 ? "local_cuda" : "auto", config, out);
}

static fsdpc_status choose_none(const fsdpc_control_config *config, fsdpc_comm **out)
{
    return fsdpc_cuda_comm_create("carrier pigeons", config, out);
}

/* A control whose ranks could not agree goes on. */
static void choices(rank_context *self)
{
    gpu_rank r;
    EXPECT_FAILS(self, rank_create_over(choose, &r, self, NULL), FSDPC_ERR_MISMATCH,
                 "rank 0 asks for 'auto', rank 1 for 'local_cuda'");
    rank_destroy(&r);
    EXPECT_FAILS(self, rank_create_over(choose_none, &r, self, NULL), FSDPC_ERR_VALUE,
                 "no transport 'carrier pigeons'");
    rank_destroy(&r);
}

int main(void)
{
    int most;
    if (!rig_find(&most))
        return rig_missing("test_comm_local_cuda");
    gpus = 1; /* of several, which may not reach each other's memory */
    for (int size = 1; size <= 4; size++)
        ranks_run_threads(size, everything, &(rank_options){0});
    ranks_run_threads(2, late_work, &(rank_options){0});
    ranks_run_threads(2, refills, &(rank_options){0});
    ranks_run_threads(3, tells, &(rank_options){0});
    ranks_run_threads(3, contents, &(rank_options){0});
    for (int disagrees = 0; disagrees < 2; disagrees++)
        ranks_run_threads(2, fault, &(rank_options){.arg = &(bool){disagrees}});
    ranks_run_threads(2, choices, &(rank_options){0});
#if defined(FSDPC_EMU)
    emu_driver_counts counts = emu_driver_look();
    CHECK(counts.handles == 0 && counts.ranges == 0 && counts.mappings == 0);
    CHECK_NOTE(counts.forbidden == 0, "%d calls broke the driver's rules", counts.forbidden);
#endif
    return check_report("test_comm_local_cuda");
}
