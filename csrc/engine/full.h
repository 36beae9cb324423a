/* Where the fulls of a unit lie: in the wire of its root; where gathers move bytes, in the memory
 * that slots.h gives it; or, in no-alias mode, in private memory that can be touched while the unit
 * is FULL and not otherwise.
 *
 * The address is fixed from place to remove.  Both announce it to base/fault.h, so that a write to
 * a full, or a read of one that was given up, names rank, unit and parameter.
 */
#ifndef FSDPC_ENGINE_FULL_H
#define FSDPC_ENGINE_FULL_H

#include "engine/root_internal.h"

/* When the wire exists; the unit is SHARDED. */
fsdpc_status fsdpc_full_place(fsdpc_root *root, fsdpc_unit *unit);
void fsdpc_full_remove(fsdpc_unit *unit); /* also of a unit that was not placed, or half */

size_t fsdpc_full_bytes(const fsdpc_unit_group *group);

/* Where a gather writes the full of a group that it moves: the same memory, by the address that
 * transports are given. */
unsigned char *fsdpc_full_target(const fsdpc_unit *unit, const fsdpc_unit_group *group);

/* Where this rank's slice of a band is published: its elements from `at` on, counted in the shard.
 */
unsigned char *fsdpc_full_published(const fsdpc_unit *unit, const fsdpc_unit_group *group,
                                    const fsdpc_slice *band, size_t at);

/* Once a gather is complete, before anybody reads.  In no-alias mode it copies the wire into the
 * private memory, unless gathers write there, and makes it readable; else it does nothing. */
fsdpc_status fsdpc_full_reveal(fsdpc_unit *unit);
/* What is in flight is waited for, or main's work to come is behind it (order.h). */
fsdpc_status fsdpc_full_settle(fsdpc_unit *unit);
/* -> SHARDED, unless it is held; what was posted stays in flight.  In no-alias mode the memory is
 * filled with NaN and every access to it taken away. */
void fsdpc_full_drop(fsdpc_unit *unit);

#endif
