/* A NCCL for the emulated device: ranks are threads of one process, bytes are copied.
 *
 * Built as a libnccl.so.2 of its own, so that the loader finds in it what it would find in NCCL.
 * It keeps NCCL's rules and complains about who breaks them: nonblocking, so that inits and groups
 * stay in progress for some polls; no call on a communicator that is in progress; collectives run
 * in the order of their stream and meet the peers' there.  Sums are taken rank by rank and rounded
 * to the type after each, unlike the tree of the CPU's reductions.
 *
 * Meeting.  Every rank leaves a copy of what it sends, waits for all, computes its own result from
 * the copies, and waits again before the next may begin.  What a gather is to write holds noise
 * meanwhile, as nobody may read it before the gather is done.  Host threads read atomics alone, so
 * that ThreadSanitizer sees no order between host and stream that CUDA would not give.
 */
#include "fake_nccl.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "cuda/nccl_abi.h"

#define EXPORT __attribute__((visibility("default")))

enum { RANKS_MAX = 16, GROUP_MAX = 64, POLLS = 3, CONFIG_BYTES = 64 };

typedef enum op_kind { GATHER, SCATTER, ALL_REDUCE, REDUCE, BROADCAST } op_kind;

typedef struct fake_op {
    op_kind kind;
    const unsigned char *send;
    unsigned char *recv;
    size_t numel;
    fsdpc_nccl_type type;
    fsdpc_nccl_red red;
    int root;
} fake_op;

/* The ranks of one identity. */
typedef struct clique {
    struct clique *next;
    fsdpc_nccl_id id;
    int size;
    _Atomic int joined, finalized;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    long arrived, finished;
    unsigned char *copies[RANKS_MAX]; /* of what ranks send; kept until they send again */
} clique;

struct ncclComm {
    clique *all;
    int rank;
    _Atomic int refs; /* the caller's, and one for each group on a stream */
    _Atomic bool aborted;
    bool begun, finalized;
    int polls;       /* left until the call in progress is done */
    long launched;   /* groups */
    long turn, done; /* groups and operations that have run; under the lock */
    fake_op held[GROUP_MAX];
    int n_held;
    cudaStream_t stream;
};

typedef struct batch {
    fsdpc_nccl_comm comm;
    long number; /* groups run in order of launching, whatever their streams */
    int n;
    fake_op ops[GROUP_MAX];
} batch;

static pthread_mutex_t cliques_lock = PTHREAD_MUTEX_INITIALIZER;
static clique *cliques;
static _Atomic int drawn, fault, fault_rank, open_comms, out_of_place, forbidden;
static _Thread_local int depth;
static _Thread_local fsdpc_nccl_comm grouped;

EXPORT void fake_nccl_break(fake_nccl_fault what, int rank);
EXPORT void fake_nccl_counts(int *open, int *moved, int *wrong);
#define X(result, name, parameters) EXPORT result name parameters;
FSDPC_NCCL_SYMBOLS(X)
#undef X

void fake_nccl_break(fake_nccl_fault what, int rank)
{
    atomic_store(&fault_rank, rank);
    atomic_store(&fault, (int)what);
}

void fake_nccl_counts(int *open, int *moved, int *wrong)
{
    *open = atomic_load(&open_comms);
    *moved = atomic_load(&out_of_place);
    *wrong = atomic_load(&forbidden);
}

static bool is_broken(fake_nccl_fault what, int rank)
{
    return atomic_load(&fault) == (int)what && atomic_load(&fault_rank) == rank;
}

static fsdpc_nccl_result complain(const char *why)
{
    fprintf(stderr, "fake NCCL: %s\n", why);
    atomic_fetch_add(&forbidden, 1);
    return FSDPC_NCCL_INVALID_USAGE;
}

/* ---- Arithmetic ---- */

static size_t type_bytes(fsdpc_nccl_type type)
{
    switch (type) {
    case FSDPC_NCCL_UINT8:
        return 1;
    case FSDPC_NCCL_FLOAT16:
    case FSDPC_NCCL_BFLOAT16:
        return 2;
    case FSDPC_NCCL_INT32:
    case FSDPC_NCCL_FLOAT32:
        return 4;
    default:
        return 8;
    }
}

#define JOIN(ctype)                                                                                \
    do {                                                                                           \
        ctype x, y;                                                                                \
        memcpy(&x, into, sizeof x);                                                                \
        memcpy(&y, from, sizeof y);                                                                \
        x = red == FSDPC_NCCL_SUM   ? (ctype)(x + y)                                               \
            : red == FSDPC_NCCL_MAX ? (x > y ? x : y)                                              \
                                    : (x < y ? x : y);                                             \
        memcpy(into, &x, sizeof x);                                                                \
    } while (0)

