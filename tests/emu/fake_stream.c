/* What groups of the fake NCCL do on their streams, and how ranks meet there.
 *
 * Chunk by chunk every rank leaves what it sends in the memory that all have mapped, waits for all,
 * computes its own result, and waits again before the next may begin. Waits look at atomics, so
 * that a rank which is killed holds no lock, and are work of the stream that touches no memory of
 * the device, so that a host which asks for an event is not kept. Host threads read atomics alone,
 * so that ThreadSanitizer sees no order between host and stream that CUDA would not give.
 *
 * Sends and receives of a group are one chunk, an exchange, in which every rank has a part: what
 * each sends to a peer goes into the mail between the two, one after the other, and is taken out in
 * the same order.
 *
 * A group on a stream that captures becomes part of a graph and runs whenever that does; it and
 * its communicator are kept until the graph goes. It has no place among the groups launched since,
 * so events must keep it apart from them: two groups of a communicator at once end the process.
 *
 * NCCL launches on a thread of its own, between the end of a group and the poll that says so, and
 * changes the graph that captures: whoever captures anything meanwhile breaks CUDA's rules.
 */
#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "fake_inside.h"
#include "fake_launch.h"

enum { LOOK_NS = 500000 };

typedef struct chunk chunk;

typedef struct batch {
    fsdpc_nccl_comm comm;
    chunk *chunks; /* captured: all of them */
    long number;   /* groups run in order of launching, whatever their streams */
    bool captured, failed;
    int n;
    fake_op ops[GROUP_MAX];
} batch;

/* A part of an operation that fits into an area, in elements of its result. */
struct chunk {
    batch *of;
    chunk *next;
    const fake_op *op;
    size_t first, numel;
    bool last; /* of the batch */
};

/* ---- Exchanges ---- */

static void exchange_give(const batch *b)
{
    enum { NOISE = 0x5a };
    meeting *all = b->comm->all;
    int rank = b->comm->rank;
    memset(all->posted[rank], 0, sizeof all->posted[rank]);
    for (int i = 0; i < b->n; i++) {
        const fake_op *op = &b->ops[i];
        size_t bytes = op->numel * fake_type_bytes(op->type), *at = &all->posted[rank][op->root];
        if (op->kind == RECV) {
            memset(op->recv, NOISE, bytes);
        } else if (*at + bytes <= MAIL_BYTES) {
            memcpy(all->mail[rank][op->root] + *at, op->send, bytes);
            *at += bytes;
        } else {
            fake_complain("more sent in a group than the fake holds");
        }
    }
}

static void exchange_take(const batch *b)
{
    meeting *all = b->comm->all;
    int rank = b->comm->rank;
    size_t taken[RANKS_MAX] = {0};
    for (int i = 0; i < b->n; i++) {
        const fake_op *op = &b->ops[i];
        size_t bytes = op->numel * fake_type_bytes(op->type), *at = &taken[op->root];
        if (op->kind == RECV && *at + bytes <= MAIL_BYTES)
            memcpy(op->recv, all->mail[op->root][rank] + *at, bytes);
        *at += op->kind == RECV ? bytes : 0;
    }
    for (int p = 0; p < b->comm->size; p++)
        if (taken[p] != all->posted[p][rank])
            fake_complain("a rank receives other than was sent to it");
}

/* ---- Chunks ---- */

static size_t parts_of(const fake_op *op, int size)
{
    return op->kind == SCATTER ? (size_t)size : 1;
}

/* What a gather is to write holds noise meanwhile, as nobody may read it before the gather is done.
 */
static void spoil(const chunk *c)
{
    enum { NOISE = 0x5a };
    const fake_op *op = c->op;
    size_t element = fake_type_bytes(op->type);
    for (int p = 0; op->kind == GATHER && p < c->of->comm->size; p++)
        if (p != c->of->comm->rank)
            memset(op->recv + ((size_t)p * op->numel + c->first) * element, NOISE,
                   c->numel * element);
}

