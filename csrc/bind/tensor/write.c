/* In-place changes to tensors' values, or to the memory that they use.
 *
 * A leaf that requires grad can be changed only inside no_grad(), and an unsharded parameter never;
 * only check_inplace decides that. Values can be tensors, arrays, lists and numbers, and are
 * broadcast and cast as needed.
 *
 * If gradients flow into or through a write, the write is recorded (nn/op_write.c), and the Python
 * object switches to the tensor with the new node. Other tensors over the same memory would keep
 * their old history. Rows and reshaped tensors refer to the object that they were made from. A
 * write therefore updates the object, the value, the other operand of `x[0] += y`, and every object
 * that these were made from. If any other tensor shares the memory, the write is rejected.
 */
#include "bind/tensor/ops.h"

#include "bind/stub_args.h"
#include "bind/tensor/tensor.h"

#include "nn/op.h"
#include "ops/flat_ops.h"

int fsdpc_py_tensor_check_inplace(fsdpc_py_tensor *self, const char *what)
{
    fsdpc_runtime *runtime = fsdpc_py_state_runtime(self->state);
    const fsdpc_tensor *t = self->tensor;
    if (!runtime)
        return -1;
    if (t->requires_grad && !t->node && runtime->tape->grad_enabled) {
        PyErr_Format(PyExc_RuntimeError,
                     "%s changes a leaf that requires grad in place: do it inside no_grad()", what);
        return -1;
    }
    fsdpc_status status = fsdpc_tensor_check_writable(t);
    return fsdpc_py_check(status);
}

void fsdpc_py_tensor_replace(fsdpc_py_tensor *self, fsdpc_tensor *t)
{
    fsdpc_tensor *old = self->tensor;
    self->tensor = t;
    fsdpc_tensor_release(old);
}

void fsdpc_py_tensor_whole(const fsdpc_tensor *t, fsdpc_box *out)
{
    *out = (fsdpc_box){.ndim = t->ndim};
    for (int i = 0; i < t->ndim; i++)
        out->shape[i] = t->shape[i];
    fsdpc_op_strides(t->ndim, t->shape, out->strides);
}

/* Returns the value as a tensor (a new reference). A number is converted to self's dtype, which
 * must be able to represent it. */
static fsdpc_tensor *value_tensor(fsdpc_py_tensor *self, PyObject *value)
{
    fsdpc_tensor *t = fsdpc_py_tensor_peek(NULL, value);
    fsdpc_scalar number;
    fsdpc_status status;
    if (!t && fsdpc_py_number(value, &number)) {
        fsdpc_runtime *runtime = &self->state->runtime;
        status =
            fsdpc_scalar_tensor(runtime->device, runtime->compute, number, self->tensor->dtype, &t);
        if (status != FSDPC_OK)
            fsdpc_py_raise(status);
        return t;
    }
    if (!t) /* lists of integers are checked like numbers */
        return fsdpc_py_tensor_from_data(
            self->state, value,
            fsdpc_dtype_is_float(self->tensor->dtype) ? -1 : (int)self->tensor->dtype);
    status = fsdpc_tensor_check(t);
    if (status != FSDPC_OK) {
        fsdpc_py_raise(status);
        return NULL;
    }
    return fsdpc_tensor_acquire(t);
}

/* Returns whether the value is already in the box's memory; `x[0] += y` ends with such a write. */
static bool is_place(const fsdpc_tensor *t, const fsdpc_box *box, const fsdpc_tensor *value)
{
    size_t dense[FSDPC_MAX_DIMS], numel = 1;
    fsdpc_op_strides(box->ndim, box->shape, dense);
    for (int i = 0; i < box->ndim; i++) {
        if (box->shape[i] != 1 && box->strides[i] != dense[i])
            return false;
        numel *= box->shape[i];
    }
    return value->storage == t->storage && value->dtype == t->dtype && value->numel == numel &&
           (char *)value->data == (char *)t->data + box->offset * fsdpc_dtype_bytes(t->dtype);
}

/* Returns the object from which `self` was made by taking rows or reshaping. Returns NULL if `self`
 * has its own memory or is a leaf that requires grad, which has its own gradient. */
static fsdpc_py_tensor *above(fsdpc_py_tensor *self)
{
    const fsdpc_tensor *t = self->tensor;
    fsdpc_py_tensor_drop_unseen(self);
    fsdpc_py_tensor *base = (fsdpc_py_tensor *)self->base;
    bool is_leaf = t->requires_grad && !t->node;
    return base && !is_leaf && base->tensor->storage == t->storage ? base : NULL;
}

