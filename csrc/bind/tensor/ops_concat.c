/* concat and stack: operations on a sequence of tensors. */
#include "bind/tensor/ops.h"

#include "bind/tensor/tensor.h"

/* Collects the tensors of a sequence, each with a new dimension for stack. */
static int collect(fsdpc_runtime *r, PyObject *fast, int dim, bool stack, fsdpc_tensor **out)
{
    Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
    for (Py_ssize_t i = 0; i < n; i++) {
        fsdpc_tensor *x = fsdpc_py_tensor_of(PySequence_Fast_GET_ITEM(fast, i));
        if (!x)
            return -1;
        if (!stack) {
            out[i] = fsdpc_tensor_acquire(x);
            continue;
        }
        int64_t shape[FSDPC_MAX_DIMS];
        int at = dim < 0 ? dim + x->ndim + 1 : dim;
        if (at < 0 || at > x->ndim || x->ndim == FSDPC_MAX_DIMS) {
            PyErr_Format(PyExc_IndexError, "stack: dimension %d for tensors of %d dimensions", dim,
                         x->ndim);
            return -1;
        }
        for (int d = 0; d <= x->ndim; d++)
            shape[d] = d == at ? 1 : (int64_t)x->shape[d - (d > at)];
        fsdpc_status status = fsdpc_op_reshape(r->tape, x, x->ndim + 1, shape, &out[i]);
        if (fsdpc_py_check(status) < 0)
            return -1;
    }
    return 0;
}

PyObject *fsdpc_py_op_concat(fsdpc_py_state *state, PyObject *const *a, bool stack)
{
    int dim = 0;
    fsdpc_runtime *r = fsdpc_py_state_runtime(state);
    if (!r || fsdpc_py_arg_int(a[1], &dim) < 0)
        return NULL;
    PyObject *fast = fsdpc_py_tensors(a[0]);
    if (!fast)
        return NULL;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
    fsdpc_tensor **xs = fsdpc_py_room(n, sizeof *xs), *y = NULL;
    PyObject *result = NULL;
    if (xs && collect(r, fast, dim, stack, xs) == 0) {
        size_t work = 0;
        for (Py_ssize_t i = 0; i < n; i++)
            work += xs[i]->numel;
        fsdpc_status status;
        FSDPC_PY_RUN(r, work, status, fsdpc_op_concat(r->tape, (int)n, xs, dim, &y));
        result = fsdpc_py_result(state, status, y);
    }
    for (Py_ssize_t i = 0; xs && i < n; i++)
        fsdpc_tensor_release(xs[i]);
    PyMem_Free(xs);
    Py_DECREF(fast);
    return result;
}
