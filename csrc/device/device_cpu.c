/* The CPU as a device.
 *
 * Memory is counted memory (base/mem). Kernels, copies and fills run in the calling thread. There
 * are two kinds of stream. On an inline stream, submit calls the function before it returns, so
 * every point on the stream has already been reached. A worker stream has a thread that takes
 * entries from a FIFO, a ring buffer that doubles when full and stops growing after the first few
 * steps.
 *
 * Note [progress]. Other threads can see a worker stream's progress, which is the number of entries
 * it has finished. The progress is a small reference-counted object, so an event or a wait in
 * another stream's ring can outlive the stream. An event stores a progress object and the count
 * that it must reach, so recording an event adds no entry. Waits only ever refer to entries
 * submitted before them, so streams cannot deadlock in a cycle.
 *
 * A thread waiting for a stream's progress spins for a few microseconds, then sleeps on a futex.
 * Waits here have no deadline: collectives have their own (comm), and a caller that must be
 * interruptible polls event_test instead of calling sync.
 */
#include "device/device.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/size.h"
#include "base/thread.h"

enum {
    FIRST_RING = 64, /* a power of two, like every ring */
    SPIN_NS = 20000,
    SPINS_PER_LOOK = 16,
    MESSAGE_BYTES = 1024,
    COPY_PART_BYTES = 1 << 20,
};

static const int64_t sleep_ns = 100000000;

/* Note [progress] */
typedef struct progress {
    _Atomic uint64_t finished;
    _Atomic uint32_t changes;  /* futex: changes together with `finished` */
    _Atomic uint32_t sleepers; /* on `changes` */
    _Atomic uint32_t references;
    pid_t pid; /* the process that owns the worker */
} progress;

typedef struct entry {
    fsdpc_stream_fn fn; /* NULL: wait until `awaited` has finished `number` entries */
    void *arg;
    progress *awaited; /* a reference */
    uint64_t number;
} entry;

typedef struct cpu_stream {
    fsdpc_stream head; /* first; head.name points to `name` */
    char *name;
    bool is_worker;

    pthread_mutex_t lock; /* guards the four below and the error */
    entry *ring;
    size_t capacity;
    uint64_t submitted, taken; /* entries from `taken` to `submitted` are in the ring */
    fsdpc_status error;
    char message[MESSAGE_BYTES];

    /* only for worker streams */
    progress *progress;
    pthread_t thread;
    _Atomic uint32_t news; /* futex of the worker: changes with every submission and at the end */
    _Atomic uint32_t worker_sleeps; /* on `news` */
    bool stop;                      /* requires the lock */
} cpu_stream;

typedef struct cpu_event {
    fsdpc_event head;   /* first */
    progress *progress; /* a reference; NULL: complete */
    uint64_t number;
} cpu_event;

typedef struct cpu_device {
    fsdpc_device head; /* first */
    int spare_cores;
    _Atomic int workers; /* streams that have a thread */
    pid_t workers_pid;   /* the process that owns them */
} cpu_device;

static cpu_stream *stream_of(fsdpc_stream *stream)
{
    return (cpu_stream *)stream;
}

/* ---- progress ---- */

static progress *progress_acquire(progress *p)
{
    if (p) /* relaxed: the caller's reference keeps it alive */
        atomic_fetch_add_explicit(&p->references, 1, memory_order_relaxed);
    return p;
}

static void progress_release(progress *p)
{
    /* acq_rel: the last holder frees it, after all uses by the others */
    if (p && atomic_fetch_sub_explicit(&p->references, 1, memory_order_acq_rel) == 1)
        free(p);
}

static bool progress_reached(const progress *p, uint64_t number)
{
    /* acquire: pairs with progress_advance, so that the finished work's stores are visible */
    return !p || atomic_load_explicit(&p->finished, memory_order_acquire) >= number;
}

static void progress_advance(progress *p, uint64_t finished)
{
    /* seq_cst, against progress_wait: we see the sleeper or it sees our number */
    atomic_store(&p->finished, finished);
    atomic_fetch_add(&p->changes, 1);
    if (atomic_load(&p->sleepers))
        fsdpc_futex_wake(&p->changes);
}

static void progress_wait(progress *p, uint64_t number)
{
    int64_t end = 0;
    for (;;) {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if (progress_reached(p, number))
                return;
            fsdpc_cpu_relax();
        }
        int64_t now = fsdpc_clock_ns();
        if (end == 0)
            end = now + SPIN_NS;
        else if (now > end)
            break;
    }
    atomic_fetch_add(&p->sleepers, 1);
    for (;;) {
        uint32_t changes = atomic_load(&p->changes);
        if (atomic_load(&p->finished) >= number)
            break;
        fsdpc_futex_wait(&p->changes, changes, sleep_ns);
    }
    atomic_fetch_sub(&p->sleepers, 1);
}

