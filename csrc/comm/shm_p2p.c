/* Messages between two ranks.
 *
 * Every ordered pair of ranks has a ring of bytes in one segment. A sender writes each message's
 * header and bytes in posting order, as far as there is space. `written` and `read` count bytes
 * since the beginning; each is changed by one side only.
 *
 * A receiver looks at the header first. If a posted receive matches, the bytes go directly to its
 * memory. If only other receives are posted, the message is set aside in private memory, because
 * the message that they wait for may follow. If none is posted, the bytes stay in the ring, and
 * the sender waits when it is full. Both sides move at most a quarter of a ring at a time, so that
 * the other side can continue meanwhile.
 */
#include "comm/shm_p2p.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/size.h"
#include "comm/shm_coll.h"
#include "comm/shm_peers.h"

enum { ALL_RINGS = 4 << 20, LEAST_RING = 4096, MOST_RING = 256 << 10 };

typedef struct ring {
    _Atomic uint64_t written __attribute__((aligned(128)));
    _Atomic uint64_t read __attribute__((aligned(128)));
    unsigned char bytes[] __attribute__((aligned(128)));
} ring;

typedef struct header {
    uint64_t tag, bytes;
} header;

/* A message without a posted receive. */
typedef struct aside {
    header head;
    fsdpc_p2p_work *wanted_by; /* a receive that was posted meanwhile; NULL: none */
    struct aside *next;
    unsigned char bytes[];
} aside;

/* What is under way from one peer. */
typedef struct source {
    header head;
    size_t head_moved, moved; /* bytes of the header and of the message */
    bool placed;              /* the message has a destination: one of these, or none */
    fsdpc_p2p_work *to;
    aside *to_aside;
    aside *oldest, *newest;
} source;

struct fsdpc_p2p {
    fsdpc_shm_comm *comm;
    fsdpc_shm_segment *segment;
    size_t ring_bytes;
    fsdpc_p2p_work **sends; /* by peer, oldest first */
    fsdpc_p2p_work *receives;
    source *sources;
};

static size_t ring_bytes_of(size_t size)
{
    size_t bytes = LEAST_RING;
    while (bytes < MOST_RING && 2 * bytes * size * size <= ALL_RINGS)
        bytes *= 2;
    return bytes;
}

static ring *ring_of(const fsdpc_p2p *p2p, int from, int to)
{
    size_t i = (size_t)from * (size_t)p2p->comm->base.size + (size_t)to;
    return (ring *)(void *)(p2p->segment->writable + i * (sizeof(ring) + p2p->ring_bytes));
}

/* ---- Rings ---- */

/* Copies between `bytes` and the ring's bytes from position `at` on, which may wrap around. */
static void copy_wrapped(const fsdpc_p2p *p2p, ring *r, uint64_t at, void *bytes, size_t n, bool in)
{
    size_t begin = (size_t)(at % p2p->ring_bytes);
    size_t first = fsdpc_min_size(n, p2p->ring_bytes - begin);
    unsigned char *rest = (unsigned char *)bytes + first;
    if (in) {
        memcpy(r->bytes + begin, bytes, first);
        memcpy(r->bytes, rest, n - first);
    } else {
        memcpy(bytes, r->bytes + begin, first);
        memcpy(rest, r->bytes, n - first);
    }
}

static void moved(const fsdpc_p2p *p2p, _Atomic uint64_t *position, uint64_t to)
{
    atomic_store_explicit(position, to, memory_order_release);
    fsdpc_shm_wake(p2p->comm->bell);
}

