/* Gram-Schmidt against the same in fp64, and what becomes of rows that have no direction.
 *
 * Tolerance. A row is rounded to fp32 four times, so its dot product with another differs from 0 by
 * a few units of 2^-24; 2^-20 is twice the largest one seen. The direction of a row moves by its
 * rounding times the condition of the rows, which is below 100 for the random ones here.
 */
#include <math.h>
#include <stdbool.h>

#include "check.h"
#include "ops/orthonormal.h"

static const double most = 0x1p-20;

static uint32_t state = 1;

static float draw(void)
{
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / (1 << 23) - 1;
}

static float *fresh(size_t numel, float scale)
{
    float *x = malloc(numel * sizeof *x + 1);
    for (size_t i = 0; i < numel; i++)
        x[i] = draw() * scale;
    return x;
}

static double dot(const float *a, const float *b, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)a[i] * b[i];
    return sum;
}

static void check_orthonormal(const float *x, size_t rows, size_t cols, const char *what)
{
    for (size_t i = 0; i < rows; i++)
        for (size_t k = 0; k <= i; k++) {
            double found = dot(x + i * cols, x + k * cols, cols);
            CHECK_NOTE(fabs(found - (i == k)) <= most, "%s: %zu x %zu, rows %zu and %zu: %g", what,
                       rows, cols, i, k, found);
        }
}

/* The same directions in fp64. */
static void plain(const float *x, size_t rows, size_t cols, double *out)
{
    for (size_t row = 0; row < rows; row++) {
        double *v = out + row * cols, length = 0;
        for (size_t i = 0; i < cols; i++)
            v[i] = x[row * cols + i];
        for (size_t r = 0; r < row; r++) {
            double along = 0;
            for (size_t i = 0; i < cols; i++)
                along += out[r * cols + i] * v[i];
            for (size_t i = 0; i < cols; i++)
                v[i] -= along * out[r * cols + i];
        }
        for (size_t i = 0; i < cols; i++)
            length += v[i] * v[i];
        for (size_t i = 0; i < cols; i++)
            v[i] /= sqrt(length);
    }
}

static void test_directions(void)
{
    static const size_t shapes[][2] = {{1, 1}, {1, 9},    {2, 2},  {3, 70},
                                       {8, 8}, {8, 1000}, {16, 33}};
    static const float scales[] = {1, 1e-20f, 1e30f};
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        size_t rows = shapes[s][0], cols = shapes[s][1], numel = rows * cols;
        float *x = fresh(numel, scales[s % 3]), *again = malloc(numel * sizeof *again);
        double *want = malloc(numel * sizeof *want), worst = 0;
        memcpy(again, x, numel * sizeof *x);
        plain(x, rows, cols, want);
        fsdpc_orthonormalize(x, rows, cols, 1);
        for (size_t i = 0; i < numel; i++)
            worst = fmax(worst, fabs(x[i] - want[i]));
        CHECK_NOTE(worst <= 100 * most, "%zu x %zu: off by %g", rows, cols, worst);
        check_orthonormal(x, rows, cols, "random");
        fsdpc_orthonormalize(again, rows, cols, 2); /* the seed is for rows without a direction */
        CHECK(memcmp(again, x, numel * sizeof *x) == 0);
        free(x);
        free(again);
        free(want);
    }
}

static void test_rows_without_a_direction(void)
{
    enum { ROWS = 6, COLS = 50 };
    float *x = fresh(ROWS * COLS, 1), zeros[ROWS * COLS] = {0}, again[ROWS * COLS] = {0};
    float *rank_two = fresh(ROWS * COLS, 1), first[2 * COLS];
    memset(x + 2 * COLS, 0, COLS * sizeof *x);            /* zero */
    memcpy(x + 4 * COLS, x + 3 * COLS, COLS * sizeof *x); /* equal */
    fsdpc_orthonormalize(x, ROWS, COLS, 3);
    check_orthonormal(x, ROWS, COLS, "zero and equal");
    fsdpc_orthonormalize(zeros, ROWS, COLS, 3);
    check_orthonormal(zeros, ROWS, COLS, "zeros");
    for (size_t i = 0; i < COLS; i++) { /* the first row is the draws' direction */
        double length = 0;
        for (size_t k = 0; k < COLS; k++)
            length += pow(fsdpc_orthonormal_draw(3, 0, k), 2);
        CHECK(fabs(zeros[i] - fsdpc_orthonormal_draw(3, 0, i) / sqrt(length)) <= most);
    }
    fsdpc_orthonormalize(again, ROWS, COLS, 4);
    CHECK(memcmp(again, zeros, sizeof again) != 0);
    for (size_t row = 2; row < ROWS; row++)
        for (size_t i = 0; i < COLS; i++)
            rank_two[row * COLS + i] =
                (float)row * rank_two[i] - 0.3f * (float)(row * row) * rank_two[COLS + i];
    memcpy(first, rank_two, sizeof first);
    fsdpc_orthonormalize(rank_two, ROWS, COLS, 5);
    check_orthonormal(rank_two, ROWS, COLS, "two directions in six rows");
    for (size_t row = 0; row < 2; row++) { /* the first two rows span what was given */
        double inside = pow(dot(first + row * COLS, rank_two, COLS), 2) +
                        pow(dot(first + row * COLS, rank_two + COLS, COLS), 2);
        double whole = dot(first + row * COLS, first + row * COLS, COLS);
        CHECK(fabs(inside / whole - 1) <= most);
    }
    free(x);
    free(rank_two);
}

static void test_not_finite(void)
{
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (size_t k = 0; k < 3; k++) {
        float *x = fresh(4 * 20, 1);
        x[47] = bad[k];
        fsdpc_orthonormalize(x, 4, 20, 1);
        for (size_t i = 0; i < 80; i++)
            CHECK(isnan(x[i]));
        free(x);
    }
}

/* Replicas compute with these numbers, on machines of several kinds. */
static void test_draws(void)
{
    double sum = 0, squares = 0;
    for (size_t i = 0; i < 10000; i++) {
        double x = fsdpc_orthonormal_draw(7, i / 100, i % 100);
        CHECK(x >= -1 && x < 1);
        sum += x;
        squares += x * x;
    }
    CHECK(fabs(sum) < 300 && fabs(squares - 10000.0 / 3) < 200);
    CHECK(fsdpc_orthonormal_draw(0, 0, 0) == (float)(0xE220A8397B1DCDAFu >> 40) / (1 << 23) - 1);
    CHECK(fsdpc_orthonormal_draw(1, 2, 3) != fsdpc_orthonormal_draw(1, 3, 2));
}

int main(void)
{
    test_directions();
    test_rows_without_a_direction();
    test_not_finite();
    test_draws();
    return check_report("orthonormal");
}
