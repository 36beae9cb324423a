/* Two lists of messages and one of receives, under one lock.
 *
 * A message is matched with the oldest receive of its peer and tag, when either comes second.  The
 * copy happens under the lock: links carry a network's worth of bytes, and memory is much faster.
 *
 * Closing and aborting keep what is in the outbox, since a send that was posted is done: peers count
 * on it.  The takers get the rest, and then the end.  What an abort was for goes behind the rest, to
 * every peer that this rank has had to do with: a peer that waits for a message which will not come
 * learns why.
 *
 * The end.  A rank sends each peer it has had to do with one last message: that it left, the reason
 * of an abort, or, if the peer was first, that it heard of that.  So a carrier that has brought
 * everybody's last message is done, and none sleeps in a receive that nothing will end.
 */
#include "comm/link_relay.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct list {
    fsdpc_message *first, **end;
} list;

static const uint32_t NEWS = UINT32_MAX;      /* tag of an abort's reason */
static const uint32_t LEFT = UINT32_MAX - 1;  /* of the last message of all */
static const uint32_t HEARD = UINT32_MAX - 2; /* of the answer to either */

typedef struct relay {
    fsdpc_link base;
    bool *met;   /* peers that something was posted for */
    bool *told;  /* peers to whom the last message is on its way */
    bool *heard; /* peers whose last message has come */
    pthread_mutex_t lock;
    pthread_cond_t news; /* for takers */
    list outbox, early;  /* to be carried; brought before their receive was posted */
    fsdpc_link_op *receives, **last_receive;
    bool closed;
    _Atomic int refs; /* the link's user, and its carriers */
} relay;

static const fsdpc_link_ops relay_ops;

static bool failed(const relay *self)
{
    return atomic_load_explicit(&self->base.failed, memory_order_acquire);
}

static void push(list *l, fsdpc_message *message)
{
    message->next = NULL;
    *l->end = message;
    l->end = &message->next;
}

static void drop_all(list *l)
{
    for (fsdpc_message *message = l->first, *next; message; message = next) {
        next = message->next;
        fsdpc_message_free(message);
    }
    *l = (list){.end = &l->first};
}

/* ---- Matching; under the lock ---- */

/* Removes the oldest message of this peer and tag; NULL: there is none. */
static fsdpc_message *pull(list *l, int peer, uint32_t tag)
{
    for (fsdpc_message **at = &l->first; *at; at = &(*at)->next) {
        fsdpc_message *message = *at;
        if (message->peer != peer || message->tag != tag)
            continue;
        *at = message->next;
        if (!*at)
            l->end = at;
        return message;
    }
    return NULL;
}

static fsdpc_link_op *pull_receive(relay *self, int peer, uint32_t tag)
{
    for (fsdpc_link_op **at = &self->receives; *at; at = &(*at)->next) {
        fsdpc_link_op *op = *at;
        if (op->peer != peer || op->tag != tag)
            continue;
        *at = op->next;
        if (!*at)
            self->last_receive = at;
        return op;
    }
    return NULL;
}

static void wake(const fsdpc_link *link)
{
    if (link->wake)
        link->wake(link->wake_arg);
}

static void receive(fsdpc_link_op *op, fsdpc_message *message)
{
    op->moved = message->bytes;
    op->status = message->bytes == op->bytes ? FSDPC_OK : FSDPC_ERR_MISMATCH;
    if (op->status == FSDPC_OK && op->bytes > 0)
        memcpy(op->data, message->data, op->bytes);
    fsdpc_message_free(message);
    /* release: the bytes come before; acquire in test. */
    atomic_store_explicit(&op->state, 0, memory_order_release);
}

/* ---- The link's side ---- */

static fsdpc_status post(fsdpc_link_op *op)
{
    relay *self = (relay *)op->link;
    fsdpc_message *message = NULL;
    const bool sends = op->sends;
    if (sends) {
        FSDPC_TRY(fsdpc_message_create(op->peer, op->tag, op->bytes, &message));
        if (op->bytes > 0)
            memcpy(message->data, op->data, op->bytes);
    }
    op->status = FSDPC_OK;
    op->next = NULL;
    atomic_store_explicit(&op->state, !sends, memory_order_relaxed);
    pthread_mutex_lock(&self->lock);
    bool over = self->closed || failed(self);
    self->met[op->peer] = true;
    if (over || (sends && self->told[op->peer])) {
        fsdpc_message_free(message);
    } else if (sends) {
        push(&self->outbox, message);
        pthread_cond_signal(&self->news);
    } else if ((message = pull(&self->early, op->peer, op->tag))) {
        receive(op, message);
    } else if (self->heard[op->peer]) {
        op->status = FSDPC_ERR_PEER;
        atomic_store_explicit(&op->state, 0, memory_order_relaxed);
    } else {
        *self->last_receive = op;
        self->last_receive = &op->next;
    }
    pthread_mutex_unlock(&self->lock);
    return over ? fsdpc_fail(FSDPC_ERR_PEER, "the link to other hosts is closed: %s",
                             self->base.poison[0] ? self->base.poison : "this rank has left")
                : FSDPC_OK;
}

