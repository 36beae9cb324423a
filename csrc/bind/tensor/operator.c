/* `x += y` and similar operators: the operation, followed by a write into x.
 *
 * The object stays the same, so every reference to it sees the new values. Without gradients, every
 * tensor over the same memory sees them too. With gradients, only the operation's result has the
 * new history. If no other tensor uses x's memory, the object switches to the result without a
 * copy. Otherwise the operation uses a clone, because its backward may need the values that the
 * write overwrites.
 */
#include "bind/tensor/tensor.h"

static int check_result(const fsdpc_tensor *t, const fsdpc_tensor *result, const char *sign)
{
    if (!fsdpc_shape_equal(t, result)) {
        char is[FSDPC_SHAPE_TEXT], want[FSDPC_SHAPE_TEXT];
        PyErr_Format(PyExc_ValueError,
                     "x %s= y gives shape %s, and x has shape %s, which stays: write x = x %s y",
                     sign, fsdpc_shape_text(result->ndim, result->shape, is),
                     fsdpc_shape_text(t->ndim, t->shape, want), sign);
        return -1;
    }
    bool loses = fsdpc_dtype_is_float(result->dtype) && !fsdpc_dtype_is_float(t->dtype);
    if (loses || (t->dtype == FSDPC_BOOL && result->dtype != FSDPC_BOOL)) {
        PyErr_Format(PyExc_TypeError,
                     "x %s= y gives %s, and x is of %s, which stays: write x = x %s y", sign,
                     fsdpc_dtype_name(result->dtype), fsdpc_dtype_name(t->dtype), sign);
        return -1;
    }
    return 0;
}

/* Returns whether no other library owns the memory and nothing but the object and tape nodes reads
 * it. */
static bool is_own(const fsdpc_tensor *t)
{
    return atomic_load_explicit(&t->refs, memory_order_acquire) == 1 &&
           fsdpc_tensor_sharers(t) == 1 && !t->storage->owner && !t->storage->exported;
}

/* Switches the object to the result, cast to the object's dtype. */
static int go_over(fsdpc_py_tensor *self, fsdpc_tensor *result)
{
    fsdpc_runtime *runtime = &self->state->runtime;
    fsdpc_tensor *cast = NULL;
    fsdpc_status status;
    FSDPC_PY_RUN(runtime, result->numel, status,
                 fsdpc_op_cast(runtime->tape, result, self->tensor->dtype, &cast));
    if (status == FSDPC_OK)
        fsdpc_py_tensor_replace(self, cast);
    return fsdpc_py_check(status);
}

static PyObject *inplace(PyObject *a, PyObject *b, binaryfunc operation, const char *what,
                         const char *sign)
{
    fsdpc_py_tensor *self = fsdpc_py_self(a);
    if (fsdpc_py_tensor_check_inplace(self, what) < 0)
        return NULL;
    fsdpc_tensor *inputs[] = {self->tensor, fsdpc_py_tensor_peek(NULL, b)};
    bool records = fsdpc_tape_wants(self->state->runtime.tape, 2, inputs);
    fsdpc_py_tensor_drop_unseen(self);
    bool own = records && is_own(self->tensor);
    PyObject *x = records && !own ? PyObject_CallMethod(a, "clone", NULL) : Py_NewRef(a);
    PyObject *result = x ? operation(x, b) : NULL;
    Py_XDECREF(x);
    fsdpc_tensor *y = result ? fsdpc_py_tensor_peek(NULL, result) : NULL;
    if (!y)
        return result; /* an operand's own type of result, or an exception */
    fsdpc_box box;
    fsdpc_py_tensor_whole(self->tensor, &box);
    int status = check_result(self->tensor, y, sign);
    if (status == 0)
        status = own ? go_over(self, y) : fsdpc_py_tensor_assign(self, what, &box, result, b);
    Py_DECREF(result);
    return status < 0 ? NULL : Py_NewRef(a);
}

#define X(name, function, sign)                                                                    \
    PyObject *fsdpc_py_tensor_inplace_##name(PyObject *a, PyObject *b)                             \
    {                                                                                              \
        return inplace(a, b, function, sign "=", sign);                                            \
    }
FSDPC_PY_INPLACE(X)
#undef X

static PyObject *power(PyObject *a, PyObject *b)
{
    return PyNumber_Power(a, b, Py_None);
}

PyObject *fsdpc_py_tensor_inplace_power(PyObject *a, PyObject *b, PyObject *Py_UNUSED(modulus))
{
    return inplace(a, b, power, "**=", "**");
}
