/* Collectives over shared memory.
 *
 * There are three methods. No method allocates memory, and none makes a system call unless a rank
 * sleeps.
 *
 * GATHER copies nothing: the slices have been in the parameter buffer since the epoch's copy-in. It
 * is complete as soon as it is posted, and compares fingerprints with the peers that have already
 * posted it. A gather with `after_copy_in` set is complete when all ranks have posted it.
 *
 * REDUCE_SCATTER and REDUCE_ALL read the peers' buffers in place. A post means that the rank's
 * buffer has been filled. When all ranks have posted, this rank sums its slices and marks them as
 * read. A buffer is idle when all ranks have read it.
 *
 * The other collectives work chunk by chunk: copy the chunk into this rank's stage, increment
 * `step`, wait until all ranks have reached it, and read all stages. Each rank alternates between
 * two stages, so one wait per chunk is enough. Step K + 2 overwrites the data that peers read in
 * step K. Step K + 2 begins after all ranks have staged step K + 1, and each rank stages that only
 * after reading step K.
 * If the ranks of an EXCHANGE know only their own counts, its first chunk begins with them.
 *
 * Operations on an asynchronous stream run and block on the stream's thread. Inline operations are
 * state machines that any poll on the driving thread advances, so ranks waiting for different
 * operations still contribute to each other's.
 */
#include "comm/shm_coll.h"

#include <stdio.h>
#include <string.h>

#include "base/size.h"
#include "comm/coll_math.h"
#include "comm/shm_peers.h"
#include "comm/shm_ring.h"

static bool is_staged(const fsdpc_coll *op)
{
    return !op->agree_only &&
           (op->kind == FSDPC_COLL_ALL_REDUCE || op->kind == FSDPC_COLL_ALL_GATHER ||
            op->kind == FSDPC_COLL_BROADCAST || op->kind == FSDPC_COLL_EXCHANGE);
}

static bool reads_buffers(const fsdpc_coll *op)
{
    return !op->agree_only && fsdpc_coll_reduces(op->kind);
}

/* ---- Agreement ---- */

static bool on_driver(const fsdpc_shm_comm *self, const fsdpc_shm_awaited *awaited)
{
    return awaited == &self->awaited;
}

static fsdpc_status mismatch(fsdpc_shm_comm *self, int peer, uint64_t sequence, bool driver)
{
    fsdpc_status status =
        fsdpc_shm_ring_differ(self->mine, self->base.world_rank, &self->control->slots[peer],
                              fsdpc_shm_name(self, peer), sequence);
    return driver ? fsdpc_shm_fail(self, status) : fsdpc_shm_tell(self, status);
}

/* Called only on the driving thread, because a wait for a worker's operation may span several
 * epochs. */
static fsdpc_status abandoned_check(fsdpc_shm_comm *self, int peer, uint64_t sequence)
{
    const fsdpc_shm_param_buffer *param_buffer = fsdpc_shm_param_buffer_ahead(self, peer);
    const _Atomic uint64_t *posted = &self->control->slots[peer].posted;
    if (!param_buffer || atomic_load_explicit(posted, memory_order_acquire) > sequence)
        return FSDPC_IN_PROGRESS;
    char where[192], ours[256];
    fsdpc_shm_world_where(self->world, self->members[peer], where, sizeof where);
    fsdpc_shm_ring_describe(self->mine, self->base.world_rank, sequence, ours, sizeof ours);
    fsdpc_fail(FSDPC_ERR_PEER,
               "%s and waits, but rank %d abandoned it: it went on to epoch %llu%s%s%s; every rank "
               "must make the same calls, and after an exception every rank must reset",
               ours, fsdpc_shm_name(self, peer), (unsigned long long)param_buffer->base.epoch + 1,
               where[0] ? " (" : "", where, where[0] ? ")" : "");
    return fsdpc_shm_fail(self, FSDPC_ERR_PEER);
}

/* Checks whether all ranks have posted this operation and agree on it. Compares the ranks that have
 * posted even while others are missing, because the missing ranks may be waiting for a mismatched
 * operation. */