static fsdpc_status test(fsdpc_link_op *op)
{
    if (atomic_load_explicit(&op->state, memory_order_acquire) != 0)
        return FSDPC_IN_PROGRESS;
    if (op->status == FSDPC_ERR_MISMATCH)
        return fsdpc_fail(FSDPC_ERR_MISMATCH,
                          "a message of %zu bytes came from rank %d where rank %d expects %zu",
                          op->moved, op->peer, op->link->rank, op->bytes);
    if (op->status == FSDPC_OK)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_link_health(op->link));
    return fsdpc_link_left(op);
}

/* The last message to a peer, unless it was sent one. */
static void tell(relay *self, int peer, uint32_t tag, const char *text)
{
    fsdpc_message *message = NULL;
    if (!self->met[peer] || self->told[peer] ||
        fsdpc_message_create(peer, tag, strlen(text), &message))
        return;
    memcpy(message->data, text, message->bytes);
    push(&self->outbox, message);
    self->told[peer] = true;
}

static void tell_peers(relay *self, uint32_t tag, const char *text)
{
    for (int peer = 0; peer < self->base.size; peer++)
        tell(self, peer, tag, text);
}

/* Receives from a rank, or from all (-1), fail: nothing will answer them. */
static void give_up(relay *self, int peer)
{
    self->last_receive = &self->receives;
    for (fsdpc_link_op *op = self->receives, *next; op; op = next) {
        next = op->next;
        if (peer >= 0 && op->peer != peer) {
            *self->last_receive = op;
            self->last_receive = &op->next;
            continue;
        }
        op->status = FSDPC_ERR_PEER;
        atomic_store_explicit(&op->state, 0, memory_order_release);
    }
    *self->last_receive = NULL;
}

static void leave_relay(fsdpc_link *link)
{
    relay *self = (relay *)link;
    pthread_mutex_lock(&self->lock);
    if (!self->closed && !failed(self))
        tell_peers(self, LEFT, "");
    self->closed = true;
    pthread_cond_broadcast(&self->news);
    pthread_mutex_unlock(&self->lock);
}

static void fail(relay *self, const char *reason)
{
    fsdpc_link *link = &self->base;
    if (!failed(self)) {
        snprintf(link->poison, sizeof link->poison, "%s", reason && reason[0] ? reason : "aborted");
        atomic_store_explicit(&link->failed, true, memory_order_release);
        tell_peers(self, NEWS, link->poison);
    }
    give_up(self, -1);
    drop_all(&self->early);
    pthread_cond_broadcast(&self->news);
    wake(link);
}

static void abort_relay(fsdpc_link *link, const char *reason)
{
    relay *self = (relay *)link;
    pthread_mutex_lock(&self->lock);
    fail(self, reason);
    pthread_mutex_unlock(&self->lock);
}

static void set_wake(fsdpc_link *link, void (*wakes)(void *arg), void *arg)
{
    relay *self = (relay *)link;
    pthread_mutex_lock(&self->lock);
    link->wake = wakes;
    link->wake_arg = arg;
    pthread_mutex_unlock(&self->lock);
}

static void describe(const fsdpc_link *link, char *text, size_t bytes)
{
    snprintf(text, bytes, "messages of rank %d of %d are carried by its program", link->rank,
             link->size);
}

static void destroy(fsdpc_link *link)
{
    relay *self = (relay *)link;
    set_wake(link, NULL, NULL);
    fsdpc_link_relay_close(link);
    /* acq_rel: whoever goes last sees all that the others did. */
    if (atomic_fetch_sub_explicit(&self->refs, 1, memory_order_acq_rel) > 1)
        return;
    drop_all(&self->outbox);
    drop_all(&self->early);
    pthread_cond_destroy(&self->news);
    pthread_mutex_destroy(&self->lock);
    free(self->met);
    free(self->told);
    free(self->heard);
    free(self);
}

/* ---- The carriers' side ---- */

fsdpc_status fsdpc_message_create(int peer, uint32_t tag, size_t bytes, fsdpc_message **out)
{
    fsdpc_message *message = malloc(sizeof *message + bytes);
    if (!message)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a message of %zu bytes to another host",
                          bytes);
    *message = (fsdpc_message){.peer = peer, .tag = tag, .bytes = bytes};
    *out = message;
    return FSDPC_OK;
}

