/* Which gradients replicas sum in low rank, and the memory that takes.
 *
 * A matrix is this rank's rows of a trained parameter of two or more dimensions; all dimensions but
 * the first are flattened into columns. It is approximated by a product P Q' of `rank` columns
 * each, if fewer numbers travel: rows x cols > min_rate x rank x (rows + cols). All other gradients
 * are summed exactly, as are arrays of three or more dimensions whose rows a layout cuts.
 *
 * Ranks of a shard group have different rows. All of them allocate what the largest share needs.
 */
#ifndef FSDPC_ENGINE_LOW_RANK_PLAN_H
#define FSDPC_ENGINE_LOW_RANK_PLAN_H

#include "engine/plan.h"

typedef struct fsdpc_low_rank_options {
    int rank;            /* 0: all sums are exact */
    uint64_t start_step; /* the unit's first so many sums are exact */
    bool warm_start;     /* Q begins as the last one; else it is random each time */
    bool error_feedback; /* what a sum leaves out is added to the next gradient */
    double min_rate;
    uint64_t seed;
} fsdpc_low_rank_options;

static inline bool fsdpc_low_rank_same(const fsdpc_low_rank_options *a,
                                       const fsdpc_low_rank_options *b)
{
    return a->rank == b->rank && a->start_step == b->start_step && a->warm_start == b->warm_start &&
           a->error_feedback == b->error_feedback && a->min_rate == b->min_rate &&
           a->seed == b->seed;
}

/* Fails if a unit with these options has no replicas, or cannot sum over them in low rank. `exact`:
 * another setting needs exact sums. */
fsdpc_status fsdpc_low_rank_check(const fsdpc_low_rank_options *options, const fsdpc_layout *layout,
                                  const fsdpc_mesh *mesh, const char *unit, bool exact);

/* The rows of a parameter that a rank of the shard group owns. */
typedef struct fsdpc_low_rank_matrix {
    int param, group;
    size_t rows, cols, rank; /* rank: at most rows and cols */
    size_t shard_offset;
} fsdpc_low_rank_matrix;

/* Returns whether the matrix is summed in low rank, and sets *out, or leaves it unset. */
bool fsdpc_low_rank_takes(const fsdpc_layout *layout, const fsdpc_low_rank_options *options,
                          int param, int rank, fsdpc_low_rank_matrix *out);

/* In elements of fp32. */
typedef struct fsdpc_low_rank_sizes {
    size_t values; /* of all matrices */
    size_t p, q;   /* of all factors */
    size_t row;    /* the longest row */
} fsdpc_low_rank_sizes;

/* The largest shares of any rank of the shard group. */
fsdpc_low_rank_sizes fsdpc_low_rank_sizes_of(const fsdpc_layout *layout,
                                             const fsdpc_low_rank_options *options);

static inline size_t fsdpc_low_rank_state_bytes(const fsdpc_low_rank_sizes *sizes)
{
    return (sizes->values + sizes->p + sizes->q + sizes->row) * sizeof(float);
}

#endif
