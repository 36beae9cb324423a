/* Graphs: a replay is what was captured, on memory that nobody else gets; what a capture cannot
 * hold is refused by name, and work goes on after it.
 */
#include "cuda/graph.h"
#include "gpu_rig.h"

enum { NUMEL = 3001, REPLAYS = 5 };

static void add(buffer *to, const buffer *from, fsdpc_stream *stream)
{
    CHECK_OK(
        fsdpc_flat_accumulate(to->on_gpu, FSDPC_F32, from->on_gpu, FSDPC_F32, to->numel, stream));
}

static void add_here(buffer *to, const buffer *from)
{
    for (size_t i = 0; i < to->numel; i++)
        ((float *)to->on_cpu)[i] += ((const float *)from->on_cpu)[i];
}

/* So that captures find free memory of this size. */
static void *warm(size_t bytes)
{
    void *block;
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_OTHER, bytes, &block));
    fsdpc_device_free(gpu, block);
    return block;
}

static void test_a_replay_is_what_was_captured(void)
{
    buffer x = buffer_random(FSDPC_F32, NUMEL, 0), step = buffer_random(FSDPC_F32, NUMEL, 0);
    fsdpc_graph *graph;
    warm(NUMEL * sizeof(float));
    CHECK_OK(fsdpc_capture_begin(gpu));
    void *scratch;
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_OTHER, NUMEL * sizeof(float), &scratch));
    CHECK_OK(fsdpc_device_copy(gpu, scratch, step.on_gpu, NUMEL * sizeof(float), gpu_stream));
    CHECK_OK(fsdpc_flat_accumulate(x.on_gpu, FSDPC_F32, scratch, FSDPC_F32, NUMEL, gpu_stream));
    fsdpc_device_free(gpu, scratch);
    CHECK_OK(fsdpc_capture_end(gpu, &graph));
    check_same_bits(&x, "what was captured and not launched");
    for (int i = 0; i < REPLAYS; i++) { /* with what is in `step` by then */
        CHECK_OK(fsdpc_graph_launch(graph));
        add_here(&x, &step);
        ((float *)step.on_cpu)[i] += 3;
        buffer_send(&step);
    }
    check_same_bits(&x, "replays");
    fsdpc_graph_destroy(graph);
    buffer_fini(&x);
    buffer_fini(&step);
}

static void test_memory_is_held(void)
{
    enum { BYTES = 3 << 20 };
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(gpu_mem, &stats);
    size_t before = stats.total_now_bytes;
    void *block = warm(BYTES), *inside, *again, *kept, *other;
    fsdpc_graph *graph;
    CHECK_OK(fsdpc_capture_begin(gpu));
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_ACTIVATION, BYTES, &inside));
    fsdpc_device_free(gpu, inside);
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_ACTIVATION, BYTES, &again));
    CHECK(inside == block && again == inside); /* a capture uses its own memory again */
    CHECK_OK(fsdpc_capture_end(gpu, &graph));
    fsdpc_device_free(gpu, again);
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_ACTIVATION, BYTES, &kept));
    CHECK(kept != block);
    fsdpc_mem_stats_read(gpu_mem, &stats);
    CHECK(stats.now_bytes[FSDPC_MEM_OTHER] >= BYTES && stats.total_now_bytes == before + 2 * BYTES);
    fsdpc_graph *second; /* a second hold on what lives */
    CHECK_OK(fsdpc_capture_begin(gpu));
    CHECK_OK(fsdpc_capture_end(gpu, &second));
    fsdpc_device_free(gpu, kept);
    fsdpc_graph_destroy(graph);
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_ACTIVATION, BYTES, &other));
    CHECK(other == block); /* given back by the first; `kept` still belongs to the second */
    fsdpc_device_free(gpu, other);
    fsdpc_graph_destroy(second);
    fsdpc_mem_stats_read(gpu_mem, &stats);
    CHECK(stats.total_now_bytes == before);
    fsdpc_graph_destroy(NULL);
}

