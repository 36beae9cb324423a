/* Runs programs of tests/model/scenarios.py on the engine and prints what every rank did, and when.
 *
 *     record_traces [none|arrivals|publications|late] < programs
 *
 * A line of input is a seed and a program a rank, separated by tabs. Ranks are threads over
 * comm_shm; a table of operations in front of the communicator's own delays them at random before
 * and after every call and notes when each began and ended. Weights are one number a rank, which
 * fills its master, so a read of a full shows a number a rank, or 0 where a slice is not uniform.
 * The argument names a wait that is left out: traces of that must be found to be impossible.
 *
 * Output: "event RANK NAME ROOT BEGIN_NS END_NS SEEN..." in the order of each rank, and "end"
 * behind each program. What an error says stands in the place of NAME, behind "!".
 */
#include <ctype.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "comm/shm_internal.h"
#include "engine_fixture.h"

enum { EVENTS = 512, MODELS = 2, GRAPHS = 16, UNITS = 2 };

typedef struct event {
    char name[160];
    int root, n_seen;
    int64_t begin, end;
    long seen[RIG_RANKS];
} event;

typedef struct model {
    fsdpc_unit *units[UNITS];
    fsdpc_root *root;
    uint64_t graphs[GRAPHS]; /* generations of forwards whose backward is still to come */
    int n_graphs;
    long version;
    fsdpc_pending pending; /* a late step */
    bool waits[UNITS];
} model;

typedef struct recorder {
    rig *r;
    model models[MODELS];
    int current; /* the model that is worked on */
    bool reducing;
    uint64_t random;
    event events[EVENTS];
    int n_events;
} recorder;

static recorder recorders[RIG_RANKS];
static const fsdpc_comm_ops *real_ops;
static fsdpc_comm_ops delayed_ops;
static bool skip_arrivals, skip_publications, skip_late;

/* ---- delays and notes ---- */

static void delay(recorder *rec)
{
    uint64_t dice = rig_random(&rec->random);
    if (dice % 3 == 0)
        nanosleep(&(struct timespec){.tv_nsec = (long)(dice / 3 % 150000)}, NULL);
    else if (dice % 3 == 1)
        sched_yield();
}

static event *note(recorder *rec, const char *name, int64_t begin)
{
    event *e = &rec->events[rec->n_events < EVENTS - 1 ? rec->n_events++ : EVENTS - 1];
    *e = (event){.root = rec->current, .begin = begin, .end = fsdpc_clock_ns()};
    snprintf(e->name, sizeof e->name, "%s", name);
    return e;
}

static void note_error(recorder *rec, int64_t begin)
{
    char text[160];
    snprintf(text, sizeof text, "!%s", fsdpc_last_error());
    for (char *c = text; *c; c++)
        *c = isspace((unsigned char)*c) ? '_' : *c;
    note(rec, text, begin);
}

static recorder *of(const fsdpc_comm *comm)
{
    return &recorders[comm->rank];
}

/* ---- the table in front ---- */

static fsdpc_status arrive(fsdpc_param_buffer *param_buffer, const fsdpc_epoch_note *mine)
{
    recorder *rec = of(param_buffer->comm);
    delay(rec);
    int64_t begin = fsdpc_clock_ns();
    FSDPC_TRY(real_ops->epoch_arrive(param_buffer, mine));
    note(rec, "arrive", begin);
    delay(rec);
    return FSDPC_OK;
}

