/* Code shared by all communicators: checks, waiting, and results of posted operations.
 *
 * All waits use one polling function. While the result is IN_PROGRESS, it first spins (only if
 * every rank has its own core), then sleeps in the implementation's `idle` for at most 100 ms at a
 * time. Between sleeps it checks the time. It gives notices about late ranks and this rank's last
 * operation, and poisons the communicator at the deadline. The interrupt callback may end the wait.
 *
 * If `idle` reports that a peer is gone, the operation has not failed yet, because that peer may be
 * done with its part. The wait polls once more, and fails only if the operation is unfinished.
 */
#include "comm/comm.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "base/crc32c.h"
#include "base/size.h"

enum { SPIN_NS = 200000, BREATH_NS = 100000000, YIELDS = 4, POLLS_PER_CLOCK = 32 };
enum { LONG_WAIT_NS = 100000000, TAIL_EVENTS = 8, LATE_BYTES = 1024 };

static const char *const coll_names[] = {
#define X(name, text) [FSDPC_COLL_##name] = text,
    FSDPC_COLL_TABLE(X)
#undef X
};

const char *fsdpc_coll_name(fsdpc_coll_kind kind)
{
    return (size_t)kind < sizeof coll_names / sizeof *coll_names ? coll_names[kind] : "operation";
}

size_t fsdpc_coll_bytes(const fsdpc_coll *op, int size)
{
    size_t numel = op->kind == FSDPC_COLL_EXCHANGE ? op->most_sent : op->numel;
    if (op->kind == FSDPC_COLL_GATHER || fsdpc_coll_reduces(op->kind)) {
        numel = 0;
        for (size_t i = 0; i < op->n_slices; i++)
            numel += op->slices[i].numel;
        numel *= op->kind == FSDPC_COLL_REDUCE_ALL ? 1 : (size_t)size;
    }
    return numel * fsdpc_dtype_bytes(op->dtype);
}

void fsdpc_comm_init(fsdpc_comm *comm, const fsdpc_comm_ops *ops, const fsdpc_comm_config *config)
{
    *comm = (fsdpc_comm){.ops = ops,
                         .device = config->device,
                         .trace = config->trace,
                         .rank = config->rank,
                         .world_rank = config->ranks ? config->ranks[config->rank] : config->rank,
                         .size = config->size,
                         .host_size = config->size,
                         .timeout_s = config->timeout_s > 0 ? config->timeout_s : 300,
                         .notice_s = config->notice_s > 0 ? config->notice_s : 10,
                         .spin = config->spin,
                         .interrupt = config->interrupt,
                         .notice = config->notice,
                         .notice_arg = config->notice_arg,
                         .log = config->log};
    comm->log.rank = config->rank;
}

fsdpc_comm_config fsdpc_comm_config_like(const fsdpc_comm *comm, int rank, int size)
{
    return (fsdpc_comm_config){
        .rank = rank,
        .size = size,
        .device = comm->device,
        .trace = comm->trace,
        .timeout_s = comm->timeout_s,
        .notice_s = comm->notice_s,
        .interrupt = comm->interrupt,
        .notice = comm->notice,
        .notice_arg = comm->notice_arg,
        .log = comm->log,
        .spin = comm->spin,
    };
}

/* ---- Failure ---- */

void fsdpc_comm_abort_local(fsdpc_comm *comm, fsdpc_status status, const char *reason)
{
    (void)status; /* only for peers */
    if (!comm->poison[0])
        snprintf(comm->poison, sizeof comm->poison, "%s",
                 reason && reason[0] ? reason : "aborted without a reason");
}

fsdpc_status fsdpc_comm_poison(fsdpc_comm *comm, fsdpc_status status)
{
    char text[sizeof comm->poison];
    snprintf(text, sizeof text, "%s", fsdpc_last_error());
    comm->ops->abort(comm, status, text);
    return fsdpc_fail(status, "%s", text);
}

fsdpc_status fsdpc_comm_health(const fsdpc_comm *comm)
{
    if (__builtin_expect(!comm->poison[0], 1))
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_POISONED,
                      "rank %d: the communicator failed earlier and is closed: %s; restart the run",
                      comm->world_rank, comm->poison);
}

/* ---- Waiting ---- */

