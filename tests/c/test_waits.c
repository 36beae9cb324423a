/* What every wait of the schedule is for: a vector-clock checker over what ranks read and write.
 *
 * A rank is three threads of happening: the driver, its gather stream and its reduce stream, each
 * with a clock of its own. A table in front of comm_shm's sees every release (arrive, publish,
 * post, the end of an operation) and every wait that succeeds, which joins clocks. Reads and
 * writes are noted per resource: slices of the parameter buffer, unsharded parameters (which a
 * communicator that copies would write), reduce buffers, gradient shards. Two accesses, one a
 * write, that no chain of releases and waits orders are a race, whether or not they met in this
 * run.
 *
 * The whole program first runs with all waits: no race. Then once for every wait, which still
 * waits but joins nothing, as if it were not there: the races are what it is for, and must be those
 * of the table below. The storage of an operation counts as written while it is in flight. A wait
 * is a kind and the entry point it happens in. Progress never completes a reduction here (it need
 * not, and then hides no wait).
 */
#include <stdatomic.h>

#include "engine_fixture.h"

enum { WORLD = 2, UNITS = 4, STREAMS = 3, AGENTS = WORLD * STREAMS, EPOCHS = 64, POSTS = 256 };
enum { DRIVER, GATHER, REDUCE };
enum {
    PARAM_BUFFERS = 0,
    UNSHARDED = WORLD,
    BUFFERS = UNSHARDED + WORLD * UNITS,
    MOST_BUFFERS = 8
};
enum { GRADS = BUFFERS + WORLD * MOST_BUFFERS, WORKS = GRADS + WORLD * UNITS };
enum { RESOURCES = WORKS + WORLD * UNITS * 2 };

typedef struct clocks {
    int at[AGENTS];
} clocks;

typedef struct accesses {
    int wrote[AGENTS], read[AGENTS]; /* each agent's own clock when it last did */
} accesses;

typedef struct job {
    const fsdpc_work *work; /* NULL: none in flight */
    clocks posted, end;
    int unit, buffer;
    int sequence; /* of reductions; -1: a gather */
} job;

typedef struct rank_state {
    const char *phase;
    const fsdpc_buffer *buffers[MOST_BUFFERS];
    int n_buffers, reductions;
    job jobs[2 * UNITS];
} rank_state;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const fsdpc_comm_ops *real_ops;
static fsdpc_comm_ops watched_ops;
static clocks now[AGENTS];
static accesses resources[RESOURCES];
static rank_state ranks[WORLD];
static clocks arrivals[EPOCHS][WORLD], publications[EPOCHS][WORLD], posts[POSTS][WORLD];
static clocks readers[MOST_BUFFERS][WORLD]; /* a rank's last reduction of this buffer */

/* The wait left out, and what was seen. */
static const char *without_kind, *without_phase;
static struct {
    char text[96];
} waits[32], races[32];
static int n_waits, n_races;

static int agent(int rank, int stream)
{
    return rank * STREAMS + stream;
}

static void join(clocks *to, const clocks *from)
{
    for (int a = 0; a < AGENTS; a++)
        to->at[a] = to->at[a] > from->at[a] ? to->at[a] : from->at[a];
}

/* What comes after it is not covered by it. */
static clocks release(int a)
{
    clocks seen = now[a];
    now[a].at[a]++;
    return seen;
}

static void remember(void *list, int *n, const char *text)
{
    char(*texts)[96] = list;
    for (int i = 0; i < *n; i++)
        if (strcmp(texts[i], text) == 0)
            return;
    snprintf(texts[*n], sizeof *texts, "%s", text);
    (*n)++;
}

static const char *name_of(int resource)
{
    return resource < UNSHARDED ? "parameter buffer"
           : resource < BUFFERS ? "full"
           : resource < GRADS   ? "buffer"
           : resource < WORKS   ? "gradient"
                                : "operation";
}

