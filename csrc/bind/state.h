/* The module's state, and the runtime that tensors, operations and the engine share.
 *
 * The runtime (memory, threads, device, compute stream, tape, trace) is created at the first use of
 * a tensor, never at import. Types belong to the module, so the state can be reached from an
 * object's type; tensors also keep a pointer to it (their type keeps the module alive).
 *
 * The GIL. Operations that do more than about 20 us of work, and all of backward, run without the
 * GIL. Backward therefore calls sinks, guards, boundary functions and tape ends WITHOUT the GIL;
 * they must acquire it (PyGILState_Ensure) before they touch Python. A function that fails with a
 * Python exception leaves it set and returns FSDPC_ERR_CALLBACK.
 */
#ifndef FSDPC_BIND_STATE_H
#define FSDPC_BIND_STATE_H

#include "bind/error.h"

#include "base/env.h"
#include "base/trace.h"
#include "nn/ops.h"
#include "ops/flat_ops.h"
#include "bind/import.h"
#include "bind/stub_docs.h"

/* ---- the module's parts, which module.c joins ---- */

/* X(name): state->name_type is created from fsdpc_py_name_spec. */
#define FSDPC_PY_TYPES(X)                                                                          \
    X(dtype)                                                                                       \
    X(tensor)                                                                                      \
    X(handle)                                                                                      \
    X(comm)                                                                                        \
    X(group)                                                                                       \
    X(group_work)                                                                                  \
    X(transport)                                                                                   \
    X(tier)                                                                                        \
    X(saved)                                                                                       \
    X(saved_set)                                                                                   \
    X(unit)                                                                                        \
    X(optimizer)                                                                                   \
    X(save)                                                                                        \
    X(graph)                                                                                       \
    X(torch_unit)

/* X(type, part): fsdpc_py_part_methods, methods that are defined next to related code instead of in
 * their type's file. */
#define FSDPC_PY_METHODS(X)                                                                        \
    X(tensor, hook)                                                                                \
    X(tensor, shape)                                                                               \
    X(tensor, value)                                                                               \
    X(tensor, number)                                                                              \
    X(tensor, write)                                                                               \
    X(tensor, dlpack)                                                                              \
    X(tensor, numpy)                                                                               \
    X(tensor, ops)                                                                                 \
    X(unit, unit_call)                                                                             \
    X(unit, unit_value)                                                                            \
    X(unit, unit_grad)                                                                             \
    X(unit, unit_schedule)                                                                         \
    X(torch_unit, torch_call)                                                                      \
    X(torch_unit, torch_follow)                                                                    \
    X(torch_unit, torch_allocator)                                                                 \
    X(torch_unit, torch_grads)                                                                     \
    X(torch_unit, torch_product)                                                                   \
    X(torch_unit, torch_show)

/* The same for attributes. */
#define FSDPC_PY_GETSETS(X)                                                                        \
    X(unit, unit_value)                                                                            \
    X(unit, unit_schedule)                                                                         \
    X(torch_unit, torch_call)                                                                      \
    X(torch_unit, torch_allocator)

/* X(part): fsdpc_py_part_functions, functions of the module. */
#define FSDPC_PY_FUNCTIONS(X)                                                                      \
    X(state)                                                                                       \
    X(dtype)                                                                                       \
    X(make)                                                                                        \
    X(dlpack)                                                                                      \
    X(numpy)                                                                                       \
    X(ops)                                                                                         \
    X(shape)                                                                                       \
    X(tape)                                                                                        \
    X(plugin)                                                                                      \
    X(walk)                                                                                        \
    X(stream)                                                                                      \
    X(engine)                                                                                      \
    X(comm)                                                                                        \
    X(unit)                                                                                        \
    X(plan)                                                                                        \
    X(optim)                                                                                       \
    X(code)                                                                                        \
    X(dry_run)                                                                                     \
    X(clip)                                                                                        \
    X(graph)                                                                                       \
    X(torch_memory)                                                                                \
    X(torch_product)                                                                               \
    X(ckpt)                                                                                        \
    X(ckpt_state)

/* Rows of these tables; the signatures and documentation are in the stub (tools/stub_docs.py). */
#define FSDPC_PY_FUNCTION(name, function, flags)                                                   \
    {                                                                                              \
#name, (PyCFunction)(void (*)(void))(function), flags, fsdpc_doc_##name                    \
    }
