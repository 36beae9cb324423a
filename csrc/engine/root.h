/* A root: the outermost unit with all units inside it, their wire and reduce buffers.
 *
 * Made at the first forward, collectively: the wire is one memory for the fulls of all units
 * (shared by the ranks of a host), the reduce buffers are two pooled ones for units that close
 * during backward and one of their own for units that stay open (the root, units that enclose
 * others, units that keep gradients).  With replicas each of them has a partial beside it.
 */
#ifndef FSDPC_ENGINE_ROOT_H
#define FSDPC_ENGINE_ROOT_H

#include "engine/root_internal.h"

/* Collective.  units[0] is the outermost; children follow in the order of their modules. `encloses`
 * says of each unit whether it holds others. */
fsdpc_status fsdpc_root_create(fsdpc_unit *const *units, const bool *encloses, int n_units,
                               fsdpc_root **out);
void fsdpc_root_destroy(fsdpc_root *root); /* units go back to having masters only */

#endif
