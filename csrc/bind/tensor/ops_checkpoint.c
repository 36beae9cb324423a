/* checkpoint(fn, *args, **kwargs): recomputes activations instead of keeping them.
 *
 * Forward runs fn without recording and connects its outputs to its tensor arguments with a custom
 * node (nn/op_custom.c). The node's backward restores the random stream, runs fn again on fresh
 * leaves with recording on, and runs a nested backward from the new outputs. The nested backward
 * also passes gradients directly to the parameters that fn reads, so the node is created even if no
 * argument requires grad.
 *
 * The node saves the tensor arguments, so a change in place before backward is an error and they
 * may leave memory (nn/saved_tensors.h). Parameters stay Python objects, because a unit gives them
 * other memory in the meantime. checkpoint_products also keeps the results of products, which the
 * second run takes (nn/products.h).
 *
 * Tensors are recognised among args and the values of kwargs, not inside containers. Both runs of
 * fn must return the same tensor or tuple of tensors; other values in the tuple pass through.
 */
#include "bind/tensor/ops.h"
#include "bind/tensor/tensor.h"

#include "nn/products.h"

typedef struct checkpoint {
    fsdpc_py_state *state;
    PyObject *fn, *values;  /* a tuple of arguments, keyword arguments last */
    int8_t *saved_at;       /* for each, the slot of the node that saves it; -1: none */
    fsdpc_saved_list saved; /* not owned after the node has them */
    bool keeps_products;
    fsdpc_products products;
    PyObject *names; /* a tuple, or NULL */
    uint64_t seed, first_stream;
    uint64_t ran_at; /* the tape's next_number after fn had run */
} checkpoint;

static void checkpoint_release(void *arg)
{
    checkpoint *c = arg;
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_XDECREF(c->fn);
    Py_XDECREF(c->values);
    Py_XDECREF(c->names);
    PyMem_Free(c->saved_at);
    fsdpc_products_drop(&c->products);
    PyMem_Free(c);
    PyGILState_Release(gil);
}

/* ---- arguments ---- */

/* Returns argument i with a leaf over the same memory, which it stores in `leaves`, for a
 * tensor. */
static PyObject *leaf_of(checkpoint *c, Py_ssize_t i, fsdpc_tensor **leaves, int *n_io)
{
    PyObject *object = PyTuple_GET_ITEM(c->values, i);
    int slot = c->saved_at[i];
    fsdpc_tensor *t = slot < 0 ? fsdpc_py_tensor_peek(NULL, object) : c->saved.t[slot], *leaf;
    if (!t)
        return Py_NewRef(object);
    fsdpc_status status = fsdpc_tensor_detach(t, &leaf);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    leaf->requires_grad = t->requires_grad;
    leaves[(*n_io)++] = fsdpc_tensor_acquire(leaf);
    return fsdpc_py_tensor_new(c->state, leaf);
}

/* Calls fn with every tensor argument replaced by a leaf. */
static PyObject *call_on_leaves(checkpoint *c, fsdpc_tensor **leaves, int *n_io)
{
    Py_ssize_t n = PyTuple_GET_SIZE(c->values), n_names = c->names ? PyTuple_GET_SIZE(c->names) : 0;
    PyObject *values = PyTuple_New(n);
    for (Py_ssize_t i = 0; values && i < n; i++)
        fsdpc_py_put(&values, i, leaf_of(c, i, leaves, n_io));
    if (!values)
        return NULL;
    PyObject *result =
        PyObject_Vectorcall(c->fn, PySequence_Fast_ITEMS(values), (size_t)(n - n_names), c->names);
    Py_DECREF(values);
    return result;
}

/* Collects the tensor arguments as borrowed references. */
static int tensor_arguments(const checkpoint *c, fsdpc_tensor **out)
{
    int n = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(c->values); i++) {
        fsdpc_tensor *t = fsdpc_py_tensor_peek(NULL, PyTuple_GET_ITEM(c->values, i));
        if (t)
            out[n++] = t;
    }
    return n;
}

/* Makes leaves of the tensors that the node is to save, in place of the Python objects. */
static fsdpc_status save_arguments(checkpoint *c)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(c->values); i++) {
        fsdpc_tensor *t = fsdpc_py_tensor_peek(NULL, PyTuple_GET_ITEM(c->values, i));
        c->saved_at[i] = -1;
        bool parameter = t && (t->guard.check || (t->requires_grad && !t->node));
        if (!t || !t->storage || parameter || c->saved.n == FSDPC_NODE_MAX_SAVED)
            continue;
        fsdpc_tensor *leaf;
        FSDPC_TRY(fsdpc_tensor_detach(t, &leaf));
        leaf->requires_grad = t->requires_grad;
        c->saved_at[i] = (int8_t)c->saved.n;
        c->saved.t[c->saved.n++] = leaf;
    }
    return FSDPC_OK;
}

