/* A transport over MPI, in processes that mpiexec starts: test_transport_mpi PLUGIN MODE.
 *
 *     suite   messages of many sizes, their order, wrong sizes, waking, what waiting costs
 *     abort   the last rank aborts; all others fail with its reason
 *     late    rank 0 leaves at once, the others a second later: a clean end
 *     orphan  the last rank leaves, and all others learn that nothing will come from it
 *     leave   the last rank returns from main without destroying its transport
 *     fail    the last rank exits with status 3 after destroying its transport
 *     stuck   as late, with a deadline of a second for MPI_Finalize
 *     again   a second transport in a process is refused
 *     names   shared memory that is named as MPICH 5 names its own has lost its name
 *     speed   latency, bandwidth, and what a computing thread loses; prints rows
 */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "base/wait.h"
#include "check.h"
#include "plugin/plugin.h"

enum { PIECE = 60 << 10, MIB = 1 << 20, GUARD = 64, OPS = 64 };

static const int64_t SECOND = 1000000000;

static fsdpc_transport *mpi;
static _Atomic uint32_t bell;

static void ring(void *arg)
{
    (void)arg;
    atomic_fetch_add(&bell, 1);
    fsdpc_futex_wake(&bell);
}

static int variable(const char *first, const char *second)
{
    const char *text = getenv(first) ? getenv(first) : getenv(second);
    return text ? (int)strtol(text, NULL, 10) : -1;
}

static fsdpc_status post(bool sends, int peer, uint32_t tag, void *data, size_t bytes,
                         fsdpc_transport_op *op)
{
    *op = (fsdpc_transport_op){
        .transport = mpi, .sends = sends, .peer = peer, .tag = tag, .data = data, .bytes = bytes};
    return mpi->ops->post(op);
}

/* Sleeps on the bell alone, so an end without `wake` shows. */
static fsdpc_status wait_for(fsdpc_transport_op *op)
{
    int64_t end = fsdpc_clock_ns() + 60 * SECOND;
    for (;;) {
        uint32_t seen = atomic_load(&bell);
        fsdpc_status status = mpi->ops->test(op);
        if (status != FSDPC_IN_PROGRESS)
            return status;
        if (fsdpc_clock_ns() > end)
            return fsdpc_fail(FSDPC_ERR_TIMEOUT, "%zu bytes, tag %u, rank %d", op->bytes, op->tag,
                              op->peer);
        fsdpc_futex_wait(&bell, seen, 20 * SECOND);
    }
}

static unsigned char byte_of(int from, int to, uint32_t tag, size_t i)
{
    return (unsigned char)((size_t)from * 31 + (size_t)to * 7 + tag + i + (i >> 8) + (i >> 16));
}

static unsigned char *filled(int from, int to, uint32_t tag, size_t bytes)
{
    unsigned char *data = malloc(bytes + GUARD);
    for (size_t i = 0; i < bytes + GUARD; i++)
        data[i] = i < bytes ? byte_of(from, to, tag, i) : 0xa5;
    return data;
}

static bool holds(const unsigned char *data, int from, int to, uint32_t tag, size_t bytes)
{
    size_t wrong = 0;
    for (size_t i = 0; i < bytes + GUARD; i++)
        wrong += data[i] != (i < bytes ? byte_of(from, to, tag, i) : 0xa5);
    return wrong == 0;
}

/* Everybody to everybody, itself included. */
static void exchange(size_t bytes, uint32_t tag, bool receives_first)
{
    int n = mpi->size, me = mpi->rank;
    fsdpc_transport_op sends[OPS], receives[OPS];
    unsigned char *out[OPS], *in[OPS];
    for (int peer = 0; peer < n; peer++) {
        out[peer] = filled(me, peer, tag, bytes);
        in[peer] = malloc(bytes + GUARD);
        memset(in[peer], 0xa5, bytes + GUARD);
    }
    for (int turn = 0; turn < 2; turn++)
        for (int peer = 0; peer < n; peer++)
            if ((turn == 0) == receives_first)
                CHECK_OK(post(false, peer, tag, in[peer], bytes, &receives[peer]));
            else
                CHECK_OK(post(true, peer, tag, out[peer], bytes, &sends[peer]));
    for (int peer = 0; peer < n; peer++) {
        CHECK_OK(wait_for(&sends[peer]));
        CHECK_OK(wait_for(&receives[peer]));
        CHECK_NOTE(holds(in[peer], peer, me, tag, bytes), "%zu bytes from rank %d", bytes, peer);
        free(out[peer]);
        free(in[peer]);
    }
}