typedef struct waiting {
    fsdpc_comm *comm;
    fsdpc_status (*poll)(void *arg);
    void *arg;
    const char *what, *unit;
    int64_t start;
    char late[LATE_BYTES / 2]; /* late ranks, for the log */
    fsdpc_nap nap;
} waiting;

static void late_text(const waiting *w, double waited_s, char *text, size_t bytes)
{
    char who[768] = "";
    fsdpc_comm_describe(w->comm, who, sizeof who);
    bool named = w->unit && w->unit[0];
    snprintf(text, bytes, "rank %d has been waiting for %.3g s in %s%s%s%s%s%s",
             w->comm->world_rank, waited_s, w->what, named ? " of '" : "", named ? w->unit : "",
             named ? "'" : "", who[0] ? " for " : "", who);
}

static void carry_above(const fsdpc_comm *comm)
{
    if (comm->carry && !comm->apart)
        comm->carry(comm->carry_arg);
}

static fsdpc_status spin(const waiting *w)
{
    for (unsigned n = 0; w->comm->spin || n < YIELDS; n++) {
        carry_above(w->comm);
        if (w->comm->spin)
            fsdpc_cpu_relax();
        else
            sched_yield();
        fsdpc_status status = w->poll(w->arg);
        if (status != FSDPC_IN_PROGRESS)
            return status;
        if (n % POLLS_PER_CLOCK == POLLS_PER_CLOCK - 1 && fsdpc_clock_ns() - w->start > SPIN_NS)
            break;
    }
    return FSDPC_IN_PROGRESS;
}