/* Returns the object that owns the memory of `self`, which may be `self`. */
static fsdpc_py_tensor *root_of(fsdpc_py_tensor *self)
{
    for (fsdpc_py_tensor *next = above(self); next; next = above(self))
        self = next;
    return self;
}

PyObject *fsdpc_py_tensor_over(PyObject *object, PyObject *result)
{
    fsdpc_py_tensor *self = fsdpc_py_self(object), *over = fsdpc_py_self(result);
    /* If gradients are disabled, no history needs an update, and a reference to the base would keep
     * its graph alive. */
    if (result && over->tensor->storage == self->tensor->storage && self->tensor->storage &&
        self->state->runtime.tape->grad_enabled) {
        fsdpc_py_tensor_drop_unseen(self); /* otherwise a loop of views would keep them all */
        over->base = Py_NewRef(object);
    }
    return result;
}

/* Returns the number of elements of `root` that precede t, which consists of rows of `root`. */
static size_t rows_before(const fsdpc_tensor *root, const fsdpc_tensor *t)
{
    return (size_t)((char *)t->data - (char *)root->data) / fsdpc_dtype_bytes(t->dtype);
}

/* Recreates t from its place in `root`, which has a new history. */
static fsdpc_status rows_again(fsdpc_tape *tape, fsdpc_tensor *root, const fsdpc_tensor *t,
                               fsdpc_tensor **out)
{
    int64_t flat = (int64_t)root->numel, shape[FSDPC_MAX_DIMS];
    fsdpc_tensor *row, *part;
    fsdpc_range range = {rows_before(root, t), t->numel, 1, false};
    for (int i = 0; i < t->ndim; i++)
        shape[i] = (int64_t)t->shape[i];
    FSDPC_TRY(fsdpc_op_reshape(tape, root, 1, &flat, &row));
    fsdpc_status st = fsdpc_op_slice(tape, row, &range, &part);
    fsdpc_tensor_release(row);
    FSDPC_TRY(st);
    st = fsdpc_op_reshape(tape, part, t->ndim, shape, out);
    fsdpc_tensor_release(part);
    return st;
}

/* The objects that use the written memory and whose history the write updates. */
enum { MOST_KNOWN = 16 };
typedef struct known {
    fsdpc_py_tensor *root;
    int n, apart; /* apart: tensors whose history the write does not change */
    fsdpc_py_tensor *objects[MOST_KNOWN]; /* without the root */
} known;

/* Adds an object that the write reads or changes, and every object from which it was made. */
static void know(known *k, const fsdpc_tensor *t, const fsdpc_box *box, PyObject *object)
{
    fsdpc_tensor *of = object ? fsdpc_py_tensor_peek(NULL, object) : NULL;
    if (!of || of->storage != t->storage)
        return;
    fsdpc_py_tensor *self = fsdpc_py_self(object);
    if (root_of(self) != k->root) {
        k->apart += !fsdpc_box_overlaps(t, box, of);
        return;
    }
    for (; self != k->root; self = above(self)) {
        int i = 0;
        while (i < k->n && k->objects[i] != self)
            i++;
        if (i < k->n || k->n == MOST_KNOWN)
            return;
        k->objects[k->n++] = self;
    }
}

static int check_shared(const fsdpc_tensor *t, const char *what, const known *k)
{
    if (fsdpc_tensor_sharers(t) <= 1 + k->n + k->apart)
        return 0;
    PyErr_Format(PyExc_RuntimeError,
                 "%s would put a gradient into memory that another tensor shares (by indexing, "
                 "reshape or detach), whose own gradient would be wrong: write into a clone(), or "
                 "make a new one (x = x + y, functional.where, functional.cat)",
                 what);
    return -1;
}

/* Updates the history of the objects that the write changes. */
static fsdpc_status bring_up(fsdpc_tape *tape, const known *k, fsdpc_tensor *written)
{
    fsdpc_tensor *again[MOST_KNOWN];
    fsdpc_status status = FSDPC_OK;
    int made = 0;
    while (status == FSDPC_OK && made < k->n) {
        status = rows_again(tape, written, k->objects[made]->tensor, &again[made]);
        made += status == FSDPC_OK;
    }
    if (status != FSDPC_OK) {
        while (made-- > 0)
            fsdpc_tensor_release(again[made]);
        fsdpc_tensor_release(written);
        return status;
    }
    for (int i = 0; i < k->n; i++)
        fsdpc_py_tensor_replace(k->objects[i], again[i]);
    fsdpc_py_tensor_replace(k->root, written);
    return FSDPC_OK;
}