/* ---- the worker ---- */

static void keep_error(cpu_stream *stream, fsdpc_status status)
{
    pthread_mutex_lock(&stream->lock);
    if (stream->error == FSDPC_OK) {
        stream->error = status;
        strncpy(stream->message, fsdpc_last_error(), sizeof stream->message - 1);
    }
    pthread_mutex_unlock(&stream->lock);
}

static void run_function(cpu_stream *stream, fsdpc_stream_fn fn, void *arg)
{
    fsdpc_status status = fn(arg, &stream->head);
    if (status != FSDPC_OK)
        keep_error(stream, status);
}

/* Takes the next entry, sleeping until one is available; returns false when the stream ends. */
static bool take_entry(cpu_stream *stream, entry *out)
{
    int64_t end = 0;
    for (;;) {
        uint32_t news = atomic_load(&stream->news);
        pthread_mutex_lock(&stream->lock);
        bool found = stream->taken != stream->submitted, stop = stream->stop;
        if (found)
            *out = stream->ring[stream->taken++ & (stream->capacity - 1)];
        pthread_mutex_unlock(&stream->lock);
        if (found || stop)
            return found;
        if (end == 0)
            end = fsdpc_clock_ns() + SPIN_NS;
        for (int i = 0; i < SPINS_PER_LOOK && atomic_load(&stream->news) == news; i++)
            fsdpc_cpu_relax();
        if (fsdpc_clock_ns() <= end)
            continue;
        /* seq_cst, against announce: it sees us asleep or we see its news */
        atomic_store(&stream->worker_sleeps, 1);
        while (atomic_load(&stream->news) == news)
            fsdpc_futex_wait(&stream->news, news, sleep_ns);
        atomic_store(&stream->worker_sleeps, 0);
        end = 0;
    }
}

static void announce(cpu_stream *stream)
{
    atomic_fetch_add(&stream->news, 1);
    if (atomic_load(&stream->worker_sleeps))
        fsdpc_futex_wake(&stream->news);
}

static void *worker_main(void *arg)
{
    cpu_stream *stream = arg;
    uint64_t finished = 0;
    entry next;
    while (take_entry(stream, &next)) {
        if (next.fn) {
            run_function(stream, next.fn, next.arg);
        } else {
            progress_wait(next.awaited, next.number);
            progress_release(next.awaited);
        }
        progress_advance(stream->progress, ++finished);
    }
    return NULL;
}

static fsdpc_status check_process(const progress *p, const char *stream_name)
{
    if (p->pid != getpid())
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "stream '%s' needs a worker thread of process %d, which this forked "
                          "child does not have; start processes with 'spawn', or fork before "
                          "fsdpc is used",
                          stream_name, (int)p->pid);
    return FSDPC_OK;
}

/* Reserves space for one more entry. The caller holds the lock. */
static fsdpc_status reserve_entry(cpu_stream *stream)
{
    if (stream->submitted - stream->taken < stream->capacity)
        return FSDPC_OK;
    size_t capacity = stream->capacity * 2;
    entry *ring = malloc(capacity * sizeof *ring);
    if (!ring)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for %zu entries of stream '%s'", capacity,
                          stream->name);
    for (uint64_t i = stream->taken; i != stream->submitted; i++)
        ring[i & (capacity - 1)] = stream->ring[i & (stream->capacity - 1)];
    free(stream->ring);
    stream->ring = ring;
    stream->capacity = capacity;
    return FSDPC_OK;
}

static fsdpc_status push_entry(cpu_stream *stream, entry next)
{
    FSDPC_TRY(check_process(stream->progress, stream->name));
    pthread_mutex_lock(&stream->lock);
    fsdpc_status status = reserve_entry(stream);
    if (status == FSDPC_OK)
        stream->ring[stream->submitted++ & (stream->capacity - 1)] = next;
    pthread_mutex_unlock(&stream->lock);
    if (status == FSDPC_OK)
        announce(stream);
    return status;
}

/* ---- streams ---- */

static fsdpc_status start_worker(cpu_stream *stream)
{
    stream->progress = calloc(1, sizeof *stream->progress);
    stream->ring = malloc(FIRST_RING * sizeof *stream->ring);
    if (!stream->progress || !stream->ring)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for stream '%s'", stream->name);
    progress_acquire(stream->progress);
    stream->capacity = FIRST_RING;
    stream->progress->pid = getpid();
    return fsdpc_thread_start(stream->name, worker_main, stream, &stream->thread);
}

