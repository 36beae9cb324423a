/* The layout of a unit: the position of each parameter, and the rows that each rank owns.
 *
 * It is pure data, computed only from names, shapes, dtypes and the number of ranks. It is the
 * same on every rank, and immutable. Offsets and lengths are in elements, so the same numbers apply
 * to masters, parameter buffers and reduce buffers, regardless of dtype.
 *
 * A flat group contains either the trainable or the frozen parameters of one original dtype. Frozen
 * bytes (uint8, for example codes of quantised weights) are gathered as they are, and come last;
 * trainable groups come first. A group's parameters of equal row length, whose codes count from
 * equal rows, form a band. They are
 * placed end to end in declaration order, each beginning at a multiple of lcm(row, 64) elements.
 * The band's rows are cut into `ranks` equal slices of whole rows. A group's unsharded parameters
 * are the concatenation of its bands; a shard is this rank's slices of them, in the same order. In
 * both, each band begins at a multiple of 64 elements, or of 256 if its rows are multiples of 256,
 * so that chunks of a shard do not split block codes.
 *
 * A row consists of the elements at one index of dim 0; for a 0-D or 1-D parameter, it is a single
 * element.
 */
#ifndef FSDPC_ENGINE_LAYOUT_H
#define FSDPC_ENGINE_LAYOUT_H

#include <stdbool.h>

#include "base/dtype.h"
#include "comm/comm.h"

enum { FSDPC_LAYOUT_ALIGN = 64, FSDPC_LAYOUT_BLOCK = 256, FSDPC_LAYOUT_MAX_DIMS = 8 };

typedef struct fsdpc_param_spec {
    const char *name; /* copied */
    fsdpc_dtype dtype;
    int ndim;
    size_t shape[FSDPC_LAYOUT_MAX_DIMS];
    bool frozen; /* needs no gradient */
    /* for plans: a matrix rule steps it, which has one state, or Adafactor does */
    bool matrix, factored;
} fsdpc_param_spec;

typedef struct fsdpc_place {
    char *name;
    fsdpc_dtype dtype;
    int ndim;
    size_t shape[FSDPC_LAYOUT_MAX_DIMS];
    size_t numel;
    size_t row_numel; /* never split by a cut */
    size_t code_row;  /* of fsdpc_layout_code_row; one value per band */
    /* The number of elements that a norm sums at a time, usually 64, which is the same at every
     * world size. If the row length is not a multiple of 64, this is the row length (1 for 1-D) or,
     * with three or more dimensions, gcd(row, 64). */
    size_t leaf_numel;
    int group, band;         /* band within the group */
    size_t unsharded_offset; /* among the group's unsharded parameters */
} fsdpc_place;

typedef struct fsdpc_group {
    fsdpc_dtype dtype;
    bool frozen;
    fsdpc_slice *bands; /* in the form that collectives expect */
    size_t *aligns;     /* of bands, in elements */
    size_t n_bands;
    size_t unsharded_numel, shard_numel;
} fsdpc_group;

/* One rank's part of a parameter: whole rows, containing the elements [first, first + numel). */
typedef struct fsdpc_local_shard {
    size_t first, numel;
    size_t shard_offset; /* in the group's shard; meaningless if numel is 0 */
} fsdpc_local_shard;

typedef struct fsdpc_layout {
    int ranks;
    int n_params;
    fsdpc_place *params;
    int n_groups, n_trained; /* frozen groups come after the first n_trained */
    fsdpc_group *groups;
    size_t real_numel; /* without padding, all groups */
} fsdpc_layout;

/* Dtypes must be floating point; any shape is allowed, even 0-D, empty, or with fewer rows than
 * ranks. If `band_per_param` is set, every parameter has its own band, and its rows are never split
 * further. With R rows and C = ceil(R / ranks), rank r owns rows [r C, (r + 1) C), as with
 * torch.chunk. A unit pads more. */
fsdpc_status fsdpc_layout_create(const fsdpc_param_spec *specs, int n_specs, int ranks,
                                 bool band_per_param, fsdpc_layout **out);
void fsdpc_layout_destroy(fsdpc_layout *layout);

/* Returns how many elements of a tensor of this shape, sharded or not, a norm sums at a time; see
 * leaf_numel. */
size_t fsdpc_layout_leaf(int ndim, const size_t *shape);

/* Returns the row inside which the blocks of a parameter's codes are counted (ops/block_code.h).
 * It divides every local shard at every number of ranks. Returns 0 for parameters of one dimension
 * and for rows shorter than 64. With three or more dimensions, rows must be multiples of 256, as
 * some layouts cut them. */
size_t fsdpc_layout_code_row(int ndim, const size_t *shape);

fsdpc_local_shard fsdpc_layout_local_shard(const fsdpc_layout *layout, int param, int rank);

/* Returns the position, among the unsharded parameters, of the element at `shard_offset` in a
 * rank's shard, which is in `band`. */
static inline size_t fsdpc_slice_unsharded(const fsdpc_slice *band, int rank, size_t shard_offset)
{
    return band->unsharded_offset + (size_t)rank * band->numel +
           (shard_offset - band->shard_offset);
}

#endif
