/* The transport that pretends: messages alone, and a world of several hosts that one rank plays. */
#include "comm/comm_hosts.h"
#include "comm/comm_null.h"
#include "comm/transport_null.h"
#include "comm_ranks.h"

static void test_messages(void)
{
    fsdpc_transport *transport;
    fsdpc_transport_op in = {0}, out = {0}, other = {0};
    char got[4] = "abc", more[4] = "abc";
    CHECK_OK(fsdpc_transport_null_create(5, 100000, &transport));
    CHECK_OK(fsdpc_transport_receive(transport, 99999, 7, got, 4, &in));
    CHECK_OK(fsdpc_transport_receive(transport, 99999, 8, more, 4, &other));
    CHECK_OK(fsdpc_transport_send(transport, 99999, 7, "xyz", 4, &out));
    CHECK_OK(fsdpc_transport_test(&other));
    CHECK_OK(fsdpc_transport_test(&in));
    CHECK_OK(fsdpc_transport_test(&out));
    CHECK(strcmp(got, "xyz") == 0 && memcmp(more, "\0\0\0", 4) == 0);
    CHECK_OK(fsdpc_transport_send(transport, 99999, 7, "uvw", 4, &out)); /* nothing waits for it */
    CHECK(strcmp(got, "xyz") == 0 && transport->sent_bytes == 8 && transport->received_bytes == 8);
    fsdpc_transport_abort(transport, "enough");
    CHECK_FAILS(fsdpc_transport_test(&out), FSDPC_ERR_PEER, "rank 5: enough");
    fsdpc_transport_destroy(transport);
}

/* A note, a gather, a sum: what crosses is what docs/hosts.md says, on worlds of any shape. */
static void play(rank_context *self, int hosts, int lanes)
{
    enum { N = 100, HEADER = 112 };
    const rank_options options = {0};
    fsdpc_comm_config config = ranks_config(self, &options), of_host = config;
    fsdpc_comm *host;
    fsdpc_transport *transport;
    of_host.rank = 0;
    of_host.size = lanes;
    CHECK_OK(fsdpc_comm_null_create(&of_host, &host));
    CHECK_OK(fsdpc_transport_null_create(self->rank, hosts * lanes, &transport));
    CHECK_OK(fsdpc_comm_hosts_create(&config, host, transport, &self->comm));
    CHECK(transport->timeout_s == config.timeout_s && transport->timeout_s > 0);

    fsdpc_param_buffer *param_buffer;
    fsdpc_epoch_note note = {.bits = FSDPC_EPOCH_CHANGED, .kind = 1}, all;
    CHECK_OK(fsdpc_param_buffer_create(self->comm, (size_t)(4 * N * hosts * lanes), &param_buffer));
    CHECK_OK(fsdpc_param_buffer_arrive(param_buffer, &note));
    CHECK_OK(fsdpc_param_buffer_epoch_wait(param_buffer, NULL, &all));
    CHECK(all.bits == FSDPC_EPOCH_CHANGED && all.kind == 1);
    CHECK_OK(fsdpc_param_buffer_copied_in(param_buffer));
    CHECK_OK(fsdpc_param_buffer_copy_in_wait(param_buffer, NULL));
    fsdpc_slice slice = {.numel = N};
    fsdpc_coll gather = {.kind = FSDPC_COLL_GATHER,
                         .epoch = param_buffer->epoch,
                         .param_buffer = param_buffer,
                         .slices = &slice,
                         .n_slices = 1};
    uint64_t want = (uint64_t)(hosts - 1) * (4 * N + HEADER), before = transport->sent_bytes;
    CHECK_OK(fsdpc_comm_run(self->comm, &gather));
    CHECK(transport->sent_bytes - before == want &&
          transport->received_bytes == transport->sent_bytes);
    CHECK_OK(fsdpc_comm_run(self->comm, &gather)); /* the rows are there */
    CHECK(transport->sent_bytes - before == want);

    fsdpc_buffer *buffer;
    float shard[N];
    CHECK_OK(fsdpc_buffer_create(self->comm, (size_t)(4 * N * hosts * lanes), &buffer));
    for (int j = 0; j < N * hosts * lanes; j++)
        ((float *)(void *)buffer->data)[j] = 1;
    before = transport->sent_bytes;
    CHECK_OK(fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_REDUCE_SCATTER,
                                                      .slices = &slice,
                                                      .n_slices = 1,
                                                      .buffer = buffer,
                                                      .shard = shard,
                                                      .scale = 1}));
    CHECK(transport->sent_bytes - before == want);
    CHECK_NOTE(shard[0] == hosts * lanes && shard[N - 1] == hosts * lanes, "the sum is %g",
               (double)shard[0]);
    fsdpc_buffer_destroy(buffer);
    fsdpc_param_buffer_destroy(param_buffer);
}

int main(void)
{
    static const int shapes[][2] = {{2, 1}, {2, 4}, {3, 2}, {32, 8}};
    test_messages();
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        int hosts = shapes[i][0], lanes = shapes[i][1];
        rank_context self = {.rank = lanes, .size = hosts * lanes, .threads = true};
        const rank_options options = {0};
        ranks_open(&self, &options);
        play(&self, hosts, lanes);
        ranks_close(&self);
        check_count += self.checks;
        check_failures += self.failures;
    }
    return check_report("test_transport_null");
}