static void touch(int a, int resource, bool write)
{
    static const char *const streams[STREAMS] = {"driver", "gather", "reduce"};
    accesses *r = &resources[resource];
    for (int b = 0; b < AGENTS; b++) {
        bool unordered = r->wrote[b] > now[a].at[b] || (write && r->read[b] > now[a].at[b]);
        if (b == a || !unordered)
            continue;
        char text[96];
        snprintf(text, sizeof text, "%s: %s %s, %s %s %s", name_of(resource), streams[a % STREAMS],
                 write ? "writes" : "reads", a / STREAMS == b / STREAMS ? "own" : "peer's",
                 streams[b % STREAMS], r->wrote[b] > now[a].at[b] ? "wrote" : "read");
        remember(races, &n_races, text);
    }
    (write ? r->wrote : r->read)[a] = now[a].at[a];
}

/* A wait has succeeded: does what it waited for count? */
static bool counts(int rank, const char *kind)
{
    char text[96];
    snprintf(text, sizeof text, "%s@%s", kind, ranks[rank].phase);
    remember(waits, &n_waits, text);
    return !(without_kind && strcmp(kind, without_kind) == 0 &&
             strcmp(ranks[rank].phase, without_phase) == 0);
}

static void join_all(int rank, const char *kind, const clocks *from)
{
    if (counts(rank, kind))
        for (int p = 0; p < WORLD; p++)
            join(&now[agent(rank, DRIVER)], &from[p]);
}

/* ---- the table in front */

static fsdpc_status arrive(fsdpc_param_buffer *param_buffer, const fsdpc_epoch_note *mine)
{
    int rank = param_buffer->comm->rank;
    pthread_mutex_lock(&lock);
    arrivals[(param_buffer->epoch + 1) % EPOCHS][rank] = release(agent(rank, DRIVER));
    if (strcmp(ranks[rank].phase, "before an epoch") == 0)
        ranks[rank].phase = "in forward";
    pthread_mutex_unlock(&lock);
    return real_ops->epoch_arrive(param_buffer, mine);
}

static fsdpc_status arrived(fsdpc_param_buffer *param_buffer, fsdpc_epoch_note *all_out)
{
    fsdpc_status status = real_ops->epoch_test(param_buffer, all_out);
    pthread_mutex_lock(&lock);
    if (status == FSDPC_OK)
        join_all(param_buffer->comm->rank, "arrivals", arrivals[param_buffer->epoch % EPOCHS]);
    pthread_mutex_unlock(&lock);
    return status;
}

/* The own slice has been written since the arrivals. */
static fsdpc_status publish(fsdpc_param_buffer *param_buffer)
{
    int rank = param_buffer->comm->rank;
    pthread_mutex_lock(&lock);
    touch(agent(rank, DRIVER), PARAM_BUFFERS + rank, true);
    publications[param_buffer->epoch % EPOCHS][rank] = release(agent(rank, DRIVER));
    pthread_mutex_unlock(&lock);
    return real_ops->epoch_copied_in(param_buffer);
}

static fsdpc_status copied_in(fsdpc_param_buffer *param_buffer)
{
    fsdpc_status status = real_ops->epoch_copy_in_test(param_buffer);
    pthread_mutex_lock(&lock);
    if (status == FSDPC_OK)
        join_all(param_buffer->comm->rank, "publications",
                 publications[param_buffer->epoch % EPOCHS]);
    pthread_mutex_unlock(&lock);
    return status;
}

static fsdpc_status buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_buffer **out)
{
    FSDPC_TRY(real_ops->buffer_create(comm, bytes, out));
    rank_state *mine = &ranks[comm->rank];
    mine->buffers[mine->n_buffers++] = *out;
    return FSDPC_OK;
}

static int buffer_index(int rank, const fsdpc_buffer *buffer)
{
    int i = 0;
    while (i < MOST_BUFFERS - 1 && ranks[rank].buffers[i] != buffer)
        i++;
    return i;
}

static fsdpc_status buffer_idle(fsdpc_buffer *buffer)
{
    fsdpc_status status = real_ops->buffer_idle(buffer);
    int rank = buffer->comm->rank;
    pthread_mutex_lock(&lock);
    if (status == FSDPC_OK)
        join_all(rank, "idle buffer", readers[buffer_index(rank, buffer)]);
    pthread_mutex_unlock(&lock);
    return status;
}

