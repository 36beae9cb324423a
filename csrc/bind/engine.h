/* The engine's Python types Comm, Unit and Optimizer, and functions that use them.
 *
 * Lifetimes. A tensor over a unit's memory (an unsharded parameter, an exported local shard) may
 * outlive all of the model's Python objects. C therefore counts references to units and roots
 * (fsdpc_unit_ref, fsdpc_root_ref). A unit lives while a Unit object, a tensor over it or a
 * boundary on the tape refers to it. A root's units are freed together, when the last reference is
 * released. A reference also keeps the communicator's Python object alive. No reference leads back
 * to a Unit, so the garbage collector sees every cycle.
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

/* One parameter; its tensor's sink and guard point here. */
typedef struct fsdpc_param_ref {
    fsdpc_unit *unit;
    int param;
    fsdpc_unit_ref *ref; /* that contains it */
} fsdpc_param_ref;

typedef struct fsdpc_root_ref {
    _Atomic int refs; /* its units that are still referenced */
    fsdpc_root *root;
    fsdpc_unit_ref **units;
    int n_units;
} fsdpc_root_ref;

/* The gradients of a unit that were handed out (bind/engine/unit_grad.c). */
typedef struct fsdpc_shared_grads {
    _Atomic int refs;    /* held by the unit while its shards exist, and by every tensor */
    fsdpc_unit_ref *ref; /* every tensor holds a reference to it */
    fsdpc_device *device;
    int n_groups;
    void *memory[]; /* per flat group, once the unit uses other memory; NULL before */
} fsdpc_shared_grads;

struct fsdpc_unit_ref {
    _Atomic int refs;
    fsdpc_unit *unit;
    fsdpc_root_ref *root; /* NULL before the first forward */
    fsdpc_param_ref *params;
    PyObject *comms[2];             /* strong: shard, replicate or NULL */
    PyObject *tier;                 /* strong: the offload tier; NULL: not offloaded */
    fsdpc_shared_grads *handed_out; /* NULL: none yet */
    PyObject *foreign; /* strong: foreign tensors holding gradient shards; NULL: its own memory */
};

typedef struct fsdpc_py_comm {
    PyObject_HEAD fsdpc_comm *comm; /* NULL once destroyed */
    bool closed;
    int hosts;        /* number of hosts of its ranks; 0 (unknown) after a split */
    fsdpc_comm *over; /* with several hosts: comm, or its control on GPUs; borrowed */
    int users;        /* number of units that use it */
    PyObject *parent; /* after a split: keeps the sockets open */
    fsdpc_interrupt interrupt;
} fsdpc_py_comm;

typedef struct fsdpc_py_unit {
    PyObject_HEAD PyObject *weakrefs;
    fsdpc_unit_ref *ref;
    fsdpc_tensor **params; /* acquired C tensors, not their objects, which refer to this one */
    Py_ssize_t n_params;
    bool explicit_reshard;         /* reshard_after_forward was given */
    int input_dtype, output_dtype; /* dtypes to cast tensors to; -1: no cast */
} fsdpc_py_unit;

/* An interrupt callback: reports Ctrl-C, and runs Python's signal handlers. */
fsdpc_status fsdpc_py_check_signals(void *unused);
/* Parses one of the first n_known reductions of FSDPC_RED_TABLE; returns -1 with ValueError. */
int fsdpc_py_parse_red(const char *name, int n_known, fsdpc_red *out);
/* Returns a Comm object's open communicator, or NULL with an exception. */
fsdpc_comm *fsdpc_py_comm_of(PyObject *object);
/* Returns the object as a Unit, or NULL with TypeError. */
fsdpc_py_unit *fsdpc_py_unit_of(PyObject *module, PyObject *object);
/* Returns the object's optimizer, or NULL with TypeError. */
fsdpc_optim *fsdpc_py_optim_of(PyObject *module, PyObject *object);
const char *fsdpc_py_code_name(fsdpc_code code);
/* Returns whether elements are whole rows of codes; a row of 0 means no codes. */
bool fsdpc_py_code_fits(size_t numel, Py_ssize_t row);
/* Returns 0, or -1 with IndexError if `param` is out of range. */
int fsdpc_py_unit_check_param(const fsdpc_py_unit *unit, int param);
/* Returns the parameter index in `arg` after checking its range, or -1 with an exception set. */
int fsdpc_py_unit_param_arg(PyObject *object, PyObject *arg);
/* Returns 0, or -1 with an exception if shutdown() has closed the unit's communicator. */
int fsdpc_py_unit_check_open(const fsdpc_py_unit *unit);

static inline fsdpc_unit_ref *fsdpc_unit_ref_acquire(fsdpc_unit_ref *ref)
{
    atomic_fetch_add_explicit(&ref->refs, 1, memory_order_relaxed);
    return ref;
}
void fsdpc_unit_ref_release(fsdpc_unit_ref *ref);

/* Returns a tensor over `data`, which is the unit's memory. */
PyObject *fsdpc_py_unit_tensor(PyObject *module, fsdpc_unit_ref *ref, fsdpc_dtype dtype, int ndim,
                               const size_t *shape, void *data);

/* Called when the unit is freed: gradients that were handed out stay valid. */
void fsdpc_py_shared_grads_release(fsdpc_shared_grads *block);

/* Creates a tensor over memory that lend(arg) lends, or none (*out unchanged) if it refuses. */
typedef fsdpc_status (*fsdpc_lend_fn)(void *arg, fsdpc_dtype dtype, fsdpc_loan *loan,
                                      void **data_out);
fsdpc_status fsdpc_py_borrow(fsdpc_device *device, fsdpc_dtype dtype, int ndim, const size_t *shape,
                             fsdpc_lend_fn lend, void *arg, fsdpc_param_ref *param,
                             fsdpc_tensor **out);
/* Returns the sink of a parameter's gradients; the unit must outlive the leaf. */
fsdpc_grad_sink fsdpc_py_sink_of(fsdpc_unit_ref *ref, int param);
/* Binds the parameter's tensor to the unit; the tensor has no memory until the root is known. */
fsdpc_status fsdpc_py_unit_bind_param(fsdpc_unit_ref *ref, int param, fsdpc_tensor *t);

/* Returns the number of dimensions and the shape of a local shard, which is the parameter's shape
 * with fewer rows. If the shard splits rows, its shape is (1, ..., n). */
int fsdpc_py_local_shape(const fsdpc_place *place, const fsdpc_local_shard *local, size_t *shape);

#endif
