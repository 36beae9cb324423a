/* Every operation is done as soon as it is posted. A receive's memory is zeroed, and the receive is
 * added to a list. A send with the same peer, tag and size fills the receive if it is posted before
 * the receive is tested. Peers therefore agree on every header, and sums are as if all ranks had
 * identical contents.
 */
#include "comm/transport_null.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct null_transport {
    fsdpc_transport base;
    fsdpc_transport_op *receives; /* neither tested nor filled yet */
} null_transport;

static void destroy(fsdpc_transport *transport)
{
    free(transport);
}

static fsdpc_status post(fsdpc_transport_op *op)
{
    null_transport *self = (null_transport *)op->transport;
    if (!op->sends) {
        if (op->bytes > 0)
            memset(op->data, 0, op->bytes);
        op->next = self->receives;
        self->receives = op;
        return FSDPC_OK;
    }
    for (fsdpc_transport_op **at = &self->receives; *at; at = &(*at)->next) {
        fsdpc_transport_op *one = *at;
        if (one->peer != op->peer || one->tag != op->tag || one->bytes != op->bytes)
            continue;
        if (op->bytes > 0)
            memcpy(one->data, op->data, op->bytes);
        *at = one->next;
        break;
    }
    return FSDPC_OK;
}

static fsdpc_status test(fsdpc_transport_op *op)
{
    FSDPC_TRY(fsdpc_transport_health(op->transport));
    for (fsdpc_transport_op **at = &((null_transport *)op->transport)->receives; *at;
         at = &(*at)->next) {
        if (*at == op) {
            *at = op->next;
            break;
        }
    }
    return FSDPC_OK;
}

static void abort_null(fsdpc_transport *transport, const char *reason)
{
    ((null_transport *)transport)->receives = NULL;
    if (atomic_load_explicit(&transport->failed, memory_order_relaxed))
        return;
    snprintf(transport->poison, sizeof transport->poison, "rank %d: %s", transport->rank, reason);
    /* release: after the poison text; acquire in fsdpc_transport_health. */
    atomic_store_explicit(&transport->failed, true, memory_order_release);
}

static void describe(const fsdpc_transport *transport, char *text, size_t bytes)
{
    snprintf(text, bytes, "nothing: %d ranks that one plays", transport->size);
}

static const fsdpc_transport_ops null_ops = {
    .name = "null",
    .destroy = destroy,
    .post = post,
    .test = test,
    .abort = abort_null,
    .describe = describe,
};

fsdpc_status fsdpc_transport_null_create(int rank, int size, fsdpc_transport **out)
{
    null_transport *self = calloc(1, sizeof *self);
    if (!self)
        return fsdpc_fail_errno("no memory for a transport of %d ranks", size);
    self->base =
        (fsdpc_transport){.ops = &null_ops, .rank = rank, .size = size, .tags = UINT32_MAX};
    *out = &self->base;
    return FSDPC_OK;
}