static int64_t earlier(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Reports this rank's last actions. The waiting thread itself writes the trace. */
static void notice_tail(const waiting *w)
{
    char tail[LATE_BYTES - 64], text[LATE_BYTES];
    if (!w->comm->notice || !fsdpc_trace_tail(w->comm->trace, TAIL_EVENTS, tail, sizeof tail))
        return;
    snprintf(text, sizeof text, "rank %d before that: %s", w->comm->world_rank, tail);
    w->comm->notice(w->comm->notice_arg, text);
}

static void give_notice(const waiting *w, int64_t now)
{
    char text[LATE_BYTES];
    if (!w->comm->notice)
        return;
    late_text(w, (double)(now - w->start) * 1e-9, text, sizeof text);
    w->comm->notice(w->comm->notice_arg, text);
    notice_tail(w);
}

static fsdpc_status timed_out(const waiting *w)
{
    char text[LATE_BYTES];
    notice_tail(w);
    late_text(w, w->comm->timeout_s, text, sizeof text);
    fsdpc_fail(
        FSDPC_ERR_TIMEOUT,
        "%s: the deadline passed; every rank must reach the same operation, and %s raises the "
        "deadline (%.3g s)",
        text, w->comm->timeout_name ? w->comm->timeout_name : "FSDPC_TIMEOUT_S",
        w->comm->timeout_s);
    return fsdpc_comm_poison(w->comm, FSDPC_ERR_TIMEOUT);
}

/* Reports that a peer is gone and this rank's operation, or the Ctrl-C that ended all ranks. */
static fsdpc_status given_up(const waiting *w, fsdpc_status status)
{
    char text[LATE_BYTES];
    bool named = w->unit && w->unit[0];
    snprintf(text, sizeof text, "%s", fsdpc_last_error());
    FSDPC_TRY(fsdpc_interrupt_check(&w->comm->interrupt));
    fsdpc_fail(status, "%s; rank %d was waiting in %s%s%s%s", text, w->comm->world_rank, w->what,
               named ? " of '" : "", named ? w->unit : "", named ? "'" : "");
    return fsdpc_comm_poison(w->comm, status);
}

static void show_wait(const waiting *w)
{
    char text[LATE_BYTES / 4];
    bool named = w->unit && w->unit[0];
    snprintf(text, sizeof text, "%s%s%s%s", w->what, named ? " of '" : "", named ? w->unit : "",
             named ? "'" : "");
    fsdpc_comm_waits(w->comm, text);
}

static fsdpc_status doze(waiting *w)
{
    fsdpc_comm *comm = w->comm;
    int64_t deadline = w->start + (int64_t)(comm->timeout_s * 1e9);
    int64_t notice_at = w->start + (int64_t)(comm->notice_s * 1e9);
    int64_t breathe_at = w->start + BREATH_NS;
    for (;;) {
        carry_above(comm);
        fsdpc_status status = w->poll(w->arg);
        if (status != FSDPC_IN_PROGRESS)
            return status;
        int64_t now = fsdpc_clock_ns();
        if (now >= deadline)
            return timed_out(w);
        if (now >= notice_at) {
            give_notice(w, now);
            notice_at = now + 2 * (now - w->start);
        }
        if (now >= breathe_at) {
            if (!w->late[0] && comm->log.level >= FSDPC_LOG_NOTE)
                fsdpc_comm_describe(comm, w->late, sizeof w->late);
            FSDPC_TRY(fsdpc_interrupt_check(&comm->interrupt));
            breathe_at = now + BREATH_NS;
        }
        int64_t until = earlier(earlier(deadline, notice_at), breathe_at);
        status = fsdpc_comm_idle(comm, &w->nap, until > now ? until - now : 1);
        if (status != FSDPC_OK) {
            fsdpc_status again = w->poll(w->arg);
            return again == FSDPC_IN_PROGRESS ? given_up(w, status) : again;
        }
    }
}

static fsdpc_status wait_for(fsdpc_comm *comm, fsdpc_status (*poll)(void *arg), void *arg,
                             const char *what, const char *unit, int id)
{
    fsdpc_status status = poll(arg);
    if (status != FSDPC_IN_PROGRESS)
        return status;
    fsdpc_trace_wait(comm->trace, what, id);
    waiting w = {.comm = comm, .poll = poll, .arg = arg, .what = what, .unit = unit};
    w.start = fsdpc_clock_ns();
    status = spin(&w);
    if (status == FSDPC_IN_PROGRESS) {
        show_wait(&w);
        status = doze(&w);
        fsdpc_comm_idle(comm, &w.nap, 0);
        fsdpc_comm_waits(comm, "");
    }
    fsdpc_trace_wait_end(comm->trace, id);
    int64_t waited_ns = fsdpc_clock_ns() - w.start;
    comm->waited_ns += waited_ns;
    if (waited_ns > LONG_WAIT_NS)
        FSDPC_NOTE(&comm->log, "waited %.3g s in %s%s%s%s%s", (double)waited_ns * 1e-9, what,
                   unit && unit[0] ? " of " : "", unit ? unit : "", w.late[0] ? " for " : "",
                   w.late);
    return status;
}

fsdpc_status fsdpc_comm_wait_for(fsdpc_comm *comm, fsdpc_status (*poll)(void *arg), void *arg,
                                 const char *what, const char *unit)
{
    return wait_for(comm, poll, arg, what, unit, -1);
}

/* ---- Operations ---- */

static fsdpc_status bad_op(const fsdpc_coll *op, const char *problem)
{
    return fsdpc_fail(FSDPC_ERR_VALUE, "%s%s%s: %s", fsdpc_coll_name(op->kind),
                      op->what ? " of " : "", op->what ? op->what : "", problem);
}

static fsdpc_status slices_check(const fsdpc_comm *comm, const fsdpc_coll *op)
{
    size_t element = fsdpc_dtype_bytes(op->dtype);
    size_t room = op->kind == FSDPC_COLL_GATHER ? op->param_buffer->bytes : op->buffer->bytes;
    if (op->offset > room)
        return bad_op(op, "the unsharded elements begin beyond their memory");
    if (op->offset % element)
        return bad_op(op, "the unsharded elements do not begin at a multiple of their size");
    size_t room_numel = (room - op->offset) / element;
    for (size_t i = 0; i < op->n_slices; i++) {
        const fsdpc_slice *slice = &op->slices[i];
        size_t numel = slice->numel, end;
        if (op->kind != FSDPC_COLL_REDUCE_ALL)
            FSDPC_TRY(fsdpc_mul_size(numel, (size_t)comm->size, &numel));
        FSDPC_TRY(fsdpc_add_size(slice->unsharded_offset, numel, &end));
        if (end > room_numel)
            return bad_op(op, "a slice reaches beyond the memory of the unsharded elements");
    }
    return FSDPC_OK;
}

static fsdpc_status op_check(const fsdpc_comm *comm, const fsdpc_coll *op)
{
    if ((unsigned)op->dtype >= FSDPC_DTYPE_COUNT)
        return bad_op(op, "unknown dtype");
    if (op->agree_only)
        return FSDPC_OK;
    switch (op->kind) {
    case FSDPC_COLL_GATHER:
        if (!op->param_buffer || op->param_buffer->comm != comm)
            return bad_op(op, "needs a parameter buffer of this communicator");
        if (op->param_buffer->offsets_only && (!op->send || !op->recv))
            return bad_op(op, "needs slices to send and memory for the unsharded elements");
        return slices_check(comm, op);
    case FSDPC_COLL_REDUCE_SCATTER:
    case FSDPC_COLL_REDUCE_ALL:
        if (!op->buffer || op->buffer->comm != comm)
            return bad_op(op, "needs a buffer of this communicator");
        if (!fsdpc_dtype_is_float(op->dtype) || !fsdpc_dtype_is_float(op->shard_dtype))
            return bad_op(op, "reduces floats only");
        if (op->sums && !(comm->ops->splits_sums && op->tree))
            return bad_op(op, "this communicator sums all ranks at once");
        if (op->sums && (op->n_sums < 1 || op->n_sums > FSDPC_COLL_MAX_SUMS))
            return bad_op(op, "leaves too many sums, or none");
        return slices_check(comm, op);
    case FSDPC_COLL_BROADCAST:
        if (op->root < 0 || op->root >= comm->size)
            return bad_op(op, "the root is no rank of this group");
        return op->numel && !op->recv ? bad_op(op, "needs memory") : FSDPC_OK;
    case FSDPC_COLL_ALL_REDUCE:
    case FSDPC_COLL_ALL_GATHER:
        return op->numel && !(op->recv && op->send) ? bad_op(op, "needs memory") : FSDPC_OK;
    case FSDPC_COLL_EXCHANGE:
        return strcmp(comm->ops->name, "shm") != 0 || !op->extents || (op->numel && !op->send)
                   ? bad_op(op, "needs memory, and ranks that share memory")
                   : FSDPC_OK;
    case FSDPC_COLL_BARRIER:
        return FSDPC_OK;
    case FSDPC_COLL_REPLAY:
        return op->graph ? FSDPC_OK : bad_op(op, "needs a graph");
    }
    return bad_op(op, "unknown kind");
}

static void note_captured(fsdpc_comm *comm, const fsdpc_coll *op)
{
    const uint64_t words[] = {(uint64_t)op->kind,  (uint64_t)op->unit,
                              (uint64_t)op->dtype, (uint64_t)op->accumulate,
                              op->trains,          fsdpc_coll_bytes(op, comm->size)};
    comm->captured = fsdpc_crc32c(comm->captured, words, sizeof words);
}

fsdpc_status fsdpc_comm_post(fsdpc_comm *comm, const fsdpc_coll *op, fsdpc_work *work)
{
    FSDPC_TRY(fsdpc_comm_health(comm));
    if (work->comm)
        return bad_op(op, "its work is still in flight; wait for it before posting it again");
    FSDPC_TRY(op_check(comm, op));
    work->op = *op;
    work->comm = comm;
    work->status = FSDPC_OK;
    work->turn = 0;
    work->impl = NULL;
    atomic_store_explicit(&work->state, 0, memory_order_relaxed);
    FSDPC_DEBUG(&comm->log, "posts %s of %s: unit %d, %zu bytes of %s, epoch %llu",
                fsdpc_coll_name(op->kind), op->what ? op->what : "nothing named", op->unit,
                fsdpc_coll_bytes(op, comm->size), fsdpc_dtype_name(op->dtype),
                (unsigned long long)op->epoch);
    fsdpc_status status = comm->ops->post(work);
    if (status != FSDPC_OK)
        work->comm = NULL;
    else if (comm->device && comm->device->capturing && !comm->apart)
        note_captured(comm, op);
    return status;
}

fsdpc_status fsdpc_comm_test(fsdpc_work *work)
{
    if (!work->comm)
        return FSDPC_OK;
    fsdpc_status status = work->comm->ops->test(work);
    if (status != FSDPC_IN_PROGRESS)
        work->comm = NULL;
    return status;
}

static fsdpc_status poll_work(void *arg)
{
    return fsdpc_comm_test(arg);
}

fsdpc_status fsdpc_comm_wait(fsdpc_work *work)
{
    if (!work->comm)
        return FSDPC_OK;
    return wait_for(work->comm, poll_work, work, fsdpc_coll_name(work->op.kind), work->op.what,
                    work->op.unit);
}

typedef struct ordering {
    fsdpc_work *work;
    fsdpc_stream *stream;
} ordering;

static fsdpc_status poll_order(void *arg)
{
    const ordering *o = arg;
    fsdpc_status status = o->work->comm->ops->order(o->work, o->stream);
    if (status != FSDPC_IN_PROGRESS)
        o->work->comm = NULL;
    return status;
}

fsdpc_status fsdpc_comm_order_streams(fsdpc_work *work, fsdpc_stream *stream)
{
    ordering o = {work, stream};
    return wait_for(work->comm, poll_order, &o, fsdpc_coll_name(work->op.kind), work->op.what,
                    work->op.unit);
}

/* Ends an operation (possibly in flight) whose storage is about to be freed. */
static fsdpc_status end_run(fsdpc_work *work, fsdpc_status status)
{
    fsdpc_stream *stream = work->op.stream;
    if (status != FSDPC_OK && work->comm) {
        char text[512];
        fsdpc_comm_poison(work->comm, status);
        snprintf(text, sizeof text, "%s", fsdpc_last_error());
        /* Waits until the stream's thread has stopped using `work`. */
        if (stream && stream->async && fsdpc_stream_sync(stream) != FSDPC_OK)
            fsdpc_fail(status, "%s", text);
    }
    return status;
}

fsdpc_status fsdpc_comm_run(fsdpc_comm *comm, const fsdpc_coll *op)
{
    fsdpc_work work = {0};
    FSDPC_TRY(fsdpc_comm_post(comm, op, &work));
    return end_run(&work, fsdpc_comm_wait(&work));
}

fsdpc_status fsdpc_comm_run_ahead(fsdpc_comm *comm, const fsdpc_coll *op, fsdpc_stream *stream)
{
    fsdpc_work work = {0};
    FSDPC_TRY(fsdpc_comm_post(comm, op, &work));
    return end_run(&work, fsdpc_comm_order(&work, stream));
}

/* ---- Agreement ---- */

typedef struct bad_news {
    int32_t status, rank;
    char text[500];
} bad_news;

static fsdpc_status run_small(fsdpc_comm *comm, fsdpc_coll_kind kind, const char *what, void *data,
                              size_t bytes, int root)
{
    bool words = kind == FSDPC_COLL_ALL_REDUCE;
    return fsdpc_comm_run(comm, &(fsdpc_coll){.kind = kind,
                                              .unit = -1,
                                              .what = what,
                                              .dtype = words ? FSDPC_I32 : FSDPC_U8,
                                              .op = FSDPC_RED_MIN,
                                              .send = data,
                                              .recv = data,
                                              .numel = words ? bytes / sizeof(int32_t) : bytes,
                                              .root = root});
}

fsdpc_status fsdpc_comm_agree(fsdpc_comm *comm, fsdpc_status status, const char *what)
{
    bad_news news = {.status = status, .rank = comm->world_rank};
    snprintf(news.text, sizeof news.text, "%s", status == FSDPC_OK ? "" : fsdpc_last_error());
    if (status != FSDPC_OK && comm->poison[0])
        return status; /* the communicator itself failed: the poison tells the peers */
    int32_t failed = status == FSDPC_OK ? INT32_MAX : comm->rank;
    FSDPC_TRY(run_small(comm, FSDPC_COLL_ALL_REDUCE, what, &failed, sizeof failed, 0));
    if (failed == INT32_MAX)
        return FSDPC_OK;
    FSDPC_TRY(run_small(comm, FSDPC_COLL_BROADCAST, what, &news, sizeof news, failed));
    if (failed == comm->rank)
        return fsdpc_fail((fsdpc_status)news.status, "%s", news.text);
    return fsdpc_fail((fsdpc_status)news.status, "rank %d: %s", news.rank, news.text);
}

/* ---- Epochs and buffers ---- */

fsdpc_status fsdpc_param_buffer_create_in(fsdpc_comm *comm, size_t bytes, fsdpc_tier *tier,
                                          fsdpc_param_buffer **out)
{
    const fsdpc_comm_ops *ops = comm->ops;
    if (tier && !ops->param_buffer_create_in)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "params on a disk over '%s'", ops->name);
    FSDPC_TRY(ops->param_buffer_create_in ? ops->param_buffer_create_in(comm, bytes, tier, out)
                                          : ops->param_buffer_create(comm, bytes, out));
    FSDPC_NOTE(&comm->log, "made a parameter buffer of %zu bytes for %d ranks%s", bytes, comm->size,
               tier ? ", on a disk" : "");
    return FSDPC_OK;
}

