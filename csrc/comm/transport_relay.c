/* Lists of operations under one lock: sends to be carried, waiting receives, and early messages.
 *
 * Copies. A message is copied once on each side. The sender's side copies it from the send's memory
 * to the carrier's, and this completes the send. The receiver's side copies it from a carrier's
 * memory to the receive's. Small sends are copied, and therefore done, when they are posted. If a
 * large message arrives before its receive is posted, it keeps its buffer and the carrier allocates
 * another. Copies happen under the lock, since memory is much faster than a network. This also
 * prevents any thread from accessing an operation's memory after an abort.
 *
 * Closing keeps the outbox; an abort keeps sends that are done, since peers rely on them, and drops
 * the others. Carriers take the remaining messages and are then told that there are no more. After
 * those messages, an abort sends its reason to every peer that this rank has exchanged messages
 * with. A peer that is waiting for a dropped message therefore learns why the message will not
 * arrive.
 *
 * The end. A rank sends a last message to each peer that it has exchanged messages with. This
 * message reports that the rank has left or why it aborted, or it acknowledges the peer's last
 * message if that came first. A carrier that has delivered the last messages of all peers is
 * therefore done, and never sleeps in a receive that cannot end.
 */
#include "comm/transport_relay.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* KEPT in `request` marks an operation that the relay owns: a completed send or an early message.
 * Freeing the operation also frees its memory. */
enum { SMALL = 4096, KEPT = 1 };

typedef struct list {
    fsdpc_transport_op *first, **end;
} list;

static const uint32_t NEWS = UINT32_MAX;      /* tag of an abort's reason */
static const uint32_t LEFT = UINT32_MAX - 1;  /* tag of the last message */
static const uint32_t HEARD = UINT32_MAX - 2; /* tag of the answer to either */

typedef struct relay {
    fsdpc_transport base;
    bool *met;   /* peers with which this rank posted operations; begins the memory of all three */
    bool *told;  /* peers whose last message is on its way to them */
    bool *heard; /* peers whose last message has come */
    pthread_mutex_t lock;
    pthread_cond_t news; /* for carriers */
    list outbox, early, receives;
    bool closed;
    _Atomic int refs; /* the transport's user, and its carriers */
} relay;

static const fsdpc_transport_ops relay_ops;

static bool failed(const relay *self)
{
    return atomic_load_explicit(&self->base.failed, memory_order_acquire);
}

static void push(list *l, fsdpc_transport_op *op)
{
    op->next = NULL;
    *l->end = op;
    l->end = &op->next;
}

/* Removes and returns the operation at this position in a list. */
static fsdpc_transport_op *take_out(list *l, fsdpc_transport_op **at)
{
    fsdpc_transport_op *op = *at;
    *at = op->next;
    if (!*at)
        l->end = at;
    return op;
}

/* Removes and returns the oldest operation with this peer and tag, or NULL if there is none. */
static fsdpc_transport_op *pull(list *l, int peer, uint32_t tag)
{
    for (fsdpc_transport_op **at = &l->first; *at; at = &(*at)->next) {
        if ((*at)->peer == peer && (*at)->tag == tag)
            return take_out(l, at);
    }
    return NULL;
}

static void end_op(fsdpc_transport_op *op, fsdpc_status status)
{
    op->status = status;
    /* release: comes after the bytes; acquire in test. */
    atomic_store_explicit(&op->state, 0, memory_order_release);
}

/* ---- Copies ---- */

fsdpc_status fsdpc_message_reserve(fsdpc_message *message, size_t bytes)
{
    if (message->data && message->capacity >= bytes)
        return FSDPC_OK;
    fsdpc_message_free(message);
    message->data = malloc(bytes);
    if (!message->data)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a message of %zu bytes to another host",
                          bytes);
    message->capacity = bytes;
    return FSDPC_OK;
}

void fsdpc_message_free(fsdpc_message *message)
{
    free(message->data);
    message->data = NULL;
    message->capacity = 0;
}

/* Copies an operation's data to the carrier's memory for a send, or from it for a receive. */
static void copy(const fsdpc_transport_op *op, unsigned char *room)
{
    const fsdpc_transport_run whole = {op->data, op->bytes}, *runs = op->runs ? op->runs : &whole;
    for (size_t i = 0; i < (op->runs ? op->n_runs : 1); room += runs[i++].bytes) {
        if (runs[i].bytes > 0)
            memcpy(op->sends ? room : runs[i].data, op->sends ? runs[i].data : room, runs[i].bytes);
    }
}

