/* A NCCL for the emulated device: ranks are threads or processes of one host, bytes are copied.
 *
 * Built as a libnccl.so.2 of its own, so that the loader finds in it what it would find in NCCL.
 * It keeps NCCL's rules and complains about who breaks them: nonblocking, so that inits and groups
 * stay in progress for some polls; no call on a communicator that is in progress; collectives run
 * in the order of their stream and meet the peers' there.  Sums are taken rank by rank and rounded
 * to the type after each, unlike the tree of the CPU's reductions.
 *
 * Meeting.  An identity names a memfd of the process that drew it, which the others open by way of
 * /proc; no death leaves anything behind.  Chunk by chunk every rank leaves what it sends there,
 * waits for all, computes its own result, and waits again before the next may begin.  Waits poll
 * atomics, so that a rank which is killed holds no lock, and are work of the stream that touches no
 * memory of the device, so that a host which asks for an event is not kept.  Host threads read
 * atomics alone, so that ThreadSanitizer sees no order between host and stream that CUDA would not
 * give.
 */
#include "fake_nccl.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/dtype.h"
#include "cuda/nccl_abi.h"

#define EXPORT __attribute__((visibility("default")))

enum { RANKS_MAX = 16, GROUP_MAX = 64, POLLS = 3, CONFIG_BYTES = 64 };
enum { AREA_BYTES = 1 << 20, LOOK_NS = 20000 };

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

/* Where the ranks of one identity meet. */
typedef struct meeting {
    _Atomic int size; /* 0 until the first rank joins */
    _Atomic int joined, finalized;
    _Atomic long arrived, finished; /* chunks, counted over ranks */
    unsigned char areas[RANKS_MAX][AREA_BYTES];
} meeting;

/* The meetings that this process has mapped; ranks that are its threads share one mapping. */
typedef struct clique {
    struct clique *next;
    fsdpc_nccl_id id;
    meeting *all;
} clique;

struct ncclComm {
    meeting *all;
    int rank, size;
    _Atomic int refs; /* the caller's, and one for each group on a stream */
    _Atomic bool aborted;
    bool begun, finalized;
    int polls;         /* left until the call in progress is done */
    long launched;     /* groups */
    _Atomic long turn; /* groups that have run */
    long chunks;       /* that have run; of whoever has the turn */
    fake_op held[GROUP_MAX];
    int n_held;
    cudaStream_t stream;
};

typedef struct batch {
    fsdpc_nccl_comm comm;
    long number; /* groups run in order of launching, whatever their streams */
    bool failed;
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

static pthread_mutex_t cliques_lock = PTHREAD_MUTEX_INITIALIZER;
static clique *cliques;
static _Atomic int fault, fault_rank, open_comms, out_of_place, forbidden;
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

/* ---- On a stream ---- */

/* The runtime's: of the program, or of the plugin, which keeps its symbols to itself. */
static void launch(cudaStream_t stream, cudaHostFn_t function, void *arg, bool touches_memory)
{
    static _Atomic(emu_launch_host_fn) found;
    emu_launch_host_fn call = atomic_load(&found);
    if (!call) {
        const char *plugin = getenv("FSDPC_CUDA_PLUGIN");
        void *handle = plugin ? dlopen(plugin, RTLD_NOW | RTLD_NOLOAD) : NULL;
        *(void **)&call = dlsym(handle ? handle : RTLD_DEFAULT, "emu_launch_host");
        if (!call) {
            fprintf(stderr, "fake NCCL: no emulated runtime: %s\n", dlerror());
            abort();
        }
        atomic_store(&found, call);
    }
    call(stream, function, arg, touches_memory);
}

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
    size_t element = type_bytes(op->type);
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
    size_t element = type_bytes(op->type), parts = parts_of(op, comm->size);
    if (c->of->failed)
        return;
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
    while (
        (is_broken(FAKE_NCCL_STUCK, comm->rank) || is_broken(FAKE_NCCL_REMOTE_ERROR, comm->rank)) &&
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
    size_t element = type_bytes(c->op->type);
    memcpy(out, comm->all->areas[0] + skipped * element, c->numel * element);
    for (int p = 1; p < comm->size; p++)
        for (size_t j = 0; j < c->numel; j++)
            join(c->op->type, c->op->red, out + j * element,
                 comm->all->areas[p] + (skipped + j) * element);
}

static void chunk_take(void *arg)
{
    chunk *c = arg;
    const fake_op *op = c->op;
    fsdpc_nccl_comm comm = c->of->comm;
    size_t element = type_bytes(op->type), bytes = c->numel * element;
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
    }
}

static void comm_release(fsdpc_nccl_comm comm)
{
    if (atomic_fetch_sub(&comm->refs, 1) == 1)
        free(comm);
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
    bool last = c->last;
    free(c);
    if (!last)
        return;
    atomic_fetch_add(&comm->turn, 1);
    comm_release(comm);
    free(b);
}

