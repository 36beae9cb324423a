/* The engine on the streams of a GPU, ordered by events, hosts ahead of the device.
 *
 *     test_streams                      trains with every wait in its place
 *     test_streams without KIND         trains with all waits of a kind left out until numbers are
 *                                       wrong; ends well if they were, in one of many runs
 *     test_streams without KIND races   the same in all of these runs, for ThreadSanitizer to end
 *
 * A model of a few units, whose blocks take turns in two slots, trains on the GPU over NCCL and on
 * the CPU over shared memory, by the engine that both frontends drive. Its modules are flat
 * kernels: forward adds unsharded parameters to the activations, and each gradient is full +
 * activations + data, so that a full read too early or too late, a sum taken too early and a step
 * on a stale sum all end up in the weights, whoever steps them, the GPU or the CPU beside it. Their
 * bits must be the CPU's where sums have the same order (two ranks, or two by two). On the
 * emulated device streams are threads, each operation begins after a random delay, and a gather in
 * flight leaves noise in the full.
 *
 * Waits are left out by tables in front of the device's and the communicator's: an event that is
 * not waited for, an operation that a stream nobody uses is ordered behind.
 */
#include "nccl_rig.h"

#include "clip_norm.h"
#include "engine/grads.h"
#include "engine/optim.h"
#include "engine/optim_internal.h"
#include "engine/root_internal.h"
#include "engine/sched.h"

enum { UNITS = 4, STEPS = 6, WIDE = 40, TALL = 36, LONG = 70, DATA = 1 << 13 };
enum { CHUNK = 100 }; /* of what the CPU steps by: several a unit */
enum { TRIES = 100 }; /* a busy machine may hide what is left out for long */

/* What is waited for: X(name, word) */
#define WAITS(X)                                                                                   \
    X(PUBLISHED, "published") /* gathers, for own slices */                                        \
    X(RELEASED, "released")   /* a gather, for the last reader of the full */                      \
    X(TAKEN, "taken")         /* a gather, for the last reader of another full in its slot */      \
    X(FILLED, "filled")       /* a reduction, for its buffer */                                    \
    X(GATHERED, "gathered")   /* compute, for the full */                                          \
    X(REDUCED, "reduced")     /* the optimizer and the next filling, for the reduction */          \
    X(PARTIAL, "partial")     /* the sum over replicas, for the partial */                         \
    X(COMPUTED, "computed")   /* copies for the CPU's steps, for what they bring */                \
    X(ARRIVED, "arrived")     /* the CPU's steps, for the copies */

typedef enum wait_kind {
#define X(name, word) name,
    WAITS(X)
#undef X
        WAIT_KINDS
} wait_kind;

static const char *const wait_words[] = {
#define X(name, word) word,
    WAITS(X)
#undef X
};

/* How ranks train; a model's arg. */
typedef struct way {
    bool square;        /* two by two */
    bool deterministic; /* sums are trees, over NCCL too */
    bool on_host;       /* the CPU steps, beside the GPU... */
    bool grads;         /* ... by gradients that lie there too, for params that do */
} way;

typedef struct model {
    rank_context *self;
    const way *way;
    fsdpc_device *device;
    fsdpc_comm *comm;
    fsdpc_mesh mesh;
    fsdpc_stream plain;
    fsdpc_stream *unused; /* orders nothing */
    fsdpc_event *kept[2]; /* what the next gather is to wait for */
    int n_kept;
    fsdpc_unit *units[UNITS];
    fsdpc_root *root;
    fsdpc_optim *optim;
    void *data, *activations, *norm;
    uint64_t seen;
} model;

static wait_kind without = WAIT_KINDS;
static _Atomic int waits_seen[WAIT_KINDS];
static _Thread_local model *here;
static const fsdpc_device_ops *device_ops;
static fsdpc_device_ops watched_device;
static const fsdpc_comm_ops *comm_ops;
static fsdpc_comm_ops watched_comm;

/* ---- Tables in front ---- */

static fsdpc_status wait_unless_left_out(wait_kind kind, fsdpc_stream *stream, fsdpc_event *event)
{
    atomic_fetch_add(&waits_seen[kind], 1);
    return kind == without ? FSDPC_OK : device_ops->stream_wait(stream, event);
}

/* Whose full a gather overwrites is known when it is posted: its waits are kept until then. */
static fsdpc_status stream_wait(fsdpc_stream *stream, fsdpc_event *event)
{
    const fsdpc_root *root = here->root;
    if (event == root->copied_in || event == root->filled)
        return wait_unless_left_out(event == root->filled ? FILLED : PUBLISHED, stream, event);
    for (int u = 0; u < UNITS; u++) {
        if (event == here->units[u]->released) {
            here->kept[here->n_kept++] = event;
            return FSDPC_OK;
        }
    }
    return wait_unless_left_out(COMPUTED, stream, event);
}

