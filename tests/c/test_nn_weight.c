/* ops/weight_code: what rows of each scheme hold, and that all paths read them alike. */
#include "nn_rig.h"

#include "ops/weight_code.h"

static const fsdpc_dtype floats[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};

/* The value of an element, by the definition in the header. */
static float value_of(const fsdpc_weight_row *row, const uint8_t *bytes, size_t col)
{
    const uint8_t *codes = bytes + row->codes_at;
    float scale = fsdpc_weight_scale(row, bytes, col / row->block);
    if (!row->nibbles)
        return (float)(int8_t)codes[col] * scale;
    return row->levels[col % 2 ? codes[col / 2] & 15 : codes[col / 2] >> 4] * scale;
}

static void test_matrix(nn_rig *rig, fsdpc_weight_scheme scheme, size_t rows, size_t cols)
{
    const fsdpc_weight_row row = fsdpc_weight_row_of(scheme, cols);
    buffer values = buffer_noise(FSDPC_F32, rows * cols, cols, -3, 1);
    buffer codes = buffer_make(FSDPC_U8, rows * row.bytes);
    float *x = values.data;
    for (size_t i = 0; i < row.block && i < rows * cols; i++)
        x[i] = 0; /* a block of zeros */
    CHECK_OK(fsdpc_weight_encode(scheme, rows, cols, x, codes.data));
    buffer_check(rig, &codes, "encode");
    for (size_t first = 0; first < cols; first += 3 * row.block)
        for (size_t d = 0; d < 4; d++) {
            size_t n = cols - first;
            buffer out = buffer_make(floats[d], rows * n);
            const fsdpc_dequantize_args args = {row,        rows,      first,   n,
                                                codes.data, floats[d], out.data};
            CHECK_OK(rig->ops->dequantize(&args, rig->stream));
            buffer_check(rig, &out, "dequantize");
            for (size_t r = 0; r < rows; r++)
                for (size_t i = 0; i < n; i++) {
                    const uint8_t *bytes = (const uint8_t *)codes.data + r * row.bytes;
                    float want = value_of(&row, bytes, first + i), got;
                    buffer one = buffer_make(floats[d], 1);
                    buffer_set(&one, 0, (double)want);
                    got = (float)buffer_get(&out, r * n + i);
                    CHECK_NOTE(got == (float)buffer_get(&one, 0), "%s %s of %zu x %zu at %zu, %zu",
                               rig->ops->name, fsdpc_weight_name(scheme), rows, cols, r, i);
                    buffer_free(&one);
                    /* Half a step between levels: 0.152 of nf4's scale, 1/14, 1/254. */
                    const float steps[] = {0.16f, 0.0715f, 0.004f};
                    float error = fabsf(want - x[r * cols + first + i]);
                    CHECK_NOTE(error <= 3.01f * steps[scheme], "%g", (double)error);
                }
            buffer_free(&out);
        }
    buffer_free(&values);
    buffer_free(&codes);
}

static void suite(nn_rig *rig)
{
    const size_t cols[] = {0, 1, 2, 7, 63, 64, 65, 127, 128, 130, 256, 511};
    for (int s = 0; s < FSDPC_WEIGHT_SCHEMES; s++)
        for (size_t c = 0; c < sizeof cols / sizeof *cols; c++) {
            test_matrix(rig, (fsdpc_weight_scheme)s, 3, cols[c]);
            test_matrix(rig, (fsdpc_weight_scheme)s, 0, cols[c]);
        }
    test_matrix(rig, FSDPC_WEIGHT_NF4, 64, 1024); /* more than one thread's part */
}

static void test_bytes(void)
{
    fsdpc_weight_row row = fsdpc_weight_row_of(FSDPC_WEIGHT_NF4, 2048);
    CHECK(row.bytes == 8 + 2048 / 64 + 2048 / 2);
    CHECK(fsdpc_weight_row_of(FSDPC_WEIGHT_INT4, 2048).bytes == 4 * 2048 / 128 + 2048 / 2);
    CHECK(fsdpc_weight_row_of(FSDPC_WEIGHT_INT8, 2048).bytes == 4 + 2048);
    uint8_t zeros[74] = {0}; /* zero bytes are zeros */
    row = fsdpc_weight_row_of(FSDPC_WEIGHT_NF4, 128);
    CHECK(row.bytes == sizeof zeros && value_of(&row, zeros, 5) == 0);
}

static void test_bad_input(void)
{
    float values[] = {1, 2, 3, INFINITY};
    uint8_t codes[64];
    fsdpc_weight_scheme found;
    CHECK_OK(fsdpc_weight_find("int8", &found));
    CHECK(found == FSDPC_WEIGHT_INT8);
    CHECK(fsdpc_weight_find("nf5", &found) == FSDPC_ERR_VALUE);
    CHECK(strstr(fsdpc_last_error(), "called 'nf5'; there are nf4 int4 int8"));
    CHECK(fsdpc_weight_encode(FSDPC_WEIGHT_NF4, 2, 2, values, codes) == FSDPC_ERR_VALUE);
    CHECK(strstr(fsdpc_last_error(), "row 1 of a weight has infinities or NaN"));
}

int main(void)
{
    nn_rig_each(suite);
    test_bytes();
    test_bad_input();
    return check_report("test_nn_weight");
}
