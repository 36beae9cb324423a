/* Where the fulls of a unit lie: in the wire of its root, or, in no-alias mode, in private memory
 * that can be touched while the unit is FULL and not otherwise.
 *
 * The address is fixed from place to remove.  Both announce it to base/fault.h, so that a write to
 * a full, or a read of one that was given up, names rank, unit and parameter.
 */
#ifndef FSDPC_ENGINE_FULL_H
#define FSDPC_ENGINE_FULL_H

#include "engine/root.h"

/* When the wire exists; the unit is SHARDED. */
fsdpc_status fsdpc_full_place(fsdpc_root *root, fsdpc_unit *unit);
void fsdpc_full_remove(fsdpc_unit *unit); /* also of a unit that was not placed, or half */

size_t fsdpc_full_bytes(const fsdpc_unit_group *group);

/* In no-alias mode only; else they do nothing.  Reveal copies the wire into the private memory and
 * makes it readable, hide fills it with NaN and takes every access away. */
fsdpc_status fsdpc_full_reveal(fsdpc_unit *unit);
void fsdpc_full_hide(fsdpc_unit *unit);

#endif