static void free_stream(cpu_stream *stream)
{
    progress_release(stream->progress);
    pthread_mutex_destroy(&stream->lock);
    free(stream->ring);
    free(stream->name);
    free(stream);
}

/* A forked child inherits none of its parent's worker threads. */
static void count_worker(cpu_device *device, int change)
{
    if (device->workers_pid != getpid())
        atomic_store(&device->workers, 0);
    device->workers_pid = getpid();
    atomic_fetch_add(&device->workers, change);
}

int fsdpc_device_cpu_workers(const fsdpc_device *device)
{
    const cpu_device *self = (const cpu_device *)device;
    return self->workers_pid == getpid() ? atomic_load(&self->workers) : 0;
}

static fsdpc_status cpu_stream_create(fsdpc_device *device, const char *name, bool want_async,
                                      fsdpc_stream **out)
{
    cpu_stream *stream = calloc(1, sizeof *stream);
    char *name_copy = strdup(name);
    if (!stream || !name_copy) {
        free(stream);
        free(name_copy);
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for stream '%s'", name);
    }
    stream->name = name_copy;
    stream->head = (fsdpc_stream){.device = device, .name = name_copy};
    pthread_mutex_init(&stream->lock, NULL);
    stream->is_worker = want_async && ((cpu_device *)device)->spare_cores > 0;
    fsdpc_status status = stream->is_worker ? start_worker(stream) : FSDPC_OK;
    if (status != FSDPC_OK) {
        free_stream(stream);
        return status;
    }
    if (stream->is_worker)
        count_worker((cpu_device *)device, 1);
    *out = &stream->head;
    return FSDPC_OK;
}

/* Work that has already been submitted still runs. */
static void cpu_stream_destroy(fsdpc_stream *base)
{
    cpu_stream *stream = stream_of(base);
    if (stream->is_worker && stream->progress->pid == getpid()) {
        pthread_mutex_lock(&stream->lock);
        stream->stop = true;
        pthread_mutex_unlock(&stream->lock);
        announce(stream);
        pthread_join(stream->thread, NULL);
        count_worker((cpu_device *)base->device, -1);
    }
    free_stream(stream);
}

static fsdpc_status cpu_stream_submit(fsdpc_stream *base, fsdpc_stream_fn fn, void *arg)
{
    cpu_stream *stream = stream_of(base);
    if (stream->is_worker)
        return push_entry(stream, (entry){.fn = fn, .arg = arg});
    run_function(stream, fn, arg);
    return FSDPC_OK;
}

static fsdpc_status cpu_stream_sync(fsdpc_stream *base)
{
    cpu_stream *stream = stream_of(base);
    if (stream->is_worker) {
        FSDPC_TRY(check_process(stream->progress, stream->name));
        if (pthread_equal(pthread_self(), stream->thread))
            return fsdpc_fail(FSDPC_ERR_STATE,
                              "work on stream '%s' waits for its own stream to end; sync from "
                              "the thread that submitted it",
                              stream->name);
        pthread_mutex_lock(&stream->lock);
        uint64_t submitted = stream->submitted;
        pthread_mutex_unlock(&stream->lock);
        progress_wait(stream->progress, submitted);
    }
    pthread_mutex_lock(&stream->lock);
    fsdpc_status status = stream->error;
    stream->error = FSDPC_OK;
    if (status != FSDPC_OK)
        fsdpc_fail(status, "%s", stream->message);
    pthread_mutex_unlock(&stream->lock);
    return status;
}

/* ---- events ---- */

static fsdpc_status cpu_event_create(fsdpc_device *device, fsdpc_event **out)
{
    cpu_event *event = calloc(1, sizeof *event);
    if (!event)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for an event");
    event->head.device = device;
    *out = &event->head;
    return FSDPC_OK;
}

static void cpu_event_destroy(fsdpc_event *base)
{
    cpu_event *event = (cpu_event *)base;
    progress_release(event->progress);
    free(event);
}

static fsdpc_status cpu_event_record(fsdpc_event *base, fsdpc_stream *stream_base)
{
    cpu_event *event = (cpu_event *)base;
    cpu_stream *stream = stream_of(stream_base);
    uint64_t number = 0;
    if (stream->is_worker) {
        FSDPC_TRY(check_process(stream->progress, stream->name));
        pthread_mutex_lock(&stream->lock);
        number = stream->submitted;
        pthread_mutex_unlock(&stream->lock);
    }
    progress *old = event->progress;
    event->progress = progress_acquire(stream->progress); /* NULL for an inline stream */
    event->number = number;
    progress_release(old);
    return FSDPC_OK;
}