static int write_recorded(fsdpc_py_tensor *self, const char *what, const fsdpc_box *box,
                          fsdpc_tensor *src, PyObject *value, PyObject *operand)
{
    fsdpc_runtime *runtime = &self->state->runtime;
    known k = {.root = root_of(self)};
    fsdpc_tensor *written = NULL;
    fsdpc_box at = *box;
    know(&k, self->tensor, box, (PyObject *)self);
    know(&k, self->tensor, box, value);
    if (operand != value)
        know(&k, self->tensor, box, operand);
    if (fsdpc_py_tensor_check_inplace(k.root, what) < 0 || check_shared(self->tensor, what, &k) < 0)
        return -1;
    at.offset += rows_before(k.root->tensor, self->tensor);
    fsdpc_status status;
    FSDPC_PY_RUN(runtime, self->tensor->numel, status,
                 fsdpc_op_write(runtime->tape, k.root->tensor, &at, src, &written));
    if (status == FSDPC_OK && written) /* NULL: the root was frozen after the rows were taken */
        status = bring_up(runtime->tape, &k, written);
    return fsdpc_py_check(status);
}

int fsdpc_py_tensor_assign(fsdpc_py_tensor *self, const char *what, const fsdpc_box *box,
                           PyObject *value, PyObject *operand)
{
    if (fsdpc_py_tensor_check_inplace(self, what) < 0)
        return -1;
    fsdpc_runtime *runtime = &self->state->runtime;
    fsdpc_tensor *src = value_tensor(self, value);
    if (!src)
        return -1;
    fsdpc_tensor *t = self->tensor, *both[] = {t, src};
    bool records = fsdpc_dtype_is_float(t->dtype) && fsdpc_tape_wants(runtime->tape, 2, both),
         current = !records || (fsdpc_py_tensor_peek(NULL, value) &&
                                root_of(fsdpc_py_self(value)) == root_of(self));
    fsdpc_status status = FSDPC_OK;
    int result = 0;
    if (current && is_place(t, box, src)) {
        fsdpc_tensor_release(src);
        return 0;
    }
    if (records) {
        result = write_recorded(self, what, box, src, value, operand);
    } else {
        FSDPC_PY_RUN(runtime, t->numel, status, fsdpc_op_write(runtime->tape, t, box, src, NULL));
        result = fsdpc_py_check(status);
    }
    fsdpc_tensor_release(src);
    return result;
}

static PyObject *assign_whole(PyObject *object, const char *what, PyObject *value)
{
    fsdpc_box box;
    fsdpc_py_tensor_whole(fsdpc_py_self(object)->tensor, &box);
    int status = fsdpc_py_tensor_assign(fsdpc_py_self(object), what, &box, value, NULL);
    return status < 0 ? NULL : Py_NewRef(object);
}

FSDPC_PY_TENSOR_OP(copy_)
{
    (void)state;
    return assign_whole(a->object, "copy_", a->source);
}

FSDPC_PY_TENSOR_OP(fill_)
{
    fsdpc_runtime *runtime = &state->runtime;
    fsdpc_tensor *one = NULL;
    if (fsdpc_py_tensor_check_inplace(fsdpc_py_self(a->object), "fill_") < 0)
        return NULL;
    fsdpc_status status =
        fsdpc_scalar_tensor(runtime->device, runtime->compute, a->value, a->self->dtype, &one);
    PyObject *value = fsdpc_py_result(state, status, one);
    PyObject *done = value ? assign_whole(a->object, "fill_", value) : NULL;
    Py_XDECREF(value);
    return done;
}

static PyObject *tensor_zero(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_tensor *self = fsdpc_py_self(object);
    if (fsdpc_py_tensor_check_inplace(self, "zero_") < 0)
        return NULL;
    fsdpc_runtime *r = &self->state->runtime;
    if (fsdpc_tape_wants(r->tape, 1, &self->tensor)) {
        PyObject *zero = PyFloat_FromDouble(0), *done;
        done = zero ? assign_whole(object, "zero_", zero) : NULL;
        Py_XDECREF(zero);
        return done;
    }
    fsdpc_status status = fsdpc_tensor_check_write(self->tensor);
    if (status == FSDPC_OK)
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
    FSDPC_PY_TENSOR_ROW(copy_),
    FSDPC_PY_TENSOR_ROW(fill_),
    FSDPC_PY_METHOD(Tensor, zero_, tensor_zero, METH_NOARGS),
    FSDPC_PY_METHOD(Tensor, set_data_, tensor_set_data, METH_O),
    FSDPC_PY_METHOD(Tensor, materialize_, tensor_materialize, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};
