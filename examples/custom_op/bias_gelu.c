/* gelu(x + bias) and its gradients in one pass over memory each, for bias_gelu.py.
 *
 *     cc -O3 -fPIC -shared -o libbias_gelu.so bias_gelu.c -lm
 *
 * Arrays are of float32, dense, row by row. None of them overlap. Nothing is checked here:
 * bias_gelu.py checks shapes and dtypes.
 */
#include <math.h>
#include <stddef.h>

#define SQRT_HALF 0.70710678f
#define INV_SQRT_2PI 0.39894228f

/* The normal distribution below z: gelu(z) = z * normal_cdf(z). */
static float normal_cdf(float z)
{
    return 0.5f * (1.0f + erff(z * SQRT_HALF));
}

/* x, y: (rows, cols); bias: (cols) */
void bias_gelu_forward(size_t rows, size_t cols, const float *x, const float *bias, float *y)
{
    for (size_t i = 0; i < rows; i++) {
        for (size_t j = 0; j < cols; j++) {
            float z = x[i * cols + j] + bias[j];
            y[i * cols + j] = z * normal_cdf(z);
        }
    }
}

/* dy, x, dx: (rows, cols); bias, dbias: (cols). dbias is the sum of dx over rows, row after row. */
void bias_gelu_backward(size_t rows, size_t cols, const float *dy, const float *x,
                        const float *bias, float *dx, float *dbias)
{
    for (size_t j = 0; j < cols; j++)
        dbias[j] = 0.0f;
    for (size_t i = 0; i < rows; i++) {
        for (size_t j = 0; j < cols; j++) {
            float z = x[i * cols + j] + bias[j];
            float slope = normal_cdf(z) + z * INV_SQRT_2PI * expf(-0.5f * z * z);
            float d = dy[i * cols + j] * slope;
            dx[i * cols + j] = d;
            dbias[j] += d;
        }
    }
}
