/* TorchUnit: what a front door over foreign tensors (torch) calls for one unit.
 *
 * The front door makes, once per unit, a foreign tensor for every piece and full, over the unit's own
 * memory (unit_memory, unit_places), and one for every piece of the gradient shard, over memory that
 * is the foreign library's (bind/torch/lent.c).  A TorchUnit keeps them and does what must be cheap: it
 * drives the schedule, swaps pieces and fulls in the modules' dictionaries, takes gradients by
 * pointer, and keeps the pieces' `.grad` and the engine's gradient shard telling the same.  It knows
 * nothing of torch but the names of a few attributes and methods.
 *
 * Gradients.  `.grad` of a piece is the user's: None after zero_grad, the TorchUnit's own tensor
 * over the shard after a backward, or anything that was assigned.  take_grads brings the engine up
 * to date with it (before the first reduction of a backward, before clipping and stepping); settle
 * hands out what a backward has reduced.  In between `.grad` is None, and takes what the graph gives
 * the piece itself: of a penalty on parameters, say.
 */
#ifndef FSDPC_BIND_TORCH_UNIT_H
#define FSDPC_BIND_TORCH_UNIT_H

#include "bind/engine.h"

typedef struct fsdpc_py_torch_unit fsdpc_py_torch_unit;

typedef struct fsdpc_torch_param {
    PyObject *piece, *full; /* foreign tensors; full: NULL before bind */
    PyObject *grad;         /* over the rows of the gradient shard */
    Py_ssize_t refs;        /* to `grad` when it was made: more are the user's */
    PyObject *early;        /* in a backward: the gradient, while shards have no memory for it */
    PyObject *given;        /* what `.grad` was set to: grad, or a copy in the piece's dtype */
    bool aside;             /* in a backward: it was, and is None */
    PyObject *own;     /* while gradients are given: one that the graph gave the piece itself */
    PyObject *hook;    /* GradHook, registered on the full once it is trainable */
    PyObject *dtype;   /* of the full; foreign dtypes are compared by identity */
    void *master;      /* where the piece's memory is; NULL: it has none */
    bool narrow;       /* the piece's dtype is not the gradient shard's */
    long long version; /* of `given` when it was handed out, if a copy */
    long long written; /* the piece's version, where fulls are lent, when it was followed last */
    bool listening;    /* it is registered */
} fsdpc_torch_param;

/* Where a parameter stands in a module: dict[name] is the piece or the full. */
typedef struct fsdpc_torch_slot {
    PyObject *dict, *name;
    int param;
} fsdpc_torch_slot;

/* A module that reads parameters of the unit: while it would see pieces its dictionary holds
 * `refuse` as its forward, so that a call past the unit raises. */
typedef struct fsdpc_torch_guard {
    PyObject *dict, *refuse;
} fsdpc_torch_guard;

/* Attributes and methods of foreign tensors, and of modules, interned. */
#define FSDPC_TORCH_NAMES(X)                                                                       \
    X(grad)                                                                                        \
    X(dtype)                                                                                       \
    X(requires_grad)                                                                               \
    X(data_ptr)                                                                                    \
    X(is_contiguous)                                                                               \
    X(contiguous)                                                                                  \
    X(copy_)                                                                                       \
    X(add_)                                                                                        \
    X(detach)                                                                                      \
    X(to)                                                                                          \
    X(_version)                                                                                    \
    X(take)                                                                                        \
    X(give)                                                                                        \
    X(is_kept)                                                                                     \
    X(forward)                                                                                     \
    X(__enter__)                                                                                   \
    X(_post_accumulate_grad_hooks)                                                                 \
    X(register_post_accumulate_grad_hook)

typedef struct fsdpc_torch_names {
#define X(name) PyObject *name;
    FSDPC_TORCH_NAMES(X)
#undef X
} fsdpc_torch_names;

struct fsdpc_py_torch_unit {
    PyObject_HEAD PyObject *unit_object;
    fsdpc_py_unit *unit;
    int n_params, n_slots;
    fsdpc_torch_param *params;
    fsdpc_torch_slot *slots;
    fsdpc_torch_guard *guards;
    int n_guards;
    PyObject *bases;       /* the tensors that fulls are views of */
    PyObject *set_version; /* set_version(bases, versions) */
    PyObject *adopt;       /* adopt(i): take over what a piece's memory was replaced by */
    PyObject *renew;       /* renew(): other gradients, as users keep these */
    PyObject *fulls;       /* memory of every flat group's full, where it is lent; else NULL */
    PyObject *mates;       /* the TorchUnits of the root, this one too; NULL before bind */
    PyObject *at_end;      /* at_end(): arranges that finish() runs when this backward ends */
    bool shown;            /* dictionaries hold fulls */
    long long version;     /* that the bases were given last */
    bool taken;            /* gradients were taken in this backward */
    bool held;             /* unshard() holds it: fulls stay shown */
    int pins;              /* calls of Unit.unshard that are not given back */
    bool lifted;           /* modules may be called: they stand on private copies */
    bool bound;
    bool gives_back; /* the foreign library has a use for memory that is not needed for a while */
    bool away;       /* gradients have none */
    size_t early_bytes; /* of gradients that wait, whose memory is the foreign library's on: */
    uintptr_t early_stream;
    PyObject *streams; /* streams(): the handle of the foreign library's current one; or NULL */
    PyObject *plainly; /* plainly(): a context in which pieces are read as plain tensors */
    PyObject *grad_of; /* the descriptor of a plain tensor's `.grad` */
    fsdpc_torch_names names;
};

