/* How an optimizer's states are stored, and where in their arrays a parameter's rows are.
 *
 * A state of a flat group is an array as long as the shard, with elements in the same places. With
 * block codes (dtype U8), it holds a byte for each element, and a second array of fp32, the side
 * array, holds the maxima of blocks. Parameters that are too small for codes, or have no row to
 * count blocks in, keep fp32 states, in the side array too. If no parameter of a group is coded, its
 * states are one fp32 array.
 *
 * Both sizes depend only on the layout and the format, so all ranks allocate the same, and
 * memory_plan() knows them.
 */
#ifndef FSDPC_ENGINE_STATE_FORMAT_H
#define FSDPC_ENGINE_STATE_FORMAT_H

#include <stddef.h>

#include "engine/layout.h"

typedef struct fsdpc_state_format {
    fsdpc_dtype dtype;      /* F32, BF16 or U8; F64 parameters always have F64 states */
    size_t min_coded_numel; /* parameters with fewer elements are not coded */
} fsdpc_state_format;

/* A parameter's place in the side array of a coded group. */
typedef struct fsdpc_state_place {
    size_t code_row; /* ops/block_code.h; 0: the parameter is not coded */
    /* Coded: index of the maximum of the local shard's first block. Else: what to add to a position
     * in the shard to get the index of its fp32 state; it may wrap. */
    size_t side;
} fsdpc_state_place;

/* Returns the length of a group's side array, which is 0 if the group is not coded. Unless NULL,
 * places[i] of the group's parameters receives their places on this rank. */
size_t fsdpc_state_side(const fsdpc_state_format *format, const fsdpc_layout *layout, int group,
                        int rank, fsdpc_state_place *places);

/* Returns the dtype of the states of parameters of dtype `param` that are not coded. */
static inline fsdpc_dtype fsdpc_state_plain_dtype(const fsdpc_state_format *format,
                                                  fsdpc_dtype param)
{
    if (param == FSDPC_F64)
        return FSDPC_F64;
    return format->dtype == FSDPC_U8 ? FSDPC_F32 : format->dtype;
}

#endif
