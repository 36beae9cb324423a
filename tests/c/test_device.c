/* Devices: order on and between streams, errors kept once, events, copies, forks; what null
 * records. */
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "device/device.h"
#include "ops/flat_ops.h"
#include "ops/nn_ops.h"

typedef struct rig {
    fsdpc_mem *mem;
    fsdpc_team *team;
    fsdpc_device *device;
} rig;

static rig make_rig(int spare_cores)
{
    rig r = {0};
    CHECK_OK(fsdpc_mem_create(&r.mem));
    CHECK_OK(fsdpc_team_create(2, &r.team));
    CHECK_OK(fsdpc_device_cpu_create(r.mem, r.team, FSDPC_ISA_PORTABLE, spare_cores, &r.device));
    return r;
}

static void drop_rig(rig r)
{
    fsdpc_device_destroy(r.device);
    fsdpc_team_destroy(r.team);
    fsdpc_mem_destroy(r.mem);
}

typedef struct work {
    int *log, *length; /* plain on purpose: the stream must order them */
    int number;
    fsdpc_status status;
} work;

static fsdpc_status note_number(void *arg, fsdpc_stream *stream)
{
    work *w = arg;
    (void)stream;
    w->log[(*w->length)++] = w->number;
    return w->status ? fsdpc_fail(w->status, "work %d failed", w->number) : FSDPC_OK;
}

/* Many more entries than the first ring holds, in order, errors kept: inline and worker alike. */
static void test_order(int spare_cores)
{
    enum { COUNT = 1000 };
    static work works[COUNT];
    static int log[COUNT];
    int length = 0;
    rig r = make_rig(spare_cores);
    fsdpc_stream *stream;
    char name[] = "gather";
    CHECK_OK(fsdpc_stream_create(r.device, name, true, &stream));
    name[0] = 'x'; /* the stream has its own copy */
    CHECK(strcmp(stream->name, "gather") == 0 && stream->device == r.device);
    CHECK_OK(fsdpc_stream_sync(stream));
    for (int i = 0; i < COUNT; i++) {
        works[i] = (work){.log = log, .length = &length, .number = i};
        if (i == 400 || i == 700)
            works[i].status = i == 400 ? FSDPC_ERR_PEER : FSDPC_ERR_VALUE;
        CHECK_OK(fsdpc_stream_submit(stream, note_number, &works[i]));
    }
    CHECK_FAILS(fsdpc_stream_sync(stream), FSDPC_ERR_PEER, "work 400 failed");
    CHECK_OK(fsdpc_stream_sync(stream)); /* once */
    CHECK(length == COUNT);              /* an error stops nothing */
    int wrong = 0;
    for (int i = 0; i < COUNT; i++)
        wrong += log[i] != i;
    CHECK(wrong == 0);
    CHECK_OK(fsdpc_stream_submit(stream, note_number, (length = 0, &works[700])));
    CHECK_FAILS(fsdpc_stream_sync(stream), FSDPC_ERR_VALUE, "work 700 failed");
    fsdpc_stream_submit(stream, note_number, &works[1]);
    fsdpc_stream_destroy(stream); /* runs what was submitted */
    CHECK(length == 2);
    fsdpc_stream_destroy(NULL);
    drop_rig(r);
}

typedef struct gate {
    _Atomic uint32_t open;
    _Atomic int passed;
} gate;

static fsdpc_status wait_for_gate(void *arg, fsdpc_stream *stream)
{
    gate *g = arg;
    (void)stream;
    int64_t end = fsdpc_clock_ns() + 10000000000;
    while (!atomic_load(&g->open)) {
        if (fsdpc_clock_ns() > end)
            return fsdpc_fail(FSDPC_ERR_TIMEOUT, "nobody opened the gate");
        fsdpc_futex_wait(&g->open, 0, 100000000);
    }
    atomic_fetch_add(&g->passed, 1);
    return FSDPC_OK;
}

static void open_gate(gate *g)
{
    atomic_store(&g->open, 1);
    fsdpc_futex_wake(&g->open);
}

typedef struct pair {
    int *value;
    int seen;
} pair;

static fsdpc_status write_value(void *arg, fsdpc_stream *stream)
{
    (void)stream;
    *((pair *)arg)->value = 42;
    return FSDPC_OK;
}

static fsdpc_status read_value(void *arg, fsdpc_stream *stream)
{
    (void)stream;
    pair *p = arg;
    p->seen = *p->value;
    return FSDPC_OK;
}

