/* A root: the outermost unit with all units inside it, their parameter buffer and reduce buffers.
 *
 * It is created by the first forward, collectively. Units on several meshes form a root per mesh, in
 * the order of their first units; calls on any of these roots are calls on the whole model. The
 * parameter buffer is a single block of memory for the unsharded parameters of a root's units,
 * shared by the ranks on a host. Units that close during backward share two pooled reduce buffers.
 * Units that stay open have their own buffers: the outermost unit, units that enclose others, and
 * units that keep gradients. With replicas, each buffer is paired with a partial.
 */
#ifndef FSDPC_ENGINE_ROOT_H
#define FSDPC_ENGINE_ROOT_H

#include "base/trace.h"
#include "engine/unit.h"

/* Collective over all meshes. units[0] is the outermost; children follow in module order. `encloses`
 * specifies whether each unit contains others. Returns the root of units[0]. */
fsdpc_status fsdpc_root_create(fsdpc_unit *const *units, const bool *encloses, int n_units,
                               fsdpc_root **out);
void fsdpc_root_destroy(fsdpc_root *root); /* its units keep only masters */

const fsdpc_unit *fsdpc_root_outermost(const fsdpc_root *root);
bool fsdpc_root_in_backward(const fsdpc_root *root);
int fsdpc_root_forward_depth(const fsdpc_root *root); /* nesting depth of its units' forwards */

/* Returns how many units the root gathers ahead. */
int fsdpc_root_prefetch(const fsdpc_root *root);
void fsdpc_root_set_prefetch(fsdpc_root *root, int distance);

/* Sets whether the end of backward waits for reductions; returns the previous value. */
bool fsdpc_root_set_last_backward(fsdpc_root *root, bool last);

/* A single use of a unit, as recorded for prefetching. */
typedef struct fsdpc_exec_entry {
    int unit;
    bool backward;
} fsdpc_exec_entry;

/* A single action of the engine on a unit, in execution order. */
typedef struct fsdpc_act {
    int unit;
    fsdpc_trace_kind kind;
    bool backward; /* the phase that it belongs to */
} fsdpc_act;

/* Owned by the root and valid until its next step. */
typedef struct fsdpc_schedule {
    const fsdpc_exec_entry *uses;
    const fsdpc_act *acts; /* from the last whole step */
    size_t n_uses, n_acts;
    bool complete; /* a whole step was recorded; else the other fields are empty */
} fsdpc_schedule;

fsdpc_schedule fsdpc_root_schedule(const fsdpc_root *root);

#endif