#define JOIN_HALF(widen, narrow)                                                                   \
    do {                                                                                           \
        uint16_t x, y;                                                                             \
        memcpy(&x, into, sizeof x);                                                                \
        memcpy(&y, from, sizeof y);                                                                \
        x = narrow(widen(x) + widen(y));                                                           \
        memcpy(into, &x, sizeof x);                                                                \
    } while (0)

static void join(fsdpc_nccl_type type, fsdpc_nccl_red red, unsigned char *into,
                 const unsigned char *from)
{
    switch (type) {
    case FSDPC_NCCL_UINT8:
        JOIN(uint8_t);
        break;
    case FSDPC_NCCL_INT32:
        JOIN(int32_t);
        break;
    case FSDPC_NCCL_INT64:
        JOIN(int64_t);
        break;
    case FSDPC_NCCL_FLOAT32:
        JOIN(float);
        break;
    case FSDPC_NCCL_FLOAT64:
        JOIN(double);
        break;
    case FSDPC_NCCL_FLOAT16:
        JOIN_HALF(fsdpc_f16_to_f32, fsdpc_f32_to_f16);
        break;
    case FSDPC_NCCL_BFLOAT16:
        JOIN_HALF(fsdpc_bf16_to_f32, fsdpc_f32_to_bf16);
        break;
    }
}

static void join_ranks(const clique *all, const fake_op *op, size_t first, unsigned char *out)
{
    size_t element = type_bytes(op->type);
    memcpy(out, all->copies[0] + first * element, op->numel * element);
    for (int p = 1; p < all->size; p++)
        for (size_t j = 0; j < op->numel; j++)
            join(op->type, op->red, out + j * element, all->copies[p] + (first + j) * element);
}

/* ---- On a stream ---- */

static size_t sent_bytes(const fake_op *op, int size)
{
    return op->numel * type_bytes(op->type) * (op->kind == SCATTER ? (size_t)size : 1);
}

static void result_take(const clique *all, int rank, const fake_op *op)
{
    size_t bytes = op->numel * type_bytes(op->type);
    switch (op->kind) {
    case GATHER:
        for (int p = 0; p < all->size; p++)
            memcpy(op->recv + (size_t)p * bytes, all->copies[p], bytes);
        break;
    case SCATTER:
        join_ranks(all, op, (size_t)rank * op->numel, op->recv);
        break;
    case ALL_REDUCE:
        join_ranks(all, op, 0, op->recv);
        break;
    case REDUCE:
        if (rank == op->root)
            join_ranks(all, op, 0, op->recv);
        break;
    case BROADCAST:
        memcpy(op->recv, all->copies[op->root], bytes);
        break;
    }
}

static void spoil(const clique *all, int rank, const fake_op *op)
{
    enum { NOISE = 0x5a };
    size_t bytes = op->numel * type_bytes(op->type);
    for (int p = 0; op->kind == GATHER && p < all->size; p++)
        if (p != rank)
            memset(op->recv + (size_t)p * bytes, NOISE, bytes);
}

/* Waits until `count` has come to `target`; false if aborted first.  The lock is held. */
static bool meet(fsdpc_nccl_comm comm, const long *count, long target)
{
    while (*count < target && !atomic_load(&comm->aborted))
        pthread_cond_wait(&comm->all->moved, &comm->all->lock);
    return *count >= target;
}

static bool op_run(fsdpc_nccl_comm comm, const fake_op *op)
{
    clique *all = comm->all;
    size_t bytes = sent_bytes(op, all->size);
    unsigned char *copy = malloc(bytes);
    memcpy(copy, op->send, bytes);
    spoil(all, comm->rank, op);
    pthread_mutex_lock(&all->lock);
    long target = ++comm->done * all->size;
    while (
        (is_broken(FAKE_NCCL_STUCK, comm->rank) || is_broken(FAKE_NCCL_REMOTE_ERROR, comm->rank)) &&
        !atomic_load(&comm->aborted))
        pthread_cond_wait(&all->moved, &all->lock);
    free(all->copies[comm->rank]);
    all->copies[comm->rank] = copy;
    bool met = !atomic_load(&comm->aborted);
    if (met) {
        all->arrived++;
        pthread_cond_broadcast(&all->moved);
        met = meet(comm, &all->arrived, target);
    }
    pthread_mutex_unlock(&all->lock);
    if (!met)
        return false;
    result_take(all, comm->rank, op);
    pthread_mutex_lock(&all->lock);
    all->finished++;
    pthread_cond_broadcast(&all->moved);
    met = meet(comm, &all->finished, target);
    pthread_mutex_unlock(&all->lock);
    return met;
}

