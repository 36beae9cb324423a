/* The structs of models and roots, shared by the files of csrc/engine and their C tests. */
#ifndef FSDPC_ENGINE_ROOT_INTERNAL_H
#define FSDPC_ENGINE_ROOT_INTERNAL_H

#include "engine/loan.h"
#include "engine/root.h"
#include "engine/unit_internal.h"

typedef struct fsdpc_model fsdpc_model;

/* The stage that the last epoch reached. Ctrl-C may interrupt the wait in any stage. The next epoch
 * then begins by completing the interrupted one as announced, because the peers rely on it. */
typedef enum fsdpc_epoch_progress {
    FSDPC_EPOCH_AT_IDLE,
    FSDPC_EPOCH_AT_ARRIVED,   /* announced; waits for all arrivals */
    FSDPC_EPOCH_AT_WRITING,   /* a rank has changed masters: no rank reads, and each writes its
                            * slices */
    FSDPC_EPOCH_AT_COPIED_IN, /* waits for all publications */
} fsdpc_epoch_progress;

typedef struct fsdpc_unsharded_ops fsdpc_unsharded_ops; /* unsharded.h */

/* The order in which units were used, for prefetching; see sched.h. */
typedef struct fsdpc_exec_order {
    fsdpc_exec_entry *entries;
    size_t length, capacity;
    size_t position; /* replaying: the next expected entry */
    bool complete;   /* a whole step was recorded */
    bool following;  /* this step has matched the execution order so far */
    bool ended;      /* a backward ended since the step began */
} fsdpc_exec_order;

/* Acts of one step: a forward with gradients and the backwards that follow it. */
typedef struct fsdpc_acts {
    fsdpc_act *items;
    size_t length, capacity;
    bool whole; /* a backward has ended */
} fsdpc_acts;

static inline void fsdpc_exec_order_clear(fsdpc_exec_order *exec_order)
{
    exec_order->length = exec_order->position = 0;
    exec_order->complete = exec_order->following = exec_order->ended = false;
}

/* One model. Its units on the same mesh form a root; most models have one mesh, so one root. */
struct fsdpc_model {
    fsdpc_unit **units; /* of all roots, in module order: the outermost first */
    int n_units;
    fsdpc_root *first; /* in the order of their first units */
    int holds;         /* hold() is in force */
    int forward_depth; /* nested forwards of units of this model */
    bool in_backward;
    bool end_asked;        /* the frontend will end the running backward (call.c) */
    uint64_t backwards;    /* number begun */
    bool is_last_backward; /* the end of backward waits for the reductions */
    int prefetch;          /* how many units ahead to gather */
    fsdpc_exec_order exec_order;
    fsdpc_acts acts, last_acts; /* the acts of this step, and of the last whole one */
    bool notes_acts;            /* a step is running */
};

/* Names what the model is running, or returns NULL between calls. */
static inline const char *fsdpc_model_inside(const fsdpc_model *model)
{
    return model->holds           ? "hold()"
           : model->in_backward   ? "backward"
           : model->forward_depth ? "forward"
                                  : NULL;
}

struct fsdpc_root {
    fsdpc_model *model;
    fsdpc_root *next;   /* the model's next root, on another mesh; NULL: none */
    fsdpc_unit **units; /* in module order */
    int n_units;
    fsdpc_comm *comm;        /* the shard group */
    fsdpc_comm *replicate;   /* NULL without replicas, or if they train apart */
    fsdpc_comm *reduce_comm; /* owns the buffers that gradients fill */
    int ranks;               /* ranks that share gradients; a single rank does not communicate */
    fsdpc_device *device;
    fsdpc_trace *trace;
    fsdpc_param_buffer *param_buffer;
    const fsdpc_unsharded_ops *unsharded; /* how unsharded parameters are made */
    fsdpc_unit **slot_users; /* unsharded_slots.c: the unit last gathered into each slot */
    fsdpc_stream *gather_stream, *reduce_stream;
    fsdpc_stream *replicate_stream;  /* for second stages, in parallel with first ones; NULL:
                                      * shared */
    bool overlaps;                   /* streams are ordered by events; see order.h */
    fsdpc_event *copied_in, *filled; /* recorded on the main stream for that */
    fsdpc_pool_plan pooled;          /* number of pooled buffers, and their sizes */
    fsdpc_buffer *pool[FSDPC_POOLED_BUFFERS];         /* NULL: not created yet; a single rank
                                                       * creates it on first use */
    fsdpc_buffer *pool_partial[FSDPC_POOLED_BUFFERS]; /* with replicas: the buffer's partial */
    fsdpc_unit *pool_filling[FSDPC_POOLED_BUFFERS];   /* the unit that fills it; NULL: none */
    fsdpc_unit *pool_reducing[FSDPC_POOLED_BUFFERS];  /* the unit whose posted reduction reads it */
    uint64_t pool_turn[FSDPC_POOLED_BUFFERS];         /* the reduction's position in posting
                                                       * order */
    uint64_t turns;
    fsdpc_lender lender;   /* of its reduce buffers */
    fsdpc_unit **reducing; /* units with a posted reduction, oldest first; n_units entries */
    int n_reducing;
    uint64_t generation;      /* generation of the parameter buffer's contents */
    uint64_t steps;           /* optimizer steps taken */
    uint64_t backwards_ended; /* written by codec_error.c */
    uint64_t compared;        /* agree.h: bytes of masters before the next slice to compare with
                          * replicas */
    fsdpc_epoch_progress epoch_progress;
    fsdpc_epoch_note note;   /* this rank's last announcement */
    bool *equal;             /* epoch.c, per unit: whether masters equal the parameter buffer */
    bool needs_reset, drops; /* to announce: a call failed; it was a backward */
    uint64_t step_streams, streams_step, step_forwards; /* deterministic: dropout streams of this
                                                         * step */
    bool captured;       /* a step is being captured (step_graph.h) */
    uint32_t captures;   /* number of captures begun */
    bool warned_folded;  /* deterministic: that the tree of micro-steps was cut short, */
    bool warned_half;    /* that fp16 gradients are divided too early, */
    bool warned_divided; /* or other gradients, by a number of micro-steps that is not a power of
                            * two, */
    bool warned_ranks;   /* that groups of ranks are not powers of two, */
    bool warned_twice;   /* and that a backward reduces a unit twice */
};

/* Makes all ranks of the model's meshes fail. */
static inline void fsdpc_root_abort(const fsdpc_root *root, const char *text)
{
    for (root = root->model->first; root; root = root->next) {
        fsdpc_comm_abort(root->comm, text);
        if (root->replicate)
            fsdpc_comm_abort(root->replicate, text);
    }
}

#endif
