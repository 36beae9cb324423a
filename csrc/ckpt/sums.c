/* Checksums on several threads.
 *
 * One core sums about as fast as it copies from the page cache.  A single thread would therefore
 * check at little more than half the speed of a plain reader.  Disks also benefit from several
 * concurrent reads.  Spans are long enough for the kernel to read ahead in each.  They also make
 * the cost of the lock (on the cursor, the sums and the first error) negligible.  A chunk of a span
 * is summed while it is in the core's own cache.  Every thread opens the files itself, because the
 * kernel reads ahead per open file.
 */
#include "ckpt/sums.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/crc32c.h"
#include "base/thread.h"

enum { SPAN_BYTES = 8 << 20, CHUNK_BYTES = 256 << 10, MAX_THREADS = 64 };

typedef struct summing {
    const fsdpc_fs *fs;
    const fsdpc_ckpt_run *runs;
    size_t n_runs;
    uint32_t *crcs;

    pthread_mutex_t lock; /* guards all below, and crcs */
    size_t run;           /* the next to take: in this run, */
    uint64_t done;        /* from here on */
    fsdpc_status status;  /* the first error, with its text */
    char text[512];
} summing;

/* The state of one reading thread. */
typedef struct reader {
    const char *path; /* of the open file, or NULL */
    int fd;
    unsigned char *chunk;
} reader;

/* Takes the next span, as a run; false: none is left, or a read has failed. */
static bool take(summing *all, fsdpc_ckpt_run *span_out)
{
    pthread_mutex_lock(&all->lock);
    while (all->run < all->n_runs && all->done == all->runs[all->run].bytes) {
        all->run++;
        all->done = 0;
    }
    bool found = all->status == FSDPC_OK && all->run < all->n_runs;
    if (found) {
        *span_out = all->runs[all->run];
        uint64_t left = span_out->bytes - all->done;
        uint64_t bytes = left < SPAN_BYTES ? left : SPAN_BYTES;
        span_out->offset += all->done;
        span_out->bytes = bytes;
        span_out->bytes_behind += left - bytes;
        all->done += bytes;
    }
    pthread_mutex_unlock(&all->lock);
    return found;
}

static fsdpc_status open_file(const fsdpc_fs *fs, reader *r, const char *path)
{
    if (r->path == path)
        return FSDPC_OK;
    if (r->path)
        FSDPC_TRY(fsdpc_fs_close(fs, r->fd, r->path));
    r->path = NULL;
    FSDPC_TRY(fsdpc_fs_open(fs, path, false, &r->fd));
    r->path = path;
    return FSDPC_OK;
}

static fsdpc_status sum_span(const fsdpc_fs *fs, reader *r, const fsdpc_ckpt_run *span,
                             uint32_t *crc_out)
{
    uint32_t crc = 0;
    FSDPC_TRY(open_file(fs, r, span->path));
    for (uint64_t done = 0; done < span->bytes;) {
        uint64_t left = span->bytes - done;
        size_t n = left < CHUNK_BYTES ? (size_t)left : CHUNK_BYTES;
        FSDPC_TRY(fsdpc_fs_pread(fs, r->fd, span->path, r->chunk, n, span->offset + done));
        crc = fsdpc_crc32c(crc, r->chunk, n);
        done += n;
    }
    *crc_out = fsdpc_crc32c_combine(crc, 0, span->bytes_behind);
    return FSDPC_OK;
}

static void add(summing *all, const fsdpc_ckpt_run *span, fsdpc_status status, uint32_t crc)
{
    pthread_mutex_lock(&all->lock);
    if (status == FSDPC_OK) {
        all->crcs[span->tensor] ^= crc;
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
    fsdpc_ckpt_run span;
    while (take(all, &span)) {
        uint32_t crc = 0;
        fsdpc_status status = r.chunk ? sum_span(all->fs, &r, &span, &crc)
                                      : fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a chunk");
        add(all, &span, status, crc);
    }
    if (r.path)
        (void)fsdpc_fs_close(NULL, r.fd, r.path);
    free(r.chunk);
    return NULL;
}

fsdpc_status fsdpc_ckpt_sum(const fsdpc_fs *fs, const fsdpc_ckpt_run *runs, size_t n_runs,
                            int n_threads, uint32_t *crcs_io)
{
    summing all = {.fs = fs, .runs = runs, .n_runs = n_runs, .crcs = crcs_io};
    pthread_t threads[MAX_THREADS];
    int started = 0;
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
