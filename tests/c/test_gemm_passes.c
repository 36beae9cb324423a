/* bf16 products of great depth against an fp64 reference.
 *
 * AMX and AVX2 pack B for at most 2048 k at a time, AVX-512 for four blocks of 768; a deeper
 * product makes several passes, in which up to 512 rows keep their sums. A product of up to 16
 * rows makes a pass every 128 k. Here are products of several passes, in the forms of a layer.
 * fp32 results are held to the bound that test_gemm.c explains, bf16 results must be their
 * rounding, whatever the number of threads.
 */
#include <math.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/size.h"
#include "base/team.h"
#include "check.h"
#include "ops/gemm.h"

static uint32_t seed = 1;

/* bf16 in [-1, 1) */
static uint16_t *fresh(size_t numel)
{
    uint16_t *x = malloc(numel * sizeof *x);
    for (size_t i = 0; i < numel; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = fsdpc_f32_to_bf16((float)(int32_t)seed * 0x1p-31f);
    }
    return x;
}

/* Memory whose end is the end of what may be read: sanitizers do not see what tile instructions
 * read. */
typedef struct guarded {
    void *data;
    char *map;
    size_t bytes;
} guarded;

static guarded guarded_make(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = fsdpc_round_up(bytes, page);
    guarded it = {.bytes = whole + page};
    it.map = mmap(NULL, it.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(it.map != MAP_FAILED);
    CHECK(mprotect(it.map + whole, page, PROT_NONE) == 0);
    it.data = it.map + whole - bytes;
    return it;
}

/* A' (lines, k), both as stored along k ([0]) and along lines ([1]), and in fp64. */
typedef struct operand {
    guarded stored[2];
    double *values;
} operand;

static operand operand_make(size_t lines, size_t k)
{
    operand it = {.values = malloc(lines * k * sizeof(double))};
    uint16_t *from = fresh(lines * k);
    for (int form = 0; form < 2; form++) {
        it.stored[form] = guarded_make(lines * k * sizeof(uint16_t));
        uint16_t *to = it.stored[form].data;
        for (size_t i = 0; i < lines; i++)
            for (size_t q = 0; q < k; q++)
                to[form ? q * lines + i : i * k + q] = from[i * k + q];
    }
    for (size_t i = 0; i < lines * k; i++)
        it.values[i] = fsdpc_bf16_to_f32(from[i]);
    free(from);
    return it;
}

static void operand_free(operand *it)
{
    for (int form = 0; form < 2; form++)
        munmap(it->stored[form].map, it->stored[form].bytes);
    free(it->values);
}

typedef struct product {
    size_t m, n, k;
    operand a, b;
    double *sums, *sizes; /* (m, n): of the terms, and of their magnitudes */
    uint16_t *before, *narrow, *narrow_again;
    float *wide, *wide_again; /* all (m, n) */
} product;

static product product_make(size_t m, size_t n, size_t k)
{
    product it = {.m = m,
                  .n = n,
                  .k = k,
                  .a = operand_make(m, k),
                  .b = operand_make(n, k),
                  .sums = malloc(m * n * sizeof(double)),
                  .sizes = malloc(m * n * sizeof(double)),
                  .before = fresh(m * n),
                  .narrow = malloc(m * n * sizeof(uint16_t)),
                  .narrow_again = malloc(m * n * sizeof(uint16_t)),
                  .wide = malloc(m * n * sizeof(float)),
                  .wide_again = malloc(m * n * sizeof(float))};
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < n; j++) {
            const double *x = it.a.values + i * k, *y = it.b.values + j * k;
            double sum = 0, size = 0;
            for (size_t q = 0; q < k; q++) {
                sum += x[q] * y[q];
                size += fabs(x[q] * y[q]);
            }
            it.sums[i * n + j] = sum;
            it.sizes[i * n + j] = size;
        }
    return it;
}

static void product_free(product *it)
{
    operand_free(&it->a);
    operand_free(&it->b);
    free(it->sums);
    free(it->sizes);
    free(it->before);
    free(it->narrow);
    free(it->narrow_again);
    free(it->wide);
    free(it->wide_again);
}