static fsdpc_status decide(fsdpc_param_buffer *param_buffer, fsdpc_epoch_note *all_out)
{
    recorder *rec = of(param_buffer->comm);
    int64_t begin = fsdpc_clock_ns();
    fsdpc_status status = real_ops->epoch_test(param_buffer, all_out);
    if (skip_arrivals && status == FSDPC_IN_PROGRESS) {
        const fsdpc_shm_param_buffer *shared = (const fsdpc_shm_param_buffer *)param_buffer;
        *all_out = (fsdpc_epoch_note){0};
        for (int p = 0; p < param_buffer->comm->size; p++) /* the notes as they are */
            all_out->bits |= (uint32_t)shared->words[p].note[param_buffer->epoch & 1].bits_kind;
        status = FSDPC_OK;
    }
    if (status == FSDPC_OK) {
        event *e = note(rec, "decide", begin);
        e->n_seen = 1;
        e->seen[0] = (all_out->bits & FSDPC_EPOCH_CHANGED) != 0;
    } else if (status != FSDPC_IN_PROGRESS) {
        note_error(rec, begin);
    }
    delay(rec);
    return status;
}

static fsdpc_status publish(fsdpc_param_buffer *param_buffer)
{
    recorder *rec = of(param_buffer->comm);
    delay(rec);
    int64_t begin = fsdpc_clock_ns();
    FSDPC_TRY(real_ops->epoch_copied_in(param_buffer));
    note(rec, "publish", begin);
    delay(rec);
    return FSDPC_OK;
}

static fsdpc_status own_slices(fsdpc_param_buffer *param_buffer)
{
    recorder *rec = of(param_buffer->comm);
    int64_t begin = fsdpc_clock_ns();
    fsdpc_status status = skip_publications ? FSDPC_OK : real_ops->epoch_copy_in_test(param_buffer);
    if (status == FSDPC_OK)
        note(rec, "published", begin);
    else if (status != FSDPC_IN_PROGRESS)
        note_error(rec, begin);
    delay(rec);
    return status;
}

/* Of a backward's several reductions the first stands for all: nobody is done before all began. */
static fsdpc_status post(fsdpc_work *work)
{
    recorder *rec = of(work->comm);
    bool counts = work->op.kind == FSDPC_COLL_BARRIER ||
                  (work->op.kind == FSDPC_COLL_REDUCE_SCATTER && !rec->reducing);
    rec->reducing = rec->reducing || work->op.kind == FSDPC_COLL_REDUCE_SCATTER;
    delay(rec);
    int64_t begin = fsdpc_clock_ns();
    work->op.after_copy_in = work->op.after_copy_in && !skip_late;
    FSDPC_TRY(real_ops->post(work));
    if (counts)
        note(rec, "post", begin);
    return FSDPC_OK;
}

static fsdpc_status test(fsdpc_work *work)
{
    fsdpc_status status = real_ops->test(work);
    if (status == FSDPC_IN_PROGRESS)
        delay(of(work->comm));
    return status;
}

/* ---- words ---- */

static long slice_version(const fsdpc_unit *unit, int rank)
{
    long version = -1;
    for (int p = 0; p < unit->layout->n_params; p++) {
        const float *unsharded = fsdpc_unit_unsharded(unit, p);
        fsdpc_local_shard local = fsdpc_layout_local_shard(unit->layout, p, rank);
        for (size_t i = 0; i < local.numel; i++) {
            long here = (long)unsharded[local.first + i];
            if (version >= 0 && here != version)
                return 0;
            version = here;
        }
    }
    return version;
}

static void look(recorder *rec, const fsdpc_unit *unit)
{
    delay(rec);
    int64_t begin = fsdpc_clock_ns();
    long seen[RIG_RANKS];
    for (int rank = 0; rank < rec->r->world; rank++)
        seen[rank] = slice_version(unit, rank);
    event *e = note(rec, "read", begin);
    e->n_seen = rec->r->world;
    memcpy(e->seen, seen, sizeof seen);
    delay(rec);
}

static fsdpc_status forward(recorder *rec, model *m, bool grad)
{
    FSDPC_TRY(fsdpc_pre_forward(m->units[0], grad));
    FSDPC_TRY(fsdpc_pre_forward(m->units[1], grad));
    look(rec, m->units[rig_random(&rec->random) % UNITS]);
    FSDPC_TRY(fsdpc_post_forward(m->units[1]));
    if (grad)
        m->graphs[m->n_graphs++] = m->root->generation;
    return fsdpc_post_forward(m->units[0]);
}

