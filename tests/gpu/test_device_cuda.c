/* The GPU as a device: memory that is counted and reused, streams and events that order work.
 *
 * On the emulated device the streams' work is delayed at random, so that what no event orders does
 * come in the wrong order sooner or later.
 */
#include "gpu_rig.h"

static void test_memory(void)
{
    static const size_t sizes[] = {0, 1, 512, 513, 5000, 1 << 20, (1 << 20) + 1, 5 << 20};
    fsdpc_mem_stats stats;
    void *pointers[8];
    uint64_t asked = 0;
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < 8; i++) {
            void *pointer;
            CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_GRAD, sizes[i], &pointer));
            CHECK((uintptr_t)pointer % 256 == 0);
            if (round > 1) { /* the same ones are free, and asked for in the same order */
                CHECK(pointer == pointers[i]);
            }
            pointers[i] = pointer;
        }
        fsdpc_mem_stats_read(gpu_mem, &stats);
        CHECK(stats.now_bytes[FSDPC_MEM_GRAD] >= (7u << 20));
        CHECK(round ? stats.system_allocs == asked : stats.system_allocs >= 7); /* CUDA, once */
        asked = stats.system_allocs;
        for (size_t i = 8; i-- > 0;)
            fsdpc_device_free(gpu, pointers[i]);
        fsdpc_mem_stats_read(gpu_mem, &stats);
        CHECK(stats.now_bytes[FSDPC_MEM_GRAD] == 0);
    }
    void *none;
    CHECK_FAILS(fsdpc_device_alloc(gpu, FSDPC_MEM_GRAD, SIZE_MAX / 4 * 3, &none), FSDPC_ERR_NOMEM,
                "are free");
}

/* By one address both sides use it, and kernels read and write it where it lies. */
static void test_pinned_memory(void)
{
    enum { NUMEL = 5000, BYTES = NUMEL * 4 };
    fsdpc_mem_stats stats;
    void *memory, *there, *again;
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_PINNED, BYTES, &memory));
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_OTHER, BYTES, &there));
    fsdpc_mem_stats_read(gpu_mem, &stats);
    CHECK(stats.now_bytes[FSDPC_MEM_PINNED] == BYTES + 32);
    CHECK(stats.total_now_bytes == BYTES + 32); /* of the device alone */
    float *here = memory;
    CHECK_OK(fsdpc_device_fill(gpu, memory, 0, BYTES, NULL));
    CHECK(here[0] == 0 && here[NUMEL - 1] == 0);
    for (int i = 0; i < NUMEL; i++)
        here[i] = (float)i;
    CHECK_OK(fsdpc_flat_cast(there, FSDPC_F32, memory, FSDPC_F32, NUMEL, gpu_stream));
    CHECK_OK(fsdpc_flat_accumulate(memory, FSDPC_F32, there, FSDPC_F32, NUMEL, gpu_stream));
    CHECK_OK(fsdpc_stream_sync(gpu_stream));
    CHECK(here[1] == 2 && here[NUMEL - 1] == 2 * (NUMEL - 1));
    fsdpc_device_free(gpu, there);
    fsdpc_device_free(gpu, memory);
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_PINNED, BYTES, &again));
    CHECK(again == memory);
    fsdpc_device_free(gpu, again);
    fsdpc_mem_stats_read(gpu_mem, &stats);
    CHECK(stats.now_bytes[FSDPC_MEM_PINNED] == 0);
    CHECK_FAILS(fsdpc_device_alloc(gpu, FSDPC_MEM_PINNED, SIZE_MAX / 4 * 3, &again),
                FSDPC_ERR_NOMEM, "no host memory to pin");
}

