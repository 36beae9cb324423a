/* A root: the outermost unit with all units inside it, their wire, epochs and reduce buffers.
 *
 * Made at the first forward, collectively: the wire is one memory for the fulls of all units
 * (shared by the ranks of a host), the reduce buffers are two pooled ones for units that close
 * during backward and one of their own for units that stay open (the root, units that enclose
 * others, units that keep gradients).  With replicas each of them has a partial beside it.
 *
 * Epochs (docs/design.md, section 3).  fsdpc_root_epoch brings the wire up to date with the
 * masters: compare where needed, arrive, wait, and if any rank changed anything write the own
 * slices and publish.  A change advances `generation`; a backward whose forward saw an older one is
 * refused.  Epochs of a captured step are this rank's alone: ranks agree on it before and after.
 */
#ifndef FSDPC_ENGINE_ROOT_H
#define FSDPC_ENGINE_ROOT_H

#include "engine/unit.h"

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

/* How far the last epoch came.  An interrupt (Ctrl-C) may end the wait of any stage; the next epoch
 * first completes this one as it was announced, since the peers count on that. */
typedef enum fsdpc_epoch_stage {
    FSDPC_STAGE_IDLE,
    FSDPC_STAGE_ARRIVED,   /* announced; waits for all arrivals */
    FSDPC_STAGE_WRITING,   /* somebody changed: nobody reads, own slices are to be written */
    FSDPC_STAGE_PUBLISHED, /* waits for all publications */
} fsdpc_epoch_stage;

enum { FSDPC_POOLED_BUFFERS = 2 };

typedef struct fsdpc_record_entry {
    int unit;
    bool backward;
} fsdpc_record_entry;

/* The order in which units were used, for prefetching; see sched.h. */
typedef struct fsdpc_record {
    fsdpc_record_entry *entries;
    size_t length, capacity;
    size_t position; /* replaying: the next expected entry */
    bool complete;   /* a whole step was recorded */
    bool following;  /* this step has agreed with the record so far */
    bool ended;      /* a backward ended since the step began */
} fsdpc_record;

/* What the engine did with a unit, in the order it did it: schedule() shows these. */
typedef struct fsdpc_act {
    int unit;
    fsdpc_trace_kind kind;
    bool backward; /* the phase that it is for */
} fsdpc_act;

/* Acts of one step: a forward with gradients and the backwards that follow it. */
typedef struct fsdpc_acts {
    fsdpc_act *items;
    size_t length, capacity;
    bool whole; /* a backward came to its end */
} fsdpc_acts;

static inline void fsdpc_record_clear(fsdpc_record *record)
{
    record->length = record->position = 0;
    record->complete = record->following = record->ended = false;
}

struct fsdpc_root {
    fsdpc_unit **units;
    int n_units;
    fsdpc_comm *comm;        /* of the shard group */
    fsdpc_comm *replicate;   /* NULL without replicas */
    fsdpc_comm *reduce_comm; /* whose buffers gradients are filled into */
    int ranks;               /* of the mesh; one rank communicates nothing */
    fsdpc_device *device;
    fsdpc_trace *trace;
    fsdpc_wire *wire;
    fsdpc_unit **slot_users; /* slots.h: who was gathered into each slot last */
    fsdpc_stream *gather_stream, *reduce_stream;
    fsdpc_stream *replicate_stream;  /* second stages beside first ones; NULL: they share one */
    bool overlaps;                   /* streams are ordered by events; see order.h */
    fsdpc_event *published, *filled; /* of the main stream, likewise */
    fsdpc_buffer *pool[FSDPC_POOLED_BUFFERS];
    fsdpc_buffer *pool_partial[FSDPC_POOLED_BUFFERS]; /* with replicas: its sums */
    fsdpc_unit *pool_filling[FSDPC_POOLED_BUFFERS];   /* who fills it; NULL: nobody */
    fsdpc_unit *pool_reducing[FSDPC_POOLED_BUFFERS];  /* whose posted reduction reads it */
    uint64_t pool_turn[FSDPC_POOLED_BUFFERS];         /* its place in the order of posts */
    uint64_t turns;
    fsdpc_unit **reducing; /* units whose reduction is posted, oldest first; n_units slots */
    int n_reducing;
    uint64_t generation; /* of the wire's contents */
    uint64_t steps;      /* optimizer steps taken */
    uint64_t compared;   /* agree.h: bytes of masters, the next slice to compare with replicas */
    fsdpc_epoch_stage stage;
    fsdpc_epoch_note note; /* what this rank announced last */
    int holds;             /* hold() is in force */
    int forward_depth;     /* nested forwards of units of this root */
    bool in_backward, needs_reset;
    bool captured;         /* a step of it is being captured (step_graph.h) */
    uint32_t captures;     /* that were begun */
    bool warned_folded;    /* deterministic: that the tree of micro-steps was cut short */
    bool warned_half;      /* likewise: that fp16 gradients are divided too early */
    bool is_last_backward; /* the end of backward waits for the reductions */
    int prefetch;          /* how many units ahead to gather */
    fsdpc_record record;
    fsdpc_acts acts, last_acts; /* of this step, and of the last whole one */
    bool notes_acts;            /* a step is under way */
};

/* Collective.  units[0] is the outermost; children follow in the order of their modules. `encloses`
 * says of each unit whether it holds others. */
fsdpc_status fsdpc_root_create(fsdpc_unit *const *units, const bool *encloses, int n_units,
                               fsdpc_root **out);
void fsdpc_root_destroy(fsdpc_root *root); /* units go back to having masters only */

/* Writes an event of a unit to the trace, and to the acts of a step that is under way. */
void fsdpc_root_trace(const fsdpc_unit *unit, fsdpc_trace_kind kind, size_t bytes, bool backward);
void fsdpc_root_begin_acts(fsdpc_root *root);
void fsdpc_root_end_acts(fsdpc_root *root);

/* Collective.  `bits` are added to the note (grad mode); on return the wire is current. */
fsdpc_status fsdpc_root_epoch(fsdpc_root *root, fsdpc_epoch_kind kind, fsdpc_unit *called,
                              uint32_t bits);

/* Collective, over replicas too: an epoch in which nobody writes.  FSDPC_OK if `status` is so on
 * every rank, and then nothing is in flight and no unit full that is not held; else on every rank
 * the error of one of them. */
fsdpc_status fsdpc_root_agree(fsdpc_root *root, fsdpc_epoch_kind kind, fsdpc_status status);

/* An optimizer's epoch: begin waits until no peer reads the wire; the caller then updates masters
 * and its own slices in one pass; end publishes.  End is called also when begin or the pass failed.
 */
fsdpc_status fsdpc_root_write_begin(fsdpc_root *root);
fsdpc_status fsdpc_root_write_end(fsdpc_root *root);

#endif