static void test_what_cannot_be_captured_is_named(void)
{
    buffer x = buffer_random(FSDPC_F32, NUMEL, 0);
    float host[4] = {0};
    double constant = 2.5;
    fsdpc_graph *graph;
    fsdpc_event *event;
    void *none;
    fsdpc_exact_sum sum = {0};
    cudaStream_t raw;
    CHECK(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking) == cudaSuccess);
    CHECK_OK(fsdpc_event_create(gpu, &event));
    CHECK_OK(fsdpc_capture_begin(gpu));
    CHECK_FAILS(fsdpc_capture_begin(gpu), FSDPC_ERR_STATE, "inside another one");
    CHECK_FAILS(fsdpc_stream_sync(gpu_stream), FSDPC_ERR_STATE, "asks for a value of the GPU");
    CHECK_FAILS(fsdpc_event_test(event), FSDPC_ERR_STATE, "asks for a value of the GPU");
    CHECK_FAILS(fsdpc_device_copy(gpu, host, x.on_gpu, sizeof host, gpu_stream), FSDPC_ERR_STATE,
                "asks for a value of the GPU");
    CHECK_FAILS(fsdpc_device_copy(gpu, x.on_gpu, host, sizeof host, gpu_stream), FSDPC_ERR_STATE,
                "16 bytes of the host are copied");
    CHECK_FAILS(fsdpc_device_copy(gpu, x.on_gpu, host, 4, NULL), FSDPC_ERR_STATE,
                "4 bytes of the host are copied");
    CHECK_FAILS(fsdpc_device_fill(gpu, x.on_gpu, 0, 4, NULL), FSDPC_ERR_STATE, "asks for a value");
    CHECK_FAILS(fsdpc_flat_sumsq(x.on_gpu, FSDPC_F32, NUMEL, NUMEL, &sum, gpu_stream),
                FSDPC_ERR_STATE, "asks for a value of the GPU");
    CHECK_FAILS(fsdpc_device_alloc(gpu, FSDPC_MEM_OTHER, 77 << 20, &none), FSDPC_ERR_STATE,
                "that no step before it did");
    uintptr_t own = fsdpc_device_handle(gpu), other = (uintptr_t)raw;
    CHECK_FAILS(fsdpc_device_precede(gpu, other), FSDPC_ERR_STATE, "stream of another library");
    CHECK_FAILS(fsdpc_device_adopt(gpu, other), FSDPC_ERR_STATE, "stream of another library");
    CHECK_OK(fsdpc_device_precede(gpu, own)); /* itself */
    CHECK_OK(fsdpc_device_adopt(gpu, own));
    CHECK_OK(fsdpc_device_copy(gpu, x.on_gpu, &constant, sizeof constant, gpu_stream));
    CHECK_OK(fsdpc_capture_end(gpu, &graph)); /* refusals leave the capture as it was */
    check_same_bits(&x, "what was refused");
    memcpy(x.on_cpu, &constant, sizeof constant);
    constant = 0;
    CHECK_OK(fsdpc_graph_launch(graph));
    check_same_bits(&x, "a constant");
    fsdpc_graph_destroy(graph);
    CHECK(cudaStreamDestroy(raw) == cudaSuccess);
    fsdpc_event_destroy(event);
    buffer_fini(&x);
}

static void test_a_dropped_capture_leaves_nothing(void)
{
    buffer x = buffer_random(FSDPC_F32, NUMEL, 0), one = buffer_random(FSDPC_F32, NUMEL, 0);
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(gpu_mem, &stats);
    size_t before = stats.total_now_bytes;
    void *block = warm(5000), *again;
    CHECK_OK(fsdpc_capture_begin(gpu));
    add(&x, &one, gpu_stream);
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_OTHER, 5000, &again));
    CHECK_OK(fsdpc_capture_end(gpu, NULL));
    fsdpc_device_free(gpu, again);
    CHECK(warm(5000) == block);
    fsdpc_mem_stats_read(gpu_mem, &stats);
    CHECK(stats.total_now_bytes == before);
    check_same_bits(&x, "a dropped capture");
    add(&x, &one, gpu_stream);
    add_here(&x, &one);
    check_same_bits(&x, "work after a dropped capture");
    buffer_fini(&x);
    buffer_fini(&one);
}

/* x += one on this stream, y += x on another, one += y here again. */
static void test_streams_join_by_events(void)
{
    buffer x = buffer_random(FSDPC_F32, NUMEL, 0), y = buffer_random(FSDPC_F32, NUMEL, 0);
    buffer one = buffer_random(FSDPC_F32, NUMEL, 0);
    fsdpc_stream *side;
    fsdpc_event *there, *back;
    fsdpc_graph *graph;
    CHECK_OK(fsdpc_stream_create(gpu, "side", true, &side));
    CHECK_OK(fsdpc_event_create(gpu, &there));
    CHECK_OK(fsdpc_event_create(gpu, &back));
    CHECK_OK(fsdpc_capture_begin(gpu));
    add(&x, &one, gpu_stream);
    CHECK_OK(fsdpc_event_record(there, gpu_stream));
    CHECK_OK(fsdpc_stream_wait(side, there));
    add(&y, &x, side);
    CHECK_OK(fsdpc_event_record(back, side));
    CHECK_OK(fsdpc_stream_wait(gpu_stream, back));
    add(&one, &y, gpu_stream);
    CHECK_OK(fsdpc_capture_end(gpu, &graph));
    for (int i = 0; i < REPLAYS; i++) {
        CHECK_OK(fsdpc_graph_launch(graph));
        add_here(&x, &one);
        add_here(&y, &x);
        add_here(&one, &y);
    }
    check_same_bits(&one, "two streams in a graph");
    fsdpc_graph_destroy(graph);

    CHECK_OK(fsdpc_capture_begin(gpu));
    CHECK_OK(fsdpc_event_record(there, gpu_stream));
    CHECK_OK(fsdpc_stream_wait(side, there));
    add(&y, &x, side);
    CHECK_FAILS(fsdpc_capture_end(gpu, &graph), FSDPC_ERR_INTERNAL, "unjoined work");
    CHECK_OK(fsdpc_event_record(back, side)); /* the stream is itself again */
    CHECK_OK(fsdpc_stream_wait(gpu_stream, back));
    check_same_bits(&y, "a capture that was not joined");
    fsdpc_event_destroy(there);
    fsdpc_event_destroy(back);
    fsdpc_stream_destroy(side);
    buffer_fini(&x);
    buffer_fini(&y);
    buffer_fini(&one);
}