/* Leaves what this rank sends: of a scatter a part for every rank. */
static void chunk_give(void *arg)
{
    chunk *c = arg;
    const fake_op *op = c->op;
    fsdpc_nccl_comm comm = c->of->comm;
    size_t element = fake_type_bytes(op->type), parts = parts_of(op, comm->size);
    if (c->of->failed)
        return;
    if (fake_exchanges(op)) {
        exchange_give(c->of);
        return;
    }
    for (size_t p = 0; p < parts; p++)
        memcpy(comm->all->areas[comm->rank] + p * c->numel * element,
               op->send + (p * op->numel + c->first) * element, c->numel * element);
    spoil(c);
}

/* The kernel looks at the low half of a count, the same for all processes that map it. */
static void sleep_on(_Atomic long *count, long seen)
{
    const struct timespec pause = {0, LOOK_NS};
    syscall(SYS_futex, (uint32_t *)count, FUTEX_WAIT, (uint32_t)seen, &pause, NULL, 0);
}

static void count_up(_Atomic long *count)
{
    atomic_fetch_add(count, 1);
    syscall(SYS_futex, (uint32_t *)count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Waits until all ranks have come to `count`; the batch fails if it is aborted first. */
static void meet(batch *b, _Atomic long *count, long target)
{
    for (long seen; !b->failed && (seen = atomic_load(count)) < target; sleep_on(count, seen))
        b->failed = fake_is_ended(b->comm);
}

static void chunk_arrive(void *arg)
{
    chunk *c = arg;
    fsdpc_nccl_comm comm = c->of->comm;
    const struct timespec pause = {0, LOOK_NS};
    long target = ++comm->chunks * comm->size;
    while ((fake_is_broken(FAKE_NCCL_STUCK, comm->rank) ||
            fake_is_broken(FAKE_NCCL_REMOTE_ERROR, comm->rank) ||
            fake_is_broken(FAKE_NCCL_CLINGS, comm->rank)) &&
           !fake_is_ended(comm))
        nanosleep(&pause, NULL);
    if (fake_is_ended(comm))
        c->of->failed = true;
    if (c->of->failed)
        return;
    count_up(&comm->all->arrived);
    meet(c->of, &comm->all->arrived, target);
}

static void join_ranks(const chunk *c, size_t skipped, unsigned char *out)
{
    fsdpc_nccl_comm comm = c->of->comm;
    size_t element = fake_type_bytes(c->op->type);
    memcpy(out, comm->all->areas[0] + skipped * element, c->numel * element);
    for (int p = 1; p < comm->size; p++)
        for (size_t j = 0; j < c->numel; j++)
            fake_join(c->op->type, c->op->red, out + j * element,
                      comm->all->areas[p] + (skipped + j) * element);
}

static void chunk_take(void *arg)
{
    chunk *c = arg;
    const fake_op *op = c->op;
    fsdpc_nccl_comm comm = c->of->comm;
    size_t element = fake_type_bytes(op->type), bytes = c->numel * element;
    unsigned char *recv = op->recv + c->first * element;
    if (c->of->failed)
        return;
    switch (op->kind) {
    case GATHER:
        for (int p = 0; p < comm->size; p++)
            memcpy(recv + (size_t)p * op->numel * element, comm->all->areas[p], bytes);
        break;
    case SCATTER:
        join_ranks(c, (size_t)comm->rank * c->numel, recv);
        break;
    case ALL_REDUCE:
        join_ranks(c, 0, recv);
        break;
    case BROADCAST:
        memcpy(recv, comm->all->areas[op->root], bytes);
        break;
    case SEND:
    case RECV:
        exchange_take(c->of);
        break;
    }
}

static void chunk_finish(void *arg)
{
    chunk *c = arg;
    batch *b = c->of;
    fsdpc_nccl_comm comm = b->comm;
    if (!b->failed) {
        count_up(&comm->all->finished);
        meet(b, &comm->all->finished, comm->chunks * comm->size);
    }
    bool last = c->last, captured = b->captured;
    if (!captured)
        free(c);
    if (!last)
        return;
    atomic_store(&comm->busy, false);
    if (captured)
        return;
    count_up(&comm->turn);
    fake_comm_release(comm);
    free(b);
}

static void batch_begin(void *arg)
{
    batch *b = arg;
    for (long turn; !b->captured && (turn = atomic_load(&b->comm->turn)) < b->number &&
                    !fake_is_ended(b->comm);)
        sleep_on(&b->comm->turn, turn);
    b->failed = fake_is_ended(b->comm);
    if (atomic_exchange(&b->comm->busy, true) && !b->failed) {
        fprintf(stderr, "fake NCCL: nothing orders a graph's group and another\n");
        abort();
    }
}

/* No graph has it any more. */
static void batch_drop(void *arg)
{
    batch *b = arg;
    while (b->chunks) {
        chunk *c = b->chunks;
        b->chunks = c->next;
        free(c);
    }
    fake_comm_release(b->comm);
    free(b);
}

static void launch_owned(batch *b)
{
    FAKE_RUNTIME(emu_launch_owned_fn, "emu_launch_owned", call)
    call(b->comm->stream, batch_begin, b, batch_drop);
}

long fake_captured(cudaStream_t stream)
{
    FAKE_RUNTIME(emu_captured_fn, "emu_captured", call)
    return call(stream);
}

static void host_waits(bool yes)
{
    FAKE_RUNTIME(emu_host_waits_fn, "emu_host_waits", call)
    call(yes);
}

void fake_wait_unused(const struct ncclComm *comm)
{
    const struct timespec pause = {0, LOOK_NS};
    host_waits(true);
    while (atomic_load(&comm->refs) > 1)
        nanosleep(&pause, NULL);
    host_waits(false);
}

static void chunk_enqueue(batch *b, const fake_op *op, size_t first, size_t most, bool last)
{
    chunk *c = malloc(sizeof *c);
    size_t left = op->numel - first;
    *c = (chunk){b, b->chunks, op, first, left < most ? left : most, last};
    if (b->captured)
        b->chunks = c;
    fake_launch(b->comm->stream, chunk_give, c, true);
    fake_launch(b->comm->stream, chunk_arrive, c, false);
    fake_launch(b->comm->stream, chunk_take, c, true);
    fake_launch(b->comm->stream, chunk_finish, c, false);
}

void fake_run(fsdpc_nccl_comm comm)
{
    batch *b = calloc(1, sizeof *b);
    int n = comm->n_held;
    b->comm = comm;
    b->captured = comm->captured >= 0;
    if (fake_captured(comm->stream) != comm->captured) {
        fake_complain("something was captured, or a capture ended, while NCCL launched into it");
        comm->spoiled = true;
    }
    if (!b->captured)
        b->number = comm->launched++;
    b->n = n;
    memcpy(b->ops, comm->held, (size_t)n * sizeof *b->ops);
    comm->n_held = 0;
    atomic_fetch_add(&comm->refs, 1);
    if (b->captured)
        launch_owned(b);
    else
        fake_launch(comm->stream, batch_begin, b, false);
    if (fake_exchanges(&b->ops[0])) {
        chunk_enqueue(b, &b->ops[0], 0, 0, true);
        return;
    }
    for (int i = 0; i < n; i++) { /* the last chunk may free the batch before we are back */
        const fake_op op = comm->held[i];
        size_t most = AREA_BYTES / fake_type_bytes(op.type) / parts_of(&op, comm->size);
        for (size_t first = 0; first < op.numel; first += most)
            chunk_enqueue(b, &b->ops[i], first, most, i == n - 1 && op.numel - first <= most);
    }
}
