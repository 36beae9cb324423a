/* A NCCL for the emulated device: ranks are threads or processes of this machine, whatever hosts
 * they are told to be on, and bytes are copied.
 *
 * Built as a libnccl.so.2 of its own, so that the loader finds in it what it would find in NCCL.
 * It keeps NCCL's rules and complains about who breaks them: nonblocking, so that inits and groups
 * stay in progress for some polls; no call on a communicator that is in progress; collectives run
 * in the order of their stream and meet the peers' there. The environment counts as it was at the
 * first call. An abort ends what runs, and waits until it has, and until no graph holds any of it;
 * those of a group end together.
 *
 * It is NCCL 2.30.7, or what FAKE_NCCL_VERSION or a test says, and lets ranks share a GPU where the
 * environment says so, as that one does.
 *
 *     fake_nccl.c     NCCL's functions: life, and calls, which are held until their group begins
 *     fake_stream.c   what runs on the streams
 *     fake_join.c     sums and extrema
 *     fake_register.c memory that it is told of
 *
 * An identity names a memfd of the process that drew it, which the others open by way of /proc; no
 * death leaves anything behind.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake_inside.h"
#include "fake_launch.h"

/* The meetings that this process has mapped; ranks that are its threads share one mapping. */
typedef struct clique {
    struct clique *next;
    fsdpc_nccl_id id;
    meeting *all;
} clique;

static pthread_mutex_t cliques_lock = PTHREAD_MUTEX_INITIALIZER;
static clique *cliques;
static _Atomic int fault, fault_rank, open_comms, out_of_place, forbidden;
static _Atomic int told_version;
static pthread_once_t environment_read = PTHREAD_ONCE_INIT;
static bool implicit_order;
static _Thread_local int depth;
static _Thread_local fsdpc_nccl_comm grouped, ending;

EXPORT void fake_nccl_break(fake_nccl_fault what, int rank);
EXPORT void fake_nccl_counts(int *open, int *moved, int *wrong);
EXPORT void fake_nccl_set_version(int version);
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

void fake_nccl_set_version(int version)
{
    atomic_store(&told_version, version);
}

bool fake_is_ended(const struct ncclComm *comm)
{
    return atomic_load(&comm->aborted) && !fake_is_broken(FAKE_NCCL_CLINGS, comm->rank);
}

bool fake_is_broken(fake_nccl_fault what, int rank)
{
    int whose = atomic_load(&fault_rank);
    return atomic_load(&fault) == (int)what && (whose == rank || whose < 0);
}

fsdpc_nccl_result fake_complain(const char *why)
{
    fprintf(stderr, "fake NCCL: %s\n", why);
    atomic_fetch_add(&forbidden, 1);
    return FSDPC_NCCL_INVALID_USAGE;
}

/* ---- Life ---- */

void fake_comm_release(fsdpc_nccl_comm comm)
{
    if (atomic_fetch_sub(&comm->refs, 1) == 1)
        free(comm);
}

fsdpc_nccl_result ncclGetVersion(int *version)
{
    const char *asked = getenv("FAKE_NCCL_VERSION");
    int told = atomic_load(&told_version);
    *version = told ? told : asked ? atoi(asked) : 23007;
    return FSDPC_NCCL_SUCCESS;
}

const char *ncclGetErrorString(fsdpc_nccl_result result)
{
    return result == FSDPC_NCCL_REMOTE_ERROR ? "remote process exited or there was a network error"
                                             : "fake error";
}

static void read_environment(void)
{
    const char *order = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    implicit_order = order && strcmp(order, "1") == 0;
}

/* Whether the environment implies a launch order: as it did when NCCL was first used. */
static bool implies_order(void)
{
    pthread_once(&environment_read, read_environment);
    return implicit_order;
}

