/* Several ranks on one GPU: collectives by way of the host, and what ranks learn of one at fault.
 */
#include "coll_checks.h"
#include "cuda/comm_local_cuda.h"
#include "cuda/transport.h"

static void everything(rank_context *self)
{
    gpu_rank r;
    EXPECT_OK(self, rank_create_over(fsdpc_comm_local_cuda_create, &r, self, NULL));
    collectives(&r);
    rank_destroy(&r);
}

/* A gather of the same contents does not write what peers may be reading; of new ones it does. */
static void contents(rank_context *self)
{
    enum { NUMEL = 64 };
    gpu_rank r;
    fsdpc_wire *wire;
    fsdpc_slice slices[BANDS];
    size_t numel = bands(self->size, NUMEL, slices);
    EXPECT_OK(self, rank_create_over(fsdpc_comm_local_cuda_create, &r, self, NULL));
    void *own, *received;
    EXPECT_OK(self, fsdpc_wire_create(r.comm, FULL_BYTES, &wire));
    EXPECT_OK(self, fsdpc_device_alloc(r.device, FSDPC_MEM_OTHER, FULL_BYTES, &own));
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
    fsdpc_device_free(r.device, own);
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

static fsdpc_status choose(const fsdpc_comm_config *config, fsdpc_comm **out)
{
    return fsdpc_cuda_comm_create(config->rank == 1 ? "local_cuda" : "auto", config, out);
}

static fsdpc_status choose_none(const fsdpc_comm_config *config, fsdpc_comm **out)
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
    for (int size = 1; size <= 4; size++)
        ranks_run_threads(size, everything, &(rank_options){0});
    ranks_run_threads(3, contents, &(rank_options){0});
    for (int disagrees = 0; disagrees < 2; disagrees++)
        ranks_run_threads(2, fault, &(rank_options){.arg = &(bool){disagrees}});
    ranks_run_threads(2, choices, &(rank_options){0});
    return check_report("test_comm_local_cuda");
}