/* Writes as much as fits and returns it. */
static size_t put(const fsdpc_p2p *p2p, ring *r, const void *bytes, size_t n)
{
    uint64_t begin = atomic_load_explicit(&r->written, memory_order_relaxed), at = begin;
    for (;;) {
        /* acquire: the reader has copied what it counts; `moved` releases. */
        uint64_t read = atomic_load_explicit(&r->read, memory_order_acquire);
        size_t now = fsdpc_min_size(n - (size_t)(at - begin), p2p->ring_bytes / 4);
        now = fsdpc_min_size(now, p2p->ring_bytes - (size_t)(at - read));
        if (now == 0)
            return (size_t)(at - begin);
        const unsigned char *from = (const unsigned char *)bytes + (at - begin);
        copy_wrapped(p2p, r, at, (void *)(uintptr_t)from, now, true);
        moved(p2p, &r->written, at += now);
    }
}

/* Reads as much as there is, up to n bytes, and returns it; discards it if `bytes` is NULL. */
static size_t get(const fsdpc_p2p *p2p, ring *r, void *bytes, size_t n)
{
    uint64_t begin = atomic_load_explicit(&r->read, memory_order_relaxed), at = begin;
    for (;;) {
        uint64_t written = atomic_load_explicit(&r->written, memory_order_acquire);
        size_t now = fsdpc_min_size(n - (size_t)(at - begin), p2p->ring_bytes / 4);
        now = fsdpc_min_size(now, (size_t)(written - at));
        if (now == 0)
            return (size_t)(at - begin);
        if (bytes)
            copy_wrapped(p2p, r, at, (unsigned char *)bytes + (at - begin), now, false);
        moved(p2p, &r->read, at += now);
    }
}

/* ---- Life ---- */

static fsdpc_status share(fsdpc_p2p *p2p, size_t bytes, uint64_t tag)
{
    fsdpc_shm_comm *self = p2p->comm;
    fsdpc_status status = FSDPC_OK;
    if (self->base.rank == 0)
        status =
            fsdpc_shm_segment_create("fsdpc mail", bytes, !self->world->threads, &p2p->segment);
    status = fsdpc_shm_share_first(self, tag, bytes, status, &p2p->segment);
    if (status != FSDPC_OK || !p2p->segment)
        return status; /* the agreement reports rank 0's failure */
    status = fsdpc_shm_segment_map(p2p->segment, true);
    fsdpc_shm_segment_close_fd(p2p->segment);
    return status;
}

fsdpc_status fsdpc_p2p_create(fsdpc_comm *comm, fsdpc_p2p **out)
{
    fsdpc_shm_comm *self = fsdpc_shm_of(comm);
    size_t n = (size_t)comm->size, each = ring_bytes_of(n), bytes = n * n * (sizeof(ring) + each);
    uint64_t tag = 0;
    FSDPC_TRY(fsdpc_shm_creation_begin(self, "new_group", bytes, &tag));
    fsdpc_p2p *p2p = calloc(1, sizeof *p2p);
    fsdpc_p2p_work **sends = calloc(n, sizeof(void *));
    source *sources = calloc(n, sizeof *sources);
    if (!p2p || !sends || !sources) {
        free(p2p);
        free(sends);
        free(sources);
        return fsdpc_fail_errno("no memory for mailboxes");
    }
    *p2p = (fsdpc_p2p){.comm = self, .ring_bytes = each, .sends = sends, .sources = sources};
    fsdpc_status status = fsdpc_comm_agree(comm, share(p2p, bytes, tag), "new_group");
    if (status != FSDPC_OK) {
        fsdpc_p2p_destroy(p2p);
        return status;
    }
    *out = p2p;
    return FSDPC_OK;
}

void fsdpc_p2p_destroy(fsdpc_p2p *p2p)
{
    if (!p2p)
        return;
    for (int p = 0; p < p2p->comm->base.size; p++) {
        for (aside *next, *a = p2p->sources[p].oldest; a; a = next) {
            next = a->next;
            free(a);
        }
        for (fsdpc_p2p_work *next, *work = p2p->sends[p]; work; work = next) {
            next = work->next;
            if (work->copied)
                free(work);
        }
    }
    fsdpc_shm_segment_release(p2p->segment);
    free(p2p->sends);
    free(p2p->sources);
    free(p2p);
}

