/* Windows: several addresses over one memory, moved apart and given back, with nothing left over.
 *
 * The same file runs on GPUs and on the emulated device, where memory is that of the processor,
 * mapped at several addresses too, and where every call of the driver can be made to fail.
 */
#include "base/size.h"
#include "gpu_rig.h"

#if defined(FSDPC_EMU)
#include "cuda/driver_abi.h"
#include "emu_driver.h"
#endif

enum { NUMEL = 3000, BYTES = NUMEL * 4, SHARERS = 3 };

static fsdpc_window *windows[SHARERS];

static void open_windows(void)
{
    for (int i = 0; i < SHARERS; i++)
        CHECK_OK(fsdpc_window_create(gpu, FSDPC_MEM_UNSHARDED, BYTES, i ? windows[0] : NULL,
                                     &windows[i]));
}

static void close_windows(void)
{
    for (int i = 0; i < SHARERS; i++)
        CHECK_OK(fsdpc_window_destroy(windows[i]));
}

static size_t counted_bytes(void)
{
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(gpu_mem, &stats);
    return stats.now_bytes[FSDPC_MEM_UNSHARDED];
}

static void put(void *to, float first)
{
    float host[NUMEL];
    for (int i = 0; i < NUMEL; i++)
        host[i] = first + (float)i;
    CHECK_OK(fsdpc_device_copy(gpu, to, host, BYTES, NULL));
}

static void check_holds(const void *at, float first, const char *what)
{
    float host[NUMEL];
    int wrong = 0;
    CHECK_OK(fsdpc_device_copy(gpu, host, at, BYTES, NULL));
    for (int i = 0; i < NUMEL; i++)
        wrong += host[i] != first + (float)i;
    CHECK_NOTE(wrong == 0, "%s: %d of %d wrong", what, wrong, NUMEL);
}

static void test_one_memory_at_several_addresses(void)
{
    size_t granule = gpu->window_granule;
    open_windows();
    CHECK(granule > 0 && counted_bytes() == fsdpc_round_up(BYTES, granule));
    for (int i = 0; i < SHARERS; i++) {
        CHECK(windows[i]->bytes == BYTES && windows[i]->memory == windows[0]->memory);
        CHECK(windows[i]->address != windows[i]->memory);
        CHECK((uintptr_t)windows[i]->address % granule == 0);
        CHECK(windows[i]->address != windows[(i + 1) % SHARERS]->address);
        struct cudaPointerAttributes attributes;
        CHECK(cudaPointerGetAttributes(&attributes, windows[i]->address) == cudaSuccess);
        CHECK(attributes.type == cudaMemoryTypeDevice);
    }
    for (int writer = 0; writer < SHARERS; writer++) {
        put(windows[writer]->address, (float)(10 * writer));
        for (int reader = 0; reader < SHARERS; reader++)
            check_holds(windows[reader]->address, (float)(10 * writer), "another address");
        check_holds(windows[0]->memory, (float)(10 * writer), "the slot's address");
    }
    CHECK_FAILS(
        fsdpc_window_create(gpu, FSDPC_MEM_UNSHARDED, counted_bytes() + 1, windows[0], &windows[0]),
        FSDPC_ERR_INTERNAL, "onto a slot of");
    close_windows();
    CHECK(counted_bytes() == 0);
}

/* As units are gathered and read: a stream fills the memory by the slot's address, over what it was
 * poisoned with when it was given up; another reads it by the window's. Events alone order them.
 */