static job *job_of(int rank, const fsdpc_work *work)
{
    job *free_one = NULL;
    for (int i = 0; i < 2 * UNITS; i++) {
        job *j = &ranks[rank].jobs[i];
        if (j->work == work)
            return j;
        free_one = j->work ? free_one : j;
    }
    return free_one;
}

static bool is_job(const fsdpc_work *work)
{
    return work->op.kind == FSDPC_COLL_GATHER || work->op.kind == FSDPC_COLL_REDUCE_SCATTER;
}

/* An operation's accesses are unordered with whatever comes after the moment from which it may run,
 * until somebody waits for its end: so they are noted at that moment. */
static void gather_runs(int rank, job *j)
{
    int a = agent(rank, GATHER);
    join(&now[a], &j->posted);
    for (int p = 0; p < WORLD; p++)
        touch(a, PARAM_BUFFERS + p, false);
    touch(a, UNSHARDED + rank * UNITS + j->unit, true);
    touch(a, WORKS + (rank * UNITS + j->unit) * 2, true);
    j->end = release(a);
}

static void reduction_runs(int rank, job *j)
{
    int a = agent(rank, REDUCE);
    for (int p = 0; p < WORLD; p++)
        join(&now[a], &posts[j->sequence][p]);
    for (int p = 0; p < WORLD; p++)
        touch(a, BUFFERS + p * MOST_BUFFERS + j->buffer, false);
    touch(a, GRADS + rank * UNITS + j->unit, true);
    touch(a, WORKS + (rank * UNITS + j->unit) * 2 + 1, true);
    j->end = readers[j->buffer][rank] = release(a);
}

/* Reductions run once all ranks have posted them. */
static void reductions_run(int sequence)
{
    for (int p = 0; p < WORLD; p++)
        if (ranks[p].reductions <= sequence)
            return;
    for (int p = 0; p < WORLD; p++)
        for (int i = 0; i < 2 * UNITS; i++)
            if (ranks[p].jobs[i].work && ranks[p].jobs[i].sequence == sequence)
                reduction_runs(p, &ranks[p].jobs[i]);
}

static fsdpc_status post(fsdpc_work *work)
{
    int rank = work->comm->rank;
    if (is_job(work)) {
        pthread_mutex_lock(&lock);
        bool gathers = work->op.kind == FSDPC_COLL_GATHER;
        touch(agent(rank, DRIVER), WORKS + (rank * UNITS + work->op.unit) * 2 + !gathers, true);
        job *j = job_of(rank, work);
        *j = (job){.work = work, .unit = work->op.unit, .sequence = -1};
        j->posted = release(agent(rank, DRIVER));
        if (gathers) {
            gather_runs(rank, j);
        } else {
            j->buffer = buffer_index(rank, work->op.buffer);
            j->sequence = ranks[rank].reductions++;
            posts[j->sequence][rank] = j->posted;
            reductions_run(j->sequence);
        }
        pthread_mutex_unlock(&lock);
    }
    return real_ops->post(work);
}

static fsdpc_status test(fsdpc_work *work)
{
    int rank = work->comm->rank;
    bool reduces = work->op.kind == FSDPC_COLL_REDUCE_SCATTER;
    if (reduces && strcmp(ranks[rank].phase, "in backward") == 0)
        return FSDPC_IN_PROGRESS; /* progress is no wait */
    fsdpc_status status = real_ops->test(work);
    if (status != FSDPC_OK || !is_job(work))
        return status;
    pthread_mutex_lock(&lock);
    job *j = job_of(rank, work);
    if (counts(rank, reduces ? "reduction" : "gather"))
        join(&now[agent(rank, DRIVER)], &j->end);
    j->work = NULL;
    pthread_mutex_unlock(&lock);
    return FSDPC_OK;
}

/* ---- a program */

static void enter(const rig *r, const char *phase)
{
    ranks[r->rank].phase = phase;
}