/* Creates an operation that the relay owns and that takes ownership of a carrier's memory. Returns
 * NULL if memory runs out. */
static fsdpc_transport_op *keep(const fsdpc_message *message)
{
    fsdpc_transport_op *op = calloc(1, sizeof *op);
    if (!op)
        return NULL;
    *op = (fsdpc_transport_op){.sends = true, .peer = message->peer, .tag = message->tag};
    op->data = message->data;
    op->bytes = message->bytes;
    op->request = KEPT;
    return op;
}

/* Does the same with a copy of a send's bytes. */
static fsdpc_transport_op *keep_copy(const fsdpc_transport_op *send)
{
    fsdpc_message copied = {.peer = send->peer, .tag = send->tag, .bytes = send->bytes};
    if (fsdpc_message_reserve(&copied, send->bytes) != FSDPC_OK)
        return NULL;
    copy(send, copied.data);
    fsdpc_transport_op *op = keep(&copied);
    if (!op)
        fsdpc_message_free(&copied);
    return op;
}

static void drop(fsdpc_transport_op *op)
{
    free(op->data);
    free(op);
}

static void drop_all(list *l)
{
    while (l->first)
        drop(take_out(l, &l->first));
}

static void wake(const fsdpc_transport *transport)
{
    if (transport->wake)
        transport->wake(transport->wake_arg);
}

/* Copies a message into its receive's memory. */
static void receive(fsdpc_transport_op *op, unsigned char *data, size_t bytes)
{
    op->moved = bytes;
    if (bytes == op->bytes)
        copy(op, data);
    end_op(op, bytes == op->bytes ? FSDPC_OK : FSDPC_ERR_MISMATCH);
}

/* ---- The transport's side ---- */

static fsdpc_status post(fsdpc_transport_op *op)
{
    relay *self = (relay *)op->transport;
    fsdpc_transport_op *sent = op, *early;
    const bool sends = op->sends;
    if (sends && op->bytes <= SMALL && !(sent = keep_copy(op)))
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a message to another host");
    op->status = FSDPC_OK;
    atomic_store_explicit(&op->state, sent == op, memory_order_relaxed);
    pthread_mutex_lock(&self->lock);
    bool over = self->closed || failed(self);
    self->met[op->peer] = true;
    if (over || (sends && self->told[op->peer])) {
        end_op(op, FSDPC_OK);
        if (sent != op)
            drop(sent);
    } else if (sends) {
        push(&self->outbox, sent);
        pthread_cond_signal(&self->news);
    } else if ((early = pull(&self->early, op->peer, op->tag))) {
        receive(op, early->data, early->bytes);
        drop(early);
    } else if (self->heard[op->peer]) {
        end_op(op, FSDPC_ERR_PEER);
    } else {
        push(&self->receives, op);
    }
    pthread_mutex_unlock(&self->lock);
    return over ? fsdpc_fail(FSDPC_ERR_PEER, "the transport to other hosts is closed: %s",
                             self->base.poison[0] ? self->base.poison : "this rank has left")
                : FSDPC_OK;
}

static fsdpc_status test(fsdpc_transport_op *op)
{
    if (atomic_load_explicit(&op->state, memory_order_acquire) != 0)
        return FSDPC_IN_PROGRESS;
    if (op->status == FSDPC_ERR_MISMATCH)
        return fsdpc_fail(FSDPC_ERR_MISMATCH,
                          "a message of %zu bytes came from rank %d where rank %d expects %zu",
                          op->moved, op->peer, op->transport->rank, op->bytes);
    if (op->status == FSDPC_OK)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_transport_health(op->transport));
    return fsdpc_transport_left(op);
}

/* Fails and removes the user's operations with one peer, or with all peers if `peer` is -1. */
static void give_up(list *l, int peer)
{
    for (fsdpc_transport_op **at = &l->first; *at;) {
        if ((*at)->request != KEPT && (peer < 0 || (*at)->peer == peer))
            end_op(take_out(l, at), FSDPC_ERR_PEER);
        else
            at = &(*at)->next;
    }
}

