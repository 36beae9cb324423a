/* The copy that a save on a thread is made from.
 *
 * The copy lays pieces out as the file will have them, and from then on they name the copy.  The
 * owner of the originals may write them once it is done.  Such a save takes no other time from its
 * caller, so the copy goes past the caches.  Nobody reads it soon, and a store that need not fetch
 * its line first saves a third of the traffic.
 */
#ifndef FSDPC_CKPT_STAGE_H
#define FSDPC_CKPT_STAGE_H

#include "ckpt/pieces.h"

/* What the copy needs; an error if a piece cannot be had in its file's dtype. */
fsdpc_status fsdpc_ckpt_stage_bytes(const fsdpc_ckpt_piece *pieces, size_t n_pieces,
                                    size_t *bytes_out);

/* Copies to `memory`, which is 64-byte aligned, and changes the pieces to stand there. */
void fsdpc_ckpt_stage(fsdpc_ckpt_piece *pieces, size_t n_pieces, void *memory);

#endif