static void comm_release(fsdpc_nccl_comm comm)
{
    if (atomic_fetch_sub(&comm->refs, 1) == 1)
        free(comm);
}

static void batch_run(void *arg)
{
    batch *b = arg;
    clique *all = b->comm->all;
    pthread_mutex_lock(&all->lock);
    bool goes_on = meet(b->comm, &b->comm->turn, b->number);
    pthread_mutex_unlock(&all->lock);
    for (int i = 0; i < b->n && goes_on; i++)
        goes_on = op_run(b->comm, &b->ops[i]);
    pthread_mutex_lock(&all->lock);
    b->comm->turn++;
    pthread_cond_broadcast(&all->moved);
    pthread_mutex_unlock(&all->lock);
    comm_release(b->comm);
    free(b);
}

static void batch_enqueue(fsdpc_nccl_comm comm)
{
    batch *b = malloc(sizeof *b);
    b->comm = comm;
    b->number = comm->launched++;
    b->n = comm->n_held;
    memcpy(b->ops, comm->held, (size_t)comm->n_held * sizeof *b->ops);
    comm->n_held = 0;
    atomic_fetch_add(&comm->refs, 1);
    cudaLaunchHostFunc(comm->stream, batch_run, b);
}

/* ---- Life ---- */

fsdpc_nccl_result ncclGetVersion(int *version)
{
    *version = 22809;
    return FSDPC_NCCL_SUCCESS;
}

const char *ncclGetErrorString(fsdpc_nccl_result result)
{
    return result == FSDPC_NCCL_REMOTE_ERROR ? "remote process exited or there was a network error"
                                             : "fake error";
}

fsdpc_nccl_result ncclGetUniqueId(fsdpc_nccl_id *id)
{
    if (!id)
        return FSDPC_NCCL_INVALID_ARGUMENT;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "fake %d", atomic_fetch_add(&drawn, 1));
    id->internal[sizeof id->internal - 1] = '!'; /* all of it has to arrive */
    return FSDPC_NCCL_SUCCESS;
}

static clique *clique_of(const fsdpc_nccl_id *id, int size)
{
    pthread_mutex_lock(&cliques_lock);
    clique *all = cliques;
    while (all && memcmp(&all->id, id, sizeof *id) != 0)
        all = all->next;
    if (!all) {
        all = calloc(1, sizeof *all);
        all->id = *id;
        all->size = size;
        pthread_mutex_init(&all->lock, NULL);
        pthread_cond_init(&all->moved, NULL);
        all->next = cliques;
        cliques = all;
    }
    pthread_mutex_unlock(&cliques_lock);
    return all;
}

fsdpc_nccl_result ncclCommInitRankConfig(fsdpc_nccl_comm *comm, int size, fsdpc_nccl_id id,
                                         int rank, fsdpc_nccl_config *config)
{
    if (size < 1 || size > RANKS_MAX || rank < 0 || rank >= size || id.internal[127] != '!')
        return complain("an init with nonsense");
    if (config->magic != 0xcafebeef || config->size > CONFIG_BYTES || config->blocking != 0)
        return complain("a config that is none, or blocks");
    const char *order = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    if (!order || strcmp(order, "1") != 0)
        return complain("several communicators whose launch order is not implied");
    fsdpc_nccl_comm made = calloc(1, sizeof *made);
    made->all = clique_of(&id, size);
    if (made->all->size != size)
        return complain("ranks disagree on their number");
    made->rank = rank;
    made->polls = POLLS;
    atomic_init(&made->refs, 1);
    atomic_fetch_add(&made->all->joined, 1);
    atomic_fetch_add(&open_comms, 1);
    *comm = made;
    return FSDPC_NCCL_IN_PROGRESS;
}

fsdpc_nccl_result ncclCommGetAsyncError(fsdpc_nccl_comm comm, fsdpc_nccl_result *out)
{
    *out = FSDPC_NCCL_IN_PROGRESS;
    if (!comm->begun) {
        if (atomic_load(&comm->all->joined) < comm->all->size ||
            atomic_load(&fault) == FAKE_NCCL_NEVER_BEGINS)
            return FSDPC_NCCL_SUCCESS;
        comm->begun = true;
    }
    if (comm->polls > 0) {
        comm->polls--;
        return FSDPC_NCCL_SUCCESS;
    }
    if (comm->finalized && atomic_load(&comm->all->finalized) < comm->all->size)
        return FSDPC_NCCL_SUCCESS; /* it ends for all together */
    if (comm->n_held) {
        batch_enqueue(comm);
        *out = FSDPC_NCCL_SUCCESS;
        return FSDPC_NCCL_SUCCESS;
    }
    *out = is_broken(FAKE_NCCL_REMOTE_ERROR, comm->rank) ? FSDPC_NCCL_REMOTE_ERROR
                                                         : FSDPC_NCCL_SUCCESS;
    return FSDPC_NCCL_SUCCESS;
}