static fsdpc_status event_test(fsdpc_event *event)
{
    if (event == here->root->filled)
        return device_ops->event_test(event);
    atomic_fetch_add(&waits_seen[ARRIVED], 1);
    return without == ARRIVED ? FSDPC_OK : device_ops->event_test(event);
}

static fsdpc_status post(fsdpc_work *work)
{
    int n = here->n_kept, unit = work->op.unit;
    here->n_kept = 0;
    for (int i = 0; i < n; i++)
        FSDPC_TRY(
            wait_unless_left_out(here->kept[i] == here->units[unit]->released ? RELEASED : TAKEN,
                                 work->op.stream, here->kept[i]));
    return comm_ops->post(work);
}

static fsdpc_status order(fsdpc_work *work, fsdpc_stream *stream)
{
    wait_kind kind = work->op.kind == FSDPC_COLL_GATHER ? GATHERED
                     : stream->async                    ? PARTIAL
                                                        : REDUCED;
    fsdpc_status status = comm_ops->order(work, kind == without ? here->unused : stream);
    if (status == FSDPC_OK)
        atomic_fetch_add(&waits_seen[kind], 1);
    return status;
}

/* A step by the CPU, whose kernels ThreadSanitizer does not see: what they touch is touched here.
 */
static fsdpc_status step_told(const fsdpc_step_args *args, fsdpc_stream *stream)
{
    const volatile double *factor = args->grad_scale_at;
    const volatile float *grad = args->grad;
    volatile float *param = args->param;
    volatile uint16_t *param_buffer = args->copy_in; /* of bf16 */
    if (factor)
        (void)*factor;
    for (size_t i = 0; i < args->numel; i++) {
        (void)grad[i];
        param[i] = param[i];
        if (param_buffer)
            param_buffer[i] = 0;
    }
    return fsdpc_flat_ops_cpu(fsdpc_isa_best())->step(args, stream);
}

static void watch(model *m)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    if (!device_ops) {
        device_ops = m->device->ops;
        watched_device = *device_ops;
        watched_device.stream_wait = stream_wait;
        watched_device.event_test = event_test;
        comm_ops = m->comm->ops;
        watched_comm = *comm_ops;
        watched_comm.post = post;
        watched_comm.order = order;
    }
    pthread_mutex_unlock(&lock);
    m->device->ops = &watched_device;
    m->mesh.shard->ops = &watched_comm;
    if (m->mesh.replicate)
        m->mesh.replicate->ops = &watched_comm;
}

/* ---- The model ---- */

static fsdpc_status mesh_create(model *m)
{
    int rank = m->self->rank;
    m->mesh = (fsdpc_mesh){.shard = m->comm};
    if (!m->way->square)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_comm_split(m->comm, rank / 2, rank, &m->mesh.shard));
    return fsdpc_comm_split(m->comm, rank % 2, rank, &m->mesh.replicate);
}