static fsdpc_status child_forward(recorder *rec, model *m)
{
    FSDPC_TRY(fsdpc_pre_forward(m->units[1], false));
    look(rec, m->units[1]);
    return fsdpc_post_forward(m->units[1]);
}

static fsdpc_status give(fsdpc_unit *unit)
{
    void *data;
    fsdpc_dtype dtype;
    bool accumulate;
    FSDPC_TRY(fsdpc_grad_target_of(unit, 0, &data, &dtype, &accumulate));
    memset(data, 0, unit->layout->params[0].numel * fsdpc_dtype_bytes(dtype));
    return FSDPC_OK;
}

static void drop(model *m, bool newest)
{
    memmove(m->graphs, m->graphs + !newest, GRAPHS * sizeof *m->graphs - sizeof *m->graphs);
    m->n_graphs--;
}

static fsdpc_status backward(recorder *rec, model *m, bool newest)
{
    uint64_t generation = m->graphs[newest ? m->n_graphs - 1 : 0];
    FSDPC_TRY(fsdpc_pre_backward(m->units[0], generation));
    FSDPC_TRY(fsdpc_pre_backward(m->units[1], generation));
    look(rec, m->units[1]);
    rec->reducing = false;
    FSDPC_TRY(give(m->units[1]));
    FSDPC_TRY(fsdpc_post_backward(m->units[1]));
    FSDPC_TRY(give(m->units[0]));
    int64_t begin = fsdpc_clock_ns();
    FSDPC_TRY(fsdpc_backward_end(m->root));
    note(rec, "done", begin);
    drop(m, newest);
    return FSDPC_OK;
}

/* Half of it, a delay, the other half: whoever reads meanwhile sees it. */
static void fill(recorder *rec, float *to, size_t numel, long version)
{
    for (size_t i = 0; i < numel; i++) {
        if (i == numel / 2)
            delay(rec);
        to[i] = (float)version;
    }
}

static void fill_unit(recorder *rec, model *m, int u, bool param_buffer_too)
{
    for (int p = 0; p < m->units[u]->layout->n_params; p++) {
        const fsdpc_unit_group *group = &m->units[u]->groups[0];
        fsdpc_local_shard local = fsdpc_layout_local_shard(m->units[u]->layout, p, rec->r->rank);
        fill(rec, (float *)(void *)group->master + local.shard_offset, local.numel, m->version);
        size_t at = m->units[u]->layout->params[p].unsharded_offset + local.first;
        if (param_buffer_too)
            fill(rec,
                 (float *)(void *)(m->root->param_buffer->write + group->param_buffer_offset) + at,
                 local.numel, m->version);
    }
}

static void fill_masters(recorder *rec, model *m, bool param_buffer_too)
{
    m->version++;
    for (int u = 0; u < UNITS; u++)
        fill_unit(rec, m, u, param_buffer_too);
}

/* ---- a late step, as an optimizer's is ---- */

static fsdpc_status advance(fsdpc_pending *pending, const fsdpc_unit *unit)
{
    model *m = (model *)((char *)pending - offsetof(model, pending));
    recorder *rec = of(m->root->comm);
    for (int u = 0; u < UNITS; u++) {
        if (m->waits[u])
            fill_unit(rec, m, u, true);
        m->waits[u] = false;
        if (m->units[u] == unit)
            break;
    }
    return FSDPC_OK;
}

static fsdpc_status end_late(fsdpc_pass_hook *hook)
{
    fsdpc_pending *pending = (fsdpc_pending *)((char *)hook - offsetof(fsdpc_pending, pass));
    model *m = (model *)((char *)pending - offsetof(model, pending));
    FSDPC_TRY(advance(pending, NULL));
    for (int u = 0; u < UNITS; u++) {
        m->units[u]->pending = NULL;
        m->units[u]->foreign = true;
    }
    return FSDPC_OK;
}