/* ---- Works ---- */

static void append(fsdpc_p2p_work **at, fsdpc_p2p_work *work)
{
    while (*at)
        at = &(*at)->next;
    *at = work;
}

static void remove_work(fsdpc_p2p_work **at, const fsdpc_p2p_work *work)
{
    while (*at && *at != work)
        at = &(*at)->next;
    if (*at)
        *at = work->next;
}

static void finish(fsdpc_p2p_work *work)
{
    work->next = NULL;
    work->state = FSDPC_P2P_DONE;
}

/* ---- Sending ---- */

static void send_some(const fsdpc_p2p *p2p, fsdpc_p2p_work *work)
{
    ring *r = ring_of(p2p, p2p->comm->base.rank, work->peer);
    const header head = {.tag = work->tag, .bytes = work->bytes};
    if (work->moved < sizeof head)
        work->moved += put(p2p, r, (const char *)&head + work->moved, sizeof head - work->moved);
    if (work->moved >= sizeof head && work->bytes) {
        size_t at = work->moved - sizeof head;
        work->moved += put(p2p, r, work->data + at, work->bytes - at);
    }
}

static void send_to(fsdpc_p2p *p2p, int peer)
{
    fsdpc_p2p_work *work;
    while ((work = p2p->sends[peer])) {
        send_some(p2p, work);
        if (work->moved < sizeof(header) + work->bytes)
            return;
        p2p->sends[peer] = work->next;
        if (work->copied)
            free(work);
        else
            finish(work);
    }
}

/* ---- Receiving ---- */

static bool takes_from(const fsdpc_p2p_work *work, int peer)
{
    return work->peer == peer || work->peer == FSDPC_P2P_ANY;
}

/* Finds a receive for a message; *any_out: receives are posted that may take later messages. */
static fsdpc_p2p_work *receive_for(fsdpc_p2p *p2p, int peer, uint64_t tag, bool *any_out)
{
    *any_out = false;
    for (fsdpc_p2p_work *work = p2p->receives; work; work = work->next) {
        if (!takes_from(work, peer))
            continue;
        *any_out = true;
        if (work->tag != tag)
            continue;
        remove_work(&p2p->receives, work);
        work->peer = peer;
        return work;
    }
    return NULL;
}

static fsdpc_status set_aside(source *from)
{
    aside *a = malloc(sizeof *a + (size_t)from->head.bytes);
    if (!a)
        return fsdpc_fail(FSDPC_ERR_NOMEM,
                          "no memory for a message of %llu bytes that no receive is posted for",
                          (unsigned long long)from->head.bytes);
    *a = (aside){.head = from->head};
    if (from->newest)
        from->newest->next = a;
    else
        from->oldest = a;
    from->newest = a;
    from->to_aside = a;
    return FSDPC_OK;
}

static void drop_aside(source *from, const aside *a)
{
    aside **at = &from->oldest, *last = NULL;
    while (*at && *at != a) {
        last = *at;
        at = &last->next;
    }
    if (!*at)
        return;
    *at = a->next;
    if (from->newest == a)
        from->newest = last;
    free((void *)(uintptr_t)a);
}

static void give_aside(source *from, aside *a, fsdpc_p2p_work *work)
{
    work->sent = (size_t)a->head.bytes;
    if (work->sent == work->bytes && work->bytes)
        memcpy(work->data, a->bytes, work->bytes);
    finish(work);
    drop_aside(from, a);
}

/* Reads the rest of a message's bytes; true once it is complete. A message of another size than its
 * receive expects is discarded. */
static bool body_is_complete(const fsdpc_p2p *p2p, source *from, ring *r)
{
    size_t all = (size_t)from->head.bytes;
    unsigned char *to = NULL;
    if (from->to_aside)
        to = from->to_aside->bytes + from->moved;
    else if (from->to && from->to->bytes == all)
        to = from->to->data + from->moved;
    from->moved += get(p2p, r, to, all - from->moved);
    return from->moved == all;
}

