/* Orthogonalisation against the same iterations in fp64, on every instruction set.
 *
 * Tolerance. Coefficients (1.5, -0.5, 0) converge to the polar factor, whose residual X X' - I is
 * then that of fp32 products. Muon's amplify a rounding by up to 3.4445 per iteration: 3.4445^5
 * units of 2^-24 times the products' own gamma (k units each), which 2e-4 covers for k <= 300. In
 * bf16, X, G and P are rounded to 2^-9 of themselves; 0.02 is twice the largest error seen.
 */
#include <math.h>

#include "base/size.h"
#include "base/team.h"
#include "check.h"
#include "ops/flat_ops.h"
#include "ops/nn_ops.h"
#include "ops/orthogonal.h"

typedef struct rig {
    fsdpc_device *device;
    fsdpc_stream *stream;
} rig;

static const double muon[3] = {3.4445, -4.775, 2.0315}, cubic[3] = {1.5, -0.5, 0};

static rig rig_of(fsdpc_mem *mem, fsdpc_team *team, fsdpc_isa isa)
{
    rig r;
    CHECK_OK(fsdpc_device_cpu_create(mem, team, isa, 0, &r.device));
    r.device->flat = fsdpc_flat_ops_cpu(isa);
    r.device->nn = fsdpc_nn_ops_cpu(isa);
    r.stream = fsdpc_device_main(r.device);
    return r;
}

static uint32_t seed = 1;

static double draw(void)
{
    seed = seed * 1664525u + 1013904223u;
    return (double)(seed >> 8) / (1 << 23) - 1;
}

static float *fresh(size_t numel)
{
    float *x = malloc(numel * sizeof *x + 1);
    for (size_t i = 0; i < numel; i++)
        x[i] = (float)draw();
    return x;
}

/* g = x x' (rows, rows) */
static void gram(const double *x, size_t rows, size_t cols, double *g)
{
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < rows; j++) {
            g[i * rows + j] = 0;
            for (size_t k = 0; k < cols; k++)
                g[i * rows + j] += x[i * cols + k] * x[j * cols + k];
        }
}

/* The iterations in fp64, always on a wide matrix. */
static void plain(const fsdpc_orthogonal_args *args, const float *x, double *out)
{
    bool tall = args->rows > args->cols;
    size_t side = tall ? args->cols : args->rows, length = tall ? args->rows : args->cols;
    size_t numel = side * length;
    double *now = malloc(2 * numel * sizeof *now), *next = now + numel, norm = 0;
    double *g = malloc(2 * side * side * sizeof *g), *p = g + side * side;
    for (size_t i = 0; i < numel; i++)
        norm += (double)x[i] * x[i];
    norm = fmax(sqrt(norm), args->eps);
    for (size_t i = 0; i < numel; i++)
        now[tall ? i % side * length + i / side : i] = x[i] / norm;
    for (int step = 0; step < args->steps; step++) {
        gram(now, side, length, g);
        gram(g, side, side, p); /* g is symmetric */
        for (size_t i = 0; i < side; i++)
            for (size_t j = 0; j < side; j++)
                p[i * side + j] =
                    (i == j ? args->a : 0) + args->b * g[i * side + j] + args->c * p[i * side + j];
        for (size_t i = 0; i < side; i++)
            for (size_t j = 0; j < length; j++) {
                next[i * length + j] = 0;
                for (size_t k = 0; k < side; k++)
                    next[i * length + j] += p[i * side + k] * now[k * length + j];
            }
        memcpy(now, next, numel * sizeof *now);
    }
    for (size_t i = 0; i < numel; i++)
        out[i] = now[tall ? i % side * length + i / side : i] * args->scale;
    free(now);
    free(g);
}

static fsdpc_orthogonal_args args_of(size_t rows, size_t cols, const double *polynomial, int steps)
{
    return (fsdpc_orthogonal_args){.rows = rows,
                                   .cols = cols,
                                   .a = polynomial[0],
                                   .b = polynomial[1],
                                   .c = polynomial[2],
                                   .eps = 1e-7,
                                   .steps = steps,
                                   .scale = 1};
}

static void run(rig *r, fsdpc_orthogonal_args *args, float *x)
{
    float *work = malloc(fsdpc_orthogonal_work(args->rows, args->cols) * sizeof *work);
    memset(work, 0xff, fsdpc_orthogonal_work(args->rows, args->cols) * sizeof *work); /* NaN */
    args->x = x;
    args->work = work;
    CHECK_OK(fsdpc_orthogonalize(args, r->stream));
    free(work);
}