static fsdpc_status late_step(recorder *rec, model *m)
{
    FSDPC_TRY(fsdpc_unit_end_step(m->units[0]));
    for (int u = 0; u < UNITS; u++)
        m->units[u]->puts_off = true;
    fsdpc_status status = fsdpc_root_write_begin(m->root);
    if (status == FSDPC_OK) {
        m->version++;
        m->pending = (fsdpc_pending){.pass.end = end_late, .advance = advance};
        for (int u = 0; u < UNITS; u++) {
            m->waits[u] = true;
            m->units[u]->pending = &m->pending;
            m->units[u]->puts_off = false;
            m->units[u]->foreign = false; /* nobody else has its memory meanwhile */
        }
        delay(rec);
    }
    FSDPC_KEEP_FIRST(status, fsdpc_root_write_end(m->root));
    return status;
}

static fsdpc_status optimizer_step(recorder *rec, model *m)
{
    FSDPC_TRY(fsdpc_unit_end_step(m->units[0]));
    fsdpc_status status = fsdpc_root_write_begin(m->root);
    if (status == FSDPC_OK)
        fill_masters(rec, m, true);
    FSDPC_KEEP_FIRST(status, fsdpc_root_write_end(m->root));
    return status;
}

static fsdpc_status say(recorder *rec, char word)
{
    model *m = &rec->models[rec->current];
    int64_t begin = fsdpc_clock_ns();
    switch (toupper((unsigned char)word)) {
    case 'F':
    case 'E':
        return forward(rec, m, toupper((unsigned char)word) == 'F');
    case 'V':
    case 'G':
        return forward(rec, m, word == 'G');
    case 'H':
        FSDPC_TRY(fsdpc_hold_begin(m->root));
        look(rec, m->units[0]);
        return FSDPC_OK;
    case 'X':
        look(rec, m->units[1]);
        return fsdpc_hold_end(m->root);
    case 'C':
        return child_forward(rec, m);
    case 'B':
    case 'N':
        return backward(rec, m, word == 'N');
    case 'D':
        drop(m, true);
        return FSDPC_OK;
    case 'O':
        return optimizer_step(rec, m);
    case 'L':
        return late_step(rec, m);
    case 'W':
        FSDPC_TRY(fsdpc_unit_end_step(m->units[0]));
        fill_masters(rec, m, false);
        note(rec, "write", begin);
        return FSDPC_OK;
    case 'U':
        FSDPC_TRY(fsdpc_unshard_begin(m->units[0]));
        FSDPC_TRY(fsdpc_unshard_wait(m->units[0]));
        look(rec, m->units[0]);
        return FSDPC_OK;
    case 'S':
        look(rec, m->units[0]);
        return fsdpc_reshard(m->units[0]);
    case '|':
        FSDPC_TRY(fsdpc_comm_run(rec->r->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}));
        note(rec, "done", begin);
        return FSDPC_OK;
    }
    return fsdpc_fail(FSDPC_ERR_VALUE, "no word is '%c'", word);
}

static fsdpc_status make_model(recorder *rec, model *m, const char *name)
{
    const bool encloses[UNITS] = {true, false};
    fsdpc_param_spec specs[] = {rig_spec("w", FSDPC_F32, 2, 24, 16, 0),
                                rig_spec("bias", FSDPC_F32, 1, 320, 0, 0)};
    for (int u = 0; u < UNITS; u++) {
        fsdpc_unit_options options = rig_options(rec->r, name);
        options.reshard_after_forward = u > 0;
        FSDPC_TRY(fsdpc_unit_create(specs, 2, &options, &m->units[u]));
        m->units[u]->foreign =
            true; /* masters are compared with the parameter buffer in every epoch */
    }
    FSDPC_TRY(fsdpc_root_create(m->units, encloses, UNITS, &m->root));
    fill_masters(rec, m, false);
    return FSDPC_OK;
}