static void test_copies_without_a_stream_are_done(void)
{
    enum { NUMEL = 1000 };
    uint32_t here[NUMEL], back[NUMEL];
    void *there;
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_OTHER, sizeof here, &there));
    for (int i = 0; i < NUMEL; i++)
        here[i] = (uint32_t)rig_bits();
    CHECK_OK(fsdpc_device_copy(gpu, there, here, sizeof here, NULL));
    CHECK_OK(fsdpc_device_copy(gpu, back, there, sizeof back, NULL));
    CHECK(memcmp(here, back, sizeof here) == 0);
    CHECK_OK(fsdpc_device_fill(gpu, there, 0x5a, sizeof here, NULL));
    CHECK_OK(fsdpc_device_copy(gpu, back, there, sizeof back, NULL));
    CHECK(back[0] == 0x5a5a5a5au && back[NUMEL - 1] == 0x5a5a5a5au);
    fsdpc_device_free(gpu, there);
}

/* Adds 1 on one stream, doubles on the other, in turns that only events order. */
static void test_events_order_streams(void)
{
    enum { TURNS = 12, NUMEL = 4099 };
    fsdpc_stream *adds, *doubles;
    fsdpc_event *added, *doubled;
    CHECK_OK(fsdpc_stream_create(gpu, "adds", true, &adds));
    CHECK_OK(fsdpc_stream_create(gpu, "doubles", true, &doubles));
    CHECK_OK(fsdpc_event_create(gpu, &added));
    CHECK_OK(fsdpc_event_create(gpu, &doubled));
    CHECK_OK(fsdpc_event_test(added)); /* never recorded: complete */
    buffer x = buffer_make(FSDPC_F32, NUMEL, 0), one = buffer_make(FSDPC_F32, NUMEL, 0);
    for (size_t i = 0; i < NUMEL; i++) {
        ((float *)x.on_cpu)[i] = (float)(i % 7);
        ((float *)one.on_cpu)[i] = 1;
    }
    buffer_send(&x);
    buffer_send(&one);
    CHECK_OK(fsdpc_stream_sync(gpu_stream));
    for (int turn = 0; turn < TURNS; turn++) {
        CHECK_OK(fsdpc_stream_wait(adds, doubled));
        CHECK_OK(fsdpc_flat_accumulate(x.on_gpu, FSDPC_F32, one.on_gpu, FSDPC_F32, NUMEL, adds));
        CHECK_OK(fsdpc_event_record(added, adds));
        CHECK_OK(fsdpc_stream_wait(doubles, added));
        CHECK_OK(fsdpc_flat_accumulate(x.on_gpu, FSDPC_F32, x.on_gpu, FSDPC_F32, NUMEL, doubles));
        CHECK_OK(fsdpc_event_record(doubled, doubles));
        for (size_t i = 0; i < NUMEL; i++)
            ((float *)x.on_cpu)[i] = (((float *)x.on_cpu)[i] + 1) * 2;
    }
    CHECK_OK(fsdpc_stream_sync(doubles));
    CHECK_OK(fsdpc_event_test(doubled));
    check_same_bits(&x, "turns of two streams");
    buffer_fini(&x);
    buffer_fini(&one);
    fsdpc_event_destroy(added);
    fsdpc_event_destroy(doubled);
    fsdpc_stream_destroy(adds);
    fsdpc_stream_destroy(doubles);
}

static fsdpc_status fails(void *arg, fsdpc_stream *stream)
{
    (void)stream;
    ++*(int *)arg;
    return fsdpc_fail(FSDPC_ERR_VALUE, "failure %d", *(int *)arg);
}

static void test_first_error_is_kept(void)
{
    int calls = 0;
    fsdpc_stream *stream;
    CHECK_OK(fsdpc_stream_create(gpu, "failing", true, &stream));
    CHECK_OK(fsdpc_stream_submit(stream, fails, &calls));
    CHECK_OK(fsdpc_stream_submit(stream, fails, &calls));
    CHECK(calls == 2);
    CHECK_FAILS(fsdpc_stream_sync(stream), FSDPC_ERR_VALUE, "failure 1");
    CHECK_OK(fsdpc_stream_sync(stream));
    fsdpc_stream_destroy(stream);
}

