/* Arrays that have only some parameters' part of a shard.
 *
 * A state needs no memory for parameters that do not have it, such as the second moment of AdamW
 * for matrices that Muon steps. An array therefore has the slices of those bands that contain a
 * parameter with the state, in the shard's order and aligned as there. Other parameters of these
 * bands have space too, which stays unused.
 */
#ifndef FSDPC_ENGINE_COVER_H
#define FSDPC_ENGINE_COVER_H

#include <stdint.h>

#include "engine/layout.h"

#define FSDPC_COVER_NONE SIZE_MAX

/* Returns the elements of an array over a flat group for the parameters that are `wanted`.
 * skips_out[i] becomes, for parameters of the group, the shard offset of an element minus its index
 * in the array, or FSDPC_COVER_NONE if the array does not have the parameter's band. */
size_t fsdpc_cover(const fsdpc_layout *layout, int group, const bool *wanted, size_t *skips_out);

#endif
