/* comm/host_watch: what one host learns all hosts know; a connection that closes is a death, unless
 * it said goodbye; a host that is silent is warned of. Hosts are worlds of two threads.
 */
#include "comm/host_watch.h"

#include <arpa/inet.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "comm_ranks.h"

enum { HOSTS = 3, PATIENCE_MS = 20000 };

static fsdpc_comm *host[HOSTS][2];
static fsdpc_host_watch *watch[HOSTS];
static _Atomic int warnings;

static void count_warning(void *arg, fsdpc_log_level level, const char *line)
{
    (void)arg, (void)level;
    if (strstr(line, "node1: rank 2 has not answered"))
        atomic_fetch_add(&warnings, 1);
}

/* Two ends of a TCP connection. */
static void connect_pair(int ends[2])
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof at;
    int listening = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listening, (struct sockaddr *)&at, sizeof at) == 0 && listen(listening, 1) == 0);
    getsockname(listening, (struct sockaddr *)&at, &bytes);
    ends[0] = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(ends[0], (struct sockaddr *)&at, sizeof at) == 0);
    ends[1] = accept(listening, NULL, NULL);
    CHECK(ends[1] >= 0);
    close(listening);
}

static void open_hosts(void)
{
    for (int h = 0; h < HOSTS; h++) {
        fsdpc_comm_config configs[2];
        for (int r = 0; r < 2; r++)
            configs[r] = (fsdpc_comm_config){.rank = r,
                                             .size = 2,
                                             .first_rank = 2 * h,
                                             .timeout_s = 60,
                                             .notice_s = 60,
                                             .log = {FSDPC_LOG_WARNING, -1, count_warning, NULL}};
        CHECK_OK(fsdpc_comm_shm_create_threads(configs, 2, host[h]));
    }
}

static void start_watch(int h, const int *fds, int n)
{
    fsdpc_host_watch_peer peers[HOSTS];
    fsdpc_host_watch_config config = {.silence_s = 5, .n_peers = n, .peers = peers};
    snprintf(config.host, sizeof config.host, "node%d", h);
    for (int i = 0; i < n; i++) {
        int other = h == 0 ? i + 1 : 0;
        peers[i] = (fsdpc_host_watch_peer){.fd = fds[i], .first_rank = 2 * other, .n_ranks = 2};
        snprintf(peers[i].host, sizeof peers[i].host, "node%d", other);
    }
    CHECK_OK(fsdpc_host_watch_start(host[h][0], &config, &watch[h]));
}

/* Host 0 and so many others; what is left of the connections are the test's. */
static void start(int others, int theirs[HOSTS])
{
    int ours[HOSTS];
    open_hosts();
    for (int h = 1; h < HOSTS; h++) {
        int ends[2];
        connect_pair(ends);
        ours[h - 1] = ends[0];
        theirs[h] = ends[1];
        if (h <= others)
            start_watch(h, &theirs[h], 1);
    }
    start_watch(0, ours, HOSTS - 1);
}

static void stop(void)
{
    for (int h = 0; h < HOSTS; h++) {
        fsdpc_host_watch_stop(watch[h]);
        watch[h] = NULL;
        for (int r = 0; r < 2; r++)
            fsdpc_comm_destroy(host[h][r]);
    }
}

/* Waits until a rank of a host learns of it, and says what. */
static void learns(int h, int rank, const char *text)
{
    char note[256];
    int ms = 0;
    while (fsdpc_comm_look(host[h][rank], note, sizeof note) == FSDPC_OK && ms++ < PATIENCE_MS)
        usleep(1000);
    CHECK_NOTE(ms < PATIENCE_MS && strstr(fsdpc_last_error(), text), "host %d: %s", h,
               fsdpc_last_error());
}

static void healthy(int h)
{
    char note[256];
    CHECK_OK(fsdpc_comm_look(host[h][0], note, sizeof note));
}

static void test_a_failure_reaches_all_hosts(void)
{
    int theirs[HOSTS];
    start(2, theirs);
    fsdpc_comm_abort(host[2][1], "out of disk");
    for (int h = 0; h < HOSTS; h++)
        learns(h, 1, "rank 5: out of disk");
    learns(0, 0, "node2: rank 5: out of disk");
    stop();
}

static void test_goodbye_is_no_death(void)
{
    int theirs[HOSTS];
    start(2, theirs);
    fsdpc_host_watch_stop(watch[2]);
    watch[2] = NULL;
    usleep(500000); /* longer than a tick: a death would be known */
    healthy(0);
    healthy(1);
    fsdpc_comm_abort(host[1][0], "after that"); /* the others go on watching */
    learns(0, 0, "node1: rank 2: after that");
    stop();
}

static void test_a_closed_connection_is_a_death(void)
{
    int theirs[HOSTS];
    start(1, theirs);
    close(theirs[2]);
    learns(0, 1, "node2: rank 4 died");
    learns(1, 1, "node2: rank 4 died");
    stop();
}

/* Host 1 is played by a test that says nothing: it is warned of, and nobody fails for it. */
static void test_silence_is_warned_of(void)
{
    int theirs[HOSTS], ms = 0;
    char nonsense[2000];
    start(0, theirs);
    while (atomic_load(&warnings) == 0 && ms++ < PATIENCE_MS)
        usleep(1000);
    CHECK(atomic_load(&warnings) == 1);
    healthy(0);
    memset(nonsense, 0xff, sizeof nonsense);
    CHECK(send(theirs[1], nonsense, sizeof nonsense, 0) == sizeof nonsense);
    usleep(500000);
    healthy(0);
    close(theirs[1]);
    learns(0, 1, "node1: rank 2 died");
    close(theirs[2]);
    stop();
}

int main(void)
{
    test_a_failure_reaches_all_hosts();
    test_goodbye_is_no_death();
    test_a_closed_connection_is_a_death();
    test_silence_is_warned_of();
    return check_report("test_host_watch");
}