void fsdpc_message_free(fsdpc_message *message)
{
    free(message);
}

static struct timespec later(int64_t ns)
{
    enum { SECOND = 1000000000 };
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)((until.tv_nsec + ns) / SECOND);
    until.tv_nsec = (long)((until.tv_nsec + ns) % SECOND);
    return until;
}

void fsdpc_link_relay_retain(fsdpc_link *link)
{
    atomic_fetch_add_explicit(&((relay *)link)->refs, 1, memory_order_relaxed);
}

fsdpc_status fsdpc_link_relay_take(fsdpc_link *link, int64_t max_ns, fsdpc_message **out)
{
    relay *self = (relay *)link;
    const struct timespec until = later(max_ns);
    int waited = 0;
    pthread_mutex_lock(&self->lock);
    while (!self->outbox.first && !self->closed && !failed(self) && waited == 0)
        waited = pthread_cond_timedwait(&self->news, &self->lock, &until);
    fsdpc_message *message = self->outbox.first;
    if (message) {
        self->outbox.first = message->next;
        if (!message->next)
            self->outbox.end = &self->outbox.first;
    }
    bool over = self->closed || failed(self);
    pthread_mutex_unlock(&self->lock);
    *out = message;
    if (message)
        return FSDPC_OK;
    return over ? fsdpc_fail(FSDPC_ERR_PEER, "the link to other hosts is closed")
                : FSDPC_IN_PROGRESS;
}

static void hear_reason(relay *self, const fsdpc_message *message)
{
    char text[sizeof self->base.poison];
    const char *why = (const char *)message->data;
    bool named = message->bytes > 5 && memcmp(why, "rank ", 5) == 0; /* the peer was told itself */
    int used = named ? 0 : snprintf(text, sizeof text, "rank %d: ", message->peer);
    snprintf(text + used, sizeof text - (size_t)used, "%.*s", (int)message->bytes, why);
    fail(self, text);
}

/* A peer's last message; whether there are peers left who have not sent theirs.  Under one lock: a
 * receive that is posted meanwhile must find the reason, not that the peer is gone. */
static bool hear_last(relay *self, fsdpc_message *message)
{
    pthread_mutex_lock(&self->lock);
    self->heard[message->peer] = true;
    tell(self, message->peer, HEARD, "");
    pthread_cond_signal(&self->news);
    if (message->tag == NEWS) {
        hear_reason(self, message);
    } else {
        give_up(self, message->peer);
        wake(&self->base);
    }
    bool others = false;
    for (int peer = 0; peer < self->base.size; peer++)
        others |= self->met[peer] && !self->heard[peer];
    pthread_mutex_unlock(&self->lock);
    fsdpc_message_free(message);
    return others;
}

bool fsdpc_link_relay_deliver(fsdpc_link *link, fsdpc_message *message)
{
    relay *self = (relay *)link;
    if (message->tag >= HEARD)
        return hear_last(self, message);
    pthread_mutex_lock(&self->lock);
    fsdpc_link_op *op = pull_receive(self, message->peer, message->tag);
    if (op)
        receive(op, message);
    else if (failed(self))
        fsdpc_message_free(message);
    else
        push(&self->early, message);
    if (op)
        wake(link);
    pthread_mutex_unlock(&self->lock);
    return true;
}

void fsdpc_link_relay_close(fsdpc_link *link)
{
    relay *self = (relay *)link;
    pthread_mutex_lock(&self->lock);
    self->closed = true;
    pthread_cond_broadcast(&self->news);
    pthread_mutex_unlock(&self->lock);
}

/* ---- The table ---- */

static const fsdpc_link_ops relay_ops = {
    .name = "relay",
    .destroy = destroy,
    .post = post,
    .test = test,
    .abort = abort_relay,
    .leave = leave_relay,
    .set_wake = set_wake,
    .describe = describe,
};

fsdpc_status fsdpc_link_relay_create(int rank, int size, fsdpc_link **out)
{
    relay *self = calloc(1, sizeof *self);
    bool *met = calloc((size_t)size, 1), *told = calloc((size_t)size, 1);
    bool *heard = calloc((size_t)size, 1);
    if (!self || !met || !told || !heard) {
        free(self);
        free(met);
        free(told);
        free(heard);
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a link of %d ranks", size);
    }
    self->base = (fsdpc_link){.ops = &relay_ops, .rank = rank, .size = size, .tags = HEARD};
    self->met = met;
    self->told = told;
    self->heard = heard;
    self->refs = 1;
    self->outbox.end = &self->outbox.first;
    self->early.end = &self->early.first;
    self->last_receive = &self->receives;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->news, &clock);
    pthread_condattr_destroy(&clock);
    *out = &self->base;
    return FSDPC_OK;
}
