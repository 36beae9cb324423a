/* Image patches as a matrix, by which convolutions multiply without storing it (implicit im2col;
 * Chetlur et al. 2014).
 *
 * Row (c, i, j) contains element (i, j) of every patch in channel c, with one column for each patch
 * position (y, x). That element is in the channel's row y step[0] + i spread[0] + origin[0] and
 * column x step[1] + j spread[1] + origin[1], or is 0 outside the image. A negative spread reverses
 * patches, as image gradients require.
 */
#ifndef FSDPC_OPS_GEMM_WINDOWS_H
#define FSDPC_OPS_GEMM_WINDOWS_H

#include <stddef.h>

typedef struct fsdpc_patches {
    size_t channels;
    size_t image[2];     /* height and width; an image's channels are dense and consecutive */
    size_t kernel[2];    /* elements of a patch */
    size_t places[2];    /* patches along height and width */
    ptrdiff_t step[2];   /* between patches; positive */
    ptrdiff_t spread[2]; /* between elements of a patch */
    ptrdiff_t origin[2]; /* of the first element of the first patch */
} fsdpc_patches;

static inline size_t fsdpc_patches_rows(const fsdpc_patches *w)
{
    return w->channels * w->kernel[0] * w->kernel[1];
}

static inline size_t fsdpc_patches_cols(const fsdpc_patches *w)
{
    return w->places[0] * w->places[1];
}

/* A rectangle of the matrix, given by its first row and column and its size. */
typedef struct fsdpc_patches_tile {
    size_t row, rows, col, cols;
} fsdpc_patches_tile;

/* Writes a rectangle to `to`, a dense (tile->rows, tile->cols) array with elements of 2, 4 or 8
 * bytes. */
void fsdpc_patches_copy(const fsdpc_patches *w, const void *image, size_t element_bytes,
                        const fsdpc_patches_tile *tile, void *to);

#endif
