/* Code shared by all transports: operation storage and counters. */
#include "comm/transport.h"

#include <stdio.h>
#include <string.h>

fsdpc_status fsdpc_transport_health(const fsdpc_transport *transport)
{
    if (!atomic_load_explicit(&transport->failed, memory_order_acquire))
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_PEER, "%s", transport->poison);
}

static fsdpc_status post(fsdpc_transport *transport, const fsdpc_transport_op *wanted,
                         fsdpc_transport_op *op)
{
    const int peer = wanted->peer;
    const uint32_t tag = wanted->tag;
    FSDPC_TRY(fsdpc_transport_health(transport));
    if (peer < 0 || peer >= transport->size || peer == transport->rank || tag >= transport->tags)
        return fsdpc_fail(FSDPC_ERR_INTERNAL,
                          "rank %d of a transport of %d %s rank %d, tag %u of %u", transport->rank,
                          transport->size, wanted->sends ? "sends to" : "receives from", peer, tag,
                          transport->tags);
    if (op->transport)
        return fsdpc_fail(FSDPC_ERR_INTERNAL, "an operation of a transport is posted twice");
    *op = *wanted;
    op->transport = transport;
    fsdpc_status status = transport->ops->post(op);
    if (status != FSDPC_OK)
        op->transport = NULL;
    else
        atomic_fetch_add_explicit(wanted->sends ? &transport->sent_bytes
                                                : &transport->received_bytes,
                                  wanted->bytes, memory_order_relaxed);
    return status;
}

fsdpc_status fsdpc_transport_send(fsdpc_transport *transport, int peer, uint32_t tag,
                                  const void *data, size_t bytes, fsdpc_transport_op *op)
{
    return post(transport,
                &(fsdpc_transport_op){
                    .sends = true, .peer = peer, .tag = tag, .data = (void *)data, .bytes = bytes},
                op);
}

fsdpc_status fsdpc_transport_receive(fsdpc_transport *transport, int peer, uint32_t tag, void *data,
                                     size_t bytes, fsdpc_transport_op *op)
{
    return post(transport,
                &(fsdpc_transport_op){.peer = peer, .tag = tag, .data = data, .bytes = bytes}, op);
}

fsdpc_status fsdpc_transport_post_runs(fsdpc_transport *transport, bool sends, int peer,
                                       uint32_t tag, const fsdpc_transport_run *runs, size_t n_runs,
                                       fsdpc_transport_op *op)
{
    fsdpc_transport_op wanted = {.sends = sends, .peer = peer, .tag = tag, .n_runs = n_runs};
    for (size_t i = 0; i < n_runs; i++)
        wanted.bytes += runs[i].bytes;
    if (n_runs == 1)
        wanted.data = runs->data;
    else
        wanted.runs = runs;
    return post(transport, &wanted, op);
}

void fsdpc_transport_name_reason(int rank, const char *why, size_t length, char *text, size_t bytes)
{
    bool named = length > 5 && memcmp(why, "rank ", 5) == 0;
    int used = named ? 0 : snprintf(text, bytes, "rank %d: ", rank);
    snprintf(text + used, bytes - (size_t)used, "%.*s", (int)length, why);
}

fsdpc_status fsdpc_transport_left(const fsdpc_transport_op *op)
{
    const fsdpc_transport *transport = op->transport;
    return fsdpc_fail(FSDPC_ERR_PEER,
                      "rank %d left (it shut its communicator down) while rank %d waits for it%s; "
                      "do all ranks run the same number of steps?",
                      op->peer, transport->rank,
                      transport->farewells ? transport->farewells[op->peer] : "");
}

fsdpc_status fsdpc_transport_test(fsdpc_transport_op *op)
{
    if (!op->transport)
        return FSDPC_OK;
    fsdpc_status status = op->transport->ops->test(op);
    if (status != FSDPC_IN_PROGRESS)
        op->transport = NULL;
    return status;
}