/* A stream that the device did not make stands for its main stream. */
static void test_plain_streams(void)
{
    fsdpc_stream plain = {.device = gpu, .name = "inline"};
    buffer x = buffer_random(FSDPC_F32, 1001, 0), y = buffer_poison(FSDPC_BF16, 1001, 0);
    CHECK_OK(fsdpc_flat_cast(y.on_cpu, FSDPC_BF16, x.on_cpu, FSDPC_F32, 1001, cpu_stream));
    CHECK_OK(fsdpc_flat_cast(y.on_gpu, FSDPC_BF16, x.on_gpu, FSDPC_F32, 1001, &plain));
    check_same_bits(&y, "a plain stream");
    buffer_fini(&x);
    buffer_fini(&y);
}

/* And so does one that is not to be async: turns of both keep their order without events. */
static void test_streams_that_are_not_async_are_one(void)
{
    enum { NUMEL = 20000, TURNS = 8 };
    fsdpc_stream plain = {.device = gpu, .name = "inline"}, *named;
    CHECK_OK(fsdpc_stream_create(gpu, "compute", false, &named));
    CHECK(!named->async);
    buffer x = buffer_make(FSDPC_F32, NUMEL, 0), one = buffer_make(FSDPC_F32, NUMEL, 0);
    for (size_t i = 0; i < NUMEL; i++) {
        ((float *)x.on_cpu)[i] = (float)(i % 7);
        ((float *)one.on_cpu)[i] = 1;
    }
    buffer_send(&x);
    buffer_send(&one);
    CHECK_OK(fsdpc_stream_sync(gpu_stream));
    for (int turn = 0; turn < TURNS; turn++) {
        CHECK_OK(fsdpc_flat_accumulate(x.on_gpu, FSDPC_F32, one.on_gpu, FSDPC_F32, NUMEL, named));
        CHECK_OK(fsdpc_flat_accumulate(x.on_gpu, FSDPC_F32, x.on_gpu, FSDPC_F32, NUMEL, &plain));
        for (size_t i = 0; i < NUMEL; i++)
            ((float *)x.on_cpu)[i] = (((float *)x.on_cpu)[i] + 1) * 2;
    }
    CHECK_OK(fsdpc_stream_sync(named));
    check_same_bits(&x, "turns of streams that are not async");
    buffer_fini(&x);
    buffer_fini(&one);
    fsdpc_stream_destroy(named);
}

/* Another library's stream becomes the main one, and another after it: nothing comes too early. */
static void test_adopted_streams_go_on_behind(void)
{
    enum { NUMEL = 20000, TURNS = 8 };
    fsdpc_stream plain = {.device = gpu, .name = "inline"};
    uintptr_t own = fsdpc_device_handle(gpu);
    cudaStream_t streams[2];
    for (int i = 0; i < 2; i++)
        CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking) == cudaSuccess);
    buffer x = buffer_make(FSDPC_F32, NUMEL, 0);
    for (size_t i = 0; i < NUMEL; i++)
        ((float *)x.on_cpu)[i] = (float)(i % 7);
    buffer_send(&x);
    for (int turn = 0; turn < TURNS; turn++) {
        uintptr_t next = turn % 3 < 2 ? (uintptr_t)streams[turn % 3] : own;
        CHECK_OK(fsdpc_device_adopt(gpu, next));
        CHECK_OK(fsdpc_device_adopt(gpu, next)); /* nothing */
        CHECK(fsdpc_device_handle(gpu) == next);
        CHECK_OK(fsdpc_flat_accumulate(x.on_gpu, FSDPC_F32, x.on_gpu, FSDPC_F32, NUMEL, &plain));
        for (size_t i = 0; i < NUMEL; i++)
            ((float *)x.on_cpu)[i] *= 2;
    }
    check_same_bits(&x, "turns of adopted streams");
    CHECK_OK(fsdpc_device_adopt(gpu, own));
    for (int i = 0; i < 2; i++)
        CHECK(cudaStreamDestroy(streams[i]) == cudaSuccess);
    buffer_fini(&x);
}