/* A writes behind a gate, B reads after an event of A. TSan sees a race if the wait is missing. */
static void test_events(void)
{
    rig r = make_rig(2);
    fsdpc_stream *a, *b;
    fsdpc_event *event;
    CHECK_OK(fsdpc_stream_create(r.device, "a", true, &a));
    CHECK_OK(fsdpc_stream_create(r.device, "b", true, &b));
    CHECK_OK(fsdpc_event_create(r.device, &event));
    CHECK(fsdpc_event_test(event) == FSDPC_OK); /* never recorded */
    CHECK_OK(fsdpc_stream_wait(b, event));
    for (int turn = 0; turn < 50; turn++) {
        gate g = {0};
        int value = 0;
        pair p = {.value = &value};
        CHECK_OK(fsdpc_stream_submit(a, wait_for_gate, &g));
        CHECK_OK(fsdpc_stream_submit(a, write_value, &p));
        CHECK_OK(fsdpc_event_record(event, a));
        CHECK(fsdpc_event_test(event) == FSDPC_IN_PROGRESS);
        CHECK_OK(fsdpc_stream_wait(b, event));
        CHECK_OK(fsdpc_stream_submit(b, read_value, &p));
        CHECK_OK(fsdpc_event_record(event, b)); /* the wait above keeps the old point */
        open_gate(&g);
        CHECK_OK(fsdpc_stream_sync(b));
        CHECK(p.seen == 42 && fsdpc_event_test(event) == FSDPC_OK);
        CHECK_OK(fsdpc_stream_sync(a));
    }
    CHECK_OK(fsdpc_stream_wait(b, event));
    fsdpc_stream_destroy(b);
    CHECK(fsdpc_event_test(event) == FSDPC_OK); /* outlives its stream */
    fsdpc_stream_destroy(a);
    fsdpc_event_destroy(event);
    fsdpc_event_destroy(NULL);
    drop_rig(r);
}

/* A wait that stands in a ring outlives event and stream; an inline stream waits in its caller. */
static void test_lifetimes(void)
{
    rig r = make_rig(1);
    fsdpc_stream *a, *b, *inline_stream;
    fsdpc_event *event;
    gate g = {0}, h = {0};
    int value = 0;
    pair p = {.value = &value};
    CHECK_OK(fsdpc_stream_create(r.device, "a", true, &a));
    CHECK_OK(fsdpc_stream_create(r.device, "b", true, &b));
    CHECK_OK(fsdpc_stream_create(r.device, "compute", false, &inline_stream));
    CHECK_OK(fsdpc_event_create(r.device, &event));
    CHECK_OK(fsdpc_stream_submit(b, wait_for_gate, &h));
    CHECK_OK(fsdpc_stream_submit(a, wait_for_gate, &g));
    CHECK_OK(fsdpc_stream_submit(a, write_value, &p));
    CHECK_OK(fsdpc_event_record(event, a));
    CHECK_OK(fsdpc_stream_wait(b, event));
    CHECK_OK(fsdpc_stream_submit(b, read_value, &p));
    open_gate(&g);
    CHECK_OK(fsdpc_stream_wait(inline_stream, event)); /* returns when `a` got there */
    CHECK(value == 42);
    CHECK_OK(fsdpc_event_record(event, inline_stream));
    CHECK(fsdpc_event_test(event) == FSDPC_OK);
    fsdpc_event_destroy(event);
    fsdpc_stream_destroy(a);
    open_gate(&h);
    CHECK_OK(fsdpc_stream_sync(b));
    CHECK(p.seen == 42);
    fsdpc_stream_destroy(b);
    fsdpc_stream_destroy(inline_stream);
    drop_rig(r);
}

static fsdpc_status sync_own(void *arg, fsdpc_stream *stream)
{
    *(fsdpc_status *)arg = fsdpc_stream_sync(stream);
    return FSDPC_OK;
}

