/* Epochs (docs/design/communication.md).  fsdpc_root_epoch brings the wire up to date with the
 * masters: compare where needed, arrive, wait, and if any rank changed anything write the own
 * slices and publish.  A change advances `generation`; a backward whose forward saw an older one is
 * refused.  Epochs of a captured step are this rank's alone: ranks agree on it before and after.
 */
#ifndef FSDPC_ENGINE_EPOCH_H
#define FSDPC_ENGINE_EPOCH_H

#include "engine/root_internal.h"

/* What began an epoch; ranks must agree.  X(name, as errors say it) */
#define FSDPC_EPOCH_KIND_TABLE(X)                                                                  \
    X(FORWARD, "a forward")                                                                        \
    X(UNSHARD, "unshard()")                                                                        \
    X(OPTIM, "an optimizer's step")                                                                \
    X(HOLD, "hold()")                                                                              \
    X(HOLD_END, "the end of hold()")                                                               \
    X(CAPTURE, "graph_step()")                                                                     \
    X(CAPTURE_END, "the end of graph_step()")                                                      \
    X(REPLAY, "a replay of a captured step")

typedef enum fsdpc_epoch_kind {
#define X(name, text) FSDPC_EPOCH_##name,
    FSDPC_EPOCH_KIND_TABLE(X)
#undef X
} fsdpc_epoch_kind;

/* As errors say it. */
const char *fsdpc_epoch_text(uint32_t kind);

/* Collective.  `bits` are added to the note (grad mode); on return the wire is current. */
fsdpc_status fsdpc_root_epoch(fsdpc_root *root, fsdpc_epoch_kind kind, fsdpc_unit *called,
                              uint32_t bits);

/* Collective, over replicas too: an epoch in which nobody writes.  FSDPC_OK if `status` is so on
 * every rank; then nothing is in flight, and no unit is full unless held.  Otherwise every rank
 * gets the error of one of them. */
fsdpc_status fsdpc_root_agree(fsdpc_root *root, fsdpc_epoch_kind kind, fsdpc_status status);

/* An optimizer's epoch: begin waits until no peer reads the wire; the caller then updates masters
 * and its own slices in one pass; end publishes.  End is called also when begin or the pass failed.
 * Slices of units that `puts_off` may be written later, until the unit is gathered. */
fsdpc_status fsdpc_root_write_begin(fsdpc_root *root);
fsdpc_status fsdpc_root_write_end(fsdpc_root *root);

#endif