/* Sends a peer its last message, unless it was already sent. */
static void tell(relay *self, int peer, uint32_t tag, const char *text)
{
    fsdpc_transport_op send = {.sends = true, .peer = peer, .tag = tag}, *last;
    send.data = (unsigned char *)text;
    send.bytes = strlen(text);
    if (!self->met[peer] || self->told[peer] || !(last = keep_copy(&send)))
        return;
    push(&self->outbox, last);
    self->told[peer] = true;
}

static void tell_peers(relay *self, uint32_t tag, const char *text)
{
    for (int peer = 0; peer < self->base.size; peer++)
        tell(self, peer, tag, text);
}

static void leave_relay(fsdpc_transport *transport)
{
    relay *self = (relay *)transport;
    pthread_mutex_lock(&self->lock);
    if (!self->closed && !failed(self))
        tell_peers(self, LEFT, transport->farewells[transport->rank]);
    self->closed = true;
    pthread_cond_broadcast(&self->news);
    pthread_mutex_unlock(&self->lock);
}

static void fail(relay *self, const char *reason)
{
    fsdpc_transport *transport = &self->base;
    if (!failed(self)) {
        snprintf(transport->poison, sizeof transport->poison, "%s",
                 reason && reason[0] ? reason : "aborted");
        atomic_store_explicit(&transport->failed, true, memory_order_release);
        tell_peers(self, NEWS, transport->poison);
    }
    give_up(&self->outbox, -1);
    give_up(&self->receives, -1);
    drop_all(&self->early);
    pthread_cond_broadcast(&self->news);
    wake(transport);
}

static void abort_relay(fsdpc_transport *transport, const char *reason)
{
    relay *self = (relay *)transport;
    pthread_mutex_lock(&self->lock);
    fail(self, reason);
    pthread_mutex_unlock(&self->lock);
}

static void set_wake(fsdpc_transport *transport, void (*wakes)(void *arg), void *arg)
{
    relay *self = (relay *)transport;
    pthread_mutex_lock(&self->lock);
    transport->wake = wakes;
    transport->wake_arg = arg;
    pthread_mutex_unlock(&self->lock);
}

static void describe(const fsdpc_transport *transport, char *text, size_t bytes)
{
    snprintf(text, bytes, "messages of rank %d of %d are carried by its program", transport->rank,
             transport->size);
}

static void destroy(fsdpc_transport *transport)
{
    relay *self = (relay *)transport;
    set_wake(transport, NULL, NULL);
    pthread_mutex_lock(&self->lock);
    self->closed = true;
    give_up(&self->outbox, -1);
    give_up(&self->receives, -1);
    pthread_cond_broadcast(&self->news);
    pthread_mutex_unlock(&self->lock);
    /* acq_rel: the last holder sees all of the others' writes. */
    if (atomic_fetch_sub_explicit(&self->refs, 1, memory_order_acq_rel) > 1)
        return;
    drop_all(&self->outbox);
    drop_all(&self->early);
    pthread_cond_destroy(&self->news);
    pthread_mutex_destroy(&self->lock);
    free(self->base.farewells);
    free(self->met);
    free(self);
}

/* ---- The carriers' side ---- */

static struct timespec later(int64_t ns)
{
    enum { SECOND = 1000000000 };
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)((until.tv_nsec + ns) / SECOND);
    until.tv_nsec = (long)((until.tv_nsec + ns) % SECOND);
    return until;
}

void fsdpc_transport_relay_retain(fsdpc_transport *transport)
{
    atomic_fetch_add_explicit(&((relay *)transport)->refs, 1, memory_order_relaxed);
}

