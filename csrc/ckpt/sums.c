/* Computes checksums on several threads.
 *
 * One core computes checksums about as fast as it copies from the page cache. A single thread would
 * therefore check files at little more than half the speed of a plain reader. Disks also benefit
 * from several concurrent reads. Spans are long enough for the kernel to read ahead in each. They
 * are also long enough to make the cost of the lock (on the cursor, the sums and the first error)
 * negligible. A chunk of a span is summed while it is in the core's own cache. Every thread opens
 * the files itself, because the kernel reads ahead per open file.
 */
#include "ckpt/sums.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "base/fs.h"
#include "base/thread.h"

enum { SPAN_BYTES = 8 << 20, CHUNK_BYTES = 256 << 10, MAX_THREADS = 64 };

typedef struct summing {
    const fsdpc_ckpt_run *runs;
    size_t n_runs;
    uint32_t *crcs;

    pthread_mutex_t lock; /* guards all below, and crcs */
    size_t run;           /* the next run to take from, */
    uint64_t done;        /* starting at this offset */
    fsdpc_status status;  /* the first error, with its text */
    char text[512];
} summing;

/* The part of a run that a thread reads at a time. */
typedef struct span {
    const char *path;
    size_t run;
    uint64_t offset, bytes; /* in the file */
    uint64_t bytes_behind;  /* bytes of the run after the span */
} span;

/* The state of one reading thread. */
typedef struct reader {
    const char *path; /* the open file's path, or NULL */
    int fd;
    unsigned char *chunk;
} reader;

/* Takes the next span; returns false if there is none, or after a failure. */
static bool take(summing *all, span *out)
{
    pthread_mutex_lock(&all->lock);
    while (all->run < all->n_runs && all->done == all->runs[all->run].bytes) {
        all->run++;
        all->done = 0;
    }
    bool found = all->status == FSDPC_OK && all->run < all->n_runs;
    if (found) {
        const fsdpc_ckpt_run *run = &all->runs[all->run];
        uint64_t left = run->bytes - all->done;
        uint64_t bytes = left < SPAN_BYTES ? left : SPAN_BYTES;
        *out = (span){run->path, all->run, run->offset + all->done, bytes, left - bytes};
        all->done += bytes;
    }
    pthread_mutex_unlock(&all->lock);
    return found;
}

static fsdpc_status open_file(reader *r, const char *path)
{
    if (r->path == path)
        return FSDPC_OK;
    if (r->path)
        FSDPC_TRY(fsdpc_fs_close(NULL, r->fd, r->path));
    r->path = NULL;
    FSDPC_TRY(fsdpc_fs_open(NULL, path, false, &r->fd));
    r->path = path;
    return FSDPC_OK;
}

static fsdpc_status sum_span(reader *r, const span *own, uint32_t *crc_out)
{
    uint32_t crc = 0;
    FSDPC_TRY(open_file(r, own->path));
    for (uint64_t done = 0; done < own->bytes;) {
        uint64_t left = own->bytes - done;
        size_t n = left < CHUNK_BYTES ? (size_t)left : CHUNK_BYTES;
        FSDPC_TRY(fsdpc_fs_pread(NULL, r->fd, own->path, r->chunk, n, own->offset + done));
        crc = fsdpc_crc32c(crc, r->chunk, n);
        done += n;
    }
    *crc_out = fsdpc_crc32c_combine(crc, 0, own->bytes_behind);
    return FSDPC_OK;
}

static void add(summing *all, const span *own, fsdpc_status status, uint32_t crc)
{
    pthread_mutex_lock(&all->lock);
    if (status == FSDPC_OK) {
        all->crcs[own->run] ^= crc;
    } else if (all->status == FSDPC_OK) {
        all->status = status;
        snprintf(all->text, sizeof all->text, "%s", fsdpc_last_error());
    }
    pthread_mutex_unlock(&all->lock);
}

static void *sum_spans(void *arg)
{
    summing *all = arg;
    reader r = {.fd = -1, .chunk = malloc(CHUNK_BYTES)};
    span own;
    while (take(all, &own)) {
        uint32_t crc = 0;
        fsdpc_status status = r.chunk ? sum_span(&r, &own, &crc)
                                      : fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a chunk");
        add(all, &own, status, crc);
    }
    if (r.path)
        (void)fsdpc_fs_close(NULL, r.fd, r.path);
    free(r.chunk);
    return NULL;
}

fsdpc_status fsdpc_ckpt_sum(const fsdpc_ckpt_run *runs, size_t n_runs, int n_threads,
                            uint32_t *crcs_out)
{
    summing all = {.runs = runs, .n_runs = n_runs, .crcs = crcs_out};
    pthread_t threads[MAX_THREADS];
    int started = 0;
    memset(crcs_out, 0, n_runs * sizeof *crcs_out);
    pthread_mutex_init(&all.lock, NULL);
    while (started < n_threads - 1 && started < MAX_THREADS &&
           fsdpc_thread_start("fsdpc-sum", sum_spans, &all, &threads[started]) == FSDPC_OK)
        started++;
    sum_spans(&all);
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&all.lock);
    return all.status == FSDPC_OK ? FSDPC_OK : fsdpc_fail(all.status, "%s", all.text);
}
