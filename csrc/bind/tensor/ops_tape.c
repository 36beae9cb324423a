/* Python's access to the tape: recording modes, boundaries and custom backwards.
 *
 * Functions that backward calls start without the GIL and acquire it themselves. An exception
 * raised by a Python function stays set in its thread and passes through C as FSDPC_ERR_CALLBACK.
 */
#include "bind/tensor/ops.h"

#include "bind/stub_args.h"
#include "bind/tensor/tensor.h"

static PyObject *set_grad_enabled(PyObject *module, PyObject *value)
{
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    int truth = runtime ? PyObject_IsTrue(value) : -1;
    if (truth < 0)
        return NULL;
    bool before = runtime->tape->grad_enabled;
    runtime->tape->grad_enabled = truth;
    return PyBool_FromLong(before);
}

static PyObject *is_grad_enabled(PyObject *module, PyObject *Py_UNUSED(unused))
{
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    return runtime ? PyBool_FromLong(runtime->tape->grad_enabled) : NULL;
}

static PyObject *in_backward(PyObject *module, PyObject *Py_UNUSED(unused))
{
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    return runtime ? PyBool_FromLong(runtime->tape->backward_depth > 0) : NULL;
}

FSDPC_PY_FUNCTION_OP(manual_seed)
{
    if (state->runtime.device->capturing)
        return PyErr_Format(
            PyExc_RuntimeError,
            "manual_seed() inside a captured step, whose replays go on from where the "
            "program is: call it before the step");
    state->runtime.tape->seed = a->seed;
    state->runtime.tape->next_stream = 0;
    Py_RETURN_NONE;
}

static PyObject *initial_seed(PyObject *module, PyObject *Py_UNUSED(unused))
{
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    return runtime ? PyLong_FromUnsignedLongLong(runtime->tape->seed) : NULL;
}

int fsdpc_py_take_stream(fsdpc_runtime *runtime, uint64_t *stream_out)
{
    if (runtime->device->capturing) {
        PyErr_SetString(PyExc_NotImplementedError,
                        "random tensors inside a captured step: every replay would make the same; "
                        "make them before it, and copy_() new ones into them before each replay");
        return -1;
    }
    *stream_out = runtime->tape->next_stream++;
    return 0;
}

static PyObject *next_stream(PyObject *module, PyObject *Py_UNUSED(unused))
{
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    uint64_t stream;
    if (!runtime || fsdpc_py_take_stream(runtime, &stream) < 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(stream);
}

/* ---- boundaries ---- */

static fsdpc_status call_boundary(void *arg)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result = PyObject_CallNoArgs(arg);
    bool failed = !result;
    Py_XDECREF(result);
    PyGILState_Release(gil);
    if (failed)
        return fsdpc_fail(FSDPC_ERR_CALLBACK, "a boundary's function raised an exception");
    return FSDPC_OK;
}

static void release_object(void *arg)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF((PyObject *)arg);
    PyGILState_Release(gil);
}

FSDPC_PY_FUNCTION_OP(boundary)
{
    fsdpc_tensor *y = NULL;
    fsdpc_status status = fsdpc_tape_boundary(state->runtime.tape, a->x, call_boundary,
                                              Py_NewRef(a->callback), release_object, &y);
    if (status != FSDPC_OK)
        Py_DECREF(a->callback);
    return fsdpc_py_result(state, status, y);
}

/* ---- several roots ---- */

/* Collects the tensors of a sequence as borrowed references (NULL for None); *fast_out keeps them
 * alive. */
static int tensors_of(PyObject *sequence, fsdpc_tensor ***out, PyObject **fast_out)
{
    PyObject *fast = fsdpc_py_tensors(sequence);
    if (!fast)
        return -1;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
    fsdpc_tensor **list = fsdpc_py_array(n, sizeof *list);
    bool fine = list;
    for (Py_ssize_t i = 0; fine && i < n; i++)
        fine = fsdpc_py_arg_tensor(PySequence_Fast_GET_ITEM(fast, i), &list[i]) == 0;
    if (!fine) {
        PyMem_Free(list);
        Py_DECREF(fast);
        return -1;
    }
    *out = list;
    *fast_out = fast;
    return (int)n;
}

FSDPC_PY_FUNCTION_OP(backward)
{
    fsdpc_runtime *runtime = &state->runtime;
    fsdpc_tensor **roots = NULL, **grads = NULL;
    PyObject *fast_roots = NULL, *fast_grads = NULL, *result = NULL;
    int n = tensors_of(a->tensors, &roots, &fast_roots), n_grads = 0;
    if (n >= 0 && a->gradients)
        n_grads = tensors_of(a->gradients, &grads, &fast_grads);
    if (n < 0 || n_grads < 0)
        goto release;
    bool complete = !grads || n_grads == n;
    for (int i = 0; i < n; i++)
        complete &= roots[i] != NULL;
    if (!complete) {
        PyErr_Format(PyExc_ValueError, "backward: %d tensors and %d gradients", n, n_grads);
        goto release;
    }
    fsdpc_status status;
    FSDPC_PY_RUN(runtime, FSDPC_PY_INLINE_WORK, status,
                 fsdpc_tape_backward_many(runtime->tape, n, roots, grads, a->retain_graph));
    result = fsdpc_py_none(status);
release:
    PyMem_Free(roots);
    PyMem_Free(grads);
    Py_XDECREF(fast_roots);
    Py_XDECREF(fast_grads);
    return result;
}

/* ---- custom backwards ---- */

typedef struct custom {
    fsdpc_py_state *state;
    PyObject *backward;
} custom;

