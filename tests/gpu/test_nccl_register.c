/* Memory that NCCL is told of before it is gathered into: as windows, as buffers where it makes no
 * windows, not at all where that fails; gathers bring the same in all cases, and by the address of
 * the slot alone.
 */
#include "nccl_rig.h"

#if defined(FSDPC_EMU)
#include "emu_driver.h"
#endif

enum { NUMEL = 1500, MOST = 4, WINDOWS = 3, BANDS = 2 };

static const fsdpc_slice bands[BANDS] = {
    {.numel = NUMEL}, {.unsharded_offset = MOST * NUMEL, .numel = NUMEL, .shard_offset = NUMEL}};

/* What a rank has to gather with: two windows onto one slot, and one that is alone. */
typedef struct stage {
    gpu_rank r;
    fsdpc_param_buffer *param_buffer;
    fsdpc_window *windows[WINDOWS];
    float *shard;
    _Atomic int warnings;
} stage;

static void count_line(void *arg, fsdpc_log_level level, const char *line)
{
    stage *s = arg;
    if (level == FSDPC_LOG_WARNING && strstr(line, "gathers go into memory"))
        s->warnings++;
}

static float value_of(int rank, int i)
{
    return (float)(1000 * rank + i % 997);
}

static void stage_open(stage *s, rank_context *self)
{
    const size_t bytes = 2 * MOST * NUMEL * sizeof(float);
    float host[2 * NUMEL];
    for (int i = 0; i < 2 * NUMEL; i++)
        host[i] = value_of(self->rank, i);
    EXPECT_OK(self, rank_create(&s->r, self, library));
    s->r.comm->log = (fsdpc_log){.level = FSDPC_LOG_WARNING, .fn = count_line, .arg = s};
    fsdpc_device *device = s->r.device;
    EXPECT_OK(self, fsdpc_param_buffer_create(s->r.comm, bytes, &s->param_buffer));
    EXPECT_OK(self,
              fsdpc_device_alloc(device, FSDPC_MEM_UNSHARDED, sizeof host, (void **)&s->shard));
    EXPECT_OK(self, fsdpc_device_copy(device, s->shard, host, sizeof host, NULL));
    for (int w = 0; w < WINDOWS; w++)
        EXPECT_OK(self, fsdpc_window_create(device, FSDPC_MEM_UNSHARDED, bytes,
                                            w == 1 ? s->windows[0] : NULL, &s->windows[w]));
}

static void stage_close(stage *s)
{
    for (int w = 0; w < WINDOWS; w++)
        fsdpc_window_destroy(s->windows[w]);
    fsdpc_device_free(s->r.device, s->shard);
    fsdpc_param_buffer_destroy(s->param_buffer);
    rank_destroy(&s->r);
}

/* Gathers into a window's memory and reads what is there by its address. */
static void gather(stage *s, int w)
{
    rank_context *self = s->r.self;
    static _Thread_local float host[2 * MOST * NUMEL];
    fsdpc_coll op = {.kind = FSDPC_COLL_GATHER,
                     .unit = w,
                     .what = "layers.3",
                     .stream = s->r.gathers,
                     .slices = bands,
                     .n_slices = BANDS,
                     .param_buffer = s->param_buffer,
                     .send = s->shard,
                     .recv = s->windows[w]->memory};
    EXPECT_OK(self, fsdpc_device_fill(s->r.device, s->windows[w]->memory, 0xff, sizeof host, NULL));
    EXPECT_OK(self, fsdpc_comm_run(s->r.comm, &op));
    EXPECT_OK(self,
              fsdpc_device_copy(s->r.device, host, s->windows[w]->address, sizeof host, NULL));
    int wrong = 0;
    for (int i = 0; i < self->size * NUMEL; i++) {
        wrong += host[i] != value_of(i / NUMEL, i % NUMEL);
        wrong += host[MOST * NUMEL + i] != value_of(i / NUMEL, NUMEL + i % NUMEL);
    }
    EXPECT(self, wrong == 0, "window %d: %d elements are wrong", w, wrong);
}

static void attach(stage *s, int w)
{
    EXPECT_OK(s->r.self, fsdpc_param_buffer_attach(s->param_buffer, s->windows[w]->memory,
                                                   s->windows[w]->bytes));
}

