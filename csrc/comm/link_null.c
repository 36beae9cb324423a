/* Every operation is done when it is posted.  A receive is zeroed and added to a list.  A send with
 * the same peer, tag and size fills it if posted before the receive is tested.  Peers thus agree in
 * every header, and sums are those of ranks with identical contents.
 */
#include "comm/link_null.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct null_link {
    fsdpc_link base;
    fsdpc_link_op *receives; /* neither tested nor filled yet */
} null_link;

static void destroy(fsdpc_link *link)
{
    free(link);
}

static fsdpc_status post(fsdpc_link_op *op)
{
    null_link *self = (null_link *)op->link;
    if (!op->sends) {
        if (op->bytes > 0)
            memset(op->data, 0, op->bytes);
        op->next = self->receives;
        self->receives = op;
        return FSDPC_OK;
    }
    for (fsdpc_link_op **at = &self->receives; *at; at = &(*at)->next) {
        fsdpc_link_op *one = *at;
        if (one->peer != op->peer || one->tag != op->tag || one->bytes != op->bytes)
            continue;
        if (op->bytes > 0)
            memcpy(one->data, op->data, op->bytes);
        *at = one->next;
        break;
    }
    return FSDPC_OK;
}

static fsdpc_status test(fsdpc_link_op *op)
{
    FSDPC_TRY(fsdpc_link_health(op->link));
    for (fsdpc_link_op **at = &((null_link *)op->link)->receives; *at; at = &(*at)->next) {
        if (*at == op) {
            *at = op->next;
            break;
        }
    }
    return FSDPC_OK;
}

static void abort_null(fsdpc_link *link, const char *reason)
{
    ((null_link *)link)->receives = NULL;
    if (atomic_load_explicit(&link->failed, memory_order_relaxed))
        return;
    snprintf(link->poison, sizeof link->poison, "rank %d: %s", link->rank, reason);
    /* release: after the poison text; acquire in fsdpc_link_health. */
    atomic_store_explicit(&link->failed, true, memory_order_release);
}

static void describe(const fsdpc_link *link, char *text, size_t bytes)
{
    snprintf(text, bytes, "nothing: %d ranks that one plays", link->size);
}

static const fsdpc_link_ops null_ops = {
    .name = "null",
    .destroy = destroy,
    .post = post,
    .test = test,
    .abort = abort_null,
    .describe = describe,
};

fsdpc_status fsdpc_link_null_create(int rank, int size, fsdpc_link **out)
{
    null_link *self = calloc(1, sizeof *self);
    if (!self)
        return fsdpc_fail_errno("no memory for a link of %d ranks", size);
    self->base = (fsdpc_link){.ops = &null_ops, .rank = rank, .size = size, .tags = UINT32_MAX};
    *out = &self->base;
    return FSDPC_OK;
}