static fsdpc_status agreed(fsdpc_shm_comm *self, uint64_t sequence, fsdpc_shm_awaited *awaited)
{
    bool all = true;
    for (int p = 0; p < self->base.size; p++) {
        const fsdpc_shm_slot *peer = &self->control->slots[p];
        if (p == self->base.rank)
            continue;
        /* acquire: pairs with the release in ring_post; makes the peer's earlier writes visible. */
        if (atomic_load_explicit(&peer->posted, memory_order_acquire) <= sequence) {
            all = false;
            if (on_driver(self, awaited)) {
                fsdpc_status status = abandoned_check(self, p, sequence);
                if (status < 0)
                    return status;
            }
        } else if (!fsdpc_shm_ring_same(self->mine, peer, sequence)) {
            return mismatch(self, p, sequence, on_driver(self, awaited));
        }
    }
    if (all)
        return FSDPC_OK;
    *awaited = (fsdpc_shm_awaited){.kind = FSDPC_SHM_AWAITS_POSTED, .target = sequence + 1};
    return FSDPC_IN_PROGRESS;
}

/* Compares a gather with the peers' posts so far, without waiting. Only late gathers wait. */
static fsdpc_status compare_early(fsdpc_shm_comm *self, uint64_t sequence)
{
    for (int p = 0; p < self->base.size; p++) {
        const fsdpc_shm_slot *peer = &self->control->slots[p];
        if (p != self->base.rank &&
            atomic_load_explicit(&peer->posted, memory_order_acquire) > sequence &&
            !fsdpc_shm_ring_same(self->mine, peer, sequence))
            return mismatch(self, p, sequence, true);
    }
    return FSDPC_OK;
}

/* ---- Steps of the state machines; IN_PROGRESS: poll again ---- */

static fsdpc_status reduce_step(fsdpc_shm_comm *self, fsdpc_work *work, fsdpc_stream *stream,
                                fsdpc_shm_awaited *awaited)
{
    fsdpc_shm_buffer *buffer = (fsdpc_shm_buffer *)work->op.buffer;
    FSDPC_TRY(agreed(self, work->sequence, awaited));
    FSDPC_TRY(fsdpc_coll_reduce_slices(&work->op, self->base.rank, self->base.size, buffer->datas,
                                       stream));
    /* This is a count because operations that read the same contents of the buffer may complete in
     * any order. release: our reads of the peers' buffers come before; acquire in buffer_idle. */
    atomic_fetch_add_explicit(&buffer->mine->read, 1, memory_order_release);
    fsdpc_shm_wake(self->bell);
    return FSDPC_OK;
}

/* Returns the number of elements that ranks stage: all of `send`, of which an EXCHANGE's ranks have
 * different numbers. */
static size_t staged_in_all(const fsdpc_coll *op)
{
    return op->kind == FSDPC_COLL_EXCHANGE ? op->most_sent : op->numel;
}

/* The bytes of one rank's counts, with which the first chunk of an EXCHANGE begins. */
static size_t counts_bytes(const fsdpc_shm_comm *self)
{
    return 2 * (size_t)self->base.size * sizeof(uint64_t);
}

/* Stages up to numel elements, after `head` bytes of counts. */
static void stage(fsdpc_shm_comm *self, const fsdpc_coll *op, size_t head, size_t numel)
{
    size_t element = fsdpc_dtype_bytes(op->dtype), at = self->staged_numel;
    const void *from = op->kind == FSDPC_COLL_BROADCAST ? op->recv : op->send;
    bool sends = op->kind != FSDPC_COLL_BROADCAST || op->root == self->base.rank;
    unsigned char *to =
        fsdpc_shm_control_staging(self->control, self->base.size, self->base.rank, self->step);
    if (head > 0)
        memcpy(to, (unsigned char *)op->counts + (size_t)self->base.rank * head, head);
    if (sends && at < op->numel)
        memcpy(to + head, (const unsigned char *)from + at * element,
               fsdpc_min_size(numel, op->numel - at) * element);
    self->step++;
    /* release: the chunk is complete; acquire in all_staged. */
    atomic_store_explicit(&self->mine->step, self->step, memory_order_release);
    fsdpc_shm_wake(self->bell);
    self->staged = true;
}

static fsdpc_status all_staged(fsdpc_shm_comm *self, fsdpc_shm_awaited *awaited)
{
    for (int p = 0; p < self->base.size; p++) {
        const _Atomic uint64_t *step = &self->control->slots[p].step;
        if (atomic_load_explicit(step, memory_order_acquire) < self->step) {
            *awaited = (fsdpc_shm_awaited){.kind = FSDPC_SHM_AWAITS_STEP, .target = self->step};
            return FSDPC_IN_PROGRESS;
        }
    }
    return FSDPC_OK;
}

/* Returns how many of the elements [first, first + numel) are also in the chunk of `chunk` elements
 * from `at` on, and sets *skip_out to the chunk's elements before them. */
static size_t overlap(size_t first, size_t numel, size_t at, size_t chunk, size_t *skip_out)
{
    size_t begin = first > at ? first : at;
    size_t end = fsdpc_min_size(first + numel, at + chunk);
    *skip_out = begin - at;
    return end > begin ? end - begin : 0;
}