/* The memfd stays open for those who come. */
fsdpc_nccl_result ncclGetUniqueId(fsdpc_nccl_id *id)
{
    if (!id)
        return FSDPC_NCCL_INVALID_ARGUMENT;
    implies_order();
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

/* Whether a config reaches to a field that ends there, and came with this version. */
static bool has_field(const fsdpc_nccl_config *config, size_t end, unsigned version)
{
    bool long_enough = config->size >= end, new_enough = config->version >= version;
    if (long_enough != new_enough)
        fake_complain("a config whose size is not its version's");
    return long_enough && new_enough;
}

static bool asks_for_order(const fsdpc_nccl_config *config)
{
    size_t end = offsetof(fsdpc_nccl_config, launch_order) + sizeof config->launch_order;
    int version;
    ncclGetVersion(&version);
    return has_field(config, end, FSDPC_NCCL_LAUNCH_ORDER_FIELD) && config->launch_order == 1 &&
           version >= FSDPC_NCCL_LAUNCH_ORDER_FIELD;
}

/* Whether a GPU may be that of several ranks; in C's tests at any version. */
static bool may_share(void)
{
    const char *enabled = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    return enabled && strcmp(enabled, "1") == 0;
}

static bool do_share(const struct ncclComm *comm)
{
    for (int r = 0; r < comm->size; r++)
        if (r != comm->rank && comm->all->devices[r] == comm->all->devices[comm->rank] &&
            comm->all->hosts[r] == comm->all->hosts[comm->rank])
            return true;
    return false;
}

/* Which host this is, as NCCL sees it: what it is told, else the host's name. */
static unsigned this_host(void)
{
    char name[64] = "";
    const char *told = getenv("NCCL_HOSTID");
    unsigned hash = 5381;
    (void)gethostname(name, sizeof name - 1);
    for (const char *at = told ? told : name; *at; at++)
        hash = 33 * hash + (unsigned char)*at;
    return hash;
}

fsdpc_nccl_result ncclCommInitRankConfig(fsdpc_nccl_comm *comm, int size, fsdpc_nccl_id id,
                                         int rank, fsdpc_nccl_config *config)
{
    if (size < 1 || size > RANKS_MAX || rank < 0 || rank >= size || id.internal[127] != '!')
        return fake_complain("an init with nonsense");
    if (config->magic != 0xcafebeef || config->size > CONFIG_BYTES || config->blocking != 0)
        return fake_complain("a config that is none, or blocks");
    if (!asks_for_order(config) && !implies_order())
        return fake_complain("several communicators whose launch order is not implied");
    meeting *all = meeting_of(&id);
    if (!all)
        return FSDPC_NCCL_SYSTEM_ERROR;
    int none = 0;
    if (!atomic_compare_exchange_strong(&all->size, &none, size) && none != size)
        return fake_complain("ranks disagree on their number");
    fsdpc_nccl_comm made = calloc(1, sizeof *made);
    made->all = all;
    made->rank = rank;
    made->size = size;
    made->polls = POLLS;
    made->may_share = may_share();
    atomic_init(&made->refs, 1);
    int (*device)(void);
    *(void **)&device = fake_runtime("emu_selected_device");
    all->devices[rank] = device();
    all->hosts[rank] = this_host();
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
        if (!comm->may_share && do_share(comm)) {
            *out = FSDPC_NCCL_INVALID_USAGE;
            return FSDPC_NCCL_SUCCESS;
        }
        comm->begun = true;
    }
    if (comm->polls > 0) {
        comm->polls--;
        return FSDPC_NCCL_SUCCESS;
    }
    if (comm->finalized && atomic_load(&comm->all->finalized) < comm->size)
        return FSDPC_NCCL_SUCCESS; /* it ends for all together */
    if (comm->n_held) {
        fake_run(comm);
        *out = comm->spoiled ? FSDPC_NCCL_INVALID_USAGE : FSDPC_NCCL_SUCCESS;
        return FSDPC_NCCL_SUCCESS;
    }
    *out = fake_is_broken(FAKE_NCCL_REMOTE_ERROR, comm->rank) ? FSDPC_NCCL_REMOTE_ERROR
                                                              : fake_registering(comm);
    return FSDPC_NCCL_SUCCESS;
}

bool fake_is_in_progress(const struct ncclComm *comm)
{
    return !comm->begun || comm->polls > 0 || comm->n_held > 0 ||
           fake_registering(comm) == FSDPC_NCCL_IN_PROGRESS;
}

