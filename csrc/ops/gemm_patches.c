/* Image patches as rows and columns: see ops/gemm_patches.h.
 *
 * A row of the matrix consists of a few runs. A run covers one row of patches and reads one row of
 * the image. A run consists of zeros, then elements `step` apart (with a step of one, a copy), then
 * zeros again.
 */
#include "ops/gemm_patches.h"

#include <stdint.h>
#include <string.h>

#include "base/size.h"

/* Returns the number of steps, at most n, that are needed to bring `at` to 0 or above. */
static size_t steps_to(ptrdiff_t at, ptrdiff_t step, size_t n)
{
    if (at >= 0)
        return 0;
    return fsdpc_min_size(step == 1 ? (size_t)-at : fsdpc_ceil_div((size_t)-at, (size_t)step), n);
}

/* Inlined, so that a constant element_bytes makes each copy a single move. */
static inline void pick(char *to, const char *from, size_t n, size_t from_bytes,
                        size_t element_bytes)
{
    for (size_t i = 0; i < n; i++)
        memcpy(to + i * element_bytes, from + i * from_bytes, element_bytes);
}

/* Copies places [0, n) of a row of patches, the first of which reads column `at` of the image's
 * row. */
static void copy_run(const fsdpc_patches *w, const char *row, ptrdiff_t at, size_t n,
                     size_t element_bytes, char *to)
{
    ptrdiff_t step = w->step[1];
    size_t before = steps_to(at, step, n);
    size_t end = steps_to(at - (ptrdiff_t)w->image[1], step, n); /* end of the places inside */
    size_t inside = end > before ? end - before : 0;
    if (!inside)
        before = n;
    if (before)
        memset(to, 0, before * element_bytes);
    if (before + inside < n)
        memset(to + (before + inside) * element_bytes, 0, (n - before - inside) * element_bytes);
    if (!inside)
        return;
    to += before * element_bytes;
    row += (at + (ptrdiff_t)before * step) * (ptrdiff_t)element_bytes;
    size_t from_bytes = (size_t)step * element_bytes;
    if (step == 1)
        memcpy(to, row, inside * element_bytes);
    else if (element_bytes == 2)
        pick(to, row, inside, from_bytes, 2);
    else if (element_bytes == 4)
        pick(to, row, inside, from_bytes, 4);
    else
        pick(to, row, inside, from_bytes, 8);
}

void fsdpc_patches_copy(const fsdpc_patches *w, const void *image, size_t element_bytes,
                        const fsdpc_patches_tile *tile, void *to)
{
    size_t plane = w->image[0] * w->image[1], patch = w->kernel[0] * w->kernel[1];
    if (!tile->rows || !tile->cols)
        return;
    size_t c = tile->row / patch, i = tile->row % patch / w->kernel[1];
    size_t j = tile->row % w->kernel[1];
    size_t first_y = tile->col / w->places[1], first_x = tile->col % w->places[1];
    char *out = to;
    for (size_t row = 0; row < tile->rows; row++) {
        const char *channel = (const char *)image + c * plane * element_bytes;
        ptrdiff_t at_y = (ptrdiff_t)i * w->spread[0] + w->origin[0];
        ptrdiff_t at_x = (ptrdiff_t)j * w->spread[1] + w->origin[1];
        size_t y = first_y, x = first_x;
        for (size_t left = tile->cols, n; left; left -= n, x = 0, y++) {
            n = fsdpc_min_size(left, w->places[1] - x);
            ptrdiff_t from_y = at_y + (ptrdiff_t)y * w->step[0];
            if (from_y < 0 || from_y >= (ptrdiff_t)w->image[0])
                memset(out, 0, n * element_bytes);
            else
                copy_run(w, channel + (size_t)from_y * w->image[1] * element_bytes,
                         at_x + (ptrdiff_t)x * w->step[1], n, element_bytes, out);
            out += n * element_bytes;
        }
        if (++j == w->kernel[1]) {
            j = 0;
            if (++i == w->kernel[0]) {
                i = 0;
                c++;
            }
        }
    }
}
