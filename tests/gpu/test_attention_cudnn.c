/* Attention by cuDNN against exact numbers and against our own kernels; which shapes are not its.
 *
 * Tolerances as in test_attention_kernels.c, of the CPU's kernels in fp64. Where the tests were
 * built without cuDNN's headers, or cuDNN is not there, they say so and check what does without.
 */
#include "attention_case.h"
#include "cuda/attention_cudnn.h"
#include "cuda/queue.h"
#include "cuda/cudnn_plan.h"
#include "gpu_rig.h"

enum { INPUTS = 4, RESULTS = 5 }; /* q, k, v, dout; out, lse, dq, dk, dv */

typedef struct attention_rig {
    fsdpc_dtype dtype;
    fsdpc_attention_args args;
    size_t q_numel, k_numel;
    buffer inputs[INPUTS], results[RESULTS];
} attention_rig;

static bool there; /* cuDNN is */

static size_t done(void)
{
    return fsdpc_cuda_attentions_done(((fsdpc_cuda_device *)gpu)->attentions);
}

/* Inputs begin `shift` elements behind 16 bytes. */
static attention_rig rig_make(attention_case c, fsdpc_dtype dtype, size_t shift)
{
    attention_rig r = {.dtype = dtype,
                       .args = attention_args_of(c, dtype),
                       .q_numel = c.batch * c.tokens_q * c.heads * c.dim,
                       .k_numel = c.batch * c.tokens_k * c.kv_heads * c.dim};
    size_t rows = c.batch * c.tokens_q * c.heads;
    for (int i = 0; i < INPUTS; i++)
        r.inputs[i] = buffer_random(dtype, i % 3 ? r.k_numel : r.q_numel, shift);
    size_t numels[RESULTS] = {r.q_numel, rows, r.q_numel, r.k_numel, r.k_numel};
    for (int i = 0; i < RESULTS; i++)
        r.results[i] = buffer_poison(i == 1 ? FSDPC_F32 : dtype, numels[i], 0);
    fsdpc_attention_args *a = &r.args;
    a->q = r.inputs[0].on_gpu, a->k = r.inputs[1].on_gpu, a->v = r.inputs[2].on_gpu;
    a->dout = r.inputs[3].on_gpu, a->out = r.results[0].on_gpu, a->lse = r.results[1].on_gpu;
    a->dq = r.results[2].on_gpu, a->dk = r.results[3].on_gpu, a->dv = r.results[4].on_gpu;
    return r;
}

static void rig_fini(attention_rig *r)
{
    for (int i = 0; i < INPUTS; i++)
        buffer_fini(&r->inputs[i]);
    for (int i = 0; i < RESULTS; i++)
        buffer_fini(&r->results[i]);
}

/* Each direction by cuDNN where it takes the shape, or by our own kernels. */
static void rig_run(attention_rig *r, bool forward_by_cudnn, bool backward_by_cudnn)
{
    ((fsdpc_cuda_device *)gpu)->cudnn = forward_by_cudnn;
    CHECK_OK(gpu->nn->attention(&r->args, gpu_stream));
    ((fsdpc_cuda_device *)gpu)->cudnn = backward_by_cudnn;
    CHECK_OK(gpu->nn->attention_backward(&r->args, gpu_stream));
    ((fsdpc_cuda_device *)gpu)->cudnn = false;
}

static double *widened(const buffer *b)
{
    double *wide = malloc((b->numel + 1) * sizeof *wide);
    for (size_t i = 0; i < b->numel; i++)
        wide[i] = element_of(b->on_cpu, i, b->dtype);
    return wide;
}

/* The same in fp64 on the CPU; (RESULTS) arrays, lse in fp32. */
static void exact_make(const attention_rig *r, void *results[RESULTS])
{
    double *inputs[INPUTS];
    for (int i = 0; i < INPUTS; i++)
        inputs[i] = widened(&r->inputs[i]);
    for (int i = 0; i < RESULTS; i++)
        results[i] = calloc(r->results[i].numel + 1, sizeof(double));
    fsdpc_attention_args a = r->args;
    a.dtype = FSDPC_F64;
    a.q = inputs[0], a.k = inputs[1], a.v = inputs[2], a.dout = inputs[3];
    a.out = results[0], a.lse = results[1];
    a.dq = results[2], a.dk = results[3], a.dv = results[4];
    CHECK_OK(cpu->nn->attention(&a, cpu_stream));
    CHECK_OK(cpu->nn->attention_backward(&a, cpu_stream));
    for (int i = 0; i < INPUTS; i++)
        free(inputs[i]);
}

