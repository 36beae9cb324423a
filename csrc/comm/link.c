/* Code shared by all links: operation storage and counters. */
#include "comm/link.h"

#include <stdio.h>
#include <string.h>

fsdpc_status fsdpc_link_health(const fsdpc_link *link)
{
    if (!atomic_load_explicit(&link->failed, memory_order_acquire))
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_PEER, "%s", link->poison);
}

static fsdpc_status post(fsdpc_link *link, const fsdpc_link_op *wanted, fsdpc_link_op *op)
{
    const int peer = wanted->peer;
    const uint32_t tag = wanted->tag;
    FSDPC_TRY(fsdpc_link_health(link));
    if (peer < 0 || peer >= link->size || peer == link->rank || tag >= link->tags)
        return fsdpc_fail(FSDPC_ERR_INTERNAL, "rank %d of a link of %d %s rank %d, tag %u of %u",
                          link->rank, link->size, wanted->sends ? "sends to" : "receives from",
                          peer, tag, link->tags);
    if (op->link)
        return fsdpc_fail(FSDPC_ERR_INTERNAL, "an operation of a link is posted twice");
    *op = *wanted;
    op->link = link;
    fsdpc_status status = link->ops->post(op);
    if (status != FSDPC_OK)
        op->link = NULL;
    else
        atomic_fetch_add_explicit(wanted->sends ? &link->sent_bytes : &link->received_bytes,
                                  wanted->bytes, memory_order_relaxed);
    return status;
}

fsdpc_status fsdpc_link_send(fsdpc_link *link, int peer, uint32_t tag, const void *data,
                             size_t bytes, fsdpc_link_op *op)
{
    return post(link,
                &(fsdpc_link_op){
                    .sends = true, .peer = peer, .tag = tag, .data = (void *)data, .bytes = bytes},
                op);
}

fsdpc_status fsdpc_link_receive(fsdpc_link *link, int peer, uint32_t tag, void *data, size_t bytes,
                                fsdpc_link_op *op)
{
    return post(link, &(fsdpc_link_op){.peer = peer, .tag = tag, .data = data, .bytes = bytes}, op);
}

fsdpc_status fsdpc_link_post_runs(fsdpc_link *link, bool sends, int peer, uint32_t tag,
                                  const fsdpc_link_run *runs, size_t n_runs, fsdpc_link_op *op)
{
    fsdpc_link_op wanted = {.sends = sends, .peer = peer, .tag = tag, .n_runs = n_runs};
    for (size_t i = 0; i < n_runs; i++)
        wanted.bytes += runs[i].bytes;
    if (n_runs == 1)
        wanted.data = runs->data;
    else
        wanted.runs = runs;
    return post(link, &wanted, op);
}

void fsdpc_link_name_reason(int rank, const char *why, size_t length, char *text, size_t bytes)
{
    bool named = length > 5 && memcmp(why, "rank ", 5) == 0;
    int used = named ? 0 : snprintf(text, bytes, "rank %d: ", rank);
    snprintf(text + used, bytes - (size_t)used, "%.*s", (int)length, why);
}

fsdpc_status fsdpc_link_left(const fsdpc_link_op *op)
{
    const fsdpc_link *link = op->link;
    return fsdpc_fail(FSDPC_ERR_PEER,
                      "rank %d left (it shut its communicator down) while rank %d waits for it%s; "
                      "do all ranks run the same number of steps?",
                      op->peer, link->rank, link->farewells ? link->farewells[op->peer] : "");
}

fsdpc_status fsdpc_link_test(fsdpc_link_op *op)
{
    if (!op->link)
        return FSDPC_OK;
    fsdpc_status status = op->link->ops->test(op);
    if (status != FSDPC_IN_PROGRESS)
        op->link = NULL;
    return status;
}