/* Reads all ranks' counts from their stages. */
static void take_counts(const fsdpc_shm_comm *self, fsdpc_coll *op)
{
    size_t size = (size_t)self->base.size, row = 2 * size, rank = (size_t)self->base.rank;
    size_t most = 0, to = 0;
    bool same = true;
    for (int p = 0; p < self->base.size; p++)
        memcpy(op->counts + (size_t)p * row,
               fsdpc_shm_control_staging(self->control, self->base.size, p, self->step - 1),
               counts_bytes(self));
    for (size_t p = 0; p < size; p++) {
        size_t sent = 0;
        for (size_t q = 0; q < size; q++) {
            size_t numel = (size_t)op->counts[p * row + q];
            same = same && numel == op->counts[q * row + size + p];
            if (q == rank)
                op->extents[p] = (fsdpc_coll_extent){.from = sent, .numel = numel, .to = to};
            sent += numel;
        }
        to += op->extents[p].numel;
        most = sent > most ? sent : most;
    }
    op->most_sent = same ? most : 0;
}

static void take_extents(const fsdpc_shm_comm *self, const fsdpc_coll *op,
                         const void *const *stages, size_t numel)
{
    size_t element = fsdpc_dtype_bytes(op->dtype), at = self->staged_numel, skip;
    for (int p = 0; p < self->base.size; p++) {
        const fsdpc_coll_extent *extent = &op->extents[p];
        size_t n = overlap(extent->from, extent->numel, at, numel, &skip);
        if (n > 0)
            memcpy((unsigned char *)op->recv + (extent->to + at + skip - extent->from) * element,
                   (const unsigned char *)stages[p] + skip * element, n * element);
    }
}

/* Reduces the elements of a chunk that belong to this rank's part of the result. */
static fsdpc_status combine_part(const fsdpc_shm_comm *self, const fsdpc_coll *op,
                                 const void **stages, size_t numel, fsdpc_stream *stream)
{
    size_t element = fsdpc_dtype_bytes(op->dtype), at = self->staged_numel, skip;
    size_t n = overlap(op->part_first, op->part_numel, at, numel, &skip);
    for (int p = 0; p < self->base.size; p++)
        stages[p] = (const unsigned char *)stages[p] + skip * element;
    if (n == 0)
        return FSDPC_OK;
    void *to = (unsigned char *)op->recv + (at + skip - op->part_first) * element;
    return fsdpc_coll_combine(op->op, op->dtype, stages, self->base.size, n, to, stream);
}

static fsdpc_status use_staging(fsdpc_shm_comm *self, const fsdpc_coll *op, size_t head,
                                size_t numel, fsdpc_stream *stream)
{
    const void *stages[FSDPC_COLL_MAX_RANKS];
    int size = self->base.size;
    size_t element = fsdpc_dtype_bytes(op->dtype), bytes = numel * element;
    unsigned char *to = (unsigned char *)op->recv + self->staged_numel * element;
    for (int p = 0; p < size; p++)
        stages[p] = fsdpc_shm_control_staging(self->control, size, p, self->step - 1) + head;
    switch (op->kind) {
    case FSDPC_COLL_ALL_REDUCE:
        return op->partial ? combine_part(self, op, stages, numel, stream)
                           : fsdpc_coll_combine(op->op, op->dtype, stages, size, numel, to, stream);
    case FSDPC_COLL_EXCHANGE:
        take_extents(self, op, stages, numel);
        return FSDPC_OK;
    case FSDPC_COLL_ALL_GATHER:
        for (int p = 0; p < size; p++)
            memcpy(to + (size_t)p * op->numel * element, stages[p], bytes);
        return FSDPC_OK;
    default:
        if (op->root != self->base.rank)
            memcpy(to, stages[op->root], bytes);
        return FSDPC_OK;
    }
}