static void check_exact(attention_rig *r, void *const results[RESULTS], const char *by)
{
    static const char *const names[RESULTS] = {"out", "lse", "dq", "dk", "dv"};
    double part = r->dtype == FSDPC_BF16 ? 0x1p-6 : r->dtype == FSDPC_F16 ? 0x1p-9 : 2e-5;
    for (int i = 0; i < RESULTS; i++) {
        buffer *b = &r->results[i];
        const void *got = buffer_fetch(b);
        fsdpc_dtype exact = i == 1 ? FSDPC_F32 : FSDPC_F64;
        double top = 1, worst = 0;
        for (size_t n = 0; n < b->numel; n++) {
            double x = element_of(got, n, b->dtype), y = element_of(results[i], n, exact);
            top = isfinite(y) ? fmax(top, fabs(y)) : top;
            double error = x == y ? 0 : fabs(x - y);
            worst = error <= worst ? worst : error;
        }
        CHECK_NOTE(worst <= (i == 1 ? 1e-5 : part) * top, "%s of attention by %s, %s: off by %g",
                   names[i], by, fsdpc_dtype_name(r->dtype), worst);
    }
}

/* What the results are becomes what they have to be. */
static void results_keep(attention_rig *r)
{
    for (int i = 0; i < RESULTS; i++) {
        buffer *b = &r->results[i];
        buffer_fetch(b);
        memcpy(b->host, b->back, b->bytes);
        memset(b->back, 0xa5, b->bytes);
        CHECK_OK(fsdpc_device_fill(gpu, b->on_gpu, 0xa5, b->numel * fsdpc_dtype_bytes(b->dtype),
                                   gpu_stream));
    }
}

static void check_kept(attention_rig *r, const char *what)
{
    for (int i = 0; i < RESULTS; i++)
        check_same_bits(&r->results[i], what);
}

/* -- tests ------------------------------------------------------------------------------------- */

static void check_taken(attention_case c, fsdpc_dtype dtype)
{
    attention_rig r = rig_make(c, dtype, 0);
    void *exact[RESULTS];
    exact_make(&r, exact);
    size_t before = done();
    rig_run(&r, true, true);
    CHECK(done() == before + 2 * there);
    check_exact(&r, exact, "cuDNN");
    results_keep(&r);
    rig_run(&r, true, true);
    check_kept(&r, "a second run of cuDNN's attention");
    rig_run(&r, true, false);
    check_exact(&r, exact, "cuDNN, backward by us");
    rig_run(&r, false, true);
    check_exact(&r, exact, "us, backward by cuDNN");
    for (int i = 0; i < RESULTS; i++)
        free(exact[i]);
    rig_fini(&r);
}

static void test_what_cudnn_takes(void)
{
#if defined(FSDPC_EMU) /* slow, and what is not the fake's is tested elsewhere */
    check_taken((attention_case){1, 20, 20, 2, 1, 32, true, 0.125}, FSDPC_BF16);
    check_taken((attention_case){1, 16, 40, 1, 1, 32, true, 0.2}, FSDPC_F16);
#else
    static const attention_case cases[] = {
        {2, 70, 70, 4, 2, 32, true, 0.125},   {1, 128, 128, 2, 1, 128, true, 0.1},
        {1, 65, 200, 2, 2, 128, false, 0.2},  {2, 64, 192, 4, 1, 128, true, 0.1},
        {2, 512, 512, 8, 2, 64, true, 0.125},
    };
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        check_taken(cases[c], FSDPC_BF16);
        check_taken(cases[c], FSDPC_F16);
    }
#endif
}

static void check_left(attention_case c, fsdpc_dtype dtype, size_t shift, const char *what)
{
    attention_rig r = rig_make(c, dtype, shift);
    size_t before = done();
    rig_run(&r, false, false);
    results_keep(&r);
    rig_run(&r, true, true);
    CHECK_NOTE(done() == before, "cuDNN was asked for %s", what);
    check_kept(&r, what);
    rig_fini(&r);
}