static void test_replays_see_no_poison(void)
{
#if defined(FSDPC_EMU)
    enum { REPLAYS = 200 };
#else
    enum { REPLAYS = 1000 };
#endif
    fsdpc_stream *gathers, *computes;
    fsdpc_event *gathered, *released;
    CHECK_OK(fsdpc_stream_create(gpu, "gathers", true, &gathers));
    CHECK_OK(fsdpc_stream_create(gpu, "computes", true, &computes));
    CHECK_OK(fsdpc_event_create(gpu, &gathered));
    CHECK_OK(fsdpc_event_create(gpu, &released));
    buffer sum = buffer_make(FSDPC_F32, NUMEL, 0), weights[2];
    memset(sum.on_cpu, 0, BYTES);
    buffer_send(&sum);
    for (int w = 0; w < 2; w++) {
        weights[w] = buffer_make(FSDPC_F32, NUMEL, 0);
        for (size_t i = 0; i < NUMEL; i++)
            ((float *)weights[w].on_cpu)[i] = (float)((i + (size_t)w) % 5);
        buffer_send(&weights[w]);
    }
    CHECK_OK(fsdpc_stream_sync(gpu_stream));
    open_windows();
    for (int turn = 0; turn < REPLAYS; turn++) {
        const fsdpc_window *unsharded = windows[turn % SHARERS];
        buffer *from = &weights[turn % 2];
        CHECK_OK(fsdpc_stream_wait(gathers, released));
        CHECK_OK(fsdpc_device_copy(gpu, unsharded->memory, from->on_gpu, BYTES, gathers));
        CHECK_OK(fsdpc_event_record(gathered, gathers));
        CHECK_OK(fsdpc_stream_wait(computes, gathered));
        CHECK_OK(fsdpc_flat_accumulate(sum.on_gpu, FSDPC_F32, unsharded->address, FSDPC_F32, NUMEL,
                                       computes));
        CHECK_OK(fsdpc_device_fill(gpu, unsharded->address, 0xff, BYTES, computes));
        CHECK_OK(fsdpc_event_record(released, computes));
        for (size_t i = 0; i < NUMEL; i++)
            ((float *)sum.on_cpu)[i] += ((const float *)from->on_cpu)[i];
    }
    CHECK_OK(fsdpc_stream_sync(computes));
    check_same_bits(&sum, "replays");
    close_windows();
    for (int w = 0; w < 2; w++)
        buffer_fini(&weights[w]);
    buffer_fini(&sum);
    fsdpc_event_destroy(gathered);
    fsdpc_event_destroy(released);
    fsdpc_stream_destroy(gathers);
    fsdpc_stream_destroy(computes);
}

static void test_memory_of_its_own(void)
{
    open_windows();
    unsigned char *address = windows[1]->address, *shared = windows[1]->memory;
    size_t slot_bytes = counted_bytes();
    put(windows[0]->address, 100);
    CHECK_OK(fsdpc_window_part(windows[1]));
    CHECK(windows[1]->address == address && windows[1]->memory != shared);
    CHECK(windows[0]->memory == shared && counted_bytes() == 2 * slot_bytes);
    put(address, 200);
    check_holds(windows[1]->memory, 200, "what was parted");
    check_holds(windows[0]->address, 100, "what it shared before");
    check_holds(windows[2]->address, 100, "what others share");
    CHECK_OK(fsdpc_window_part(windows[0]));
    unsigned char *alone = windows[2]->memory;
    CHECK_OK(fsdpc_window_part(windows[2])); /* nobody shares it any more */
    CHECK(windows[2]->memory == alone && counted_bytes() == 3 * slot_bytes);
    check_holds(windows[2]->address, 100, "the last one of a slot");
    close_windows();
}

static fsdpc_status fails(void *arg, fsdpc_stream *stream)
{
    (void)arg;
    (void)stream;
    return fsdpc_fail(FSDPC_ERR_INDEX, "a bad index");
}

static void test_more_than_there_is(void)
{
    fsdpc_window *none = NULL;
    CHECK_FAILS(fsdpc_window_create(gpu, FSDPC_MEM_UNSHARDED, (size_t)1 << 46, NULL, &none),
                FSDPC_ERR_NOMEM, "for a window");
    CHECK(none == NULL && counted_bytes() == 0);
}