static fsdpc_status staged_step(fsdpc_shm_comm *self, fsdpc_work *work, fsdpc_stream *stream,
                                fsdpc_shm_awaited *awaited)
{
    fsdpc_coll *op = &work->op;
    /* acquire: pairs with the release below, which makes the fields of the turn visible. */
    if (atomic_load_explicit(&self->turn, memory_order_acquire) != work->turn)
        return FSDPC_IN_PROGRESS;
    size_t head = op->counts && self->staged_numel == 0 ? counts_bytes(self) : 0;
    if (head == 0 && staged_in_all(op) == 0)
        FSDPC_TRY(agreed(self, work->sequence, awaited));
    for (; head > 0 || self->staged_numel < staged_in_all(op); head = 0) {
        size_t chunk = (FSDPC_SHM_CHUNK - head) / fsdpc_dtype_bytes(op->dtype);
        if (!self->staged)
            stage(self, op, head, chunk);
        if (self->staged_numel == 0)
            FSDPC_TRY(agreed(self, work->sequence, awaited));
        FSDPC_TRY(all_staged(self, awaited));
        if (head > 0)
            take_counts(self, op);
        size_t numel = fsdpc_min_size(chunk, staged_in_all(op) - self->staged_numel);
        FSDPC_TRY(use_staging(self, op, head, numel, stream));
        self->staged_numel += numel;
        self->staged = false;
    }
    self->staged_numel = 0;
    atomic_store_explicit(&self->turn, work->turn + 1, memory_order_release);
    return FSDPC_OK;
}

static fsdpc_status work_step(fsdpc_shm_comm *self, fsdpc_work *work, fsdpc_stream *stream,
                              fsdpc_shm_awaited *awaited)
{
    if (reads_buffers(&work->op))
        return reduce_step(self, work, stream, awaited);
    if (is_staged(&work->op))
        return staged_step(self, work, stream, awaited);
    return agreed(self, work->sequence, awaited);
}

/* ---- On a stream's thread ---- */

static fsdpc_status worker_wait(fsdpc_shm_comm *self, fsdpc_work *work, fsdpc_stream *stream)
{
    enum { SPINS = 2000, SLEEP_NS = 100000000 };
    fsdpc_shm_awaited awaited = {0};
    fsdpc_nap nap = {0};
    int64_t deadline = fsdpc_clock_ns() + (int64_t)(self->base.timeout_s * 1e9);
    fsdpc_status status = work_step(self, work, stream, &awaited);
    for (int n = 0; self->base.spin && n < SPINS && status == FSDPC_IN_PROGRESS; n++) {
        fsdpc_cpu_relax();
        status = work_step(self, work, stream, &awaited);
    }
    while (status == FSDPC_IN_PROGRESS) {
        fsdpc_shm_nap_take(self->bell, &nap, SLEEP_NS);
        fsdpc_status peers = fsdpc_shm_peers_check(self);
        status = work_step(self, work, stream, &awaited);
        if (status != FSDPC_IN_PROGRESS)
            break;
        if (fsdpc_shm_poisoned(self->control))
            status = FSDPC_ERR_POISONED;
        else if (peers != FSDPC_OK)
            status = fsdpc_shm_tell(self, peers);
        else if (fsdpc_clock_ns() > deadline)
            status = fsdpc_shm_tell(
                self, fsdpc_fail(FSDPC_ERR_TIMEOUT,
                                 "%s of '%s' waited %.3g s on its stream for the other ranks; "
                                 "FSDPC_TIMEOUT_S raises the deadline",
                                 fsdpc_coll_name(work->op.kind), work->op.what ? work->op.what : "",
                                 self->base.timeout_s));
    }
    fsdpc_shm_nap_end(self->bell, &nap);
    return status;
}

static fsdpc_status run_on_stream(void *arg, fsdpc_stream *stream)
{
    fsdpc_work *work = arg;
    fsdpc_shm_comm *self = fsdpc_shm_of(work->comm);
    fsdpc_status status = worker_wait(self, work, stream);
    if (status < 0 && !fsdpc_shm_poisoned(self->control))
        fsdpc_shm_tell(self, status); /* a kernel failed: the driving thread finds the reason
                                       * there */
    work->status = status;
    /* release: comes after status and results; acquire in test. From here on, the caller owns
     * `work`. */
    atomic_store_explicit(&work->state, 0, memory_order_release);
    fsdpc_shm_wake(self->bell);
    return status;
}

/* ---- Post and test ---- */

static bool on_thread(const fsdpc_coll *op)
{
    return op->stream && op->stream->async && op->kind != FSDPC_COLL_BARRIER &&
           op->kind != FSDPC_COLL_GATHER && !op->agree_only;
}

/* Handles a failure of `work`, and therefore of the communicator; no operation remains in
 * flight. */
static fsdpc_status failed(fsdpc_shm_comm *self, fsdpc_work *work, fsdpc_status status)
{
    fsdpc_comm_poison(&self->base, status);
    fsdpc_shm_pending_drop(self, FSDPC_ERR_POISONED);
    work->status = status;
    return status;
}