fsdpc_nccl_result ncclCommFinalize(fsdpc_nccl_comm comm)
{
    if (fake_is_in_progress(comm))
        return fake_complain("a communicator is finalized while in progress");
    comm->finalized = true;
    atomic_fetch_add(&comm->all->finalized, 1);
    comm->polls = POLLS;
    return FSDPC_NCCL_IN_PROGRESS;
}

fsdpc_nccl_result ncclCommDestroy(fsdpc_nccl_comm comm)
{
    if (fake_is_in_progress(comm) || atomic_load(&comm->all->finalized) < comm->size)
        return fake_complain("a communicator is destroyed while in progress, or not finalized");
    fake_forget_all(comm, true);
    atomic_fetch_sub(&open_comms, 1);
    fake_comm_release(comm);
    return FSDPC_NCCL_SUCCESS;
}

static void end(fsdpc_nccl_comm comm)
{
    fake_wait_unused(comm);
    fake_forget_all(comm, false);
    atomic_fetch_sub(&open_comms, 1);
    fake_comm_release(comm);
}

fsdpc_nccl_result ncclCommAbort(fsdpc_nccl_comm comm)
{
    atomic_store(&comm->aborted, true);
    if (depth > 0) {
        comm->next_ending = ending;
        ending = comm;
        return FSDPC_NCCL_SUCCESS;
    }
    end(comm);
    return FSDPC_NCCL_SUCCESS;
}

static void end_grouped(void)
{
    while (ending) {
        fsdpc_nccl_comm comm = ending;
        ending = comm->next_ending;
        end(comm);
    }
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
        return fake_complain("a group ends that never began");
    grouped = NULL;
    end_grouped();
    if (!comm)
        return FSDPC_NCCL_SUCCESS;
    comm->polls = POLLS;
    comm->captured = fake_captured(comm->stream);
    return FSDPC_NCCL_IN_PROGRESS;
}

static fsdpc_nccl_result hold(fsdpc_nccl_comm comm, cudaStream_t stream, fake_op op)
{
    if (depth != 1)
        return fake_complain("a collective outside of a group");
    if (grouped ? grouped != comm || comm->stream != stream : fake_is_in_progress(comm))
        return fake_complain("a collective while another is in progress, or of another group");
    if (comm->n_held && fake_exchanges(&comm->held[0]) != fake_exchanges(&op))
        return fake_complain("an exchange in a group with collectives");
    if (comm->n_held == GROUP_MAX)
        return fake_complain("more collectives in a group than the fake holds");
    if (op.kind == SCATTER &&
        op.recv != op.send + (size_t)comm->rank * op.numel * fake_type_bytes(op.type))
        atomic_fetch_add(&out_of_place, 1);
    if (op.kind == GATHER)
        fake_look_at_gather(comm, &op);
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

fsdpc_nccl_result ncclBroadcast(const void *send, void *recv, size_t numel, fsdpc_nccl_type type,
                                int root, fsdpc_nccl_comm comm, cudaStream_t stream)
{
    return hold(comm, stream, (fake_op){BROADCAST, send, recv, numel, type, FSDPC_NCCL_SUM, root});
}

static bool is_peer(const struct ncclComm *comm, int peer)
{
    return peer >= 0 && peer < comm->size && peer != comm->rank;
}

fsdpc_nccl_result ncclSend(const void *send, size_t numel, fsdpc_nccl_type type, int peer,
                           fsdpc_nccl_comm comm, cudaStream_t stream)
{
    if (!is_peer(comm, peer))
        return fake_complain("a send to nobody");
    return hold(comm, stream, (fake_op){SEND, send, NULL, numel, type, FSDPC_NCCL_SUM, peer});
}

fsdpc_nccl_result ncclRecv(void *recv, size_t numel, fsdpc_nccl_type type, int peer,
                           fsdpc_nccl_comm comm, cudaStream_t stream)
{
    if (!is_peer(comm, peer))
        return fake_complain("a receipt from nobody");
    return hold(comm, stream, (fake_op){RECV, NULL, recv, numel, type, FSDPC_NCCL_SUM, peer});
}