/* What cannot be waited for stays mapped, as something may still use it. */
static void test_windows_in_use_stay(void)
{
    buffer y = buffer_make(FSDPC_F32, NUMEL, 0);
    fsdpc_graph *graph;
    for (int i = 0; i < NUMEL; i++)
        ((float *)y.on_cpu)[i] = 7 + (float)i;
    buffer_send(&y);
    open_windows();
    put(windows[0]->address, 7);
    gpu->peer_check.wait_for = rig_no_wait;
    CHECK_FAILS(fsdpc_window_destroy(windows[1]), FSDPC_ERR_TIMEOUT, "a peer is gone");
    gpu->peer_check.wait_for = NULL;
    CHECK_OK(fsdpc_capture_begin(gpu));
    CHECK_OK(fsdpc_device_copy(gpu, y.on_gpu, windows[1]->address, BYTES, gpu_stream));
    CHECK_FAILS(fsdpc_window_destroy(windows[1]), FSDPC_ERR_STATE, "inside a captured step");
    CHECK_OK(fsdpc_capture_end(gpu, &graph));
    CHECK_OK(fsdpc_graph_launch(graph));
    check_same_bits(&y, "a window that was in use");
    fsdpc_graph_destroy(graph);
    close_windows();
    buffer_fini(&y);
}

/* Bad indices are told by the next sync, not by who gives memory back. */
static void test_errors_of_work_are_no_reason_to_stay(void)
{
    open_windows();
    CHECK_OK(fsdpc_stream_submit(gpu_stream, fails, NULL));
    close_windows();
    CHECK(counted_bytes() == 0);
    CHECK_FAILS(fsdpc_stream_sync(gpu_stream), FSDPC_ERR_INDEX, "a bad index");
}

#if defined(FSDPC_EMU)

static bool same_counts(emu_driver_counts a, emu_driver_counts b)
{
    return a.handles == b.handles && a.ranges == b.ranges && a.mappings == b.mappings &&
           a.bytes == b.bytes && a.forbidden == b.forbidden;
}

/* Every call that makes something fails once, at its turn. */
static void test_no_memory_at_any_step(void)
{
    enum { CALLS_OF_A_SLOT = 4, CALLS_OF_A_WINDOW = 3, REMAPPINGS = 2 };
    emu_driver_counts empty = emu_driver_look();
    fsdpc_window *window;
    fsdpc_status status = FSDPC_ERR_NOMEM;
    int calls = 0;
    for (; status != FSDPC_OK && calls < 20; calls++) {
        emu_driver_fail_after(calls);
        status = fsdpc_window_create(gpu, FSDPC_MEM_UNSHARDED, BYTES, NULL, &window);
        CHECK(status == FSDPC_OK || status == FSDPC_ERR_NOMEM);
        if (status != FSDPC_OK)
            CHECK(same_counts(emu_driver_look(), empty) && counted_bytes() == 0);
    }
    CHECK(calls - 1 == CALLS_OF_A_SLOT + CALLS_OF_A_WINDOW);
    emu_driver_fail_after(-1);
    CHECK_OK(fsdpc_window_destroy(window));

    open_windows();
    emu_driver_counts shared = emu_driver_look();
    unsigned char *address = windows[1]->address, *memory = windows[1]->memory;
    put(memory, 300);
    for (calls = 0; calls < CALLS_OF_A_SLOT + REMAPPINGS; calls++) {
        emu_driver_fail_after(calls);
        CHECK_FAILS(fsdpc_window_part(windows[1]), FSDPC_ERR_NOMEM, "for a window");
        CHECK(windows[1]->address == address && windows[1]->memory == memory);
        CHECK(same_counts(emu_driver_look(), shared));
        check_holds(address, 300, "a window that could not be parted");
    }
    emu_driver_fail_after(calls);
    CHECK_OK(fsdpc_window_part(windows[1]));
    emu_driver_fail_after(-1);
    close_windows();
    CHECK(same_counts(emu_driver_look(), empty));
}