#define FSDPC_PY_METHOD(type, name, function, flags)                                               \
    {                                                                                              \
#name, (PyCFunction)(void (*)(void))(function), flags, fsdpc_doc_##type##_##name           \
    }
#define FSDPC_PY_ATTRIBUTE(type, name, get, set)                                                   \
    {                                                                                              \
#name, get, set, fsdpc_doc_##type##_##name, NULL                                           \
    }
enum { FSDPC_PY_FAST = METH_FASTCALL | METH_KEYWORDS };

/* Defines a getter for an attribute of `object`; the value is an expression. */
#define FSDPC_PY_GETTER(function, ...)                                                             \
    static PyObject *function(PyObject *object, void *Py_UNUSED(closure))                          \
    {                                                                                              \
        (void)object;                                                                              \
        return __VA_ARGS__;                                                                        \
    }

/* Argument names in the form that PyArg_ParseTupleAndKeywords accepts. */
#define FSDPC_PY_KEYWORDS(names, ...) static char *names[] = {__VA_ARGS__, NULL}

/* A Python type named `name_`, and its spec. */
#define FSDPC_PY_TYPE(type, name_, object, more_flags, slots_)                                     \
    PyType_Spec fsdpc_py_##type##_spec = {.name = "fsdpc._core." #name_,                           \
                                          .basicsize = sizeof(object),                             \
                                          .flags = Py_TPFLAGS_DEFAULT | (more_flags),              \
                                          .slots = slots_}

#define X(name) extern PyType_Spec fsdpc_py_##name##_spec;
FSDPC_PY_TYPES(X)
#undef X
#define X(type, part) extern PyMethodDef fsdpc_py_##part##_methods[];
FSDPC_PY_METHODS(X)
#undef X
#define X(type, part) extern PyGetSetDef fsdpc_py_##part##_getset[];
FSDPC_PY_GETSETS(X)
#undef X
#define X(part) extern PyMethodDef fsdpc_py_##part##_functions[];
FSDPC_PY_FUNCTIONS(X)
#undef X

int fsdpc_py_dtype_setup(PyObject *module); /* adds the dtype objects */

struct fsdpc_plugin; /* plugin/plugin.h */

typedef struct fsdpc_runtime {
    bool ready, dry;                   /* dry: for dry_run.c, in which units do not gather */
    bool played, orders;               /* for play(); orders: waits order streams */
    const struct fsdpc_plugin *plugin; /* provides the device; NULL: the CPU */
    int local_rank;                    /* index among several GPUs; 0: from LOCAL_RANK */
    bool ordered;                      /* the device's setting, also if it is created later */
    fsdpc_env env;
    int threads; /* per rank */
    fsdpc_mem *mem;
    fsdpc_team *team;
    fsdpc_device *device;
    fsdpc_mem *host_mem; /* with a plugin: host memory for a GPU's communicator */
    fsdpc_device *host;  /* that memory's device; else NULL */
    fsdpc_stream *compute;
    fsdpc_tape *tape;
    fsdpc_trace *trace;
    _Atomic int running; /* operations running without the GIL */
} fsdpc_runtime;

typedef struct fsdpc_py_state {
    fsdpc_runtime runtime;
    fsdpc_py_imports imports;
    PyObject *dtypes[FSDPC_DTYPE_COUNT];
    PyObject *reclaim; /* called if device memory runs out; NULL: not set */
#define X(name) PyObject *name##_type;
    FSDPC_PY_TYPES(X)
#undef X
} fsdpc_py_state;

typedef struct fsdpc_py_tensor {
    PyObject_HEAD fsdpc_tensor *tensor; /* changes only if a write in place is recorded */
    fsdpc_py_state *state;
    PyObject *weakrefs;
    PyObject *base; /* for rows or a reshaped view: the object it was made from; or NULL */
} fsdpc_py_tensor;

extern PyModuleDef fsdpc_py_module;

/* Returns the module state of one of the module's types or a subclass, or NULL with TypeError. */
fsdpc_py_state *fsdpc_py_state_of_type(PyTypeObject *type);
static inline fsdpc_py_state *fsdpc_py_state_of_ref(PyObject *object)
{
    return fsdpc_py_state_of_type(Py_TYPE(object));
}

