/* Codecs: messages carry what was rounded without loss, wherever rows are cut. */
#include "ops/codec.h"

#include <math.h>
#include <string.h>

#include "test_flat_common.h"

enum { ROW = 320, ROWS = 441, MOST = ROW * ROWS };

static const fsdpc_codec codecs[] = {FSDPC_CODEC_EXACT, FSDPC_CODEC_BF16, FSDPC_CODEC_FP16,
                                     FSDPC_CODEC_INT8,  FSDPC_CODEC_FP8,  FSDPC_CODEC_INT4};
static const fsdpc_dtype dtypes[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};

/* Rounds rows together and one by one: the same bits, which a message of any rows keeps. */
static void test_round(rig *r, fsdpc_codec codec, fsdpc_dtype dtype, size_t row)
{
    size_t element = fsdpc_dtype_bytes(dtype), numel = MOST / row * row;
    char *values = test_alloc(MOST * element), *parts = test_alloc(MOST * element);
    char *back = test_alloc(MOST * element);
    fsdpc_codec_rows whole = {dtype, row, numel}, one = {dtype, row, row};
    fill_random(values, numel, dtype, row);
    memcpy(parts, values, numel * element);
    CHECK_OK(fsdpc_codec_round(codec, &whole, values, NULL, &r->stream));
    if (!fsdpc_codec_shortens(codec, &whole))
        CHECK(memcmp(values, parts, numel * element) == 0);
    for (size_t at = 0; at < numel; at += row)
        CHECK_OK(fsdpc_codec_round(codec, &one, parts + at * element, NULL, &r->stream));
    CHECK(memcmp(values, parts, numel * element) == 0);
    CHECK_OK(fsdpc_codec_round(codec, &whole, parts, NULL, &r->stream)); /* again */
    CHECK(memcmp(values, parts, numel * element) == 0);
    for (size_t rows = 1; rows * row <= numel; rows = rows * 7 + 1) {
        fsdpc_codec_rows span = {dtype, row, rows * row};
        size_t bytes = fsdpc_codec_bytes(codec, &span);
        unsigned char *message = test_alloc(bytes + 4);
        memset(message + bytes, 0x5a, 4);
        const char *from = values + (numel - rows * row) * element;
        CHECK_OK(fsdpc_codec_encode(codec, &span, from, message, NULL, &r->stream));
        CHECK(message[bytes] == 0x5a && bytes % 4 == 0);
        CHECK_OK(fsdpc_codec_decode(codec, &span, message, back, &r->stream));
        CHECK_NOTE(memcmp(from, back, rows * row * element) == 0, "%s of %s, %zu rows of %zu",
                   fsdpc_codec_name(codec), fsdpc_dtype_name(dtype), rows, row);
        free(message);
    }
    free(values), free(parts), free(back);
}

/* Messages carry numbers with their residual, of which what they leave out remains. */
static void test_residual(rig *r, fsdpc_codec codec)
{
    fsdpc_codec_rows rows = {FSDPC_F32, MOST, MOST};
    float *values = test_alloc(MOST * sizeof(float)), *residual = test_alloc(MOST * sizeof(float));
    float *sum = test_alloc(MOST * sizeof(float)), *back = test_alloc(MOST * sizeof(float));
    size_t bytes = fsdpc_codec_bytes(codec, &rows);
    unsigned char *message = test_alloc(bytes), *plain = test_alloc(bytes);
    fsdpc_exact_sum left_out = {0}, meant = {0};
    fsdpc_codec_error error = {residual, &left_out, &meant};
    fill_random((char *)values, MOST, FSDPC_F32, 3);
    fill_random((char *)residual, MOST, FSDPC_F32, 4);
    for (size_t i = 0; i < MOST; i++)
        sum[i] = values[i] + residual[i];
    CHECK_OK(fsdpc_codec_encode(codec, &rows, sum, plain, NULL, &r->stream));
    CHECK_OK(fsdpc_codec_encode(codec, &rows, values, message, &error, &r->stream));
    CHECK(memcmp(message, plain, bytes) == 0);
    CHECK_OK(fsdpc_codec_decode(codec, &rows, message, back, &r->stream));
    double squares[2] = {0};
    for (size_t i = 0; i < MOST; i++) {
        CHECK(residual[i] == sum[i] - back[i]);
        squares[0] += (double)residual[i] * residual[i];
        squares[1] += (double)sum[i] * sum[i];
    }
    CHECK(fabs(fsdpc_exact_sum_value(&left_out) - squares[0]) <= 1e-12 * squares[0]);
    CHECK(fabs(fsdpc_exact_sum_value(&meant) - squares[1]) <= 1e-12 * squares[1]);
    memcpy(sum, residual,
           MOST * sizeof(float)); /* an infinity in the last part changes only others */
    values[MOST - 1] = INFINITY;
    CHECK_OK(fsdpc_codec_encode(codec, &rows, values, message, &error, &r->stream));
    CHECK(memcmp(residual + MOST - 100, sum + MOST - 100, 100 * sizeof(float)) == 0);
    CHECK(memcmp(residual, sum, 100 * sizeof(float)) != 0);
    free(values), free(residual), free(sum), free(back), free(message), free(plain);
}

static void test_bytes(void)
{
    const fsdpc_codec_rows span = {FSDPC_F32, 320, 3 * 320}, vector = {FSDPC_F32, 0, 33};
    CHECK(fsdpc_codec_bytes(FSDPC_CODEC_EXACT, &span) == 3 * 320 * 4);
    CHECK(fsdpc_codec_bytes(FSDPC_CODEC_BF16, &span) == 3 * 320 * 2);
    CHECK(fsdpc_codec_bytes(FSDPC_CODEC_INT8, &span) == 3 * (320 + 2 * 4));
    CHECK(fsdpc_codec_bytes(FSDPC_CODEC_FP8, &span) == 3 * (320 + 2 * 4));
    CHECK(fsdpc_codec_bytes(FSDPC_CODEC_INT4, &span) == 3 * (160 + 5 * 4));
    CHECK(fsdpc_codec_bytes(FSDPC_CODEC_INT8, &vector) == 33 * 4);
    CHECK(fsdpc_codec_bytes(FSDPC_CODEC_BF16, &vector) == 68);
}

static void test_names(void)
{
    fsdpc_codec found;
    for (size_t i = 0; i < sizeof codecs / sizeof *codecs; i++) {
        CHECK_OK(fsdpc_codec_find(fsdpc_codec_name(codecs[i]), &found));
        CHECK(found == codecs[i]);
    }
    CHECK_FAILS(fsdpc_codec_find("int7", &found), FSDPC_ERR_VALUE,
                "no codec 'int7': choose from exact, bf16, fp16, int8, fp8, int4");
}

int main(void)
{
    fsdpc_isa isas[FSDPC_ISA_COUNT];
    int n_isas = usable_isas(isas);
    for (int k = 0; k < n_isas; k++) {
        rig r;
        rig_init(&r, isas[k], k % 2 ? 3 : 1);
        for (size_t c = 0; c < sizeof codecs / sizeof *codecs; c++) {
            if (codecs[c] != FSDPC_CODEC_EXACT)
                test_residual(&r, codecs[c]);
            for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
                test_round(&r, codecs[c], dtypes[d], ROW);
                test_round(&r, codecs[c], dtypes[d], 65);
                test_round(&r, codecs[c], dtypes[d], MOST / 2); /* parts inside rows */
                test_round(&r, codecs[c], dtypes[d], MOST - 1);
            }
        }
        rig_fini(&r);
    }
    test_bytes();
    test_names();
    return check_report("codec");
}