/* What the device keeps for reuse is the driver's to have. */
static void test_free_memory_makes_room(void)
{
    enum { ROOM = 1 << 20 };
    void *block;
    fsdpc_window *window;
    fsdpc_graph *graph;
    rig_leave_free(ROOM + ROOM / 2);
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_OTHER, ROOM, &block));
    CHECK_FAILS(fsdpc_window_create(gpu, FSDPC_MEM_UNSHARDED, ROOM, NULL, &window), FSDPC_ERR_NOMEM,
                "for a window");
    buffer y = buffer_make(FSDPC_F32, NUMEL, 0);
    for (int i = 0; i < NUMEL; i++)
        ((float *)y.on_cpu)[i] = (float)i;
    buffer_send(&y);
    put(block, 0);
    CHECK_OK(fsdpc_device_copy(gpu, y.on_gpu, block, BYTES, gpu_stream));
    fsdpc_device_free(gpu, block);
    CHECK_OK(fsdpc_capture_begin(gpu)); /* which may not wait */
    CHECK_FAILS(fsdpc_window_create(gpu, FSDPC_MEM_UNSHARDED, ROOM, NULL, &window), FSDPC_ERR_NOMEM,
                "for a window");
    CHECK_OK(fsdpc_capture_end(gpu, &graph));
    fsdpc_graph_destroy(graph);
    CHECK_OK(fsdpc_window_create(gpu, FSDPC_MEM_UNSHARDED, ROOM, NULL, &window));
    check_same_bits(&y, "a copy out of memory that made room");
    buffer_fini(&y);
    CHECK_FAILS(fsdpc_device_alloc(gpu, FSDPC_MEM_OTHER, ROOM, &block), FSDPC_ERR_NOMEM,
                "are free"); /* the window's memory is out of the same store */
    rig_leave_free(SIZE_MAX);
    CHECK_OK(fsdpc_window_destroy(window));
}

static size_t granule_of_another(void)
{
    fsdpc_device *another;
    CHECK_OK(fsdpc_device_cuda_create(gpu_mem, 0, &another));
    size_t granule = another->window_granule;
    fsdpc_device_destroy(another);
    return granule;
}

static void test_no_virtual_memory(void)
{
    emu_driver_hide_windows(1);
    CHECK(granule_of_another() == 0);
    emu_driver_hide_windows(0);
    CHECK(granule_of_another() == gpu->window_granule);
}

/* As in a container, or on a part of a GPU; a GPU that is full now is another matter. */
static void test_virtual_memory_that_is_refused(void)
{
    for (emu_driver_call call = EMU_CREATE; call <= EMU_MAP; call++) {
        emu_driver_fail(call, FSDPC_CU_NOT_PERMITTED);
        CHECK(granule_of_another() == 0);
        emu_driver_fail(call, FSDPC_CU_OUT_OF_MEMORY);
        CHECK(granule_of_another() == gpu->window_granule);
        emu_driver_fail(call, 0);
    }
}

static void test_the_driver_s_rules(void)
{
    emu_driver_counts counts = emu_driver_look();
    CHECK(counts.handles == 0 && counts.ranges == 0 && counts.mappings == 0);
    CHECK_NOTE(counts.forbidden == 0, "%d calls broke the driver's rules", counts.forbidden);
}

#endif

int main(void)
{
#if defined(FSDPC_EMU)
    emu_set_delays(2468);
#endif
    static const rig_test_fn tests[] = {
        test_one_memory_at_several_addresses,
        test_replays_see_no_poison,
        test_memory_of_its_own,
        test_more_than_there_is,
        test_windows_in_use_stay,
        test_errors_of_work_are_no_reason_to_stay,
#if defined(FSDPC_EMU)
        test_no_memory_at_any_step,
        test_free_memory_makes_room,
        test_no_virtual_memory,
        test_virtual_memory_that_is_refused,
        test_the_driver_s_rules
#endif
    };
    return rig_main("test_windows", tests, sizeof tests / sizeof tests[0]);
}