static inline fsdpc_unit *fsdpc_torch_unit(const fsdpc_py_torch_unit *self)
{
    return self->unit->ref->unit;
}

static inline const fsdpc_place *fsdpc_torch_place(const fsdpc_py_torch_unit *self, int param)
{
    return &fsdpc_unit_layout(fsdpc_torch_unit(self))->params[param];
}

/* Makes the engine's next work run in the order of the foreign library's current stream, in this
 * thread too.  Every method that reaches the schedule calls it first. */
int fsdpc_torch_join(const fsdpc_py_torch_unit *self);
/* The parameter that a method was given; -1 for all where it was given none, or with an exception.
 */
int fsdpc_torch_param_arg(const fsdpc_py_torch_unit *self, PyObject *const *args, Py_ssize_t n);

/* What the user may change between steps, before an epoch publishes masters: the memory of pieces,
 * and their gradients, for all units of the root.  Does nothing inside an epoch. */
int fsdpc_torch_follow_root(fsdpc_py_torch_unit *self);
/* Where nothing is published, nothing can be compared: writes are known by the pieces' versions. */
int fsdpc_torch_follow_writes(fsdpc_py_torch_unit *self);

/* Pieces watch what is asked of them, at a price.  Between begin and end, which keeps a pending
 * exception, this thread's reads of them are as cheap as of plain tensors.  begin: NULL with an
 * exception.  Gradients do not watch there either, so nothing is computed with them. */
PyObject *fsdpc_torch_plain_begin(const fsdpc_py_torch_unit *self);
void fsdpc_torch_plain_end(PyObject *context);

/* Whether any piece has a `.grad`; -1 with an exception. */
int fsdpc_torch_has_grads(const fsdpc_py_torch_unit *self);
/* Pieces' `.grad` -> the engine; 0 or -1 with an exception. */
int fsdpc_torch_take_grads(fsdpc_py_torch_unit *self);
/* A backward begins: takes gradients, and pieces have none until it ends. */
int fsdpc_torch_begin_grads(fsdpc_py_torch_unit *self);
/* It was given up: pieces have the gradients again that they had when it began. */
int fsdpc_torch_restore_grads(fsdpc_py_torch_unit *self);

/* What engine/unit.h says; gradients of what was frozen get tensors. */
int fsdpc_torch_set_trainable(fsdpc_py_torch_unit *self, int param, bool trainable);
/* Gradient shards have memory after it. */
int fsdpc_torch_lend(fsdpc_py_torch_unit *self);
/* Whether a gradient of so many bytes had better wait for it. */
bool fsdpc_torch_can_wait(const fsdpc_py_torch_unit *self, size_t bytes);
/* Writes those that waited, before any other is written and when the unit's backward ends. */
int fsdpc_torch_add_early(fsdpc_py_torch_unit *self);
/* Forgets them. */
void fsdpc_torch_drop_early(fsdpc_py_torch_unit *self);
/* Drops gradients; what users keep of them is theirs alone, and clipped.  `idle`: a forward begins. */
int fsdpc_torch_zero_grad(fsdpc_py_torch_unit *self, bool idle);
/* The same where there may be none any more; does nothing where there are. */
int fsdpc_torch_renew(fsdpc_py_torch_unit *self, bool idle);
/* A forward begins: drops gradients that no piece has any more. */
int fsdpc_torch_drop_grads(fsdpc_py_torch_unit *self);
/* Lets fulls come to lie in foreign memory, where that is given back. */
void fsdpc_torch_lend_fulls(fsdpc_py_torch_unit *self);
/* The version counter of a foreign tensor. */
int fsdpc_torch_version(const fsdpc_py_torch_unit *self, PyObject *tensor, long long *out);

/* Gives back what Unit.unshard took, all of it. */
void fsdpc_torch_unpin(fsdpc_py_torch_unit *self);
/* Modules' dictionaries hold fulls, trainable as the pieces are now, or pieces.  `grad`: gradients
 * are recorded. */
int fsdpc_torch_show(fsdpc_py_torch_unit *self, bool full, bool grad);
/* After the schedule may have resharded. */
int fsdpc_torch_hide(fsdpc_py_torch_unit *self);

/* Backward of the unit begins, for weights of `generation`. */
int fsdpc_torch_begin_backward(fsdpc_py_torch_unit *self, uint64_t generation);

/* Before a gradient is taken, in the order of the foreign stream: begins the unit's backward where
 * its outputs were by-passed, so that no mark did. */
int fsdpc_torch_reach_backward(fsdpc_py_torch_unit *self);

/* A callable for the full of one parameter: takes its `.grad` and drops it. */
PyObject *fsdpc_torch_hook_new(fsdpc_py_torch_unit *self, int param);
/* The TorchUnit goes: the hook, which a graph may keep, no longer knows it. */
void fsdpc_torch_hook_part(PyObject *callable);

#endif