/* Passes the outbox's first message to a carrier; the caller holds the lock. */
static fsdpc_status hand_over(relay *self, fsdpc_message *out)
{
    FSDPC_TRY(fsdpc_message_reserve(out, self->outbox.first->bytes));
    fsdpc_transport_op *op = take_out(&self->outbox, &self->outbox.first);
    out->peer = op->peer;
    out->tag = op->tag;
    out->bytes = op->bytes;
    copy(op, out->data);
    if (op->request == KEPT) {
        drop(op);
    } else {
        end_op(op, FSDPC_OK);
        wake(&self->base);
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_transport_relay_take(fsdpc_transport *transport, int64_t max_ns,
                                        fsdpc_message *message)
{
    relay *self = (relay *)transport;
    const struct timespec until = later(max_ns);
    int waited = 0;
    pthread_mutex_lock(&self->lock);
    while (!self->outbox.first && !self->closed && !failed(self) && waited == 0)
        waited = pthread_cond_timedwait(&self->news, &self->lock, &until);
    fsdpc_status status = FSDPC_IN_PROGRESS;
    if (self->outbox.first)
        status = hand_over(self, message);
    else if (self->closed || failed(self))
        status = fsdpc_fail(FSDPC_ERR_PEER, "the transport to other hosts is closed");
    pthread_mutex_unlock(&self->lock);
    return status;
}

static void hear_reason(relay *self, const fsdpc_message *message)
{
    char text[sizeof self->base.poison];
    fsdpc_transport_name_reason(message->peer, (const char *)message->data, message->bytes, text,
                                sizeof text);
    fail(self, text);
}

/* Handles a peer's last message; returns whether any peer's last message is still missing. It holds
 * the lock throughout, so that a receive posted meanwhile fails with the peer's reason, not with
 * the error that the peer is gone. */
static bool hear_last(relay *self, const fsdpc_message *message)
{
    pthread_mutex_lock(&self->lock);
    self->heard[message->peer] = true;
    tell(self, message->peer, HEARD, "");
    pthread_cond_signal(&self->news);
    if (message->tag == NEWS) {
        hear_reason(self, message);
    } else {
        if (message->tag == LEFT)
            snprintf(self->base.farewells[message->peer], FSDPC_TRANSPORT_FAREWELL, "%.*s",
                     (int)message->bytes, (const char *)message->data);
        give_up(&self->receives, message->peer);
        wake(&self->base);
    }
    bool others = false;
    for (int peer = 0; peer < self->base.size; peer++)
        others |= self->met[peer] && !self->heard[peer];
    pthread_mutex_unlock(&self->lock);
    return others;
}

/* Keeps a message that has no receive yet: copies a small one, and takes ownership of a large one's
 * memory. */
static fsdpc_transport_op *keep_early(fsdpc_message *message)
{
    fsdpc_transport_op small = {.sends = true, .peer = message->peer, .tag = message->tag}, *early;
    small.data = message->data;
    small.bytes = message->bytes;
    if (message->bytes <= SMALL)
        return keep_copy(&small);
    if ((early = keep(message)))
        *message = (fsdpc_message){0};
    return early;
}

bool fsdpc_transport_relay_deliver(fsdpc_transport *transport, fsdpc_message *message)
{
    relay *self = (relay *)transport;
    if (message->tag >= HEARD)
        return hear_last(self, message);
    pthread_mutex_lock(&self->lock);
    fsdpc_transport_op *op = pull(&self->receives, message->peer, message->tag), *early;
    if (op) {
        receive(op, message->data, message->bytes);
        wake(transport);
    } else if (!failed(self) && (early = keep_early(message))) {
        push(&self->early, early);
    } else {
        fail(self, "no memory for a message of another host"); /* no effect if it has already
                                                                * failed */
    }
    pthread_mutex_unlock(&self->lock);
    return true;
}

void fsdpc_transport_relay_close(fsdpc_transport *transport)
{
    relay *self = (relay *)transport;
    pthread_mutex_lock(&self->lock);
    self->closed = true;
    pthread_cond_broadcast(&self->news);
    pthread_mutex_unlock(&self->lock);
}

/* ---- The table ---- */

static const fsdpc_transport_ops relay_ops = {
    .name = "relay",
    .destroy = destroy,
    .post = post,
    .test = test,
    .abort = abort_relay,
    .leave = leave_relay,
    .set_wake = set_wake,
    .describe = describe,
};

fsdpc_status fsdpc_transport_relay_create(int rank, int size, fsdpc_transport **out)
{
    relay *self = calloc(1, sizeof *self);
    bool *met = calloc(3 * (size_t)size, 1);
    void *farewells = calloc((size_t)size, FSDPC_TRANSPORT_FAREWELL);
    if (!self || !met || !farewells) {
        free(self);
        free(met);
        free(farewells);
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a transport of %d ranks", size);
    }
    self->base = (fsdpc_transport){
        .ops = &relay_ops, .rank = rank, .size = size, .takes_runs = true, .tags = HEARD};
    self->base.farewells = farewells;
    self->met = met;
    self->told = met + size;
    self->heard = met + 2 * (size_t)size;
    self->refs = 1;
    self->outbox.end = &self->outbox.first;
    self->early.end = &self->early.first;
    self->receives.end = &self->receives.first;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->news, &clock);
    pthread_condattr_destroy(&clock);
    *out = &self->base;
    return FSDPC_OK;
}