static void batch_begin(void *arg)
{
    batch *b = arg;
    const struct timespec pause = {0, LOOK_NS};
    while (atomic_load(&b->comm->turn) < b->number && !atomic_load(&b->comm->aborted))
        nanosleep(&pause, NULL);
    b->failed = atomic_load(&b->comm->aborted);
}

static void chunk_enqueue(batch *b, const fake_op *op, size_t first, size_t most)
{
    chunk *c = malloc(sizeof *c);
    size_t left = op->numel - first;
    *c = (chunk){b, op, first, left < most ? left : most, false};
    c->last = left <= most && op == &b->ops[b->n - 1];
    launch(b->comm->stream, chunk_give, c, true);
    launch(b->comm->stream, chunk_arrive, c, false);
    launch(b->comm->stream, chunk_take, c, true);
    launch(b->comm->stream, chunk_finish, c, false);
}

static void batch_enqueue(fsdpc_nccl_comm comm)
{
    batch *b = calloc(1, sizeof *b);
    int n = comm->n_held;
    b->comm = comm;
    b->number = comm->launched++;
    b->n = n;
    memcpy(b->ops, comm->held, (size_t)n * sizeof *b->ops);
    comm->n_held = 0;
    atomic_fetch_add(&comm->refs, 1);
    launch(comm->stream, batch_begin, b, false);
    for (int i = 0; i < n; i++) { /* the last chunk may free the batch before we are back */
        const fake_op op = comm->held[i];
        size_t most = AREA_BYTES / type_bytes(op.type) / parts_of(&op, comm->size);
        for (size_t first = 0; first < op.numel; first += most)
            chunk_enqueue(b, &b->ops[i], first, most);
    }
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

/* The memfd stays open for those who come. */
fsdpc_nccl_result ncclGetUniqueId(fsdpc_nccl_id *id)
{
    if (!id)
        return FSDPC_NCCL_INVALID_ARGUMENT;
    int fd = memfd_create("fake NCCL", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, sizeof(meeting)) != 0)
        return FSDPC_NCCL_SYSTEM_ERROR;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/proc/%d/fd/%d", (int)getpid(), fd);
    id->internal[sizeof id->internal - 1] = '!'; /* all of it has to arrive */
    return FSDPC_NCCL_SUCCESS;
}

static meeting *meeting_open(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    void *all = fd < 0 ? MAP_FAILED
                       : mmap(NULL, sizeof(meeting), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    return all == MAP_FAILED ? NULL : all;
}

static meeting *meeting_of(const fsdpc_nccl_id *id)
{
    pthread_mutex_lock(&cliques_lock);
    clique *it = cliques;
    while (it && memcmp(&it->id, id, sizeof *id) != 0)
        it = it->next;
    if (!it) {
        it = calloc(1, sizeof *it);
        it->id = *id;
        it->all = meeting_open(id->internal);
        it->next = cliques;
        cliques = it;
    }
    pthread_mutex_unlock(&cliques_lock);
    return it->all;
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
    meeting *all = meeting_of(&id);
    if (!all)
        return FSDPC_NCCL_SYSTEM_ERROR;
    int none = 0;
    if (!atomic_compare_exchange_strong(&all->size, &none, size) && none != size)
        return complain("ranks disagree on their number");
    fsdpc_nccl_comm made = calloc(1, sizeof *made);
    made->all = all;
    made->rank = rank;
    made->size = size;
    made->polls = POLLS;
    atomic_init(&made->refs, 1);
    atomic_fetch_add(&all->joined, 1);
    atomic_fetch_add(&open_comms, 1);
    *comm = made;
    return FSDPC_NCCL_IN_PROGRESS;
}

fsdpc_nccl_result ncclCommGetAsyncError(fsdpc_nccl_comm comm, fsdpc_nccl_result *out)
{
    *out = FSDPC_NCCL_IN_PROGRESS;
    if (!comm->begun) {
        if (atomic_load(&comm->all->joined) < comm->size ||
            atomic_load(&fault) == FAKE_NCCL_NEVER_BEGINS)
            return FSDPC_NCCL_SUCCESS;
        comm->begun = true;
    }
    if (comm->polls > 0) {
        comm->polls--;
        return FSDPC_NCCL_SUCCESS;
    }
    if (comm->finalized && atomic_load(&comm->all->finalized) < comm->size)
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
    if (is_in_progress(comm) || atomic_load(&comm->all->finalized) < comm->size)
        return complain("a communicator is destroyed while in progress, or not finalized");
    atomic_fetch_sub(&open_comms, 1);
    comm_release(comm);
    return FSDPC_NCCL_SUCCESS;
}

fsdpc_nccl_result ncclCommAbort(fsdpc_nccl_comm comm)
{
    atomic_store(&comm->aborted, true);
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