static void end_message(source *from)
{
    aside *a = from->to_aside;
    if (from->to)
        finish(from->to);
    else if (a && a->wanted_by)
        give_aside(from, a, a->wanted_by);
    from->to = NULL;
    from->to_aside = NULL;
    from->head_moved = from->moved = 0;
    from->placed = false;
}

static fsdpc_status receive_from(fsdpc_p2p *p2p, int peer)
{
    source *from = &p2p->sources[peer];
    ring *r = ring_of(p2p, peer, p2p->comm->base.rank);
    for (;;) {
        if (from->head_moved < sizeof from->head) {
            from->head_moved += get(p2p, r, (char *)&from->head + from->head_moved,
                                    sizeof from->head - from->head_moved);
            if (from->head_moved < sizeof from->head)
                return FSDPC_OK;
        }
        if (!from->placed) {
            bool others;
            from->to = receive_for(p2p, peer, from->head.tag, &others);
            if (from->to)
                from->to->sent = (size_t)from->head.bytes;
            else if (!others)
                return FSDPC_OK;
            else
                FSDPC_TRY(set_aside(from));
            from->placed = true;
        }
        if (!body_is_complete(p2p, from, r))
            return FSDPC_OK;
        end_message(from);
    }
}

/* ---- The interface ---- */

fsdpc_status fsdpc_p2p_progress(fsdpc_p2p *p2p)
{
    for (int p = 0; p < p2p->comm->base.size; p++) {
        if (p == p2p->comm->base.rank)
            continue;
        send_to(p2p, p);
        fsdpc_status status = receive_from(p2p, p);
        if (status != FSDPC_OK)
            return fsdpc_shm_fail(p2p->comm, status);
    }
    return FSDPC_OK;
}

/* A message that was set aside, or is being, may be what a new receive asks for. */
static bool take_aside(fsdpc_p2p *p2p, fsdpc_p2p_work *work, int peer)
{
    source *from = &p2p->sources[peer];
    aside *a = from->oldest;
    while (a && (a->head.tag != work->tag || a->wanted_by))
        a = a->next;
    if (!a)
        return false;
    work->peer = peer;
    if (from->to_aside != a)
        give_aside(from, a, work);
    else
        a->wanted_by = work;
    return true;
}

fsdpc_status fsdpc_p2p_post(fsdpc_p2p *p2p, fsdpc_p2p_work *work)
{
    const fsdpc_comm *comm = &p2p->comm->base;
    FSDPC_TRY(fsdpc_shm_health(p2p->comm));
    bool any = work->receives && work->peer == FSDPC_P2P_ANY;
    if (!any && (work->peer < 0 || work->peer >= comm->size || work->peer == comm->rank))
        return fsdpc_fail(FSDPC_ERR_VALUE, "rank %d of a group of %d exchanges a message with %d",
                          comm->rank, comm->size, work->peer);
    work->state = FSDPC_P2P_POSTED;
    work->moved = work->sent = 0;
    work->next = NULL;
    if (!work->receives) {
        append(&p2p->sends[work->peer], work);
        return fsdpc_p2p_progress(p2p);
    }
    for (int p = any ? 0 : work->peer; p < (any ? comm->size : work->peer + 1); p++)
        if (take_aside(p2p, work, p))
            return FSDPC_OK;
    append(&p2p->receives, work);
    return fsdpc_p2p_progress(p2p);
}

static bool all_others_left(const fsdpc_shm_comm *comm)
{
    int n = 0;
    for (int p = 0; p < comm->base.size; p++)
        n += p != comm->base.rank &&
             atomic_load_explicit(&comm->control->slots[p].left, memory_order_acquire);
    return n == comm->base.size - 1;
}

