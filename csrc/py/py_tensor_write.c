/* Tensors that are changed in place: their values, or the memory that they stand on.
 *
 * A tensor that requires grad is changed inside no_grad() alone, and a full never: who may write is
 * asked once, in check_inplace.  Values may come from tensors, arrays, lists and numbers; they are
 * broadcast and cast on their way.
 */
#include "py/py_ops.h"
#include "py/py_tensor.h"

#include "ops/flat_ops.h"

int fsdpc_py_tensor_check_inplace(fsdpc_py_tensor *self, const char *what)
{
    fsdpc_runtime *runtime = fsdpc_py_state_runtime(self->state);
    fsdpc_tensor *t = self->tensor;
    if (!runtime)
        return -1;
    if (t->requires_grad && runtime->tape->grad_enabled) {
        PyErr_Format(PyExc_RuntimeError,
                     "%s changes a tensor that requires grad in place: do it inside no_grad()",
                     what);
        return -1;
    }
    fsdpc_status status = fsdpc_tensor_check_write(t);
    return fsdpc_py_check(status);
}

/* The value as a tensor, new reference. */
static fsdpc_tensor *value_tensor(fsdpc_py_tensor *self, PyObject *value)
{
    fsdpc_tensor *t = fsdpc_py_tensor_peek(NULL, value);
    if (!t)
        return fsdpc_py_tensor_from_data(self->state, value, -1);
    fsdpc_status status = fsdpc_tensor_check(t);
    if (status != FSDPC_OK) {
        fsdpc_py_raise(status);
        return NULL;
    }
    return fsdpc_tensor_acquire(t);
}

int fsdpc_py_tensor_assign(fsdpc_py_tensor *self, void *dst, int ndim, const size_t *shape,
                           const size_t *strides, PyObject *value)
{
    fsdpc_runtime *runtime = &self->state->runtime;
    fsdpc_tensor *src = value_tensor(self, value);
    if (!src)
        return -1;
    fsdpc_copy_args args = {.ndim = ndim,
                            .dst_dtype = self->tensor->dtype,
                            .src_dtype = src->dtype,
                            .dst = dst,
                            .src = src->data};
    size_t stride = 1, numel = 1;
    bool fits = src->ndim <= ndim;
    for (int i = ndim - 1; fits && i >= 0; i--) {
        int at = i - (ndim - src->ndim);
        size_t extent = at >= 0 ? src->shape[at] : 1;
        fits = extent == 1 || extent == shape[i];
        args.shape[i] = shape[i];
        args.stride_dst[i] = strides[i];
        args.stride_src[i] = extent == 1 ? 0 : stride;
        stride *= extent;
        numel *= shape[i];
    }
    if (!fits) {
        char want[FSDPC_SHAPE_TEXT], is[FSDPC_SHAPE_TEXT];
        PyErr_Format(PyExc_ValueError, "values of shape %s do not broadcast to shape %s",
                     fsdpc_shape_text(src->ndim, src->shape, is),
                     fsdpc_shape_text(ndim, shape, want));
        fsdpc_tensor_release(src);
        return -1;
    }
    fsdpc_status status;
    FSDPC_PY_RUN(runtime, numel, status, runtime->device->nn->copy(&args, runtime->compute));
    fsdpc_tensor_release(src);
    return fsdpc_py_check(status);
}

static PyObject *tensor_copy(PyObject *object, PyObject *source)
{
    fsdpc_py_tensor *self = fsdpc_py_self(object);
    const fsdpc_tensor *t = self->tensor;
    size_t strides[FSDPC_MAX_DIMS], stride = 1;
    if (fsdpc_py_tensor_check_inplace(self, "copy_") < 0)
        return NULL;
    for (int i = t->ndim - 1; i >= 0; i--) {
        strides[i] = stride;
        stride *= t->shape[i];
    }
    if (fsdpc_py_tensor_assign(self, t->data, t->ndim, t->shape, strides, source) < 0)
        return NULL;
    return Py_NewRef(object);
}
FSDPC_PY_NAMED(tensor_copy, "copy_", "source")

static PyObject *tensor_fill(PyObject *object, PyObject *value)
{
    double number;
    bool integral;
    if (!fsdpc_py_number(value, &number, &integral))
        return PyErr_Format(PyExc_TypeError, "fill_: a number is needed, not %s",
                            Py_TYPE(value)->tp_name);
    return tensor_copy(object, value);
}
FSDPC_PY_NAMED(tensor_fill, "fill_", "value")

static PyObject *tensor_zero(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_tensor *self = fsdpc_py_self(object);
    if (fsdpc_py_tensor_check_inplace(self, "zero_") < 0)
        return NULL;
    fsdpc_runtime *r = &self->state->runtime;
    fsdpc_status status;
    FSDPC_PY_RUN(r, self->tensor->numel, status,
                 fsdpc_device_fill(r->device, self->tensor->data, 0,
                                   fsdpc_tensor_bytes(self->tensor), r->compute));
    return status == FSDPC_OK ? Py_NewRef(object) : fsdpc_py_raise(status);
}

static PyObject *tensor_set_data(PyObject *object, PyObject *source)
{
    fsdpc_tensor *t = fsdpc_py_self(object)->tensor, *from = fsdpc_py_tensor_of(source);
    if (!from)
        return NULL;
    fsdpc_status status = fsdpc_tensor_check(from);
    if (status == FSDPC_OK && !fsdpc_shape_equal(t, from)) {
        char is[FSDPC_SHAPE_TEXT], want[FSDPC_SHAPE_TEXT];
        status = fsdpc_fail(FSDPC_ERR_SHAPE, "set_data_: shape %s given for a tensor of shape %s",
                            fsdpc_shape_text(from->ndim, from->shape, is),
                            fsdpc_shape_text(t->ndim, t->shape, want));
    }
    if (status == FSDPC_OK)
        status = fsdpc_tensor_bind(t, from->dtype, from->storage, from->data);
    return status == FSDPC_OK ? Py_NewRef(object) : fsdpc_py_raise(status);
}

static PyObject *tensor_materialize(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_tensor *t = fsdpc_py_self(object)->tensor, *fresh;
    fsdpc_runtime *runtime = fsdpc_py_state_runtime(fsdpc_py_self(object)->state);
    if (!runtime)
        return NULL;
    if (t->storage)
        return Py_NewRef(object);
    fsdpc_status status = fsdpc_tensor_create(runtime->device, t->dtype, t->ndim, t->shape, &fresh);
    if (status == FSDPC_OK) {
        status = fsdpc_tensor_bind(t, t->dtype, fresh->storage, fresh->data);
        fsdpc_tensor_release(fresh);
    }
    return status == FSDPC_OK ? Py_NewRef(object) : fsdpc_py_raise(status);
}

PyMethodDef fsdpc_py_write_methods[] = {
    FSDPC_PY_METHOD(Tensor, copy_, tensor_copy_named, FSDPC_PY_FAST),
    FSDPC_PY_METHOD(Tensor, fill_, tensor_fill_named, FSDPC_PY_FAST),
    FSDPC_PY_METHOD(Tensor, zero_, tensor_zero, METH_NOARGS),
    FSDPC_PY_METHOD(Tensor, set_data_, tensor_set_data, METH_O),
    FSDPC_PY_METHOD(Tensor, materialize_, tensor_materialize, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};