/* Returns the runtime, created on first use; NULL with an exception. */
fsdpc_runtime *fsdpc_py_runtime_start(fsdpc_runtime *runtime);
static inline fsdpc_runtime *fsdpc_py_state_runtime(fsdpc_py_state *state)
{
    return state->runtime.ready ? &state->runtime : fsdpc_py_runtime_start(&state->runtime);
}
static inline fsdpc_runtime *fsdpc_py_runtime(PyObject *module)
{
    return fsdpc_py_state_runtime(PyModule_GetState(module));
}
fsdpc_runtime *fsdpc_py_runtime_of_type(PyTypeObject *type);
/* Takes the next random stream for a one-time draw. Inside a captured step it returns -1 with an
 * exception, because every replay would draw the same values. */
int fsdpc_py_take_stream(fsdpc_runtime *runtime, uint64_t *stream_out);
void fsdpc_py_runtime_destroy(fsdpc_runtime *runtime);

/* Returns a Python object's tensor as a borrowed reference. If the object is not a tensor, _of
 * raises TypeError and returns NULL, while _peek only returns NULL. */
fsdpc_tensor *fsdpc_py_tensor_of(PyObject *object);
fsdpc_tensor *fsdpc_py_tensor_peek(PyObject *module, PyObject *object);
/* Returns a new Tensor; takes ownership of the reference to `t`, even on failure. */
PyObject *fsdpc_py_tensor_wrap(PyObject *module, fsdpc_tensor *t);
PyObject *fsdpc_py_tensor_new(fsdpc_py_state *state, fsdpc_tensor *t);
/* Returns a new Tensor, or NULL with an exception if `status` is a failure, in which case `t` may
 * be NULL. */
PyObject *fsdpc_py_result(fsdpc_py_state *state, fsdpc_status status, fsdpc_tensor *t);

/* Accepts a dtype object, a name, a NumPy dtype or scalar type, or Python's float, int, bool. */
int fsdpc_py_dtype_parse(PyObject *object, fsdpc_dtype *out);
/* NULL and None leave *inout unchanged. */
int fsdpc_py_dtype_optional(PyObject *object, fsdpc_dtype *inout);

/* Parses the kind "constant", "normal" or "uniform"; NULL selects the default. Returns -1 with an
 * exception. */
int fsdpc_py_init_kind(const char *text, fsdpc_init_kind *out);

/* Copies a tensor's bytes to host memory, waiting without the GIL until they have been computed. */
fsdpc_status fsdpc_py_tensor_read(const fsdpc_tensor *t, void *out);
/* Returns FSDPC_ERR_UNSUPPORTED if the host cannot access the device's memory; `what` begins the
 * message.
 */
fsdpc_status fsdpc_py_check_local(const fsdpc_device *device, const char *what);

/* Stores an item in a dictionary and releases the item's reference. */
void fsdpc_py_put_item(PyObject **dict_io, const char *key, PyObject *item);

/* Returns the extents as a tuple. */
PyObject *fsdpc_py_shape_tuple(int ndim, const size_t *shape);

/* Stores an item in a new list or tuple, which takes ownership of its reference; frees the sequence
 * if the item is NULL. */
void fsdpc_py_put(PyObject **sequence_io, Py_ssize_t i, PyObject *item);

/* Releases the GIL during a statement that may wait, so that other threads can run Python. */
#define FSDPC_PY_WITHOUT_GIL(...)                                                                  \
    do {                                                                                           \
        Py_BEGIN_ALLOW_THREADS;                                                                    \
        __VA_ARGS__;                                                                               \
        Py_END_ALLOW_THREADS;                                                                      \
    } while (0)

/* status = expression, without the GIL if `work` (elements accessed) is large enough. */
#define FSDPC_PY_RUN(runtime_, work, status, expression)                                           \
    do {                                                                                           \
        if ((work) < FSDPC_PY_INLINE_WORK) {                                                       \
            (status) = (expression);                                                               \
        } else {                                                                                   \
            fsdpc_runtime *run_runtime_ = (runtime_);                                              \
            atomic_fetch_add_explicit(&run_runtime_->running, 1, memory_order_relaxed);            \
            PyThreadState *run_thread_ = PyEval_SaveThread();                                      \
            (status) = (expression);                                                               \
            PyEval_RestoreThread(run_thread_);                                                     \
            atomic_fetch_sub_explicit(&run_runtime_->running, 1, memory_order_relaxed);            \
        }                                                                                          \
    } while (0)
enum { FSDPC_PY_INLINE_WORK = 32768 };

#endif