static PyObject *wrap_or_none(fsdpc_py_state *state, fsdpc_tensor *t)
{
    return t ? fsdpc_py_tensor_new(state, fsdpc_tensor_acquire(t)) : Py_NewRef(Py_None);
}

static PyObject *wrap_all(fsdpc_py_state *state, int n, fsdpc_tensor *const *tensors)
{
    PyObject *tuple = PyTuple_New(n);
    for (int i = 0; tuple && i < n; i++)
        fsdpc_py_put(&tuple, i, wrap_or_none(state, tensors[i]));
    return tuple;
}

/* Reads the gradients of the inputs from backward's result, which is a tensor, a sequence or
 * None. */
static int take_gradients(PyObject *returned, int n, fsdpc_tensor **out)
{
    fsdpc_tensor **list;
    PyObject *fast, *single = NULL;
    if (returned == Py_None)
        return 0;
    if (fsdpc_py_tensor_peek(NULL, returned))
        returned = single = PyTuple_Pack(1, returned);
    if (!returned)
        return -1;
    int count = tensors_of(returned, &list, &fast);
    Py_XDECREF(single);
    if (count < 0)
        return -1;
    if (count != n)
        PyErr_Format(PyExc_ValueError, "backward returned %d gradients for %d inputs", count, n);
    for (int i = 0; count == n && i < n; i++)
        out[i] = fsdpc_tensor_acquire(list[i]);
    PyMem_Free(list);
    Py_DECREF(fast);
    return count == n ? 0 : -1;
}

static fsdpc_status custom_backward(void *arg, int n_out, fsdpc_tensor *const *dys, int n_in,
                                    const bool *Py_UNUSED(wanted), fsdpc_tensor **dxs_out)
{
    custom *c = arg;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *gradients = wrap_all(c->state, n_out, dys);
    PyObject *returned = gradients ? PyObject_CallObject(c->backward, gradients) : NULL;
    int result = returned ? take_gradients(returned, n_in, dxs_out) : -1;
    Py_XDECREF(gradients);
    Py_XDECREF(returned);
    PyGILState_Release(gil);
    if (result < 0)
        return fsdpc_fail(FSDPC_ERR_CALLBACK, "a custom backward raised an exception");
    return FSDPC_OK;
}

static void custom_release(void *arg)
{
    custom *c = arg;
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF(c->backward);
    PyMem_Free(c);
    PyGILState_Release(gil);
}

static const fsdpc_custom_ops custom_ops = {"custom", custom_backward, custom_release};

/* Creates detached views of the outputs, which are then connected to the tape. */
static fsdpc_status detach_all(int n, fsdpc_tensor *const *tensors, fsdpc_tensor **out)
{
    for (int i = 0; i < n; i++)
        FSDPC_TRY(fsdpc_tensor_detach(tensors[i], &out[i]));
    return FSDPC_OK;
}

FSDPC_PY_FUNCTION_OP(custom)
{
    fsdpc_tensor **inputs = NULL, **outputs = NULL;
    PyObject *fast_in = NULL, *fast_out = NULL, *result = NULL;
    int n_in = -1, n_out = -1;
    if ((n_in = tensors_of(a->inputs, &inputs, &fast_in)) < 0 ||
        (n_out = tensors_of(a->outputs, &outputs, &fast_out)) < 0)
        goto release;
    for (int i = 0; i < n_out; i++) {
        if (!outputs[i]) {
            PyErr_SetString(PyExc_TypeError, "custom: every output is a tensor");
            goto release;
        }
    }
    custom *c = fsdpc_py_array(0, sizeof *c);
    fsdpc_tensor **fresh = fsdpc_py_array(n_out, sizeof *fresh);
    if (!c || !fresh) {
        PyMem_Free(c);
        PyMem_Free(fresh);
        goto release;
    }
    *c = (custom){state, Py_NewRef(a->backward)};
    fsdpc_status status = detach_all(n_out, outputs, fresh);
    if (status == FSDPC_OK)
        status =
            fsdpc_op_custom(state->runtime.tape, &custom_ops, c, NULL, n_in, inputs, n_out, fresh);
    if (status == FSDPC_OK) {
        result = wrap_all(state, n_out, fresh);
    } else {
        custom_release(c);
        fsdpc_py_raise(status);
    }
    for (int i = 0; i < n_out; i++)
        fsdpc_tensor_release(fresh[i]);
    PyMem_Free(fresh);
release:
    PyMem_Free(inputs);
    PyMem_Free(outputs);
    Py_XDECREF(fast_in);
    Py_XDECREF(fast_out);
    return result;
}

PyMethodDef fsdpc_py_tape_functions[] = {
    FSDPC_PY_FUNCTION(set_grad_enabled, set_grad_enabled, METH_O),
    FSDPC_PY_FUNCTION(is_grad_enabled, is_grad_enabled, METH_NOARGS),
    FSDPC_PY_FUNCTION(in_backward, in_backward, METH_NOARGS),
    FSDPC_PY_FUNCTION_ROW(manual_seed),
    FSDPC_PY_FUNCTION(initial_seed, initial_seed, METH_NOARGS),
    FSDPC_PY_FUNCTION(next_stream, next_stream, METH_NOARGS),
    FSDPC_PY_FUNCTION_ROW(boundary),
    FSDPC_PY_FUNCTION_ROW(backward),
    FSDPC_PY_FUNCTION_ROW(custom),
    FSDPC_PY_FUNCTION(checkpoint, fsdpc_py_checkpoint, FSDPC_PY_FAST),
    FSDPC_PY_FUNCTION(checkpoint_products, fsdpc_py_checkpoint_products, FSDPC_PY_FAST),
    {NULL, NULL, 0, NULL},
};