fsdpc_status fsdpc_param_buffer_own(fsdpc_param_buffer *param_buffer, size_t bytes,
                                    unsigned char **out)
{
    const fsdpc_comm *comm = param_buffer->comm;
    if (comm->ops->param_buffer_own)
        return comm->ops->param_buffer_own(param_buffer, bytes, out);
    void *data;
    fsdpc_mem_kind kind = param_buffer->pinned ? FSDPC_MEM_PINNED : FSDPC_MEM_UNSHARDED;
    FSDPC_TRY(fsdpc_device_alloc_zeroed(comm->device, kind, bytes, &data));
    *out = param_buffer->own = data;
    return FSDPC_OK;
}

fsdpc_status fsdpc_param_buffer_map_private(const fsdpc_param_buffer *param_buffer, size_t offset,
                                            size_t bytes, void *address)
{
    void *at = mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED,
                    param_buffer->memfd, (off_t)offset);
    if (at == MAP_FAILED)
        return fsdpc_fail_errno("mapping %zu bytes of a parameter buffer once more", bytes);
    madvise(at, bytes, MADV_DONTDUMP);
    return FSDPC_OK;
}

void fsdpc_param_buffer_drop_copies(void *address, size_t bytes)
{
    madvise(address, bytes, MADV_DONTNEED);
}