static void test_sizes(void)
{
    const size_t sizes[] = {0,         1,     7,         4096,      65537,
                            PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 90 * PIECE + 5};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        exchange(sizes[i], (uint32_t)i, (mpi->rank + (int)i) % 2 == 0);
    CHECK(mpi->tags >= 1u << 15);
    exchange(5, mpi->tags - 1, true);
}

/* Long and short messages of one tag arrive as they were sent. */
static void test_order(void)
{
    enum { N = 20 };
    int next = (mpi->rank + 1) % mpi->size, before = (mpi->rank + mpi->size - 1) % mpi->size;
    fsdpc_transport_op sends[N], receives[N];
    unsigned char *out[N], *in[N];
    for (int i = 0; i < N; i++) {
        size_t bytes = i % 3 ? 3 + (size_t)i : 5 * PIECE + (size_t)i;
        out[i] = filled(mpi->rank, i, 9, bytes);
        in[i] = malloc(bytes + GUARD);
        memset(in[i], 0xa5, bytes + GUARD);
        CHECK_OK(post(true, next, 9, out[i], bytes, &sends[i]));
    }
    for (int i = 0; i < N; i++)
        CHECK_OK(post(false, before, 9, in[i], sends[i].bytes, &receives[i]));
    for (int i = 0; i < N; i++) {
        CHECK_OK(wait_for(&sends[i]));
        CHECK_OK(wait_for(&receives[i]));
        CHECK_NOTE(holds(in[i], before, i, 9, receives[i].bytes), "message %d", i);
        free(out[i]);
        free(in[i]);
    }
}

/* The receiver fails and nothing beyond its memory is written; other tags go on. */
static void test_wrong_sizes(void)
{
    const size_t pairs[][2] = {
        {12, 8},   {8, 12}, {0, 1}, {PIECE, PIECE + 1}, {PIECE + 1, 1}, {2 * PIECE, PIECE},
        {3, PIECE}};
    for (uint32_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        fsdpc_transport_op op;
        if (mpi->rank == 0) {
            unsigned char *out = filled(0, 1, i, pairs[i][0]);
            CHECK_OK(post(true, 1, 100 + i, out, pairs[i][0], &op));
            wait_for(&op);
        } else if (mpi->rank == 1) {
            size_t bytes = pairs[i][1];
            unsigned char *in = malloc(bytes + GUARD);
            memset(in, 0xa5, bytes + GUARD);
            CHECK_OK(post(false, 0, 100 + i, in, bytes, &op));
            CHECK_FAILS(wait_for(&op), FSDPC_ERR_MISMATCH, "of another size than the");
            size_t wrong = 0;
            for (size_t at = bytes; at < bytes + GUARD; at++)
                wrong += in[at] != 0xa5;
            CHECK_NOTE(wrong == 0, "%zu bytes for %zu", pairs[i][0], bytes);
            free(in);
        }
        exchange(11, 200 + i, true);
    }
}

static int64_t process_ns(clockid_t clock)
{
    struct timespec used;
    clock_gettime(clock, &used);
    return used.tv_sec * SECOND + used.tv_nsec;
}

/* Processor time of all threads but this one, over the time that passed, while a receive waits. */
static double cost_of_waiting(int64_t ns)
{
    fsdpc_transport_op receive, send;
    int next = (mpi->rank + 1) % mpi->size, before = (mpi->rank + mpi->size - 1) % mpi->size;
    exchange(1, 300, true);
    int64_t began = fsdpc_clock_ns();
    int64_t others = process_ns(CLOCK_PROCESS_CPUTIME_ID) - process_ns(CLOCK_THREAD_CPUTIME_ID);
    CHECK_OK(post(false, before, 301, NULL, 0, &receive));
    _Atomic uint32_t nobody = 0;
    while (fsdpc_clock_ns() < began + ns)
        fsdpc_futex_wait(&nobody, 0, began + ns - fsdpc_clock_ns());
    others = process_ns(CLOCK_PROCESS_CPUTIME_ID) - process_ns(CLOCK_THREAD_CPUTIME_ID) - others;
    double share = (double)others / (double)(fsdpc_clock_ns() - began);
    CHECK_OK(post(true, next, 301, NULL, 0, &send));
    CHECK_OK(wait_for(&receive));
    CHECK_OK(wait_for(&send));
    return share;
}

