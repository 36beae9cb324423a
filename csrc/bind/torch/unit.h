/* TorchUnit: the per-unit interface for a frontend over foreign tensors (torch).
 *
 * Once per unit, the frontend creates a foreign tensor for every sharded parameter and unsharded
 * parameter, over the unit's own memory (unit_memory, unit_places). It also creates a tensor for
 * every sharded parameter of the gradient shard, over the foreign library's memory
 * (bind/torch/allocator.c). A TorchUnit keeps these tensors and performs the operations that must
 * be cheap. It drives the schedule, swaps sharded parameters and unsharded parameters in the
 * modules' dictionaries, and reads gradients through their pointers. It keeps the sharded
 * parameters' `.grad` consistent with the engine's gradient shard. It relies on only a few of
 * torch's attribute and method names.
 *
 * Gradients. The `.grad` of a sharded parameter belongs to the user. It is None after zero_grad,
 * TorchUnit's own tensor over the shard after a backward, or a tensor that the user assigned.
 * take_grads updates the engine from it (before the first reduction of a backward, before clipping
 * and stepping); settle hands out the reduced gradients after a backward. In between, `.grad` is
 * None unless the graph computes a gradient for the sharded parameter itself, for example through a
 * parameter penalty.
 */
#ifndef FSDPC_BIND_TORCH_UNIT_H
#define FSDPC_BIND_TORCH_UNIT_H

#include "bind/engine.h"

typedef struct fsdpc_py_torch_unit fsdpc_py_torch_unit;

typedef struct fsdpc_torch_param {
    PyObject *sharded, *unsharded; /* foreign tensors; unsharded: NULL before bind */
    PyObject *grad;                /* over the rows of the gradient shard */
    Py_ssize_t refs;               /* of `grad` at creation: any more are the user's */
    PyObject *early; /* in a backward: the gradient, while shards have no memory for it */
    PyObject
        *given;    /* last value set as `.grad`: grad, or a copy in the sharded parameter's dtype */
    bool aside;    /* in a backward: it was set, and is None for now */
    PyObject *own; /* while gradients are handed out: the sharded parameter's own, from the graph */
    PyObject *hook;    /* GradHook, registered once the parameter is trainable */
    PyObject *stored;  /* stored(gradient): the part that the unit stores, or NULL: all of it */
    PyObject *dtype;   /* of the unsharded parameter; foreign dtypes are compared by identity */
    void *master;      /* address of the sharded parameter's memory; NULL: none */
    bool narrow;       /* the sharded parameter's dtype is not the gradient shard's */
    long long version; /* of `given` when it was handed out, if it is a copy */
    long long written; /* with unsharded parameters in foreign memory: the sharded parameter's
                          version when it was last followed */
    bool listening;    /* the hook is registered */
} fsdpc_torch_param;

/* A place where a module stores a parameter: dict[name] is its sharded or its unsharded
 * parameter. */
typedef struct fsdpc_torch_slot {
    PyObject *dict, *name;
    int param;
} fsdpc_torch_slot;

/* A module that reads parameters of the unit directly. While its dictionary contains sharded
 * parameters, its forward is `refuse`, so that a call outside the unit raises an error. */
typedef struct fsdpc_torch_guard {
    PyObject *dict, *refuse;
} fsdpc_torch_guard;

/* Interned names of attributes and methods of foreign tensors and modules. */
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
    PyObject *bases;       /* the tensors that unsharded parameters are views of */
    PyObject *set_version; /* set_version(bases, versions) */
    PyObject *adopt;     /* adopt(i): copies in the memory that replaced the sharded parameter's */
    PyObject *renew;     /* renew(): creates new gradients, because the user keeps the old ones */
    PyObject *unsharded; /* memory of every flat group's unsharded parameters if it is foreign
                              memory; else NULL */
    PyObject *mates;     /* all TorchUnits of the root, including this one; NULL before bind */
    PyObject *at_end;    /* at_end(): schedules finish() for the end of this backward */
    bool shown;          /* dictionaries hold unsharded parameters */
    long long version;   /* last version set on the bases */
    bool taken;          /* gradients were taken in this backward */
    bool held;           /* unshard() holds it: unsharded parameters stay shown */
    int pins;            /* calls of Unit.unshard not yet released */
    bool lifted;         /* modules may be called: they use private copies */
    bool bound;
    bool gives_back;    /* the foreign library can use memory that we do not need for a while */
    bool away;          /* gradient shards have no memory, */
    bool pooled;        /* or an optimizer's, which steps inside backward */
    size_t early_bytes; /* of waiting gradients; the foreign library owns their memory on: */
    uintptr_t early_stream;
    PyObject *streams; /* streams(): handle of the foreign library's current stream; or NULL */
    PyObject *local;   /* name of the attribute that holds a sharded parameter's own rows; NULL: the
                          sharded parameter */
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

/* Orders the engine's next work after the foreign library's current stream, and lets this thread
 * use the device. Every method that uses the schedule calls this first. */
