/* The gradient shards of a unit: whether they hold anything, what is pending on them.
 *
 * Reductions write them (reduce.h).  Whoever reads them has micro-steps brought together and the
 * factor that clipping left applied first, or applies it while reading.
 */
#ifndef FSDPC_ENGINE_GRADS_H
#define FSDPC_ENGINE_GRADS_H

#include "engine/unit.h"

/* May an optimizer or a norm use its gradient? */
static inline bool fsdpc_unit_has_grad(const fsdpc_unit *unit, int param)
{
    return unit->grad_live && unit->trainable[param] && unit->grads[param] != FSDPC_GRAD_NONE;
}

/* This rank's piece of a parameter's gradient, any pending scale applied; NULL when there is none.
 */
fsdpc_status fsdpc_unit_grad(fsdpc_unit *unit, int param, fsdpc_piece *piece_out, void **out);

/* On every rank alike: drops gradients, also those that are not reduced yet.  Touches no memory. */
void fsdpc_unit_zero_grad(fsdpc_unit *unit);

/* Is a factor pending? */
static inline bool fsdpc_unit_is_scaled(const fsdpc_unit *unit)
{
    return unit->pending_scale != 1 || unit->clipped;
}

/* The part of it in the device's memory; NULL: none. */
static inline const double *fsdpc_unit_scale_at(const fsdpc_unit *unit)
{
    return unit->clipped ? unit->clip_factor : NULL;
}

/* Makes the gradient shards what they are said to be: micro-steps brought together, multiplied by
 * what clipping left to be applied. */
fsdpc_status fsdpc_unit_apply_scale(fsdpc_unit *unit);

#endif
