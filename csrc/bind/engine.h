/* The engine's Python types: Comm, Unit, Optimizer, and functions over them.
 *
 * Lifetimes.  A tensor over a unit's memory (a full, an exported piece) may outlive every Python
 * object of the model.  So C counts references to units and roots (fsdpc_unit_ref, fsdpc_root_ref):
 * a unit lives while a Unit object, a tensor over it or a boundary on the tape refers to it, and
 * the units of a root are freed together, after the last reference.  References hold the
 * communicator's Python object; none leads back to a Unit, so no cycle escapes the garbage
 * collector.
 */
#ifndef FSDPC_BIND_ENGINE_H
#define FSDPC_BIND_ENGINE_H

#include "bind/state.h"

#include "engine/collect.h"
#include "engine/grads.h"
#include "engine/optim.h"
#include "engine/call.h"
#include "nn/tape.h"

typedef struct fsdpc_unit_ref fsdpc_unit_ref;

/* Of one parameter: what its tensor's sink and guard point to. */
typedef struct fsdpc_param_ref {
    fsdpc_unit *unit;
    int param;
} fsdpc_param_ref;

typedef struct fsdpc_root_ref {
    _Atomic int refs; /* units of it that are still referred to */
    fsdpc_root *root;
    fsdpc_unit_ref **units;
    int n_units;
} fsdpc_root_ref;

struct fsdpc_unit_ref {
    _Atomic int refs;
    fsdpc_unit *unit;
    fsdpc_root_ref *root; /* NULL before the first forward */
    fsdpc_param_ref *params;
    PyObject *comms[2]; /* strong: shard, replicate or NULL */
    PyObject *tier;     /* strong: what it is offloaded to; NULL: nothing */
    struct fsdpc_shared_grads
        *handed_out; /* bind/engine/unit_grad.c: its gradients; NULL: none yet */
    PyObject *lent;  /* strong: foreign tensors that gradient shards lie in; NULL: its own memory */
};

typedef struct fsdpc_py_comm {
    PyObject_HEAD fsdpc_comm *comm; /* NULL once destroyed */
    bool closed;
    int hosts;        /* that its ranks are on; of a split: 0, not known */
    fsdpc_comm *over; /* of several hosts: comm, or its control on GPUs; borrowed */
    int users;        /* units over it */
    PyObject *parent; /* of a split: keeps the sockets open */
    fsdpc_interrupt interrupt;
} fsdpc_py_comm;

typedef struct fsdpc_py_unit {
    PyObject_HEAD PyObject *weakrefs;
    fsdpc_unit_ref *ref;
    fsdpc_tensor **params; /* acquired; not their objects, which refer to this one */
    Py_ssize_t n_params;
    bool explicit_reshard;         /* reshard_after_forward was given */
    int input_dtype, output_dtype; /* what tensors are cast to; -1: left as they are */
} fsdpc_py_unit;

/* The open communicator of a Comm object, or NULL with an exception. */
fsdpc_comm *fsdpc_py_comm_of(PyObject *object);
/* The Unit behind an object, or NULL with TypeError. */
fsdpc_py_unit *fsdpc_py_unit_of(PyObject *module, PyObject *object);
/* The optimizer behind an object, or NULL with TypeError. */
fsdpc_optim *fsdpc_py_optim_of(PyObject *module, PyObject *object);
/* 0, or -1 with IndexError. */
int fsdpc_py_unit_check_param(const fsdpc_py_unit *unit, int param);
/* The parameter of a Unit that a method was given; -1 with an exception. */
int fsdpc_py_unit_param_arg(PyObject *object, PyObject *arg);
/* 0, or -1 with an exception when shutdown() has ended what the unit communicates over. */
int fsdpc_py_unit_check_open(const fsdpc_py_unit *unit);

static inline fsdpc_unit_ref *fsdpc_unit_ref_acquire(fsdpc_unit_ref *ref)
{
    atomic_fetch_add_explicit(&ref->refs, 1, memory_order_relaxed);
    return ref;
}
void fsdpc_unit_ref_release(fsdpc_unit_ref *ref);

/* A tensor over `data`, memory of the unit. */
PyObject *fsdpc_py_unit_tensor(PyObject *module, fsdpc_unit_ref *ref, fsdpc_dtype dtype, int ndim,
                               const size_t *shape, void *data);

/* The unit goes: gradients that were handed out stay. */
void fsdpc_py_shared_grads_release(struct fsdpc_shared_grads *block);

/* Lets the parameter's tensor stand on the unit: on nothing before the root is known. */
fsdpc_status fsdpc_py_unit_bind_param(fsdpc_unit_ref *ref, int param, fsdpc_tensor *t);

/* The shape of a piece and its dimensions: as the parameter, with fewer rows; cut finer than rows,
 * it is (1, ..., n). */
int fsdpc_py_piece_shape(const fsdpc_place *place, const fsdpc_piece *piece, size_t *shape);

#endif