fsdpc_status fsdpc_p2p_test(fsdpc_p2p *p2p, fsdpc_p2p_work *work)
{
    bool none =
        work->peer == FSDPC_P2P_ANY && all_others_left(p2p->comm); /* before the last look */
    FSDPC_TRY(fsdpc_shm_progress(p2p->comm));
    FSDPC_TRY(fsdpc_p2p_progress(p2p));
    if (work->state != FSDPC_P2P_DONE) {
        if (none)
            return fsdpc_fail(FSDPC_ERR_PEER,
                              "rank %d receives from any rank, and all others have left",
                              p2p->comm->base.world_rank);
        p2p->comm->awaited = (fsdpc_shm_awaited){.kind = FSDPC_SHM_AWAITS_RANK,
                                                 .target = (uint64_t)(int64_t)work->peer};
        return FSDPC_IN_PROGRESS;
    }
    if (!work->receives || work->sent == work->bytes)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_MISMATCH,
                      "rank %d receives %zu bytes from rank %d with tag %llu, and was sent %zu",
                      p2p->comm->base.world_rank, work->bytes,
                      fsdpc_shm_name(p2p->comm, work->peer), (unsigned long long)work->tag,
                      work->sent);
}

typedef struct waiting {
    fsdpc_p2p *p2p;
    fsdpc_p2p_work *work;
} waiting;

static fsdpc_status poll(void *arg)
{
    waiting *w = arg;
    return fsdpc_p2p_test(w->p2p, w->work);
}

fsdpc_status fsdpc_p2p_wait(fsdpc_p2p *p2p, fsdpc_p2p_work *work)
{
    waiting w = {.p2p = p2p, .work = work};
    return fsdpc_comm_wait_for(&p2p->comm->base, poll, &w, work->receives ? "recv" : "send", NULL);
}

/* Takes a message that has begun to arrive from its receive, so that another can receive it. One of
 * another size than its receive expects is discarded. */
static void put_aside(fsdpc_p2p *p2p, source *from)
{
    const fsdpc_p2p_work *work = from->to;
    from->to = NULL;
    if (p2p->comm->base.poison[0] || work->bytes != from->head.bytes)
        return;
    fsdpc_status status = set_aside(from);
    if (status == FSDPC_OK)
        memcpy(from->to_aside->bytes, work->data, from->moved);
    else
        fsdpc_shm_fail(p2p->comm, status);
}

static void cancel_receive(fsdpc_p2p *p2p, const fsdpc_p2p_work *work)
{
    remove_work(&p2p->receives, work);
    for (int p = 0; p < p2p->comm->base.size; p++) {
        source *from = &p2p->sources[p];
        if (from->to == work)
            put_aside(p2p, from);
        for (aside *a = from->oldest; a; a = a->next)
            if (a->wanted_by == work)
                a->wanted_by = NULL;
    }
}

/* Puts a copy in the place of a send. */
static fsdpc_status copy_send(fsdpc_p2p *p2p, const fsdpc_p2p_work *work)
{
    fsdpc_p2p_work *copy = malloc(sizeof *copy + work->bytes), **at = &p2p->sends[work->peer];
    if (!copy)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to finish a message of %zu bytes",
                          work->bytes);
    *copy = *work;
    copy->state = FSDPC_P2P_POSTED;
    copy->copied = true;
    copy->data = (unsigned char *)(copy + 1);
    memcpy(copy->data, work->data, work->bytes);
    while (*at != work)
        at = &(*at)->next;
    *at = copy;
    return FSDPC_OK;
}

void fsdpc_p2p_drop(fsdpc_p2p *p2p, fsdpc_p2p_work *work)
{
    work->state = FSDPC_P2P_DONE;
    if (work->receives) {
        cancel_receive(p2p, work);
        return;
    }
    if (!p2p->comm->base.poison[0]) {
        fsdpc_status status = copy_send(p2p, work);
        if (status == FSDPC_OK)
            return;
        fsdpc_shm_fail(p2p->comm, status);
    }
    remove_work(&p2p->sends[work->peer], work);
}