/* A module reads its full: the parameter buffer itself where nothing is copied. */
static void compute(const rig *r, int unit)
{
    pthread_mutex_lock(&lock);
    int a = agent(r->rank, DRIVER);
    touch(a, UNSHARDED + r->rank * UNITS + unit, false);
    for (int p = 0; p < WORLD; p++)
        touch(a, PARAM_BUFFERS + p, false);
    pthread_mutex_unlock(&lock);
}

static fsdpc_status use(rig *r, int unit)
{
    FSDPC_TRY(fsdpc_pre_forward(r->units[unit], true));
    compute(r, unit);
    return unit ? fsdpc_post_forward(r->units[unit]) : FSDPC_OK;
}

static fsdpc_status forward(rig *r, int units)
{
    enter(r, "before an epoch");
    for (int u = 0; u < units; u++)
        FSDPC_TRY(use(r, u));
    r->seen = r->root->generation;
    return fsdpc_post_forward(r->units[0]);
}

static fsdpc_status give(rig *r, int unit, const char *phase)
{
    enter(r, phase);
    FSDPC_TRY(rig_give_all(r, unit));
    pthread_mutex_lock(&lock);
    int buffer = buffer_index(r->rank, r->units[unit]->buffer);
    touch(agent(r->rank, DRIVER), BUFFERS + r->rank * MOST_BUFFERS + buffer, true);
    pthread_mutex_unlock(&lock);
    enter(r, "in backward");
    return FSDPC_OK;
}

static fsdpc_status backward(rig *r, bool twice)
{
    enter(r, "in backward");
    FSDPC_TRY(fsdpc_pre_backward(r->units[0], r->seen));
    for (int u = UNITS - 1; u > 0; u--) {
        FSDPC_TRY(fsdpc_pre_backward(r->units[u], r->seen));
        compute(r, u);
        FSDPC_TRY(give(r, u, "in a gradient's target"));
        FSDPC_TRY(fsdpc_post_backward(r->units[u]));
    }
    if (twice) /* a unit used twice: its gradients come after its reduction was posted */
        FSDPC_TRY(give(r, 1, "in a later gradient's target"));
    FSDPC_TRY(give(r, 0, "in a gradient's target"));
    enter(r, "in the end of backward");
    return fsdpc_backward_end(r->root);
}

static fsdpc_status step(rig *r)
{
    enter(r, "in an optimizer's step");
    fsdpc_status status = fsdpc_root_write_begin(r->root);
    pthread_mutex_lock(&lock);
    for (int u = 0; u < UNITS && status == FSDPC_OK; u++)
        touch(agent(r->rank, DRIVER), GRADS + r->rank * UNITS + u, false);
    pthread_mutex_unlock(&lock);
    FSDPC_KEEP_FIRST(status, fsdpc_root_write_end(r->root));
    return status;
}

static void put_in_front(const fsdpc_comm *comm)
{
    pthread_mutex_lock(&lock);
    real_ops = comm->ops == &watched_ops ? real_ops : comm->ops;
    watched_ops = *real_ops;
    watched_ops.epoch_arrive = arrive;
    watched_ops.epoch_test = arrived;
    watched_ops.epoch_copied_in = publish;
    watched_ops.epoch_copy_in_test = copied_in;
    watched_ops.buffer_create = buffer_create;
    watched_ops.buffer_idle = buffer_idle;
    watched_ops.post = post;
    watched_ops.test = test;
    pthread_mutex_unlock(&lock);
}

static fsdpc_status program(rig *r)
{
    put_in_front(r->comm);
    FSDPC_TRY(fsdpc_comm_run(r->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}));
    r->comm->ops = &watched_ops;
    enter(r, "in creation");
    FSDPC_TRY(rig_add_units(r, UNITS, false));
    FSDPC_TRY(rig_root(r));
    for (int i = 0; i < 4; i++) { /* the first on demand, the others with gathers ahead */
        FSDPC_TRY(forward(r, UNITS));
        FSDPC_TRY(backward(r, i == 1));
        FSDPC_TRY(step(r));
    }
    FSDPC_TRY(forward(r, UNITS));
    FSDPC_TRY(step(r)); /* with no backward between that would have brought the ranks together */
    /* A forward that ends early, with a gather ahead that nobody asks for; then weights change. */
    for (int i = 0; i < 3; i++) {
        FSDPC_TRY(forward(r, i == 1 ? 2 : UNITS));
        if (i != 1)
            FSDPC_TRY(backward(r, false));
        r->units[1]->dirty = true;
    }
    r->comm->ops = real_ops;
    return FSDPC_OK;
}