static fsdpc_status units_create(model *m)
{
    static const char *const names[UNITS] = {"root", "a", "b", "c"};
    static const bool encloses[UNITS] = {true};
    fsdpc_param_spec specs[] = {
        {.name = "w", .dtype = FSDPC_F32, .ndim = 2, .shape = {WIDE, TALL}},
        {.name = "bias", .dtype = FSDPC_F32, .ndim = 1, .shape = {LONG}},
    };
    FSDPC_TRY(fsdpc_optim_create(FSDPC_OPTIM_ADAMW, m->device, NULL, &m->optim));
    m->optim->host_chunk = CHUNK;
    for (int u = 0; u < UNITS; u++) {
        fsdpc_unit_options options = {.name = names[u],
                                      .mesh = m->mesh,
                                      .device = m->device,
                                      .cast_params = true,
                                      .param_dtype = FSDPC_BF16,
                                      .cast_reduce = true,
                                      .reduce_dtype = FSDPC_F32,
                                      .reshard_after_forward = u > 0};
        if (m->device->remote && m->way->on_host)
            options.offload = (fsdpc_offload){.host = true,
                                              .params = m->way->grads,
                                              .masters = true,
                                              .states = true,
                                              .gradients = m->way->grads};
        FSDPC_TRY(fsdpc_unit_create(specs, 2, &options, &m->units[u]));
        m->units[u]->settings.deterministic = m->way->deterministic;
        for (int p = 0; p < 2; p++) {
            FSDPC_TRY(fsdpc_unit_init_param(m->units[u], p, FSDPC_INIT_NORMAL, 0, 0.5, 7,
                                            (uint64_t)(2 * u + p)));
            FSDPC_TRY(fsdpc_optim_add(m->optim, m->units[u], p, 0));
        }
    }
    fsdpc_hyper hyper = {.lr = 0.05, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
    FSDPC_TRY(fsdpc_optim_set_hyper(m->optim, 0, &hyper));
    return fsdpc_root_create(m->units, encloses, UNITS, &m->root);
}

static fsdpc_status data_create(model *m)
{
    float *host = malloc(DATA * sizeof *host);
    for (int i = 0; i < DATA; i++)
        host[i] = (float)((i * 37 + m->self->rank * 101) % 257 - 128) / 64.0f;
    fsdpc_status status =
        fsdpc_device_alloc(m->device, FSDPC_MEM_OTHER, DATA * sizeof *host, &m->data);
    if (status == FSDPC_OK)
        status = fsdpc_device_alloc(m->device, FSDPC_MEM_OTHER, WIDE * TALL * sizeof *host,
                                    &m->activations);
    if (status == FSDPC_OK)
        status = fsdpc_device_alloc(m->device, FSDPC_MEM_OTHER, sizeof(double), &m->norm);
    if (status == FSDPC_OK)
        status = fsdpc_device_copy(m->device, m->data, host, DATA * sizeof *host, NULL);
    free(host);
    return status;
}

static void model_destroy(model *m)
{
    fsdpc_root_destroy(m->root);
    fsdpc_optim_destroy(m->optim);
    for (int u = 0; u < UNITS; u++)
        fsdpc_unit_destroy(m->units[u]);
    fsdpc_device_free(m->device, m->data);
    fsdpc_device_free(m->device, m->activations);
    fsdpc_device_free(m->device, m->norm);
    if (m->mesh.replicate) {
        fsdpc_comm_destroy(m->mesh.replicate);
        fsdpc_comm_destroy(m->mesh.shard);
    }
    fsdpc_stream_destroy(m->unused);
}

/* ---- A step ---- */

static fsdpc_status use(model *m, int unit)
{
    for (int p = 0; p < 2; p++) {
        size_t numel = m->units[unit]->layout->params[p].numel;
        FSDPC_TRY(fsdpc_flat_accumulate(m->activations, FSDPC_F32,
                                        fsdpc_unit_unsharded(m->units[unit], p), FSDPC_BF16, numel,
                                        &m->plain));
    }
    return FSDPC_OK;
}

static fsdpc_status forward_of(model *m, int unit, bool grad)
{
    FSDPC_TRY(fsdpc_pre_forward(m->units[unit], grad));
    FSDPC_TRY(use(m, unit));
    return fsdpc_post_forward(m->units[unit]);
}

/* Of the first `n_units`; fewer than all is a forward that ends early. */
static fsdpc_status forward(model *m, int n_units, bool grad)
{
    FSDPC_TRY(fsdpc_pre_forward(m->units[0], grad));
    FSDPC_TRY(
        fsdpc_device_fill(m->device, m->activations, 0, WIDE * TALL * sizeof(float), &m->plain));
    FSDPC_TRY(use(m, 0));
    for (int u = 1; u < n_units; u++)
        FSDPC_TRY(forward_of(m, u, grad));
    m->seen = fsdpc_unit_generation(m->units[0]);
    return fsdpc_post_forward(m->units[0]);
}

static fsdpc_status gradients(model *m, int unit, int step)
{
    for (int p = 0; p < 2; p++) {
        void *grad;
        fsdpc_dtype dtype;
        bool accumulate;
        size_t numel = m->units[unit]->layout->params[p].numel;
        const float *data =
            (const float *)m->data + ((size_t)(step * 7 + unit * 3 + p) * 64) % 4096;
        void *unsharded = fsdpc_unit_unsharded(m->units[unit], p);
        FSDPC_TRY(fsdpc_grad_target_of(m->units[unit], p, &grad, &dtype, &accumulate));
        if (accumulate)
            FSDPC_TRY(fsdpc_flat_accumulate(grad, dtype, unsharded, FSDPC_BF16, numel, &m->plain));
        else
            FSDPC_TRY(fsdpc_flat_cast(grad, dtype, unsharded, FSDPC_BF16, numel, &m->plain));
        FSDPC_TRY(fsdpc_flat_accumulate(grad, dtype, m->activations, FSDPC_F32, numel, &m->plain));
        FSDPC_TRY(fsdpc_flat_accumulate(grad, dtype, data, FSDPC_F32, numel, &m->plain));
    }
    return FSDPC_OK;
}

static fsdpc_status backward(model *m, int step)
{
    FSDPC_TRY(fsdpc_pre_backward(m->units[0], m->seen));
    for (int u = UNITS - 1; u > 0; u--) {
        FSDPC_TRY(fsdpc_pre_backward(m->units[u], m->seen));
        FSDPC_TRY(gradients(m, u, step));
        FSDPC_TRY(fsdpc_post_backward(m->units[u]));
    }
    FSDPC_TRY(gradients(m, 0, step));
    return fsdpc_backward_end(m->root);
}

/* In the device's memory; the host waits for nothing. */
static fsdpc_status clip_ahead(model *m)
{
    fsdpc_norm_scratch total;
    fsdpc_status status = fsdpc_norm_scratch_init(&total, m->device, 1);
    if (status == FSDPC_OK)
        status = fsdpc_clip_norms(m->units, UNITS, 2, total.at, NULL);
    if (status == FSDPC_OK)
        status = fsdpc_norm_put(total.at, 2, m->norm, &m->plain);
    fsdpc_norm_scratch_fini(&total);
    FSDPC_TRY(status);
    return fsdpc_clip_scale_remote(m->units, UNITS, m->norm, 1.0, &m->plain);
}

/* Two micro-steps in one of the steps, clipping, which reads a value, in every second one. */
static fsdpc_status train_step(model *m, int step)
{
    int micro_steps = step == 2 ? 2 : 1;
    if (step == 3)
        FSDPC_TRY(forward(m, 2, false));
    for (int micro = 0; micro < micro_steps; micro++) {
        m->root->model->is_last_backward = micro == micro_steps - 1;
        FSDPC_TRY(forward(m, UNITS, true));
        FSDPC_TRY(backward(m, step + 10 * micro));
    }
    if (step % 2 && m->device->remote && m->way->on_host) {
        FSDPC_TRY(clip_ahead(m));
    } else if (step % 2) {
        double norm;
        FSDPC_TRY(clip_norm(m->units, UNITS, &norm));
        fsdpc_clip_scale(m->units, UNITS, norm, 1.0);
    }
    FSDPC_TRY(fsdpc_optim_step(m->optim));
    for (int u = 0; u < UNITS; u++)
        fsdpc_unit_zero_grad(m->units[u]);
    return FSDPC_OK;
}

enum { RESULT = UNITS * (WIDE * TALL + LONG + 2 * WIDE + 2 * LONG) };

/* This rank's masters. */
static fsdpc_status fetch_masters(const model *m, float *out)
{
    for (int u = 0; u < UNITS; u++) {
        const fsdpc_unit_group *group = &m->units[u]->groups[0];
        size_t numel = group->plan->shard_numel;
        FSDPC_TRY(fsdpc_device_copy(m->device, out, group->master, numel * sizeof *out, NULL));
        out += numel;
    }
    return FSDPC_OK;
}

static fsdpc_status train(model *m, float *out)
{
    FSDPC_TRY(mesh_create(m));
    FSDPC_TRY(fsdpc_stream_create(m->device, "unused", true, &m->unused));
    FSDPC_TRY(units_create(m));
    FSDPC_TRY(data_create(m));
    if (m->device->remote)
        watch(m);
    for (int step = 0; step < STEPS; step++)
        FSDPC_TRY(train_step(m, step));
    return fetch_masters(m, out);
}

/* ---- On both devices ---- */

static float on_cpu[RANKS_MAX][RESULT], on_gpu[RANKS_MAX][RESULT];

static void train_on_cpu(rank_context *self)
{
    model m = {.self = self, .way = self->arg, .device = self->device, .comm = self->comm};
    m.plain = (fsdpc_stream){.device = m.device, .name = "plain"};
    EXPECT_OK(self, train(&m, on_cpu[self->rank]));
    model_destroy(&m);
}

static void train_on_gpu(rank_context *self)
{
    gpu_rank r;
    EXPECT_OK(self, rank_create(&r, self, library));
    r.device->host = self->device;
    fsdpc_flat_ops told = *self->device->flat;
    told.step = step_told;
    self->device->flat = &told;
    model m = {
        .self = self, .way = self->arg, .device = r.device, .comm = r.comm, .plain = r.plain};
    here = &m;
    fsdpc_status status = train(&m, on_gpu[self->rank]);
    if (without == WAIT_KINDS)
        EXPECT(self, status == FSDPC_OK, "%s", fsdpc_last_error());
    model_destroy(&m);
    rank_destroy(&r);
}

static size_t differing(int size, double tolerance)
{
    size_t wrong = 0;
    for (int r = 0; r < size; r++)
        for (int i = 0; i < RESULT; i++)
            wrong += !(fabs((double)on_gpu[r][i] - (double)on_cpu[r][i]) <= tolerance);
    return wrong;
}

static size_t run(int size, way how, double tolerance)
{
    memset(on_cpu, 0, sizeof on_cpu);
    memset(on_gpu, 0, sizeof on_gpu);
    ranks_run_threads(size, train_on_cpu, &(rank_options){.arg = &how});
    ranks_run_threads(size, train_on_gpu, &(rank_options){.arg = &how});
    return differing(size, tolerance);
}

static void test_training(int most)
{
    static const struct {
        int size;
        way how;
        double tolerance;
    } worlds[] = {{1, {0}, 0},
                  {2, {0}, 0},
                  {4, {.square = true}, 0},
                  {4, {0}, 1e-3},
                  {4, {.deterministic = true}, 0},
                  {1, {.on_host = true}, 0},
                  {2, {.on_host = true}, 0},
                  {2, {.on_host = true, .grads = true}, 0},
                  {4, {.square = true, .on_host = true}, 0}};
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++) {
        if (worlds[w].size > most)
            continue;
        size_t wrong = run(worlds[w].size, worlds[w].how, worlds[w].tolerance);
        CHECK_NOTE(wrong == 0, "%d ranks%s%s%s%s: %zu weights differ", worlds[w].size,
                   worlds[w].how.square ? ", two by two" : "",
                   worlds[w].how.deterministic ? ", deterministic" : "",
                   worlds[w].how.on_host ? ", stepped by the CPU" : "",
                   worlds[w].how.grads ? ", gradients and params there" : "", wrong);
    }
    for (int kind = 0; kind < WAIT_KINDS && most >= 4; kind++)
        CHECK_NOTE(waits_seen[kind] > 0, "no wait for what is %s", wait_words[kind]);
}