static fsdpc_status cpu_stream_wait(fsdpc_stream *base, fsdpc_event *event_base)
{
    cpu_stream *stream = stream_of(base);
    cpu_event *event = (cpu_event *)event_base;
    /* work before this on our own stream is already ordered, and any other may be finished */
    if (event->progress == stream->progress || progress_reached(event->progress, event->number))
        return FSDPC_OK;
    FSDPC_TRY(check_process(event->progress, stream->name));
    if (!stream->is_worker) {
        progress_wait(event->progress, event->number);
        return FSDPC_OK;
    }
    entry next = {.awaited = progress_acquire(event->progress), .number = event->number};
    fsdpc_status status = push_entry(stream, next);
    if (status != FSDPC_OK)
        progress_release(next.awaited);
    return status;
}

static fsdpc_status cpu_event_test(fsdpc_event *base)
{
    cpu_event *event = (cpu_event *)base;
    return progress_reached(event->progress, event->number) ? FSDPC_OK : FSDPC_IN_PROGRESS;
}

/* ---- memory ---- */

static fsdpc_status cpu_alloc(fsdpc_device *device, fsdpc_mem_kind kind, size_t bytes, void **out)
{
    return fsdpc_mem_alloc(device->mem, kind, bytes, out);
}

static void cpu_free(fsdpc_device *device, void *pointer)
{
    fsdpc_mem_free(device->mem, pointer);
}

typedef struct move {
    char *to;
    const char *from; /* NULL: fill */
    size_t bytes;
    int byte;
} move;

static void move_part(void *arg, size_t part)
{
    const move *m = arg;
    size_t first = part * COPY_PART_BYTES;
    size_t bytes = fsdpc_min_size(m->bytes - first, COPY_PART_BYTES);
    if (m->from)
        memcpy(m->to + first, m->from + first, bytes);
    else
        memset(m->to + first, m->byte, bytes);
}

static fsdpc_status cpu_copy(fsdpc_device *device, void *to, const void *from, size_t bytes,
                             fsdpc_stream *stream)
{
    (void)stream;
    move m = {.to = to, .from = from, .bytes = bytes};
    if (to != from)
        fsdpc_team_run(device->team, fsdpc_ceil_div(bytes, COPY_PART_BYTES), move_part, &m);
    return FSDPC_OK;
}

static fsdpc_status cpu_fill(fsdpc_device *device, void *to, int byte, size_t bytes,
                             fsdpc_stream *stream)
{
    (void)stream;
    move m = {.to = to, .bytes = bytes, .byte = byte};
    fsdpc_team_run(device->team, fsdpc_ceil_div(bytes, COPY_PART_BYTES), move_part, &m);
    return FSDPC_OK;
}

static fsdpc_status cpu_protect(fsdpc_device *device, void *pages, size_t bytes,
                                fsdpc_access access)
{
    (void)device;
    static const int flags[] = {[FSDPC_ACCESS_NONE] = PROT_NONE,
                                [FSDPC_ACCESS_READ] = PROT_READ,
                                [FSDPC_ACCESS_WRITE] = PROT_READ | PROT_WRITE};
    if (mprotect(pages, bytes, flags[access]))
        return fsdpc_fail_errno("%zu bytes of memory could not be protected; FSDPC_NO_ALIAS needs "
                                "a few mappings a unit (see vm.max_map_count)",
                                bytes);
    return FSDPC_OK;
}

static void cpu_destroy(fsdpc_device *device)
{
    free(device);
}

static const fsdpc_device_ops cpu_ops = {
    .name = "cpu",
    .destroy = cpu_destroy,
    .stream_create = cpu_stream_create,
    .stream_destroy = cpu_stream_destroy,
    .stream_submit = cpu_stream_submit,
    .stream_sync = cpu_stream_sync,
    .event_create = cpu_event_create,
    .event_destroy = cpu_event_destroy,
    .event_record = cpu_event_record,
    .stream_wait = cpu_stream_wait,
    .event_test = cpu_event_test,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .copy = cpu_copy,
    .fill = cpu_fill,
    .protect = cpu_protect,
};

fsdpc_status fsdpc_device_cpu_create(fsdpc_mem *mem, fsdpc_team *team, fsdpc_isa isa,
                                     int spare_cores, fsdpc_device **out)
{
    cpu_device *device = calloc(1, sizeof *device);
    if (!device)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a device");
    device->head = (fsdpc_device){.ops = &cpu_ops, .mem = mem, .team = team, .isa = isa};
    device->spare_cores = spare_cores;
    fsdpc_status status = cpu_stream_create(&device->head, "main", false, &device->head.main);
    if (status != FSDPC_OK)
        free(device);
    else
        *out = &device->head;
    return status;
}