static void suite(void)
{
    test_sizes();
    test_order();
    test_wrong_sizes();
    double share = cost_of_waiting(SECOND / 2);
    CHECK_NOTE(share < 0.1, "waiting took %.1f %% of a core", 100 * share);
    char text[256];
    mpi->ops->describe(mpi, text, sizeof text);
    CHECK_NOTE(strstr(text, "MPI between") && (strstr(text, "MPICH") || strstr(text, "Open MPI")),
               "%s", text);
}

static void aborts(void)
{
    unsigned char byte, *big = malloc(8 * MIB);
    fsdpc_transport_op waits, half;
    int last = mpi->size - 1;
    CHECK_OK(post(false, last, 1, &byte, 1, &waits));
    CHECK_OK(post(false, last, 2, big, 8 * MIB, &half));
    exchange(3, 3, true);
    char reason[64]; /* which named no rank */
    snprintf(reason, sizeof reason, "rank %d: out of paper", last);
    if (mpi->rank == last)
        mpi->ops->abort(mpi, "out of paper");
    CHECK_FAILS(wait_for(&waits), FSDPC_ERR_PEER, reason);
    CHECK_FAILS(wait_for(&half), FSDPC_ERR_PEER, reason);
    CHECK_FAILS(post(true, 0, 1, &byte, 1, &waits), FSDPC_ERR_PEER, reason);
    CHECK(strcmp(mpi->poison, reason) == 0);
}

static void pause_ms(int ms)
{
    usleep((useconds_t)ms * 1000);
}

static volatile double sink;

static double compute_s(void)
{
    int64_t began = fsdpc_clock_ns();
    double x = 1;
    for (long i = 0; i < 400000000; i++)
        x = x * 0.999999 + 1e-9;
    sink = x;
    return (double)(fsdpc_clock_ns() - began) / 1e9;
}

/* The median of five computations, while nothing is under way, or a receive waits. */
static double computing(bool waits)
{
    double times[5];
    fsdpc_transport_op receive, send;
    int next = (mpi->rank + 1) % mpi->size, before = (mpi->rank + mpi->size - 1) % mpi->size;
    for (int i = 0; i < 5; i++) {
        exchange(1, 400, true);
        if (waits)
            CHECK_OK(post(false, before, 401, NULL, 0, &receive));
        double s = compute_s();
        int at = i;
        for (; at > 0 && times[at - 1] > s; at--)
            times[at] = times[at - 1];
        times[at] = s;
        if (waits) {
            CHECK_OK(post(true, next, 401, NULL, 0, &send));
            CHECK_OK(wait_for(&send));
            CHECK_OK(wait_for(&receive));
        }
    }
    return times[2];
}

/* Seconds of an exchange of `bytes` with the neighbour, the least of `times` repetitions. */
static double exchanging(size_t bytes, int times, bool both)
{
    double best = 1e9;
    int peer = mpi->rank ^ 1;
    unsigned char *out = calloc(1, bytes + 1), *in = calloc(1, bytes + 1);
    for (int i = 0; i < times; i++) {
        exchange(1, 500, true);
        int64_t began = fsdpc_clock_ns();
        fsdpc_transport_op send, receive;
        for (int k = 0; k < (bytes < MIB ? 100 : 1); k++) {
            bool first = both || mpi->rank % 2 == 0;
            CHECK_OK(post(false, peer, 501, in, bytes, &receive));
            if (first)
                CHECK_OK(post(true, peer, 501, out, bytes, &send));
            CHECK_OK(wait_for(&receive));
            if (!first)
                CHECK_OK(post(true, peer, 501, out, bytes, &send));
            CHECK_OK(wait_for(&send));
        }
        double s = (double)(fsdpc_clock_ns() - began) / 1e9 / (bytes < MIB ? 100 : 1);
        best = s < best ? s : best;
    }
    free(out);
    free(in);
    return best;
}

static void speed(void)
{
    double small = exchanging(64, 5, false), middle = exchanging(65536, 5, false);
    double big = exchanging(64 * MIB, 5, true), medium = exchanging(4 * MIB, 9, true);
    double cost = cost_of_waiting(3 * SECOND);
    double idle = computing(false), busy = computing(true), after = computing(false);
    idle = idle < after ? idle : after;
    if (mpi->rank == 0)
        printf("there and back: 64 B %.1f us, 64 KiB %.1f us; both ways at once: 4 MiB %.2f ms "
               "(%.2f GB/s each way), 64 MiB %.1f ms (%.2f GB/s)\na receive that waits takes %.2f "
               "%% of a core; computing beside it takes %.3f s, without %.3f s (%+.1f %%)\n",
               small * 1e6, middle * 1e6, medium * 1e3, 4.194304e-3 / medium, big * 1e3,
               67.108864e-3 / big, 100 * cost, busy, idle, 100 * (busy / idle - 1));
}