/* A copy on another library's stream reads what the main stream wrote before. */
static void test_a_stream_that_the_main_one_precedes(void)
{
    enum { NUMEL = 50000 };
    fsdpc_stream plain = {.device = gpu, .name = "inline"};
    cudaStream_t other;
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess);
    buffer x = buffer_make(FSDPC_F32, NUMEL, 0), y = buffer_poison(FSDPC_F32, NUMEL, 0);
    for (size_t i = 0; i < NUMEL; i++)
        ((float *)x.on_cpu)[i] = (float)i;
    buffer_send(&x);
    CHECK_OK(fsdpc_flat_accumulate(x.on_gpu, FSDPC_F32, x.on_gpu, FSDPC_F32, NUMEL, &plain));
    CHECK_OK(fsdpc_device_precede(gpu, (uintptr_t)other));
    CHECK(cudaMemcpyAsync(y.on_gpu, x.on_gpu, NUMEL * sizeof(float), cudaMemcpyDefault, other) ==
          cudaSuccess);
    CHECK(cudaStreamSynchronize(other) == cudaSuccess);
    for (size_t i = 0; i < NUMEL; i++)
        ((float *)x.on_cpu)[i] = ((float *)y.on_cpu)[i] = (float)i * 2;
    check_same_bits(&x, "what the main stream wrote");
    check_same_bits(&y, "what the other stream read of it");
    CHECK(cudaStreamDestroy(other) == cudaSuccess);
    buffer_fini(&x);
    buffer_fini(&y);
}

#if defined(FSDPC_EMU)

static void wait_a_while(void *unused)
{
    (void)unused;
    nanosleep(&(struct timespec){.tv_nsec = 20 * 1000 * 1000}, NULL);
}

/* Free memory of other sizes makes room, but not before what was given to the stream has used it.
 */
static void test_free_memory_makes_room(void)
{
    enum { NUMEL = 1 << 20, BYTES = NUMEL * 4 };
    buffer y = buffer_poison(FSDPC_F32, NUMEL, 0);
    void *x, *z;
    rig_leave_free(BYTES + BYTES / 2);
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_OTHER, BYTES, &x));
    for (int i = 0; i < NUMEL; i++)
        ((float *)y.on_cpu)[i] = (float)i;
    CHECK_OK(fsdpc_device_copy(gpu, x, y.on_cpu, BYTES, gpu_stream));
    CHECK(cudaLaunchHostFunc(fsdpc_cuda_queue_of(gpu_stream)->raw, wait_a_while, NULL) ==
          cudaSuccess);
    CHECK_OK(fsdpc_device_copy(gpu, y.on_gpu, x, BYTES, gpu_stream));
    fsdpc_device_free(gpu, x);
    gpu->peer_check.wait_for = rig_no_wait;
    CHECK_FAILS(fsdpc_device_alloc(gpu, FSDPC_MEM_OTHER, BYTES / 4 * 5, &z), FSDPC_ERR_TIMEOUT,
                "a peer is gone");
    gpu->peer_check.wait_for = NULL;
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_OTHER, BYTES / 4 * 5, &z));
    check_same_bits(&y, "a copy out of memory that made room");
    CHECK_FAILS(fsdpc_device_alloc(gpu, FSDPC_MEM_OTHER, BYTES, &x), FSDPC_ERR_NOMEM, "are free");
    rig_leave_free(SIZE_MAX);
    fsdpc_device_free(gpu, z);
    buffer_fini(&y);
}

#endif

int main(void)
{
#if defined(FSDPC_EMU)
    emu_set_delays(12345);
#endif
    static const rig_test_fn tests[] = {
        test_memory,
        test_pinned_memory,
        test_copies_without_a_stream_are_done,
        test_events_order_streams,
        test_first_error_is_kept,
        test_plain_streams,
        test_streams_that_are_not_async_are_one,
        test_adopted_streams_go_on_behind,
#if defined(FSDPC_EMU)
        test_free_memory_makes_room,
#endif
        test_a_stream_that_the_main_one_precedes
    };
    return rig_main("test_device_cuda", tests, sizeof tests / sizeof tests[0]);
}
