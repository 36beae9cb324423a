/* Quantised weights on the GPU: every element has the CPU's bits. */
#include "gpu_rig.h"

#include "ops/weight_code.h"

static void check_matrix(fsdpc_weight_scheme scheme, fsdpc_dtype dtype, size_t rows, size_t cols,
                         size_t first)
{
    const fsdpc_weight_row row = fsdpc_weight_row_of(scheme, cols);
    size_t n = cols - first;
    buffer values = buffer_random(FSDPC_F32, rows * cols, 0);
    buffer codes = buffer_make(FSDPC_U8, rows * row.bytes, 1),
           out = buffer_poison(dtype, rows * n, 0);
    CHECK_OK(fsdpc_weight_encode(scheme, rows, cols, values.on_cpu, codes.on_cpu));
    buffer_send(&codes);
    fsdpc_dequantize_args args = {.row = row, .rows = rows, .first = first, .n = n, .dtype = dtype};
    args.codes = codes.on_cpu, args.out = out.on_cpu;
    CHECK_OK(cpu_stream->device->nn->dequantize(&args, cpu_stream));
    args.codes = codes.on_gpu, args.out = out.on_gpu;
    CHECK_OK(gpu_stream->device->nn->dequantize(&args, gpu_stream));
    check_same_bits(&out, fsdpc_weight_name(scheme));
    buffer_fini(&values);
    buffer_fini(&codes);
    buffer_fini(&out);
}

static void test_dequantize(void)
{
    static const fsdpc_dtype floats[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
    static const size_t cols[] = {1, 64, 127, 130, 512, 1025};
    for (int s = 0; s < FSDPC_WEIGHT_SCHEMES; s++)
        for (int d = 0; d < 4; d++)
            for (int c = 0; c < 6; c++) {
                check_matrix((fsdpc_weight_scheme)s, floats[d], 5, cols[c], 0);
                if (cols[c] > 128 && s != FSDPC_WEIGHT_INT8)
                    check_matrix((fsdpc_weight_scheme)s, floats[d], 3, cols[c], 128);
            }
    check_matrix(FSDPC_WEIGHT_NF4, FSDPC_F32, 0, 64, 0);
}

int main(void)
{
    static const rig_test_fn tests[] = {test_dequantize};
    return rig_main("test_weight_kernels", tests, sizeof tests / sizeof tests[0]);
}