/* The memory of a graph that goes while another is captured comes back when that one ends. */
static void test_a_graph_may_go_inside_a_capture(void)
{
    fsdpc_graph *first, *second;
    void *block = warm(7 << 20), *held, *again;
    CHECK_OK(fsdpc_capture_begin(gpu));
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_OTHER, 7 << 20, &held));
    CHECK_OK(fsdpc_capture_end(gpu, &first));
    fsdpc_device_free(gpu, held);
    CHECK_OK(fsdpc_capture_begin(gpu));
    fsdpc_graph_destroy(first);
    CHECK_OK(fsdpc_capture_end(gpu, &second));
    fsdpc_graph_destroy(second);
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_OTHER, 7 << 20, &again));
    CHECK(held == block && again == block);
    fsdpc_device_free(gpu, again);
}

/* As before a communicator is aborted. */
static void test_graphs_that_are_given_up_are_errors(void)
{
    buffer x = buffer_random(FSDPC_F32, NUMEL, 0), y = buffer_random(FSDPC_F32, NUMEL, 0);
    fsdpc_graph *graphs[3], *open = NULL;
    for (int i = 0; i < 2; i++) {
        CHECK_OK(fsdpc_capture_begin(gpu));
        add(&x, &y, gpu_stream);
        CHECK_OK(fsdpc_capture_end(gpu, &graphs[i]));
    }
    fsdpc_graph_destroy(graphs[0]);
    CHECK_OK(fsdpc_capture_begin(gpu));
    add(&x, &y, gpu_stream);
    fsdpc_cuda_graphs_give_up(gpu);
    fsdpc_cuda_graphs_give_up(gpu);
    CHECK_FAILS(fsdpc_capture_end(gpu, &open), FSDPC_ERR_STATE, "capture a step again");
    CHECK_FAILS(fsdpc_graph_launch(graphs[1]), FSDPC_ERR_STATE, "a communicator that failed");
    fsdpc_graph_destroy(graphs[1]);
    check_same_bits(&x, "graphs that were given up");
    CHECK_OK(fsdpc_capture_begin(gpu));
    add(&x, &y, gpu_stream);
    CHECK_OK(fsdpc_capture_end(gpu, &graphs[2]));
    CHECK_OK(fsdpc_graph_launch(graphs[2]));
    add_here(&x, &y);
    check_same_bits(&x, "one that was captured afterwards");
    fsdpc_graph_destroy(graphs[2]);
    buffer_fini(&x);
    buffer_fini(&y);
}

/* Also of work that another library's stream has still to do, such as the legacy default one. */
static void test_what_ran_on_another_stream_before(void)
{
    buffer x = buffer_random(FSDPC_F32, NUMEL, 0), step = buffer_random(FSDPC_F32, NUMEL, 0);
    uintptr_t own = fsdpc_device_handle(gpu);
    fsdpc_graph *graph;
    for (uintptr_t legacy = 0; legacy <= 1; legacy++) {
        CHECK_OK(fsdpc_device_adopt(gpu, legacy));
        add(&x, &step, gpu_stream);
        CHECK_OK(fsdpc_capture_begin(gpu));
        CHECK(fsdpc_device_handle(gpu) == own);
        add(&x, &step, gpu_stream);
        CHECK_OK(fsdpc_capture_end(gpu, &graph));
        CHECK(fsdpc_device_handle(gpu) == legacy);
        CHECK_OK(fsdpc_graph_launch(graph));
        add(&x, &step, gpu_stream);
        for (int i = 0; i < 3; i++)
            add_here(&x, &step);
        check_same_bits(&x, "a capture behind a default stream");
        fsdpc_graph_destroy(graph);
    }
    CHECK_OK(fsdpc_device_adopt(gpu, own));
    buffer_fini(&x);
    buffer_fini(&step);
}

static void test_devices_without_graphs_say_so(void)
{
    CHECK_FAILS(fsdpc_capture_begin(cpu), FSDPC_ERR_UNSUPPORTED, "device 'cpu' has no graphs");
}

int main(void)
{
#if defined(FSDPC_EMU)
    emu_set_delays(4711);
#endif
    static const rig_test_fn tests[] = {test_a_replay_is_what_was_captured,
                                        test_memory_is_held,
                                        test_what_cannot_be_captured_is_named,
                                        test_a_dropped_capture_leaves_nothing,
                                        test_streams_join_by_events,
                                        test_a_graph_may_go_inside_a_capture,
                                        test_graphs_that_are_given_up_are_errors,
                                        test_what_ran_on_another_stream_before,
                                        test_devices_without_graphs_say_so};
    return rig_main("test_graph", tests, sizeof tests / sizeof tests[0]);
}