static void drop_arguments(checkpoint *c)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(c->values); i++) {
        if (c->saved_at[i] >= 0) {
            PyObject *object = PyTuple_GET_ITEM(c->values, i);
            PyTuple_SET_ITEM(c->values, i, Py_NewRef(Py_None));
            Py_DECREF(object);
        }
    }
    for (int i = 0; i < c->saved.n; i++)
        fsdpc_tensor_release(c->saved.t[i]);
}

/* ---- results ---- */

/* Returns item i of fn's result, which is a tuple or a single value. */
static PyObject *result_item(PyObject *result, Py_ssize_t i)
{
    return PyTuple_Check(result) ? PyTuple_GET_ITEM(result, i) : result;
}

static Py_ssize_t result_size(PyObject *result)
{
    return PyTuple_Check(result) ? PyTuple_GET_SIZE(result) : 1;
}

/* ---- backward ---- */

/* Collects the recomputed outputs and their gradients as roots; returns the number of roots, or
 * -1. */
static int pair_outputs(PyObject *result, int n_out, fsdpc_tensor *const *dys, fsdpc_tensor **roots,
                        fsdpc_tensor **grads)
{
    int at = 0, n = 0;
    for (Py_ssize_t i = 0; i < result_size(result); i++) {
        fsdpc_tensor *t = fsdpc_py_tensor_peek(NULL, result_item(result, i));
        if (!t)
            continue;
        if (at < n_out && dys[at] && t->requires_grad) {
            roots[n] = t;
            grads[n++] = dys[at];
        }
        at++;
    }
    if (at == n_out)
        return n;
    PyErr_Format(PyExc_RuntimeError,
                 "checkpoint: the function returned %d tensors at first and %d when recomputed",
                 n_out, at);
    return -1;
}

static fsdpc_status nested_backward(fsdpc_runtime *runtime, PyObject *result, int n_out,
                                    fsdpc_tensor *const *dys)
{
    fsdpc_tensor **roots = PyMem_Calloc(2 * (size_t)n_out + 1, sizeof *roots);
    fsdpc_status status;
    if (!roots)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for %d outputs", n_out);
    int n = pair_outputs(result, n_out, dys, roots, roots + n_out);
    if (n < 0)
        status = fsdpc_fail(FSDPC_ERR_CALLBACK, "checkpoint: outputs differ");
    else
        FSDPC_PY_RUN(runtime, FSDPC_PY_INLINE_WORK, status,
                     fsdpc_tape_backward_many(runtime->tape, n, roots, roots + n_out, false));
    PyMem_Free(roots);
    return status;
}

static fsdpc_status recompute(checkpoint *c, int n_out, fsdpc_tensor *const *dys,
                              fsdpc_tensor **leaves, int *n_leaves)
{
    fsdpc_tape *tape = c->state->runtime.tape;
    uint64_t seed = tape->seed, stream = tape->next_stream, recomputing = tape->recomputing;
    bool enabled = tape->grad_enabled;
    struct fsdpc_products *products = tape->products;
    c->products.replay = true;
    c->products.at = 0;
    tape->products = c->keeps_products ? &c->products : NULL;
    tape->seed = c->seed;
    tape->next_stream = c->first_stream;
    tape->recomputing = c->ran_at;
    tape->grad_enabled = true;
    PyObject *result = call_on_leaves(c, leaves, n_leaves);
    tape->seed = seed;
    tape->next_stream = stream;
    tape->recomputing = recomputing;
    tape->grad_enabled = enabled;
    tape->products = products;
    if (!result)
        return fsdpc_fail(FSDPC_ERR_CALLBACK, "a checkpointed function raised when recomputed");
    fsdpc_status status = nested_backward(&c->state->runtime, result, n_out, dys);
    Py_DECREF(result);
    return status;
}

static fsdpc_status checkpoint_backward(void *arg, int n_out, fsdpc_tensor *const *dys, int n_in,
                                        const bool *wanted, fsdpc_tensor **dxs_out)
{
    checkpoint *c = arg;
    PyGILState_STATE gil = PyGILState_Ensure();
    int n_leaves = 0;
    fsdpc_status status;
    fsdpc_tensor **leaves = PyMem_Calloc((size_t)n_in + 1, sizeof *leaves);
    if (!leaves)
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for %d arguments", n_in);
    else
        status = recompute(c, n_out, dys, leaves, &n_leaves);
    for (int i = 0; i < n_leaves; i++) {
        if (status == FSDPC_OK && wanted[i])
            dxs_out[i] = fsdpc_tensor_acquire(leaves[i]->grad);
        fsdpc_tensor_release(leaves[i]);
    }
    PyMem_Free(leaves);
    PyGILState_Release(gil);
    return status;
}

static const fsdpc_custom_ops checkpoint_ops = {"checkpoint", checkpoint_backward,
                                                checkpoint_release};

/* ---- forward ---- */