static bool is_in_progress(const struct ncclComm *comm)
{
    return !comm->begun || comm->polls > 0 || comm->n_held > 0;
}

fsdpc_nccl_result ncclCommFinalize(fsdpc_nccl_comm comm)
{
    if (is_in_progress(comm))
        return complain("a communicator is finalized while in progress");
    comm->finalized = true;
    atomic_fetch_add(&comm->all->finalized, 1);
    comm->polls = POLLS;
    return FSDPC_NCCL_IN_PROGRESS;
}

fsdpc_nccl_result ncclCommDestroy(fsdpc_nccl_comm comm)
{
    if (is_in_progress(comm) || atomic_load(&comm->all->finalized) < comm->all->size)
        return complain("a communicator is destroyed while in progress, or not finalized");
    atomic_fetch_sub(&open_comms, 1);
    comm_release(comm);
    return FSDPC_NCCL_SUCCESS;
}

fsdpc_nccl_result ncclCommAbort(fsdpc_nccl_comm comm)
{
    pthread_mutex_lock(&comm->all->lock);
    atomic_store(&comm->aborted, true);
    pthread_cond_broadcast(&comm->all->moved);
    pthread_mutex_unlock(&comm->all->lock);
    atomic_fetch_sub(&open_comms, 1);
    comm_release(comm);
    return FSDPC_NCCL_IN_PROGRESS;
}

/* ---- Calls ---- */

fsdpc_nccl_result ncclGroupStart(void)
{
    depth++;
    return FSDPC_NCCL_SUCCESS;
}

fsdpc_nccl_result ncclGroupEnd(void)
{
    fsdpc_nccl_comm comm = grouped;
    if (--depth < 0)
        return complain("a group ends that never began");
    grouped = NULL;
    if (!comm)
        return FSDPC_NCCL_SUCCESS;
    comm->polls = POLLS;
    return FSDPC_NCCL_IN_PROGRESS;
}

static fsdpc_nccl_result hold(fsdpc_nccl_comm comm, cudaStream_t stream, fake_op op)
{
    if (depth != 1)
        return complain("a collective outside of a group");
    if (grouped ? grouped != comm || comm->stream != stream : is_in_progress(comm))
        return complain("a collective while another is in progress, or of another group");
    if (comm->n_held == GROUP_MAX)
        return complain("more collectives in a group than the fake holds");
    if (op.kind == SCATTER &&
        op.recv != op.send + (size_t)comm->rank * op.numel * type_bytes(op.type))
        atomic_fetch_add(&out_of_place, 1);
    grouped = comm;
    comm->stream = stream;
    comm->held[comm->n_held++] = op;
    return FSDPC_NCCL_SUCCESS;
}

fsdpc_nccl_result ncclAllGather(const void *send, void *recv, size_t numel, fsdpc_nccl_type type,
                                fsdpc_nccl_comm comm, cudaStream_t stream)
{
    return hold(comm, stream, (fake_op){GATHER, send, recv, numel, type, FSDPC_NCCL_SUM, 0});
}

fsdpc_nccl_result ncclReduceScatter(const void *send, void *recv, size_t numel,
                                    fsdpc_nccl_type type, fsdpc_nccl_red red, fsdpc_nccl_comm comm,
                                    cudaStream_t stream)
{
    return hold(comm, stream, (fake_op){SCATTER, send, recv, numel, type, red, 0});
}

fsdpc_nccl_result ncclAllReduce(const void *send, void *recv, size_t numel, fsdpc_nccl_type type,
                                fsdpc_nccl_red red, fsdpc_nccl_comm comm, cudaStream_t stream)
{
    return hold(comm, stream, (fake_op){ALL_REDUCE, send, recv, numel, type, red, 0});
}

fsdpc_nccl_result ncclReduce(const void *send, void *recv, size_t numel, fsdpc_nccl_type type,
                             fsdpc_nccl_red red, int root, fsdpc_nccl_comm comm,
                             cudaStream_t stream)
{
    return hold(comm, stream, (fake_op){REDUCE, send, recv, numel, type, red, root});
}

fsdpc_nccl_result ncclBroadcast(const void *send, void *recv, size_t numel, fsdpc_nccl_type type,
                                int root, fsdpc_nccl_comm comm, cudaStream_t stream)
{
    return hold(comm, stream, (fake_op){BROADCAST, send, recv, numel, type, FSDPC_NCCL_SUM, root});
}