/* What was sent before it left arrives; what was not never will. */
static void orphans(void)
{
    static unsigned char data[3 * MIB];
    fsdpc_transport_op op = {0};
    int last = mpi->size - 1;
    if (mpi->rank == last) {
        for (int peer = 0; peer < last; peer++) {
            CHECK_OK(post(true, peer, 601, data, sizeof data, &op));
            CHECK_OK(wait_for(&op));
        }
        snprintf(mpi->farewells[last], FSDPC_TRANSPORT_FAREWELL, "; it was in a test");
        mpi->ops->leave(mpi);
        return;
    }
    pause_ms(300);
    CHECK_OK(post(false, last, 601, data, sizeof data, &op));
    CHECK_OK(wait_for(&op));
    CHECK_OK(post(false, last, 601, data, sizeof data, &op));
    for (int twice = 0; twice < 2; twice++) {
        CHECK_FAILS(wait_for(&op), FSDPC_ERR_PEER, "waits for it; it was in a test");
        CHECK_OK(post(false, last, 601, data, sizeof data, &op));
    }
    CHECK_FAILS(wait_for(&op), FSDPC_ERR_PEER, "left (it shut its communicator down) while rank");
    CHECK_OK(fsdpc_transport_health(mpi));
}

/* Maps shared memory as MPICH 5 does in MPI_Init, and returns its name. */
static const char *map_as_mpich(void)
{
    static char name[64];
    snprintf(name, sizeof name, "/mpich_shm_fsdpc_test_%d", (int)getpid());
    int fd = shm_open(name, O_CREAT | O_RDWR, 0600);
    CHECK(fd >= 0 && ftruncate(fd, 4096) == 0);
    CHECK(mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0) != MAP_FAILED);
    close(fd);
    return name;
}

int main(int argc, char **argv)
{
    const char *mode = argc > 2 ? argv[2] : "suite";
    int rank = variable("OMPI_COMM_WORLD_RANK", "PMI_RANK");
    int size = variable("OMPI_COMM_WORLD_SIZE", "PMI_SIZE");
    const char *shared = strcmp(mode, "names") == 0 ? map_as_mpich() : NULL;
    const fsdpc_plugin *plugin = NULL;
    fsdpc_status status = fsdpc_plugin_load(argc > 1 ? argv[1] : "none", &plugin);
    if (status == FSDPC_OK)
        status = plugin->transport_create(rank, size, &mpi);
    if (status != FSDPC_OK) {
        printf("refused: %s\n", fsdpc_last_error());
        return 2;
    }
    if (shared)
        CHECK(shm_unlink(shared) != 0); /* it has no name any more */
    mpi->ops->set_wake(mpi, ring, NULL);
    int last = mpi->size - 1, me = mpi->rank;
    if (strcmp(mode, "suite") == 0)
        suite();
    else if (strcmp(mode, "speed") == 0)
        speed();
    else if (strcmp(mode, "abort") == 0)
        aborts();
    else
        exchange(100, 1, true);
    if (strcmp(mode, "orphan") == 0)
        orphans();
    if (strcmp(mode, "stuck") == 0) {
        mpi->timeout_s = 1;
        mpi->log = (fsdpc_log){.level = FSDPC_LOG_WARNING, .rank = me};
    }
    if ((strcmp(mode, "late") == 0 || strcmp(mode, "stuck") == 0) && me != 0)
        pause_ms(1000);
    if (strcmp(mode, "leave") == 0 && me == last)
        return check_report("test_transport_mpi");
    fsdpc_transport_destroy(mpi);
    if (strcmp(mode, "again") == 0) {
        pause_ms(500);
        CHECK_FAILS(plugin->transport_create(rank, size, &mpi), FSDPC_ERR_STATE, "MPI ");
    }
    int failed = check_report("test_transport_mpi");
    fflush(stdout);
    if (strcmp(mode, "abort") == 0) /* launchers kill the others when one has ended so */
        pause_ms(2000);
    return strcmp(mode, "fail") == 0 && me == last ? 3 : failed;
}