int fsdpc_torch_join(const fsdpc_py_torch_unit *self);
/* Returns the parameter index passed to a method. Returns -1 if none was passed (meaning all), or
 * with an exception set on failure.
 */
int fsdpc_torch_param_arg(const fsdpc_py_torch_unit *self, PyObject *const *args, Py_ssize_t n);

/* Before an epoch copies in masters, tracks the user's changes since the last step to the memory
 * and gradients of the sharded parameters of every unit of the root. Does nothing inside an epoch.
 */
int fsdpc_torch_follow_root(fsdpc_py_torch_unit *self);
/* If nothing is copied in, values cannot be compared, so writes are detected by the sharded
 * parameters' version counters. */
int fsdpc_torch_follow_writes(fsdpc_py_torch_unit *self);

/* Returns the tensor that holds the rows of a sharded parameter or of a gradient: a new reference,
 * or NULL with an exception. */
PyObject *fsdpc_torch_rows(const fsdpc_py_torch_unit *self, PyObject *tensor);
/* Returns whether any sharded parameter has a `.grad`; -1 with an exception. */
int fsdpc_torch_has_grads(const fsdpc_py_torch_unit *self);
/* Passes the sharded parameters' `.grad` to the engine; returns 0, or -1 with an exception. */
int fsdpc_torch_take_grads(fsdpc_py_torch_unit *self);
/* Begins a backward by taking the sharded parameters' gradients; sharded parameters have none until
 * it ends. */
int fsdpc_torch_begin_grads(fsdpc_py_torch_unit *self);
/* After an abandoned backward, restores the gradients that sharded parameters had when it began. */
int fsdpc_torch_restore_grads(fsdpc_py_torch_unit *self);

/* Does the same as fsdpc_unit_set_trainable, and creates tensors for the gradients of formerly
 * frozen parameters. */
int fsdpc_torch_set_trainable(fsdpc_py_torch_unit *self, int param, bool trainable);
/* Provides memory for the gradient shards. */
int fsdpc_torch_provide_grads(fsdpc_py_torch_unit *self);
/* Returns whether a gradient of this size should wait until the shards have memory. */
bool fsdpc_torch_can_wait(const fsdpc_py_torch_unit *self, size_t bytes);
/* Writes the waiting gradients; called before any other gradient is written and when the unit's
 * backward ends. */
int fsdpc_torch_add_early(fsdpc_py_torch_unit *self);
/* Drops the waiting gradients. */
void fsdpc_torch_drop_early(fsdpc_py_torch_unit *self);
/* Drops gradients. Kept gradients receive any pending clip factor and from then on belong only to
 * the user. `idle`: a forward begins. */
int fsdpc_torch_zero_grad(fsdpc_py_torch_unit *self, bool idle);
/* If the gradient shards are empty and unused, replaces memory that the user keeps or, if `idle`,
 * returns memory. */
int fsdpc_torch_renew(fsdpc_py_torch_unit *self, bool idle);
/* Called when a forward begins: drops gradients that no sharded parameter holds any longer. */
int fsdpc_torch_drop_grads(fsdpc_py_torch_unit *self);
/* Makes unsharded parameters use foreign memory, if the foreign library takes memory back. */
void fsdpc_torch_provide_unsharded(fsdpc_py_torch_unit *self);
/* Reads the version counter of the rows of a sharded parameter or of a gradient. */
int fsdpc_torch_version(const fsdpc_py_torch_unit *self, PyObject *tensor, long long *out);

/* Releases everything that Unit.unshard took. */
void fsdpc_torch_unpin(fsdpc_py_torch_unit *self);
/* Puts unsharded parameters (with the sharded parameters' current requires_grad) or sharded
 * parameters into the modules' dictionaries. `grad`: gradients are recorded. */
int fsdpc_torch_show(fsdpc_py_torch_unit *self, bool unsharded, bool grad);
/* Called when the schedule may have resharded the unit. */
int fsdpc_torch_hide(fsdpc_py_torch_unit *self);

/* Begins the unit's backward, for the weights of `generation`. */
int fsdpc_torch_begin_backward(fsdpc_py_torch_unit *self, uint64_t generation);

/* Called in foreign-stream order before a gradient is taken. Begins the unit's backward if no mark
 * did so because the backward bypassed the unit's outputs. */
int fsdpc_torch_reach_backward(fsdpc_py_torch_unit *self);

/* Writes a gradient of the running backward into the reduce buffer, or keeps it until the shards
 * have memory. */
int fsdpc_torch_accept_grad(fsdpc_py_torch_unit *self, int index, PyObject *grad);
/* Creates a callable that takes one unsharded parameter's `.grad` and drops it. */
PyObject *fsdpc_torch_hook_new(fsdpc_py_torch_unit *self, int param);
/* Detaches the hook, which a graph may keep, from a TorchUnit that is being freed. */
void fsdpc_torch_hook_part(PyObject *callable);

#endif