/* Detaches each tensor of the result, in order; returns their number, or -1. */
static int detach_outputs(PyObject *result, fsdpc_tensor **out)
{
    int n = 0;
    for (Py_ssize_t i = 0; i < result_size(result); i++) {
        fsdpc_tensor *t = fsdpc_py_tensor_peek(NULL, result_item(result, i));
        if (!t)
            continue;
        fsdpc_status status = fsdpc_tensor_detach(t, &out[n]);
        if (fsdpc_py_check(status) < 0)
            return -1;
        n++;
    }
    if (n == 0) {
        PyErr_SetString(PyExc_TypeError,
                        "checkpoint: the function must return a tensor or a tuple with tensors");
        return -1;
    }
    return n;
}

static PyObject *rebuild_result(fsdpc_py_state *state, PyObject *result, fsdpc_tensor **fresh)
{
    int at = 0;
    if (!PyTuple_Check(result))
        return fsdpc_py_tensor_new(state, fsdpc_tensor_acquire(fresh[0]));
    PyObject *tuple = PyTuple_New(PyTuple_GET_SIZE(result));
    for (Py_ssize_t i = 0; tuple && i < PyTuple_GET_SIZE(result); i++) {
        PyObject *item = PyTuple_GET_ITEM(result, i);
        item = fsdpc_py_tensor_peek(NULL, item)
                   ? fsdpc_py_tensor_new(state, fsdpc_tensor_acquire(fresh[at++]))
                   : Py_NewRef(item);
        fsdpc_py_put(&tuple, i, item);
    }
    return tuple;
}

/* Connects the outputs to the tape; takes ownership of c. */
static PyObject *join(checkpoint *c, PyObject *result)
{
    fsdpc_py_state *state = c->state;
    int n_in = (int)PyTuple_GET_SIZE(c->values), n_out = (int)result_size(result);
    fsdpc_tensor **inputs = fsdpc_py_array((Py_ssize_t)n_in + n_out, sizeof *inputs);
    PyObject *joined = NULL;
    if (!inputs) {
        checkpoint_release(c);
        return NULL;
    }
    fsdpc_tensor **fresh = inputs + n_in;
    n_in = tensor_arguments(c, inputs);
    int n = detach_outputs(result, fresh);
    fsdpc_status status = n < 0 ? FSDPC_ERR_CALLBACK : save_arguments(c);
    if (status == FSDPC_OK)
        status = fsdpc_op_custom(state->runtime.tape, &checkpoint_ops, c, &c->saved, n_in, inputs,
                                 n, fresh);
    drop_arguments(c);
    if (status == FSDPC_OK) {
        joined = rebuild_result(state, result, fresh);
    } else {
        checkpoint_release(c);
        fsdpc_py_raise(status);
    }
    for (int i = 0; i < n_out; i++)
        fsdpc_tensor_release(fresh[i]);
    PyMem_Free(inputs);
    return joined;
}

static PyObject *call_checkpoint(FSDPC_PY_FASTCALL(module), bool keeps_products)
{
    fsdpc_py_state *state = PyModule_GetState(module);
    fsdpc_runtime *runtime = fsdpc_py_state_runtime(state);
    if (!runtime)
        return NULL;
    if (nargs < 1 || !PyCallable_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "checkpoint(fn, *args): fn must be callable");
    fsdpc_tape *tape = runtime->tape;
    if (!tape->grad_enabled)
        return PyObject_Vectorcall(args[0], args + 1, (size_t)nargs - 1, keywords);
    checkpoint *c = fsdpc_py_array(0, sizeof *c);
    Py_ssize_t n = nargs - 1 + (keywords ? PyTuple_GET_SIZE(keywords) : 0);
    PyObject *result = NULL;
    if (!c)
        return NULL;
    *c = (checkpoint){.state = state,
                      .fn = Py_NewRef(args[0]),
                      .values = PyTuple_New(n),
                      .saved_at = PyMem_Calloc((size_t)n + 1, 1),
                      .names = Py_XNewRef(keywords),
                      .keeps_products = keeps_products,
                      .seed = tape->seed,
                      .first_stream = tape->next_stream};
    for (Py_ssize_t i = 0; c->values && i < n; i++)
        PyTuple_SET_ITEM(c->values, i, Py_NewRef(args[1 + i]));
    if (c->values && c->saved_at) {
        struct fsdpc_products *products = tape->products;
        tape->products = keeps_products ? &c->products : NULL;
        tape->grad_enabled = false;
        result = PyObject_Vectorcall(args[0], args + 1, (size_t)nargs - 1, keywords);
        tape->grad_enabled = true;
        tape->products = products;
    }
    if (!result) {
        checkpoint_release(c);
        return NULL;
    }
    c->ran_at = atomic_load_explicit(&tape->next_number, memory_order_relaxed);
    PyObject *joined = join(c, result);
    Py_DECREF(result);
    return joined;
}

PyObject *fsdpc_py_checkpoint(FSDPC_PY_FASTCALL(module))
{
    return call_checkpoint(module, args, nargs, keywords, false);
}

PyObject *fsdpc_py_checkpoint_products(FSDPC_PY_FASTCALL(module))
{
    return call_checkpoint(module, args, nargs, keywords, true);
}
