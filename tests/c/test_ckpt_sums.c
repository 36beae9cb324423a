/* Checksums of files by any number of threads: those of the bytes, cut into any runs; errors of
 * any of the threads are the answer. */
#include "ckpt/sums.h"

#include <unistd.h>

#include "base/crc32c.h"
#include "base/fs.h"
#include "check.h"

enum { FILES = 2, BYTES = (19 << 20) + 4099, RUNS = 5, PATH_BYTES = 512 };

typedef struct made {
    char folder[PATH_BYTES], paths[FILES][PATH_BYTES];
    unsigned char *data[FILES];
} made;

static void make(made *m)
{
    const char *base = getenv("TMPDIR");
    snprintf(m->folder, sizeof m->folder, "%.400s/fsdpc-sums-XXXXXX", base ? base : "/tmp");
    CHECK(mkdtemp(m->folder) != NULL);
    for (int f = 0; f < FILES; f++) {
        snprintf(m->paths[f], sizeof m->paths[f], "%.400s/%d", m->folder, f);
        m->data[f] = malloc(BYTES);
        uint32_t word = (uint32_t)f + 1;
        for (size_t i = 0; i < BYTES; i++)
            m->data[f][i] = (unsigned char)((word = word * 1664525u + 1013904223u) >> 24);
        int fd;
        CHECK_OK(fsdpc_fs_create(NULL, m->paths[f], BYTES, &fd));
        CHECK_OK(fsdpc_fs_pwrite(NULL, fd, m->paths[f], m->data[f], BYTES, 0));
        CHECK_OK(fsdpc_fs_close(NULL, fd, m->paths[f]));
    }
}

static void drop(made *m)
{
    for (int f = 0; f < FILES; f++)
        free(m->data[f]);
    CHECK_OK(fsdpc_fs_remove_tree(NULL, m->folder));
}

/* All of the first file; the second half of the other; odd bytes; none. */
static size_t lay_runs(const made *m, fsdpc_ckpt_run *runs)
{
    uint64_t half = BYTES / 2;
    size_t n = 0;
    runs[n++] = (fsdpc_ckpt_run){.path = m->paths[0], .bytes = BYTES};
    runs[n++] = (fsdpc_ckpt_run){.path = m->paths[1], .offset = half, .bytes = BYTES - half};
    runs[n++] = (fsdpc_ckpt_run){.path = m->paths[0], .offset = 3, .bytes = 1};
    runs[n++] = (fsdpc_ckpt_run){.path = m->paths[0], .offset = BYTES};
    runs[n++] = (fsdpc_ckpt_run){.path = m->paths[1], .offset = 77, .bytes = (8 << 20) + 1};
    return n;
}

static void test_sums(void)
{
    made m;
    fsdpc_ckpt_run runs[RUNS];
    make(&m);
    size_t n = lay_runs(&m, runs);
    const uint32_t want[RUNS] = {fsdpc_crc32c(0, m.data[0], BYTES),
                                 fsdpc_crc32c(0, m.data[1] + BYTES / 2, BYTES - BYTES / 2),
                                 fsdpc_crc32c(0, m.data[0] + 3, 1), 0,
                                 fsdpc_crc32c(0, m.data[1] + 77, (8 << 20) + 1)};
    for (int threads = 0; threads <= 7; threads++) {
        uint32_t crcs[RUNS];
        CHECK_OK(fsdpc_ckpt_sum(runs, n, threads, crcs));
        for (int t = 0; t < RUNS; t++)
            CHECK_NOTE(crcs[t] == want[t], "run %d, %d threads: %08x, not %08x", t, threads,
                       crcs[t], want[t]);
    }
    uint32_t none = 5;
    CHECK_OK(fsdpc_ckpt_sum(runs, 0, 3, &none));
    CHECK(none == 5);
    drop(&m);
}

static void test_errors(void)
{
    made m;
    fsdpc_ckpt_run runs[RUNS];
    uint32_t crcs[RUNS];
    make(&m);
    size_t n = lay_runs(&m, runs);
    CHECK(truncate(m.paths[1], BYTES - 1) == 0);
    for (int threads = 1; threads <= 4; threads++)
        CHECK_FAILS(fsdpc_ckpt_sum(runs, n, threads, crcs), FSDPC_ERR_OS, "/1' ends at byte");
    CHECK(unlink(m.paths[0]) == 0);
    for (int threads = 1; threads <= 4; threads++)
        CHECK_FAILS(fsdpc_ckpt_sum(runs, 1, threads, crcs), FSDPC_ERR_OS,
                    "No such file or directory");
    drop(&m);
}

int main(void)
{
    test_sums();
    test_errors();
    return check_report("test_ckpt_sums");
}