static void test_shapes(rig *r, bool in_bf16)
{
    const double most = in_bf16 ? 0.02 : 2e-4;
    static const size_t shapes[][2] = {{1, 1},   {1, 9},   {9, 1},    {2, 2},    {3, 70},
                                       {70, 3},  {16, 16}, {17, 33},  {33, 17},  {64, 64},
                                       {5, 300}, {300, 5}, {100, 40}, {40, 100}, {128, 129}};
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        size_t rows = shapes[s][0], cols = shapes[s][1], numel = rows * cols;
        float *x = fresh(numel), *given = malloc(numel * sizeof *given);
        double *want = malloc(numel * sizeof *want), worst = 0;
        memcpy(given, x, numel * sizeof *x);
        fsdpc_orthogonal_args args = args_of(rows, cols, muon, 5 - (int)(s % 2));
        args.scale = s % 3 ? 1 : 0.25;
        args.in_bf16 = in_bf16;
        plain(&args, x, want);
        run(r, &args, x);
        for (size_t i = 0; i < numel; i++)
            worst = fmax(worst, fabs(x[i] - want[i]));
        CHECK_NOTE(worst <= most, "%s, %zu x %zu: off by %g", fsdpc_isa_name(r->device->isa), rows,
                   cols, worst);
        for (size_t i = 0; in_bf16 && args.scale == 1 && i < numel; i++)
            CHECK(fsdpc_bf16_to_f32(fsdpc_f32_to_bf16(x[i])) == x[i]);
        run(r, &args, given); /* again: the same bits */
        CHECK(memcmp(given, x, numel * sizeof *x) == 0);
        free(x);
        free(given);
        free(want);
    }
}

/* With coefficients that converge, rows (or columns) become orthonormal. */
static void test_residual(rig *r)
{
    for (int tall = 0; tall < 2; tall++) {
        size_t rows = tall ? 90 : 40, cols = tall ? 40 : 90, side = 40;
        float *x = fresh(rows * cols);
        double *wide = malloc(rows * cols * sizeof *wide), *g = malloc(side * side * sizeof *g);
        fsdpc_orthogonal_args args = args_of(rows, cols, cubic, 30);
        double worst = 0;
        run(r, &args, x);
        for (size_t i = 0; i < rows * cols; i++)
            wide[tall ? i % side * 90 + i / side : i] = x[i];
        gram(wide, side, 90, g);
        for (size_t i = 0; i < side * side; i++)
            worst = fmax(worst, fabs(g[i] - (i % (side + 1) == 0)));
        CHECK_NOTE(worst <= 90 * 0x1p-23, "%zu x %zu: residual %g", rows, cols, worst);
        free(x);
        free(wide);
        free(g);
    }
}

static void test_special(rig *r)
{
    fsdpc_orthogonal_args args = args_of(6, 11, muon, 5);
    float x[66] = {0};
    run(r, &args, x);
    for (size_t i = 0; i < 66; i++)
        CHECK(x[i] == 0);
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (size_t k = 0; k < 3; k++) {
        for (size_t i = 0; i < 66; i++)
            x[i] = i == 13 ? bad[k] : (float)draw();
        run(r, &args, x);
        for (size_t i = 0; i < 66; i++)
            CHECK(isnan(x[i]));
    }
    for (int tiny = 0; tiny < 2; tiny++) { /* squares beyond fp32 */
        for (size_t i = 0; i < 66; i++)
            x[i] = (i % 12 == 0) * (tiny ? 1e-30f : 1e38f);
        args = args_of(6, 11, cubic, 30);
        args.eps = 1e-35;
        run(r, &args, x);
        for (size_t i = 0; i < 66; i++)
            CHECK(fabsf(x[i] - (i % 12 == 0)) <= 1e-6f);
    }
    args = args_of(6, 0, muon, 5); /* nothing to do */
    CHECK_OK(fsdpc_orthogonalize(&args, r->stream));
}

static void test_threads(rig *r)
{
    fsdpc_team *team;
    CHECK_OK(fsdpc_team_create(3, &team));
    float *x = fresh(200 * 150), *same = malloc(200 * 150 * sizeof *same);
    memcpy(same, x, 200 * 150 * sizeof *x);
    fsdpc_orthogonal_args args = args_of(200, 150, muon, 5);
    run(r, &args, x);
    rig with_team = rig_of(r->device->mem, team, r->device->isa);
    run(&with_team, &args, same);
    fsdpc_device_destroy(with_team.device);
    CHECK(memcmp(x, same, 200 * 150 * sizeof *x) == 0);
    fsdpc_team_destroy(team);
    free(x);
    free(same);
}

int main(void)
{
    fsdpc_mem *mem;
    CHECK_OK(fsdpc_mem_create(&mem));
    for (int isa = 0; isa <= (int)fsdpc_isa_best(); isa++) {
        rig r = rig_of(mem, NULL, (fsdpc_isa)isa);
        test_shapes(&r, false);
        test_shapes(&r, true);
        test_residual(&r);
        test_special(&r);
        test_threads(&r);
        fsdpc_device_destroy(r.device);
    }
    fsdpc_mem_destroy(mem);
    return check_report("orthogonal");
}
