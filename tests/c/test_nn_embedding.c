/* Embedding rows, their gradients and rotary position embedding. */
#include "nn_rig.h"

static void test_embedding(nn_rig *rig, fsdpc_dtype dtype, fsdpc_dtype id_dtype,
                           fsdpc_dtype dtable_dtype, size_t count, size_t dim, bool accumulate)
{
    size_t rows = 23;
    buffer ids = buffer_noise(id_dtype, count, 1, 0, 20); /* rows 20.. are never named */
    buffer table = buffer_noise(dtype, rows * dim, 2, -1, 1), out = buffer_make(dtype, count * dim);
    buffer dout = buffer_noise(dtype, count * dim, 3, -1, 1);
    buffer dtable = buffer_noise(dtable_dtype, rows * dim, 4, -1, 1);
    double *want = calloc(rows * dim + 1, sizeof *want),
           *size = calloc(rows * dim + 1, sizeof *size);
    for (size_t i = 0; i < rows * dim; i++)
        want[i] = accumulate ? buffer_get(&dtable, i) : 0;
    fsdpc_embedding_args args = {.dtype = dtype, .id_dtype = id_dtype, .count = count};
    args.rows = rows;
    args.dim = dim;
    args.ids = ids.data;
    args.table = table.data;
    args.out = out.data;
    args.dout = dout.data;
    args.dtable = dtable.data;
    args.dtable_dtype = dtable_dtype;
    args.accumulate = accumulate;
    CHECK_OK(rig->ops->embedding(&args, rig->stream));
    CHECK_OK(rig->ops->embedding_backward(&args, rig->stream));
    buffer_check(rig, &out, "embedding");
    buffer_check(rig, &dtable, "embedding backward");
    for (size_t i = 0; i < count; i++)
        for (size_t c = 0; c < dim; c++) {
            size_t row = (size_t)buffer_get(&ids, i);
            CHECK(buffer_get(&out, i * dim + c) == buffer_get(&table, row * dim + c));
            want[row * dim + c] += buffer_get(&dout, i * dim + c);
            size[row * dim + c] += fabs(buffer_get(&dout, i * dim + c));
        }
    for (size_t i = 0; i < rows * dim; i++)
        check_near(rig, "embedding backward", dtable_dtype, i, buffer_get(&dtable, i), want[i],
                   tolerance(dtable_dtype, want[i], 1, 1) + 1e-6 * size[i]);
    buffer_free(&ids);
    buffer_free(&table);
    buffer_free(&out);
    buffer_free(&dout);
    buffer_free(&dtable);
    free(want);
    free(size);
}

static void test_embedding_errors(nn_rig *rig)
{
    int64_t ids[3] = {0, 4, 1};
    int32_t negative[3] = {0, 1, -2};
    float table[8], out[6] = {9, 9, 9, 9, 9, 9};
    fsdpc_embedding_args args = {.dtype = FSDPC_F32, .id_dtype = FSDPC_I64, .count = 3};
    args.rows = 4;
    args.dim = 2;
    args.ids = ids;
    args.table = table;
    args.out = out;
    CHECK_FAILS(rig->ops->embedding(&args, rig->stream), FSDPC_ERR_INDEX, "id 4 at index 1");
    CHECK_FAILS(rig->ops->embedding_backward(&args, rig->stream), FSDPC_ERR_INDEX, "4 rows");
    CHECK(out[0] == 9); /* nothing was written */
    args.id_dtype = FSDPC_I32;
    args.ids = negative;
    CHECK_FAILS(rig->ops->embedding(&args, rig->stream), FSDPC_ERR_INDEX, "id -2 at index 2");
    args.id_dtype = FSDPC_F32;
    CHECK_FAILS(rig->ops->embedding(&args, rig->stream), FSDPC_ERR_DTYPE, "int32 or int64");
}