static fsdpc_status carry_on_group(fsdpc_shm_comm *self)
{
    fsdpc_work *before = NULL, *next;
    for (fsdpc_work *work = self->pending; work; work = next) {
        next = work->impl;
        fsdpc_stream *stream = work->op.stream ? work->op.stream : &self->inline_stream;
        fsdpc_status status = work_step(self, work, stream, &self->awaited);
        if (status < 0)
            return failed(self, work, status);
        if (status == FSDPC_IN_PROGRESS) {
            before = work;
            continue;
        }
        if (before)
            before->impl = next;
        else
            self->pending = next;
        work->impl = NULL;
        atomic_store_explicit(&work->state, 0, memory_order_relaxed);
    }
    return FSDPC_OK;
}

/* Advances all groups of this rank, because a peer in another group may be waiting for this rank
 * while it waits here. Failures there are reported there. */
static fsdpc_status carry_on(fsdpc_shm_comm *self)
{
    fsdpc_shm_comm *group = self->base.apart ? NULL : self->world->groups;
    for (; group; group = group->next_group) {
        if (group != self && !group->base.apart && group->pending)
            carry_on_group(group);
    }
    return carry_on_group(self);
}

fsdpc_status fsdpc_shm_progress(fsdpc_shm_comm *self)
{
    FSDPC_TRY(carry_on(self));
    return fsdpc_shm_health(self);
}

static fsdpc_status buffer_post_check(fsdpc_shm_comm *self, const fsdpc_shm_buffer *buffer)
{
    for (int p = 0; p < self->base.size; p++)
        if (atomic_load_explicit(&buffer->words[p]->read, memory_order_acquire) < buffer->posts)
            return fsdpc_fail(FSDPC_ERR_STATE,
                              "the buffer is posted while rank %d has not read its last reduction; "
                              "wait for buffer_idle before filling it",
                              fsdpc_shm_name(self, p));
    return FSDPC_OK;
}

static uint64_t object_of(const fsdpc_coll *op)
{
    if (op->agree_only)
        return 0;
    if (op->kind == FSDPC_COLL_GATHER)
        return ((const fsdpc_shm_param_buffer *)op->param_buffer)->id;
    if (fsdpc_coll_reduces(op->kind))
        return ((const fsdpc_shm_buffer *)op->buffer)->id;
    return 0;
}

fsdpc_status fsdpc_shm_post(fsdpc_work *work)
{
    fsdpc_shm_comm *self = fsdpc_shm_of(work->comm);
    const fsdpc_coll *op = &work->op;
    FSDPC_TRY(fsdpc_shm_health(self));
    if (reads_buffers(op)) {
        fsdpc_shm_buffer *buffer = (fsdpc_shm_buffer *)op->buffer;
        if (!op->same_filling)
            FSDPC_TRY(buffer_post_check(self, buffer));
        buffer->posts++;
    } else if (is_staged(op)) {
        work->turn = self->turns_given++;
    }
    work->sequence = self->posted++;
    self->chain = fsdpc_shm_ring_post(self->mine, work->sequence, self->chain, op,
                                      fsdpc_coll_bytes(op, self->base.size), object_of(op));
    fsdpc_shm_wake(self->bell);
    if (op->kind == FSDPC_COLL_GATHER && !op->agree_only && !op->after_copy_in)
        return compare_early(self, work->sequence);

    atomic_store_explicit(&work->state, 1, memory_order_relaxed);
    if (on_thread(op))
        return fsdpc_stream_submit(op->stream, run_on_stream, work);
    fsdpc_work *last = self->pending;
    while (last && last->impl)
        last = last->impl;
    if (last)
        last->impl = work;
    else
        self->pending = work;
    /* The failure is stored in the work, and test reports it. */
    carry_on(self);
    return FSDPC_OK;
}

fsdpc_status fsdpc_shm_test(fsdpc_work *work)
{
    fsdpc_shm_comm *self = fsdpc_shm_of(work->comm);
    /* acquire: pairs with the release in run_on_stream. */
    int state = atomic_load_explicit(&work->state, memory_order_acquire);
    if (state) {
        fsdpc_status status = carry_on(self);
        if (on_thread(
                &work->op)) /* its thread still uses the work, even after another failure, but ends
                             * soon */
            return FSDPC_IN_PROGRESS;
        if (atomic_load_explicit(&work->state, memory_order_relaxed)) {
            FSDPC_TRY(status);
            FSDPC_TRY(fsdpc_shm_health(self));
            return FSDPC_IN_PROGRESS;
        }
    }
    if (work->status == FSDPC_OK)
        return FSDPC_OK;
    fsdpc_shm_health(self); /* gets the reason */
    return fsdpc_fail(work->status, "%s", self->base.poison);
}
