/* What groups of the fake NCCL do on their streams, and how ranks meet there.
 *
 * Chunk by chunk every rank leaves what it sends in the memory that all have mapped, waits for all,
 * computes its own result, and waits again before the next may begin.  Waits poll atomics, so that
 * a rank which is killed holds no lock, and are work of the stream that touches no memory of the
 * device, so that a host which asks for an event is not kept.  Host threads read atomics alone, so
 * that ThreadSanitizer sees no order between host and stream that CUDA would not give.
 *
 * Sends and receives of a group are one chunk, an exchange, in which every rank has a part: what
 * each sends to a peer goes into the mail between the two, one after the other, and is taken out in
 * the same order.
 *
 * A group on a stream that captures becomes part of a graph and runs whenever that does; it and
 * its communicator are kept for good.  It has no place among the groups launched since, so events
 * must keep it apart from them: two groups of a communicator at once end the process.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fake_inside.h"
#include "fake_launch.h"

enum { LOOK_NS = 20000 };

typedef cudaError_t (*is_capturing_fn)(cudaStream_t stream, enum cudaStreamCaptureStatus *status);

typedef struct batch {
    fsdpc_nccl_comm comm;
    long number; /* groups run in order of launching, whatever their streams */
    bool captured, failed;
    int n;
    fake_op ops[GROUP_MAX];
} batch;

/* A part of an operation that fits into an area, in elements of its result. */
typedef struct chunk {
    batch *of;
    const fake_op *op;
    size_t first, numel;
    bool last; /* of the batch */
} chunk;

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

/* Waits until all ranks have come to `count`; the batch fails if it is aborted first. */
static void meet(batch *b, const _Atomic long *count, long target)
{
    const struct timespec pause = {0, LOOK_NS};
    while (!b->failed && atomic_load(count) < target) {
        b->failed = atomic_load(&b->comm->aborted);
        nanosleep(&pause, NULL);
    }
}

static void chunk_arrive(void *arg)
{
    chunk *c = arg;
    fsdpc_nccl_comm comm = c->of->comm;
    const struct timespec pause = {0, LOOK_NS};
    long target = ++comm->chunks * comm->size;
    while ((fake_is_broken(FAKE_NCCL_STUCK, comm->rank) ||
            fake_is_broken(FAKE_NCCL_REMOTE_ERROR, comm->rank)) &&
           !atomic_load(&comm->aborted))
        nanosleep(&pause, NULL);
    if (atomic_load(&comm->aborted))
        c->of->failed = true;
    if (c->of->failed)
        return;
    atomic_fetch_add(&comm->all->arrived, 1);
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
    case REDUCE:
        if (comm->rank == op->root)
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
        atomic_fetch_add(&comm->all->finished, 1);
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
    atomic_fetch_add(&comm->turn, 1);
    fake_comm_release(comm);
    free(b);
}

static void batch_begin(void *arg)
{
    batch *b = arg;
    const struct timespec pause = {0, LOOK_NS};
    while (!b->captured && atomic_load(&b->comm->turn) < b->number &&
           !atomic_load(&b->comm->aborted))
        nanosleep(&pause, NULL);
    b->failed = atomic_load(&b->comm->aborted);
    if (atomic_exchange(&b->comm->busy, true) && !b->failed) {
        fprintf(stderr, "fake NCCL: nothing orders a graph's group and another\n");
        abort();
    }
}

static bool is_capturing(cudaStream_t stream)
{
    FAKE_RUNTIME(is_capturing_fn, "cudaStreamIsCapturing", call)
    enum cudaStreamCaptureStatus status;
    call(stream, &status);
    return status != cudaStreamCaptureStatusNone;
}

static void chunk_enqueue(batch *b, const fake_op *op, size_t first, size_t most, bool last)
{
    chunk *c = malloc(sizeof *c);
    size_t left = op->numel - first;
    *c = (chunk){b, op, first, left < most ? left : most, last};
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
    b->captured = is_capturing(comm->stream);
    if (!b->captured)
        b->number = comm->launched++;
    b->n = n;
    memcpy(b->ops, comm->held, (size_t)n * sizeof *b->ops);
    comm->n_held = 0;
    atomic_fetch_add(&comm->refs, 1);
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