static void test_refusals(void)
{
    rig r = make_rig(1);
    fsdpc_stream *stream;
    fsdpc_status inside = FSDPC_OK;
    CHECK_OK(fsdpc_stream_create(r.device, "gather", true, &stream));
    CHECK_OK(fsdpc_stream_submit(stream, sync_own, &inside));
    CHECK_OK(fsdpc_stream_sync(stream));
    CHECK(inside == FSDPC_ERR_STATE);
    pid_t child = fork();
    if (child == 0) {
        check_failures = 0;
        CHECK_FAILS(fsdpc_stream_submit(stream, sync_own, &inside), FSDPC_ERR_STATE, "forked");
        CHECK_FAILS(fsdpc_stream_sync(stream), FSDPC_ERR_STATE, "'gather'");
        fsdpc_stream_destroy(stream); /* joins nobody */
        _exit(check_failures != 0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    fsdpc_stream_destroy(stream);
    drop_rig(r);
}

static void test_memory(void)
{
    rig r = make_rig(0);
    fsdpc_stream *stream;
    CHECK_OK(fsdpc_stream_create(r.device, "s", true, &stream));
    const size_t sizes[] = {0, 1, 4097, (1 << 20) + 1, 5 << 20};
    for (int i = 0; i < 5; i++) {
        size_t bytes = sizes[i], wrong = 0;
        void *from, *to;
        CHECK_OK(fsdpc_device_alloc(r.device, FSDPC_MEM_OTHER, bytes, &from));
        CHECK_OK(fsdpc_device_alloc(r.device, FSDPC_MEM_OTHER, bytes, &to));
        CHECK_OK(fsdpc_device_fill(r.device, from, 0x81, bytes, stream));
        if (bytes)
            ((unsigned char *)from)[bytes - 1] = 7;
        CHECK_OK(fsdpc_device_copy(r.device, to, from, bytes, stream));
        CHECK_OK(fsdpc_device_copy(r.device, to, to, bytes, stream));
        for (size_t j = 0; j < bytes; j++)
            wrong += ((unsigned char *)to)[j] != (j + 1 == bytes ? 7 : 0x81);
        CHECK_NOTE(wrong == 0, "%zu bytes: %zu wrong", bytes, wrong);
        fsdpc_device_free(r.device, from);
        fsdpc_device_free(r.device, to);
    }
    fsdpc_device_free(r.device, NULL);
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(r.mem, &stats);
    CHECK(stats.total_now_bytes == 0 && stats.total_peak_bytes == 10 << 20);
    fsdpc_stream_destroy(stream);
    fsdpc_device_destroy(NULL);
    drop_rig(r);
}

static void test_null(void)
{
    fsdpc_mem *mem;
    fsdpc_device *device;
    fsdpc_stream *gather, *compute;
    fsdpc_event *event;
    void *block;
    CHECK_OK(fsdpc_mem_create(&mem));
    CHECK_OK(fsdpc_device_null_create(mem, false, &device));
    CHECK_OK(fsdpc_stream_create(device, "gather", true, &gather));
    CHECK_OK(fsdpc_stream_create(device, "compute", false, &compute));
    CHECK_OK(fsdpc_event_create(device, &event));
    CHECK_OK(fsdpc_device_alloc(device, FSDPC_MEM_UNSHARDED, (size_t)1 << 33,
                                &block)); /* costs nothing */
    int log[2], length = 0;
    work w = {.log = log, .length = &length, .status = FSDPC_ERR_VALUE};
    CHECK_OK(fsdpc_stream_submit(gather, note_number, &w));
    CHECK_OK(fsdpc_device_copy(device, block, &w, sizeof w, gather));
    CHECK_OK(fsdpc_event_record(event, gather));
    CHECK_OK(fsdpc_stream_wait(compute, event));
    CHECK_OK(fsdpc_device_fill(device, block, 0, 64, NULL));
    CHECK_OK(fsdpc_stream_sync(compute));
    CHECK(length == 0 && fsdpc_event_test(event) == FSDPC_OK);
    fsdpc_stream_destroy(gather); /* its name stays in the records */
    const fsdpc_null_record *got;
    const fsdpc_null_record want[] = {
        {"gather", "submit", &w},   {"gather", "copy", block}, {"gather", "record", event},
        {"compute", "wait", event}, {NULL, "fill", block},     {"compute", "sync", NULL},
    };
    CHECK(fsdpc_device_null_records(device, &got) == 6);
    for (int i = 0; i < 6; i++) {
        CHECK_NOTE(strcmp(got[i].what, want[i].what) == 0, "record %d is '%s'", i, got[i].what);
        CHECK(got[i].object == want[i].object && !got[i].stream == !want[i].stream);
        CHECK(!want[i].stream || strcmp(got[i].stream, want[i].stream) == 0);
    }
    fsdpc_event_destroy(event);
    fsdpc_stream_destroy(compute);
    fsdpc_device_free(device, block);
    fsdpc_device_destroy(device);
    CHECK_OK(fsdpc_device_null_create(mem, true, &device)); /* host work runs */
    CHECK_OK(fsdpc_stream_create(device, "gather", true, &gather));
    CHECK_OK(fsdpc_stream_submit(gather, note_number, &w));
    CHECK(length == 1);
    CHECK_FAILS(fsdpc_stream_sync(gather), FSDPC_ERR_VALUE, "work 0 failed");
    CHECK_OK(fsdpc_stream_sync(gather));
    for (int i = 0; i < 1000; i++)
        CHECK_OK(fsdpc_stream_sync(gather));
    CHECK(fsdpc_device_null_records(device, &got) == 1003 && strcmp(got[1002].what, "sync") == 0);
    fsdpc_stream_destroy(gather);
    fsdpc_device_destroy(device);
    fsdpc_mem_destroy(mem);
}

/* Products and attention are counted, those of other devices and of memory not. */
static void test_null_flops(void)
{
    fsdpc_mem *mem;
    fsdpc_device *device, other = {.nn = fsdpc_nn_ops_null()};
    CHECK_OK(fsdpc_mem_create(&mem));
    CHECK_OK(fsdpc_device_null_create(mem, false, &device));
    const int64_t *flops = fsdpc_device_null_flops(device);
    const fsdpc_nn_ops *nn = fsdpc_nn_ops_null();
    fsdpc_stream *stream = fsdpc_device_main(device);
    fsdpc_gemm_gelu_args product = {.gemm = {.m = 2, .n = 3, .k = 5}};
    CHECK_OK(nn->gemm(&product.gemm, stream));
    CHECK(*flops == 60);
    product.gemm.batch = 10;
    CHECK_OK(nn->gemm_gelu(&product, stream));
    CHECK(*flops == 660);
    CHECK_OK(nn->gemm(&product.gemm, &(fsdpc_stream){.device = &other}));
    CHECK_OK(nn->unary(&(fsdpc_unary_args){.numel = 1000}, stream));
    CHECK(*flops == 660);
    fsdpc_attention_args attention = {
        .batch = 1, .tokens_q = 2, .tokens_k = 4, .heads = 3, .kv_heads = 1, .dim = 10};
    CHECK_OK(nn->attention(&attention, stream)); /* two products of 2 x 4 x 10 a head */
    CHECK(*flops == 660 + 2 * 2 * 80 * 3);
    attention.causal = true; /* 3 and 4 keys */
    CHECK_OK(nn->attention_backward(&attention, stream));
    CHECK(*flops == 660 + 960 + 5 * 2 * 70 * 3);
    fsdpc_device_destroy(device);
    fsdpc_mem_destroy(mem);
}

/* Every slot of the null tables is filled: the tables are arrays of function pointers behind a
 * name. */
static void test_null_tables(void)
{
    fsdpc_device device = {.flat = fsdpc_flat_ops_null(), .nn = fsdpc_nn_ops_null()};
    fsdpc_stream stream = {.device = &device};
    const void *const *flat = (const void *const *)(const void *)device.flat;
    const void *const *nn = (const void *const *)(const void *)device.nn;
    for (size_t i = 0; i < sizeof(fsdpc_flat_ops) / sizeof *flat; i++)
        CHECK_NOTE(flat[i] != NULL, "flat slot %zu", i);
    for (size_t i = 0; i < sizeof(fsdpc_nn_ops) / sizeof *nn; i++)
        CHECK_NOTE(nn[i] != NULL, "nn slot %zu", i);
    float x = 3, y = 5;
    bool equal = true;
    CHECK_OK(fsdpc_flat_cast(&x, FSDPC_F32, &y, FSDPC_F32, 1, &stream));
    CHECK_OK(fsdpc_flat_accumulate(&x, FSDPC_F32, &y, FSDPC_F32, 1, &stream));
    CHECK_OK(fsdpc_flat_equal(&x, FSDPC_F32, &y, FSDPC_F32, 1, &equal, &stream));
    CHECK(x == 3 && equal);
    fsdpc_unary_args args = {.kind = FSDPC_UNARY_NEG, .numel = 1, .x = &y, .out = &x};
    CHECK_OK(fsdpc_nn_ops_of(&stream)->unary(&args, &stream));
    CHECK(x == 3);
}

int main(void)
{
    test_order(0);
    test_order(1);
    test_events();
    test_lifetimes();
    test_refusals();
    test_memory();
    test_null();
    test_null_flops();
    test_null_tables();
    return check_report("device");
}
