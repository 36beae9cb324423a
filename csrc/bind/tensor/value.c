/* Tensor: conversion to Python values, copies in other dtypes, and the tensor's position on the
 * tape. */
#include "bind/tensor/ops.h"

#include "bind/stub_args.h"
#include "bind/tensor/tensor.h"

#include <stdlib.h>
#include <string.h>

#include "nn/op.h"
#include "ops/flat_ops.h"

#define TENSOR(object) (fsdpc_py_self(object)->tensor)
#define STATE(object) (fsdpc_py_self(object)->state)

/* ---- values ---- */

static PyObject *method_item(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const fsdpc_tensor *t = TENSOR(object);
    fsdpc_status status = fsdpc_tensor_check(t);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    if (t->numel != 1) {
        char text[FSDPC_SHAPE_TEXT];
        return PyErr_Format(PyExc_ValueError,
                            "a tensor of shape %s is not one number: index it, or use tolist()",
                            fsdpc_shape_text(t->ndim, t->shape, text));
    }
    union {
        float f32;
        double f64;
        uint16_t bits;
        int32_t i32;
        int64_t i64;
        uint8_t u8;
    } value;
    status = fsdpc_py_tensor_read(t, &value);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    switch (t->dtype) {
    case FSDPC_F32:
        return PyFloat_FromDouble(value.f32);
    case FSDPC_BF16:
        return PyFloat_FromDouble(fsdpc_bf16_to_f32(value.bits));
    case FSDPC_F16:
        return PyFloat_FromDouble(fsdpc_f16_to_f32(value.bits));
    case FSDPC_F64:
        return PyFloat_FromDouble(value.f64);
    case FSDPC_I32:
        return PyLong_FromLong(value.i32);
    case FSDPC_I64:
        return PyLong_FromLongLong(value.i64);
    case FSDPC_U8:
        return PyLong_FromLong(value.u8);
    default:
        return PyBool_FromLong(value.u8);
    }
}

static PyObject *method_tolist(PyObject *object, PyObject *Py_UNUSED(unused))
{
    PyObject *plain = fsdpc_py_tensor_plain(object);
    PyObject *array = plain ? fsdpc_py_tensor_numpy(plain, NULL) : NULL;
    PyObject *list = array ? PyObject_CallMethod(array, "tolist", NULL) : NULL;
    Py_XDECREF(plain);
    Py_XDECREF(array);
    return list;
}

/* ---- autograd ---- */

FSDPC_PY_TENSOR_OP(backward)
{
    fsdpc_runtime *runtime = &state->runtime;
    fsdpc_status status;
    FSDPC_PY_RUN(runtime, FSDPC_PY_INLINE_WORK, status,
                 fsdpc_tape_backward(runtime->tape, a->self, a->gradient, a->retain_graph));
    return fsdpc_py_none(status);
}

static PyObject *method_detach(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_tensor *y = NULL;
    fsdpc_status status = fsdpc_tensor_detach(TENSOR(object), &y);
    return fsdpc_py_result(STATE(object), status, y);
}

FSDPC_PY_TENSOR_OP(requires_grad_)
{
    (void)state;
    PyObject *value = a->requires_grad ? Py_True : Py_False;
    return PyObject_SetAttrString(a->object, "requires_grad", value) < 0 ? NULL
                                                                         : Py_NewRef(a->object);
}

/* ---- dtypes and copies ---- */

#define CAST(name, dtype_)                                                                         \
    static PyObject *method_##name(PyObject *object, PyObject *Py_UNUSED(unused))                  \
    {                                                                                              \
        return fsdpc_py_cast(STATE(object), object, FSDPC_##dtype_);                               \
    }
CAST(float, F32)
CAST(bfloat16, BF16)
CAST(half, F16)
CAST(double, F64)
#undef CAST

static PyObject *method_clone(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_runtime *runtime = fsdpc_py_state_runtime(STATE(object));
    fsdpc_tensor *y = NULL;
    fsdpc_status status;
    if (!runtime)
        return NULL;
    FSDPC_PY_RUN(runtime, TENSOR(object)->numel, status,
                 fsdpc_op_clone(runtime->tape, TENSOR(object), &y));
    return fsdpc_py_result(STATE(object), status, y);
}

/* The copy of a leaf must be a leaf for copy.deepcopy of a module to work. */
static PyObject *method_deepcopy(PyObject *object, PyObject *Py_UNUSED(memo))
{
    fsdpc_runtime *runtime = fsdpc_py_state_runtime(STATE(object));
    const fsdpc_tensor *t = TENSOR(object);
    fsdpc_tensor *leaf, *y = NULL;
    if (!runtime)
        return NULL;
    if (t->node)
        return PyErr_Format(PyExc_RuntimeError,
                            "only leaves can be deep-copied: detach() this tensor first");
    fsdpc_status status = fsdpc_tensor_detach(t, &leaf);
    if (status == FSDPC_OK) {
        status = fsdpc_op_clone(runtime->tape, leaf, &y);
        fsdpc_tensor_release(leaf);
    }
    if (status == FSDPC_OK)
        y->requires_grad = t->requires_grad;
    return fsdpc_py_result(STATE(object), status, y);
}

PyMethodDef fsdpc_py_value_methods[] = {
    FSDPC_PY_METHOD(Tensor, item, method_item, METH_NOARGS),
    FSDPC_PY_METHOD(Tensor, tolist, method_tolist, METH_NOARGS),
    FSDPC_PY_TENSOR_ROW(backward),
    FSDPC_PY_METHOD(Tensor, detach, method_detach, METH_NOARGS),
    FSDPC_PY_TENSOR_ROW(requires_grad_),
    FSDPC_PY_METHOD(Tensor, float, method_float, METH_NOARGS),
    FSDPC_PY_METHOD(Tensor, bfloat16, method_bfloat16, METH_NOARGS),
    FSDPC_PY_METHOD(Tensor, half, method_half, METH_NOARGS),
    FSDPC_PY_METHOD(Tensor, double, method_double, METH_NOARGS),
    FSDPC_PY_METHOD(Tensor, clone, method_clone, METH_NOARGS),
    {"__deepcopy__", method_deepcopy, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

fsdpc_status fsdpc_py_tensor_same_bytes(const fsdpc_tensor *x, const fsdpc_tensor *y,
                                        bool *equal_out)
{
    size_t bytes = fsdpc_tensor_bytes(x);
    if (!x->storage->device->remote) {
        *equal_out = memcmp(x->data, y->data, bytes) == 0;
        return FSDPC_OK;
    }
    char *copies = malloc(2 * bytes + 1);
    if (!copies)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to compare tensors of %zu bytes", bytes);
    fsdpc_status status = fsdpc_py_tensor_read(x, copies);
    if (status == FSDPC_OK)
        status = fsdpc_py_tensor_read(y, copies + bytes);
    *equal_out = status == FSDPC_OK && memcmp(copies, copies + bytes, bytes) == 0;
    free(copies);
    return status;
}