static void run_without(const char *kind, const char *phase)
{
    memset(now, 0, sizeof now);
    memset(resources, 0, sizeof resources);
    memset(ranks, 0, sizeof ranks);
    memset(arrivals, 0, sizeof arrivals);
    memset(publications, 0, sizeof publications);
    memset(posts, 0, sizeof posts);
    memset(readers, 0, sizeof readers);
    for (int a = 0; a < AGENTS; a++)
        now[a].at[a] = 1;
    n_races = 0;
    without_kind = kind;
    without_phase = phase;
    rig rigs[RIG_RANKS];
    rigs_run(rigs, WORLD, program, NULL);
    rigs_close(rigs, WORLD);
}

/* Every wait, and what is read or written too early or too late without it. */
static const struct {
    const char *wait, *breaks, *how;
} reasons[] = {
    {"arrivals in forward", "parameter buffer",
     "slices are written while peers read the last epoch's"},
    {"arrivals in an optimizer's step", "parameter buffer", "the same, by the step itself"},
    {"publications in forward", "parameter buffer",
     "slices are read while their owners write them"},
    {"gather in forward", "full", "a module reads a full that is still being gathered"},
    {"gather in backward", "full", "the same"},
    {"gather before an epoch", "parameter buffer",
     "a gather ahead that nobody used reads what peers write"},
    {"idle buffer in a gradient's target", "buffer", "a peer still reduces what is overwritten"},
    {"idle buffer in a later gradient's target", "buffer", "the same, of a unit used twice"},
    {"reduction in a later gradient's target", "operation", "it is posted while in flight"},
    {"reduction in the end of backward", "gradient", "the optimizer reads what is being reduced"},
    /* Nothing on one row of a mesh: that the buffer is idle says all. With replicas the slot's
     * partial holds sums whose all-reduce is not posted before this wait, so that no other wait
     * would see it. */
    {"reduction in a gradient's target", NULL, "sums over replicas"},
};

enum { REASONS = sizeof reasons / sizeof *reasons };

static bool races_on(const char *resource)
{
    for (int i = 0; i < n_races; i++)
        if (strncmp(races[i].text, resource, strlen(resource)) == 0)
            return true;
    return false;
}

static void test_a_wait(const char *wait)
{
    char kind[96];
    snprintf(kind, sizeof kind, "%s", wait);
    char *phase = strchr(kind, '@');
    int at = 0;
    CHECK_NOTE(phase != NULL, "%s", wait);
    *phase++ = 0;
    while (at < REASONS && (strncmp(reasons[at].wait, kind, strlen(kind)) != 0 ||
                            strcmp(reasons[at].wait + strlen(kind) + 1, phase) != 0))
        at++;
    CHECK_NOTE(at < REASONS, "nobody says what %s %s is for", kind, phase);
    if (at == REASONS)
        return;
    run_without(kind, phase);
    if (reasons[at].breaks)
        CHECK_NOTE(races_on(reasons[at].breaks), "without %s no race on a %s (%s); %d others",
                   reasons[at].wait, reasons[at].breaks, reasons[at].how, n_races);
    else
        CHECK_NOTE(n_races == 0, "without %s: %s", reasons[at].wait, races[0].text);
}

int main(void)
{
    run_without(NULL, NULL);
    CHECK_NOTE(n_races == 0, "with all waits: %s", races[0].text);
    int all = n_waits;
    CHECK_NOTE(all == REASONS, "%d waits, and reasons for %d", all, REASONS);
    for (int i = 0; i < all; i++)
        test_a_wait(waits[i].text);
    return check_report("test_waits");
}