fsdpc_status fsdpc_buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_buffer **out)
{
    FSDPC_TRY(comm->ops->buffer_create(comm, bytes, out));
    FSDPC_NOTE(&comm->log, "made a reduce buffer of %zu bytes", bytes);
    return FSDPC_OK;
}

typedef struct epoch_wait {
    fsdpc_param_buffer *param_buffer;
    fsdpc_epoch_note *all;
} epoch_wait;

static fsdpc_status poll_epoch(void *arg)
{
    epoch_wait *w = arg;
    return w->param_buffer->comm->ops->epoch_test(w->param_buffer, w->all);
}

fsdpc_status fsdpc_param_buffer_epoch_wait(fsdpc_param_buffer *param_buffer, const char *unit,
                                           fsdpc_epoch_note *all_out)
{
    fsdpc_comm *comm = param_buffer->comm;
    fsdpc_epoch_note all;
    epoch_wait w = {param_buffer, &all};
    FSDPC_TRY(fsdpc_comm_wait_for(comm, poll_epoch, &w, "the beginning of an epoch", unit));
    *all_out = all;
    if (all.bits & FSDPC_EPOCH_CHANGED)
        FSDPC_NOTE(&comm->log, "epoch %llu changes the weights: unit %s, %llu steps taken",
                   (unsigned long long)param_buffer->epoch, unit ? unit : "none",
                   (unsigned long long)all.steps);
    else
        FSDPC_DEBUG(&comm->log, "epoch %llu changes nothing: unit %s",
                    (unsigned long long)param_buffer->epoch, unit ? unit : "none");
    return FSDPC_OK;
}

static fsdpc_status poll_copy_in(void *arg)
{
    fsdpc_param_buffer *param_buffer = arg;
    return param_buffer->comm->ops->epoch_copy_in_test(param_buffer);
}

fsdpc_status fsdpc_param_buffer_copy_in_wait(fsdpc_param_buffer *param_buffer, const char *unit)
{
    return fsdpc_comm_wait_for(param_buffer->comm, poll_copy_in, param_buffer,
                               "the copy-in of weights", unit);
}

static fsdpc_status poll_buffer(void *arg)
{
    fsdpc_buffer *buffer = arg;
    return buffer->comm->ops->buffer_idle(buffer);
}

fsdpc_status fsdpc_buffer_idle_wait(fsdpc_buffer *buffer, const char *unit)
{
    return fsdpc_comm_wait_for(buffer->comm, poll_buffer, buffer, "reuse of the reduce buffer",
                               unit);
}
