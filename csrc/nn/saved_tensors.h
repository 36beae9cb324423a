/* Regions of the tape whose saved tensors leave memory until backward (tier/saved.h).
 *
 * A region is the forward of one unit: the nodes created between its begin and its end that its
 * outputs depend on. A saved tensor leaves only if the region's nodes hold all references to its
 * memory, so that leaving frees it. Parameters, inputs that the user still has, and tensors that
 * were changed in place since they were saved therefore stay.
 *
 * A region inside another belongs to the outer one. Recomputation in backward makes no regions.
 */
#ifndef FSDPC_NN_SAVED_TENSORS_H
#define FSDPC_NN_SAVED_TENSORS_H

#include "nn/node.h"

typedef struct fsdpc_region {
    fsdpc_saved *saved; /* borrowed; NULL: no region */
    uint64_t first;     /* the number of its first node */
} fsdpc_region;

/* Fails if the store cannot write what an earlier region saved. */
fsdpc_status fsdpc_region_begin(fsdpc_tape *tape, fsdpc_saved *saved, fsdpc_region *out);
/* Ends a region, whose outputs are given; `n` is 0 if its forward failed. Errors use the unit's
 * name. */
fsdpc_status fsdpc_region_end(fsdpc_tape *tape, const fsdpc_region *region, const char *unit, int n,
                              fsdpc_tensor *const *outputs);

#endif