static void put_in_front(void)
{
    real_ops = recorders[0].r->comm->ops;
    delayed_ops = *real_ops;
    delayed_ops.epoch_arrive = arrive;
    delayed_ops.epoch_test = decide;
    delayed_ops.epoch_copied_in = publish;
    delayed_ops.epoch_copy_in_test = own_slices;
    delayed_ops.post = post;
    delayed_ops.test = test;
}

static fsdpc_status run_program(rig *r)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    recorder *rec = &recorders[r->rank];
    const char *const *programs = r->arg;
    rec->r = r;
    for (int i = 0; i < MODELS; i++)
        FSDPC_TRY(make_model(rec, &rec->models[i], i ? "second" : "first"));
    FSDPC_TRY(fsdpc_comm_run(r->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER, .what = "start"}));
    pthread_once(&once, put_in_front); /* all have set their recorder by now */
    r->comm->ops = &delayed_ops;
    r->comm->timeout_s = skip_arrivals || skip_publications ? 0.5 : 20;
    fsdpc_status status = FSDPC_OK;
    for (const char *c = programs[r->rank]; *c && status == FSDPC_OK; c++) {
        if (isspace((unsigned char)*c))
            continue;
        if (*c != '|')
            rec->current = islower((unsigned char)*c) != 0;
        fsdpc_comm_locate(r->comm, "word", (char[]){*c, 0});
        int64_t begin = fsdpc_clock_ns();
        status = say(rec, *c);
        bool noted = rec->n_events > 0 && rec->events[rec->n_events - 1].name[0] == '!';
        if (status != FSDPC_OK && !noted)
            note_error(rec, begin);
    }
    r->comm->ops = real_ops;
    if (status != FSDPC_OK) /* the others need not wait */
        fsdpc_comm_abort(r->comm, fsdpc_last_error());
    return FSDPC_OK;
}

static void print_events(int world)
{
    for (int rank = 0; rank < world; rank++) {
        for (int i = 0; i < recorders[rank].n_events; i++) {
            const event *e = &recorders[rank].events[i];
            printf("event %d %s %d %lld %lld", rank, e->name, e->root, (long long)e->begin,
                   (long long)e->end);
            for (int k = 0; k < e->n_seen; k++)
                printf(" %ld", e->seen[k]);
            putchar('\n');
        }
    }
    puts("end");
}

static void clean(rig *rigs, int world)
{
    for (int rank = 0; rank < world; rank++) {
        for (int i = 0; i < MODELS; i++) {
            fsdpc_root_destroy(recorders[rank].models[i].root);
            for (int u = 0; u < UNITS; u++)
                fsdpc_unit_destroy(recorders[rank].models[i].units[u]);
        }
    }
    rigs_close(rigs, world);
}

static void run_line(char *line)
{
    char *programs[RIG_RANKS];
    int world = 0;
    uint64_t seed = strtoull(strtok(line, "\t\n"), NULL, 10);
    for (char *text; world < RIG_RANKS && (text = strtok(NULL, "\t\n"));)
        programs[world++] = text;
    for (int rank = 0; rank < world; rank++)
        recorders[rank] = (recorder){.random = seed * 64 + (uint64_t)rank};
    rig rigs[RIG_RANKS];
    CHECK(rigs_run(rigs, world, run_program, programs));
    print_events(world);
    clean(rigs, world);
}

int main(int argc, char **argv)
{
    static char line[4096];
    skip_arrivals = argc > 1 && strcmp(argv[1], "arrivals") == 0;
    skip_late = argc > 1 && strcmp(argv[1], "late") == 0;
    skip_publications = argc > 1 && strcmp(argv[1], "publications") == 0;
    while (fgets(line, sizeof line, stdin))
        run_line(line);
    return check_failures != 0;
}