static void test_rotary(nn_rig *rig, fsdpc_dtype dtype, size_t batch, size_t tokens, size_t heads,
                        size_t dim)
{
    size_t numel = batch * tokens * heads * dim, half = dim / 2;
    float *cosines = malloc((tokens * half + 1) * sizeof *cosines);
    float *sines = malloc((tokens * half + 1) * sizeof *sines);
    for (size_t t = 0; t < tokens; t++)
        for (size_t i = 0; i < half; i++) {
            double angle = (double)t * pow(10000, -2.0 * (double)i / (double)dim);
            cosines[t * half + i] = (float)cos(angle);
            sines[t * half + i] = (float)sin(angle);
        }
    buffer x = buffer_noise(dtype, numel, 5, -2, 2), y = buffer_make(dtype, numel);
    fsdpc_rotary_args args = {dtype,   batch, tokens, heads,  dim,
                              cosines, sines, false,  x.data, y.data};
    for (int inverse = 0; inverse < 2; inverse++) {
        args.inverse = inverse;
        CHECK_OK(rig->ops->rotary(&args, rig->stream));
        buffer_check(rig, &y, "rotary");
        for (size_t at = 0; at < numel; at++) {
            size_t i = at % dim, angle = at / dim / heads % tokens * half + i % half;
            double c = cosines[angle], s = inverse ? -sines[angle] : sines[angle];
            double mine = buffer_get(&x, at);
            double other = i < half ? -buffer_get(&x, at + half) : buffer_get(&x, at - half);
            double want = mine * c + other * s;
            check_near(rig, "rotary", dtype, at, buffer_get(&y, at), want,
                       tolerance(dtype, want, 3, 1));
        }
    }
    args.y = x.data; /* in place */
    CHECK_OK(rig->ops->rotary(&args, rig->stream));
    CHECK(numel == 0 || memcmp(x.data, y.data, numel * fsdpc_dtype_bytes(dtype)) == 0);
    buffer_free(&x);
    buffer_free(&y);
    free(cosines);
    free(sines);
    args.dim = 3;
    CHECK_FAILS(rig->ops->rotary(&args, rig->stream), FSDPC_ERR_SHAPE, "even");
}

/* Single elements of many rows, of which two threads take parts: sums in the order of the ids. */
static void test_single_elements(nn_rig *rig, fsdpc_dtype dtype)
{
    enum { ROWS = 50001, COUNT = 70001 };
    static int64_t ids[COUNT];
    static float want[ROWS];
    buffer dout = buffer_noise(dtype, COUNT, 3, -1, 1), dtable = buffer_make(dtype, ROWS);
    memset(want, 0, sizeof want);
    for (size_t i = 0; i < COUNT; i++) {
        ids[i] = (int64_t)(noise(7, i) * ROWS);
        want[ids[i]] += (float)buffer_get(&dout, i);
    }
    fsdpc_embedding_args args = {.dtype = dtype,
                                 .id_dtype = FSDPC_I64,
                                 .count = COUNT,
                                 .rows = ROWS,
                                 .dim = 1,
                                 .ids = ids,
                                 .dout = dout.data,
                                 .dtable = dtable.data,
                                 .dtable_dtype = dtype};
    CHECK_OK(rig->ops->embedding_backward(&args, rig->stream));
    buffer_check(rig, &dtable, "single elements");
    for (size_t i = 0; i < ROWS; i++) {
        float rounded =
            dtype == FSDPC_F32 ? want[i] : fsdpc_bf16_to_f32(fsdpc_f32_to_bf16(want[i]));
        CHECK((float)buffer_get(&dtable, i) == rounded);
    }
    buffer_free(&dout);
    buffer_free(&dtable);
}

static void suite(nn_rig *rig)
{
    const size_t counts[] = {0, 1, 7, 40, 301};
    const size_t dims[] = {0, 1, 17, 64, 515, 2050};
    for (size_t d = 0; d < 4; d++)
        for (size_t n = 0; n < 5; n++)
            for (size_t c = 0; c < 6; c++) {
                test_embedding(rig, float_dtypes[d], FSDPC_I64, float_dtypes[(d + c) % 4],
                               counts[n], dims[c], (n + c) % 2);
                if (c < 4)
                    test_embedding(rig, float_dtypes[d], FSDPC_I32, FSDPC_F32, counts[n], dims[c],
                                   (n + c) % 2 == 0);
            }
    test_embedding_errors(rig);
    test_single_elements(rig, FSDPC_F32);
    test_single_elements(rig, FSDPC_BF16);
    for (size_t d = 0; d < 4; d++) {
        test_rotary(rig, float_dtypes[d], 0, 5, 2, 8);
        test_rotary(rig, float_dtypes[d], 2, 3, 1, 2);
        test_rotary(rig, float_dtypes[d], 2, 7, 3, 22);
        test_rotary(rig, float_dtypes[d], 1, 64, 6, 128);
    }
}

int main(void)
{
    nn_rig_each(suite);
    return check_report("test_nn_embedding");
}
