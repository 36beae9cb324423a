/* Norms on the way from sums to factors, on the GPU and on the CPU: the same bits, words and all.
 *
 * Norms are of random gradients of many sizes, NaN and infinities among them, so that every kind of
 * sum is joined with every other.
 */
#include "gpu_rig.h"

static const size_t sizes[] = {0, 1, 63, 1001, 20011};
static const double powers[] = {1, 2, INFINITY, 3};
enum { SIZES = 5, POWERS = 4, SPECIALS = 5 };

/* On both sides; `special`: 0 none, 1 NaN, 2 infinity, 3 both, 4 as small as fp64 gets. */
static buffer norm_of(double p, size_t numel, int special)
{
    const double odd[] = {0, NAN, -INFINITY, NAN, 0};
    buffer x = buffer_random(FSDPC_F64, numel, 0);
    for (size_t i = 0; i < numel && special == 4; i++)
        element_set(x.on_cpu, i, FSDPC_F64, rig_value() * 0x1p-537);
    if (numel && special && special < 4)
        element_set(x.on_cpu, numel - 1, FSDPC_F64, odd[special]);
    if (numel > 1 && special == 3)
        element_set(x.on_cpu, 0, FSDPC_F64, INFINITY);
    buffer norm = buffer_make(FSDPC_I64, FSDPC_NORM_WORDS, 0);
    fsdpc_norm *words = norm.on_cpu;
    memset(words, 0, sizeof *words);
    if (isinf(p))
        CHECK_OK(fsdpc_flat_absmax(x.on_cpu, FSDPC_F64, numel, &words->magnitude, cpu_stream));
    else
        CHECK_OK(fsdpc_flat_sumpow(x.on_cpu, FSDPC_F64, numel, 64, p, &words->sum, cpu_stream));
    buffer_send(&norm);
    buffer_fini(&x);
    return norm;
}

/* *out = the norm's value, on both sides. */
static void check_value(const buffer *norm, double p)
{
    buffer value = buffer_poison(FSDPC_F64, 1, 0);
    if (p == 3) {
        CHECK_FAILS(fsdpc_flat_norm_value(norm->on_gpu, p, value.on_gpu, gpu_stream),
                    FSDPC_ERR_VALUE, "1, 2 or inf, not 3");
    } else {
        CHECK_OK(fsdpc_flat_norm_value(norm->on_cpu, p, value.on_cpu, cpu_stream));
        CHECK_OK(fsdpc_flat_norm_value(norm->on_gpu, p, value.on_gpu, gpu_stream));
        check_same_bits(&value, "a norm's value");
    }
    buffer_fini(&value);
}

static void test_join(void)
{
    static const int exponents[] = {0, -1, -16, 31, -64, 400};
    size_t turn = 0;
    for (size_t n = 0; n < SIZES; n++)
        for (int p = 0; p < POWERS; p++)
            for (int special = 0; special < SPECIALS; special++, turn++) {
                double power = powers[p];
                buffer into = norm_of(power, sizes[n], special);
                buffer from = norm_of(power, sizes[turn % SIZES], (int)(turn / 7 % SPECIALS));
                fsdpc_norm_join_args args = {.into = into.on_cpu, .from = from.on_cpu, .p = power};
                args.exponent = power == 3 ? 0 : exponents[turn % 6];
                CHECK_OK(fsdpc_flat_norm_join(&args, cpu_stream));
                args.into = into.on_gpu, args.from = from.on_gpu;
                CHECK_OK(fsdpc_flat_norm_join(&args, gpu_stream));
                check_same_bits(&into, "joined norms");
                check_same_bits(&from, "what was joined"); /* only read */
                check_value(&into, power);
                args = (fsdpc_norm_join_args){.into = from.on_cpu, .p = power};
                CHECK_OK(fsdpc_flat_norm_join(&args, cpu_stream));
                args.into = from.on_gpu;
                CHECK_OK(fsdpc_flat_norm_join(&args, gpu_stream));
                check_same_bits(&from, "a normalised norm");
                buffer_fini(&into);
                buffer_fini(&from);
            }
}

static void test_clip(void)
{
    static const double norms[] = {0, 1e-300, 0.25, 1, 7.5, 1e300, INFINITY, NAN};
    static const int counts[] = {1, 3, FSDPC_CLIP_FACTORS};
    for (size_t k = 0; k < sizeof norms / sizeof norms[0]; k++)
        for (int c = 0; c < 3; c++) {
            buffer factors = buffer_random(FSDPC_F64, FSDPC_CLIP_FACTORS, 0);
            buffer norm = buffer_make(FSDPC_F64, 1, 0);
            *(double *)norm.on_cpu = norms[k];
            buffer_send(&norm);
            fsdpc_clip_args args = {.max_norm = 0.7, .n = counts[c], .pending = rig_bits()};
            args.norm = norm.on_cpu;
            for (int i = 0; i < args.n; i++)
                args.factors[i] = (double *)factors.on_cpu + i;
            CHECK_OK(fsdpc_flat_clip(&args, cpu_stream));
            args.norm = norm.on_gpu;
            for (int i = 0; i < args.n; i++)
                args.factors[i] = (double *)factors.on_gpu + i;
            CHECK_OK(fsdpc_flat_clip(&args, gpu_stream));
            check_same_bits(&factors, "clipping"); /* those behind the last stay */
            buffer_fini(&factors);
            buffer_fini(&norm);
        }
}

/* A gradient's way: sums, value, factor and the product in one go, and nothing is waited for. */
static void test_gradients_are_clipped(void)
{
    static const fsdpc_dtype floats[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
    for (int d = 0; d < 4; d++)
        for (size_t n = 0; n < SIZES; n++) {
            buffer x = buffer_random(floats[d], sizes[n], n % 3);
            buffer norm = norm_of(2, 0, 0), value = buffer_poison(FSDPC_F64, 1, 0);
            buffer factor = buffer_poison(FSDPC_F64, 1, 0);
            for (int side = 0; side < 2; side++) {
                fsdpc_stream *stream = side ? gpu_stream : cpu_stream;
                fsdpc_norm *sum = side ? norm.on_gpu : norm.on_cpu;
                double *at = side ? value.on_gpu : value.on_cpu;
                fsdpc_clip_args clip = {.norm = at, .max_norm = 1.5, .n = 1};
                clip.factors[0] = side ? factor.on_gpu : factor.on_cpu;
                void *data = side ? x.on_gpu : x.on_cpu;
                CHECK_OK(fsdpc_flat_sumsq(data, floats[d], sizes[n], 64, &sum->sum, stream));
                CHECK_OK(fsdpc_flat_norm_value(sum, 2, at, stream));
                CHECK_OK(fsdpc_flat_clip(&clip, stream));
                CHECK_OK(fsdpc_flat_scale(data, floats[d], sizes[n], 0.5, clip.factors[0], NULL,
                                          stream));
            }
            check_same_bits(&value, "a norm");
            check_same_bits(&factor, "a factor");
            check_same_bits(&x, "clipped gradients");
            buffer_fini(&x);
            buffer_fini(&norm);
            buffer_fini(&value);
            buffer_fini(&factor);
        }
}

int main(void)
{
    static const rig_test_fn tests[] = {test_join, test_clip, test_gradients_are_clipped};
    return rig_main("test_norm_kernels", tests, sizeof tests / sizeof tests[0]);
}
