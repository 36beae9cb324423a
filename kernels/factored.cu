/* Passes over a matrix of gradients for Adafactor: the table's `factored` (ops/factored.h).
 *
 * Passes by column combine integers atomically, so their results do not depend on the order of
 * threads. The squares of a row are added by 16 threads, one for each of the CPU's partial sums,
 * and the sums are folded in the CPU's order. All results have the CPU's bits.
 */
#include "array.cuh"
#include "common.cuh"

enum { ROW_THREADS = 16, COLUMN_ROWS = 64 }; /* rows of a column that one thread takes */

#define FACTORED_SHIFT 0x1.8p52 /* an fp64 number in [2^52, 2^53) has an integer in its low bits */

__device__ __forceinline__ float scaled(const fsdpc_factored_args &a, size_t i)
{
    return untyped(a.grad, a.grad_dtype).template load<1, float>(i).at[0] * a.scale;
}

/* Adds COLUMN_ROWS rows of a column, or finds their largest magnitude. */
__global__ void __launch_bounds__(BLOCK_THREADS)
    columns_kernel(fsdpc_factored_args a, size_t parts)
{
    bool finds_most = a.pass == FSDPC_FACTORED_MOST;
    for (size_t t = grid_thread(); t < parts * a.cols; t += grid_threads()) {
        size_t col = t % a.cols, row = t / a.cols * COLUMN_ROWS;
        size_t end = row + COLUMN_ROWS < a.rows ? row + COLUMN_ROWS : a.rows;
        while (row < end) { /* one matrix of a stack at a time */
            size_t matrix = row / a.rows_per_matrix, at = matrix * a.cols + col;
            size_t last = (matrix + 1) * a.rows_per_matrix;
            unsigned most = 0;
            unsigned long long sum = 0;
            for (last = last < end ? last : end; row < last; row++) {
                float g = scaled(a, row * a.cols + col);
                if (finds_most) {
                    unsigned bits = __float_as_uint(g) & 0x7fffffffu;
                    most = bits > most ? bits : most;
                } else {
                    double square = (double)g * (double)g * a.units[at];
                    sum += (unsigned long long)(__double_as_longlong(square + FACTORED_SHIFT) -
                                                __double_as_longlong(FACTORED_SHIFT));
                }
            }
            if (finds_most)
                atomicMax((unsigned *)(void *)&a.most[at], most);
            else
                atomicAdd((unsigned long long *)(void *)&a.sums[at], sum);
        }
    }
}

__global__ void __launch_bounds__(BLOCK_THREADS) row_sums_kernel(fsdpc_factored_args a)
{
    size_t lane = threadIdx.x % ROW_THREADS, rows = grid_threads() / ROW_THREADS;
    size_t first = grid_thread() / ROW_THREADS;
    for (size_t base = 0; base < a.rows; base += rows) { /* the same number of rounds for all */
        size_t row = base + first;
        double sum = 0;
        for (size_t col = lane; row < a.rows && col < a.cols; col += ROW_THREADS) {
            double g = (double)scaled(a, row * a.cols + col);
            sum += g * g;
        }
        for (unsigned lanes = ROW_THREADS / 2; lanes; lanes /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        if (row < a.rows && lane == 0)
            a.row_sums[row] = sum;
    }
}

__global__ void __launch_bounds__(BLOCK_THREADS) update_kernel(fsdpc_factored_args a)
{
    for (size_t i = grid_thread(); i < a.rows * a.cols; i += grid_threads()) {
        size_t row = i / a.cols, matrix = (a.first_row + row) / a.rows_per_matrix;
        float factor = a.by_row[row] * a.by_col[matrix * a.cols + i % a.cols];
        factor = factor > a.most_factor ? a.most_factor : factor; /* NaN stays */
        a.out[i] = scaled(a, i) * factor;
    }
}

extern "C" fsdpc_status fsdpc_cuda_factored(const fsdpc_factored_args *a, fsdpc_stream *stream)
{
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    size_t numel = a->rows * a->cols, parts = fsdpc_ceil_div(a->rows, COLUMN_ROWS);
    if (numel == 0)
        return FSDPC_OK;
    if (a->pass == FSDPC_FACTORED_UPDATE)
        FSDPC_LAUNCH(update_kernel, grid_of(queue, numel, BLOCK_THREADS), BLOCK_THREADS, 0, queue,
                     *a);
    else if (a->pass == FSDPC_FACTORED_ROWS)
        FSDPC_LAUNCH(row_sums_kernel, grid_of(queue, a->rows * ROW_THREADS, BLOCK_THREADS),
                     BLOCK_THREADS, 0, queue, *a);
    else
        FSDPC_LAUNCH(columns_kernel, grid_of(queue, parts * a->cols, BLOCK_THREADS), BLOCK_THREADS,
                     0, queue, *a, parts);
    return launched("a pass of Adafactor");
}