#if defined(FSDPC_EMU)

/* A peer's operations come to nobody: kernels wait for ever, hosts ahead of them do not. */
static void stuck(rank_context *self)
{
    static const double SOON_S = 0.5;
    static float unread[RANKS_MAX][RESULT];
    gpu_rank r;
    EXPECT_OK(self, rank_create(&r, self, library));
    r.device->host = self->device;
    model m = {
        .self = self, .way = self->arg, .device = r.device, .comm = r.comm, .plain = r.plain};
    here = &m;
    r.comm->timeout_s = SOON_S; /* of the GPU; the control's is generous */
    fsdpc_status status = train(&m, unread[self->rank]);
    EXPECT(self, status < 0 && strstr(fsdpc_last_error(), "deadline passed"), "%s: %s",
           fsdpc_status_text(status), fsdpc_last_error());
    EXPECT_OK(self, fsdpc_stream_sync(&r.plain)); /* nothing holds the GPU any more */
    model_destroy(&m);
    rank_destroy(&r);
}

static void test_stuck(void)
{
    break_nccl(FAKE_NCCL_STUCK, 1);
    ranks_run_threads(2, stuck, &(rank_options){.arg = &(way){0}});
    ranks_run_threads(2, stuck, &(rank_options){.arg = &(way){.on_host = true}});
    break_nccl(FAKE_NCCL_WELL, 0);
}

#endif

static int test_without(const char *word, bool until_wrong, int most)
{
    without = 0;
    while (without < WAIT_KINDS && strcmp(wait_words[without], word) != 0)
        without++;
    int size = without == PARTIAL ? 4 : 2;
    if (without == WAIT_KINDS || size > most) {
        fprintf(stderr, "no wait '%s', or too few GPUs\n", word);
        return 2;
    }
    size_t wrong = 0;
    for (int i = 0; i < TRIES && !(wrong && until_wrong); i++) {
#if defined(FSDPC_EMU)
        emu_set_delays(77 + (unsigned)i);
#endif
        wrong = run(size, (way){.square = size == 4, .on_host = without >= COMPUTED}, 0);
    }
    printf("test_streams: without '%s' %zu weights differ\n", word, wrong);
    return wrong == 0;
}

int main(int argc, char **argv)
{
    int most;
    if (!rig_find(&most))
        return rig_missing("test_streams");
#if defined(FSDPC_EMU)
    fake_open();
#endif
    if (argc >= 3 && strcmp(argv[1], "without") == 0)
        return test_without(argv[2], argc == 3, most);
    test_training(most);
#if defined(FSDPC_EMU)
    test_stuck();
    fake_check();
#endif
    return check_report("test_streams");
}