static void gathers_from_slot_to_slot(stage *s)
{
    attach(s, 0); /* and so the second window's too */
    for (int w = 0; w < WINDOWS; w++)
        gather(s, w);
    attach(s, 2);
    for (int w = 0; w < WINDOWS; w++)
        gather(s, w);
}

static void detach(stage *s)
{
    for (int w = 0; w < WINDOWS; w++)
        fsdpc_param_buffer_detach(s->param_buffer, s->windows[w]->memory);
    gather(s, 0); /* as before it was attached */
}

#if defined(FSDPC_EMU)

static pthread_barrier_t all_here;

/* What is known while nobody goes on. */
static void check_known(rank_context *self, int windows, int buffers)
{
    fake_nccl_memory known;
    pthread_barrier_wait(&all_here);
    look_at_memory(&known);
    EXPECT(self, known.windows == windows * self->size && known.buffers == buffers * self->size,
           "%d windows and %d buffers of %d ranks instead of %d and %d each", known.windows,
           known.buffers, self->size, windows, buffers);
    pthread_barrier_wait(&all_here);
}

typedef enum way { WINDOWED, BUFFERED, FAILED, FAILED_ON_ONE, WAYS } way;

static void known_to_the_fake(rank_context *self)
{
    way which = *(const way *)self->arg;
    stage s = {0};
    stage_open(&s, self);
    if (which == FAILED_ON_ONE)
        s.r.comm->timeout_s = 6; /* half of it the others wait for that one */
    gathers_from_slot_to_slot(&s);
    check_known(self, which == WINDOWED ? 2 : 0, which == BUFFERED ? 2 : 0);
    EXPECT(self, s.warnings == (which >= FAILED), "%d warnings", s.warnings);
    detach(&s);
    check_known(self, 0, 0);
    stage_close(&s);
}

static void test_each_way(int size)
{
    for (way which = WINDOWED; which < (size == 2 ? WAYS : FAILED_ON_ONE); which++) {
        fake_nccl_memory before, after;
        look_at_memory(&before);
        hide_nccl_windows(which == BUFFERED);
        break_nccl(which >= FAILED ? FAKE_NCCL_NO_WINDOW : FAKE_NCCL_WELL,
                   which == FAILED ? -1 : 1);
        pthread_barrier_init(&all_here, NULL, (unsigned)size);
        ranks_run_threads(size, known_to_the_fake, &(rank_options){.arg = &which});
        pthread_barrier_destroy(&all_here);
        look_at_memory(&after);
        int in_place = (after.in_place - before.in_place) / size;
        int elsewhere = (after.elsewhere - before.elsewhere) / size;
        CHECK_NOTE(in_place == (which >= FAILED ? 0 : 5 * BANDS) &&
                       in_place + elsewhere == 7 * BANDS,
                   "way %d: %d gathers in place, %d not", (int)which, in_place, elsewhere);
    }
    hide_nccl_windows(false);
    break_nccl(FAKE_NCCL_WELL, 0);
}

static void open_both_channels(rank_context *self)
{
    gpu_rank r;
    fsdpc_param_buffer *param_buffer = NULL;
    fsdpc_buffer *buffer = NULL;
    EXPECT_OK(self, rank_create(&r, self, library));
    EXPECT_OK(self, fsdpc_param_buffer_create(r.comm, 4096, &param_buffer));
    EXPECT_OK(self, fsdpc_buffer_create(r.comm, 4096, &buffer));
    fsdpc_buffer_destroy(buffer);
    fsdpc_param_buffer_destroy(param_buffer);
    rank_destroy(&r);
}

#else

static void known_to_nccl(rank_context *self)
{
    stage s = {0};
    stage_open(&s, self);
    gathers_from_slot_to_slot(&s);
    detach(&s);
    stage_close(&s);
}

#endif

int main(void)
{
    int most;
#if defined(FSDPC_EMU)
    setenv("EMU_GPUS", "4", 1);
#endif
    if (!rig_find(&most))
        return rig_missing("test_nccl_register");
#if defined(FSDPC_EMU)
    fake_open();
    for (int size = 2; size <= most; size++)
        test_each_way(size);
    ranks_run_threads(1, open_both_channels, &(rank_options){0});
    fake_check();
#else
    for (int size = 2; size <= most; size++)
        ranks_run_threads(size, known_to_nccl, &(rank_options){0});
#endif
    return check_report("test_nccl_register");
}