/* The product in fp32 and in bf16, from the same C. */
static void product_run(fsdpc_stream *stream, const product *it, int form, bool accumulate,
                        float *wide, uint16_t *narrow)
{
    fsdpc_gemm_args args = {.m = it->m,
                            .n = it->n,
                            .k = it->k,
                            .dtype = FSDPC_BF16,
                            .c_dtype = FSDPC_BF16,
                            .trans_a = form == 2,
                            .trans_b = form == 0,
                            .a = it->a.stored[form == 2].data,
                            .b = it->b.stored[form != 0].data,
                            .lda = form == 2 ? it->m : it->k,
                            .ldb = form == 0 ? it->k : it->n,
                            .c = narrow,
                            .ldc = it->n,
                            .accumulate = accumulate};
    for (size_t i = 0; i < it->m * it->n; i++) {
        narrow[i] = it->before[i];
        wide[i] = fsdpc_bf16_to_f32(it->before[i]);
    }
    CHECK_OK(fsdpc_gemm_cpu(&args, stream));
    args.c = wide;
    args.c_dtype = FSDPC_F32;
    CHECK_OK(fsdpc_gemm_cpu(&args, stream));
}

/* fp32 within the bound, bf16 its rounding, and three threads give the bits of one. */
static void product_check(fsdpc_stream *stream, product *it, int form, bool accumulate)
{
    size_t numel = it->m * it->n, far = 0, rounded = 0;
    double n = (double)(it->k + 3), gamma = n * 0x1p-24 / (1 - n * 0x1p-24);
    product_run(stream, it, form, accumulate, it->wide, it->narrow);
    for (size_t i = 0; i < numel; i++) {
        double c = accumulate ? fsdpc_bf16_to_f32(it->before[i]) : 0;
        double bound = (gamma + 0x1p-24) * (it->sizes[i] + fabs(c));
        far += !(fabs((double)it->wide[i] - it->sums[i] - c) <= bound);
        rounded += it->narrow[i] == fsdpc_f32_to_bf16(it->wide[i]);
    }
    CHECK_OK(fsdpc_team_create(3, &stream->device->team));
    product_run(stream, it, form, accumulate, it->wide_again, it->narrow_again);
    fsdpc_team_destroy(stream->device->team);
    stream->device->team = NULL;
    CHECK_NOTE(far == 0 && rounded == numel &&
                   memcmp(it->wide, it->wide_again, numel * sizeof(float)) == 0 &&
                   memcmp(it->narrow, it->narrow_again, numel * sizeof(uint16_t)) == 0,
               "%s m %zu n %zu k %zu, form %d, accumulate %d: %zu far off, %zu not rounded",
               fsdpc_isa_name(stream->device->isa), it->m, it->n, it->k, form, accumulate, far,
               numel - rounded);
}

/* x W^T, dy W and dy^T x; blocks of k that are whole and not, panels of A too, and more rows
 * than keep their sums at a time. */
static void test_passes(fsdpc_stream *stream)
{
    static const size_t shapes[][3] = {
        {70, 300, 2100}, {12, 75, 2100}, {70, 300, 4200}, {64, 96, 4096}, {544, 40, 2100}};
    for (size_t s = 0; s < 5; s++) {
        product it = product_make(shapes[s][0], shapes[s][1], shapes[s][2]);
        /* a pass of the portable path is one block: test_forms has several */
        int least = s < 2 ? FSDPC_ISA_PORTABLE : FSDPC_ISA_AVX2;
        for (int isa = least; isa <= (int)fsdpc_isa_best(); isa++) {
            stream->device->isa = (fsdpc_isa)isa;
            for (int form = 0; form < 3; form++)
                for (int accumulate = 0; accumulate < 2; accumulate++)
                    product_check(stream, &it, form, accumulate);
        }
        product_free(&it);
    }
}

int main(void)
{
    fsdpc_device device = {0};
    fsdpc_stream stream = {.device = &device};
    CHECK_OK(fsdpc_mem_create(&device.mem));
    test_passes(&stream);
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(device.mem, &stats);
    CHECK(stats.now_bytes[FSDPC_MEM_OTHER] == 0); /* every call gave its workspace back */
    fsdpc_mem_destroy(device.mem);
    return check_report("gemm_passes");
}