static void test_what_stays_with_our_kernels(void)
{
    check_left((attention_case){1, 9, 9, 2, 1, 32, true, 0.1}, FSDPC_F32, 0, "fp32");
    check_left((attention_case){1, 9, 9, 2, 1, 32, true, 0.1}, FSDPC_BF16, 1, "odd addresses");
    check_left((attention_case){1, 9, 9, 2, 1, 20, true, 0.1}, FSDPC_BF16, 0, "odd rows");
    check_left((attention_case){1, 12, 9, 2, 1, 32, true, 0.1}, FSDPC_BF16, 0, "idle queries");
    check_left((attention_case){1, 9, 9, 2, 1, 32, true, -0.1}, FSDPC_BF16, 0, "a scale below 0");
    check_left((attention_case){1, 0, 9, 2, 1, 32, false, 1}, FSDPC_BF16, 0, "no query");
    check_left((attention_case){1, 9, 9, 1, 1, 264, true, 0.1}, FSDPC_BF16, 0, "wide heads");
#if defined(FSDPC_EMU)
    check_left((attention_case){1, 9, 9, 1, 1, 136, true, 0.1}, FSDPC_BF16, 0, "no plan");
#endif
}

/* Plans and memory are found again; a capture has the bits, and asks for no new plan. */
static void test_a_captured_step_is_one_that_ran(void)
{
    attention_rig r = rig_make((attention_case){1, 24, 24, 2, 1, 32, true, 0.1}, FSDPC_BF16, 0);
    rig_run(&r, true, true);
    results_keep(&r);
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(gpu_mem, &stats);
    uint64_t asked = stats.system_allocs;
    rig_run(&r, true, true);
    CHECK_OK(fsdpc_stream_sync(gpu_stream));
    fsdpc_mem_stats_read(gpu_mem, &stats);
    CHECK(stats.system_allocs == asked);

    fsdpc_graph *graph;
    CHECK_OK(fsdpc_capture_begin(gpu));
    rig_run(&r, true, true);
    if (there) {
        fsdpc_attention_args other = r.args;
        other.scale = 0.25;
        ((fsdpc_cuda_device *)gpu)->cudnn = true;
        CHECK_FAILS(gpu->nn->attention(&other, gpu_stream), FSDPC_ERR_STATE,
                    "a shape that no step before it did");
        ((fsdpc_cuda_device *)gpu)->cudnn = false;
    }
    CHECK_OK(fsdpc_capture_end(gpu, &graph));
    for (int i = 0; i < RESULTS; i++)
        CHECK_OK(fsdpc_device_fill(gpu, r.results[i].on_gpu, 0xa5,
                                   r.results[i].numel * fsdpc_dtype_bytes(r.results[i].dtype),
                                   gpu_stream));
    CHECK_OK(fsdpc_graph_launch(graph));
    check_kept(&r, "captured attention");
    fsdpc_graph_destroy(graph);
    rig_fini(&r);
}

#if defined(FSDPC_EMU)
/* The fake's backward of 64 wants 4 GiB, unless it may add up in any order. */
static void test_what_the_fake_makes_of_its_plans(void)
{
    attention_rig r = rig_make((attention_case){1, 16, 16, 1, 1, 64, true, 0.1}, FSDPC_BF16, 0);
    size_t before = done();
    rig_run(&r, true, true);
    CHECK(done() == before + 1);
    ((fsdpc_cuda_device *)gpu)->cudnn = 2;
    CHECK_OK(gpu->nn->attention_backward(&r.args, gpu_stream));
    CHECK(done() == before + 2);
    r.args.scale = 0.75; /* which makes the fake fail */
    ((fsdpc_cuda_device *)gpu)->cudnn = true;
    CHECK_FAILS(gpu->nn->attention(&r.args, gpu_stream), FSDPC_ERR_INTERNAL,
                "cuDNN failed on attention of 16 queries, 16 keys and 1 heads of 64: status");
    ((fsdpc_cuda_device *)gpu)->cudnn = false;
    rig_fini(&r);
}
#endif

int main(void)
{
    static const rig_test_fn tests[] = {
        test_what_cudnn_takes,
        test_what_stays_with_our_kernels,
        test_a_captured_step_is_one_that_ran,
#if defined(FSDPC_EMU)
        test_what_the_fake_makes_of_its_plans,
#endif
    };
    char found[512];
    fsdpc_cuda_attentions_describe(found, sizeof found);
    there = strncmp(found, "cuDNN ", 6) == 0;
    printf("test_attention_cudnn: %s\n", found);
    return rig_main("test_attention_cudnn", tests, sizeof tests / sizeof tests[0]);
}
