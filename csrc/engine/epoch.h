/* Epochs (docs/design/communication.md). fsdpc_root_epoch brings the parameter buffer up to date
 * with the masters. It compares the masters if needed, arrives and waits for the other ranks; if
 * masters changed on any rank, each rank copies in its own slices. A change advances `generation`;
 * a backward fails if its forward saw an older generation. Inside a captured step, epochs are local
 * to the rank; ranks agree only before and after the step.
 */
#ifndef FSDPC_ENGINE_EPOCH_H
#define FSDPC_ENGINE_EPOCH_H

#include "engine/root_internal.h"

/* The reason for an epoch, which must be the same on all ranks. X(name, text for errors) */
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

/* Returns the text for errors. */
const char *fsdpc_epoch_text(uint32_t kind);

/* Collective. `bits` are added to the note (grad mode); on return the parameter buffer is up to
 * date. */
fsdpc_status fsdpc_root_epoch(fsdpc_root *root, fsdpc_epoch_kind kind, fsdpc_unit *called,
                              uint32_t bits);

/* Collective over the meshes of all roots: an epoch of each. */
fsdpc_status fsdpc_model_epoch(fsdpc_model *model, fsdpc_epoch_kind kind, fsdpc_unit *called,
                               uint32_t bits);

/* Collective, also over replicas: runs an epoch in which no rank writes. Returns FSDPC_OK if
 * `status` is OK on every rank; in that case, no operation is in flight, and only held units are
 * unsharded. Otherwise every rank returns the same rank's error. */
fsdpc_status fsdpc_root_agree(fsdpc_root *root, fsdpc_epoch_kind kind, fsdpc_status status);

/* An optimizer's epoch. begin waits until no peer is reading the parameter buffer; the caller then
 * updates masters and its own slices in one pass; end reports the copy-in. Call end even if begin
 * or the pass failed. The slices of units with `puts_off` set may be written later, before the unit
 * is gathered. */
fsdpc_status fsdpc_root_write_begin(fsdpc_root *root);
fsdpc_status fsdpc_root_write_end(fsdpc_root *root);

#endif
