/* Gradients between foreign tensors and the engine.
 *
 * In backward: the foreign autograd puts a gradient into a full's `.grad` and calls our hook, which
 * writes it into the reduce buffer (a cast, or a sum after the first) and drops it.  So the
 * gradient exists once, for as long as one parameter's backward, unless it had better wait for
 * the memory of the shard (py_torch_lent.c).
 *
 * Between backwards `.grad` of a piece belongs to the user.  What was handed out is a tensor over
 * the gradient shard itself, so scaling it in place reaches the engine by itself.  Dropping and
 * assigning do not, and are found here by identity: no gradient on any piece drops the unit's shard
 * without touching memory; on some, their rows are zeroed; a tensor that is not ours is copied in.
 */
#include "py/py_torch_unit.h"

#include "ops/flat_ops.h"

typedef struct hook_data {
    fsdpc_py_torch_unit *owner; /* borrowed; NULL once it has gone */
    int param;
} hook_data;

static void free_hook_data(PyObject *capsule)
{
    PyMem_Free(PyCapsule_GetPointer(capsule, NULL));
}

/* The gradient as a dense tensor of the full's dtype: itself nearly always. */
static PyObject *dense(const fsdpc_py_torch_unit *self, const fsdpc_torch_param *param,
                       PyObject *grad)
{
    PyObject *its = PyObject_GetAttr(grad, self->names.dtype);
    if (!its)
        return NULL;
    PyObject *result = its == param->dtype
                           ? Py_NewRef(grad)
                           : PyObject_CallMethodOneArg(grad, self->names.to, param->dtype);
    Py_DECREF(its);
    if (!result)
        return NULL;
    PyObject *yes = PyObject_CallMethodNoArgs(result, self->names.is_contiguous);
    if (yes != Py_True) {
        PyObject *copy = yes ? PyObject_CallMethodNoArgs(result, self->names.contiguous) : NULL;
        Py_SETREF(result, copy);
    }
    Py_XDECREF(yes);
    return result;
}

static void *data_of(const fsdpc_py_torch_unit *self, PyObject *tensor)
{
    PyObject *number = PyObject_CallMethodNoArgs(tensor, self->names.data_ptr);
    void *data = number ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(number);
    return data;
}

/* Writes a dense gradient into the reduce buffer. */
static int add(fsdpc_py_torch_unit *self, int index, PyObject *grad)
{
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    void *data = data_of(self, grad);
    fsdpc_status status = FSDPC_OK;
    if (PyErr_Occurred())
        return -1;
    fsdpc_runtime *runtime = &fsdpc_py_state_of_ref(self->unit_object)->runtime;
    if (fsdpc_grad_is_open(unit))
        FSDPC_PY_RUN(runtime, fsdpc_torch_place(self, index)->numel, status,
                     fsdpc_grad_add(unit, index, data));
    else
        FSDPC_PY_WITHOUT_GIL(status = fsdpc_grad_add(unit, index, data));
    return fsdpc_py_check(status);
}

/* On the stream of those that waited: whoever has their memory next there is behind it. */
int fsdpc_torch_add_early(fsdpc_py_torch_unit *self)
{
    if (self->early_bytes == 0)
        return 0;
    fsdpc_device *device = fsdpc_unit_device(fsdpc_torch_unit(self));
    uintptr_t now = fsdpc_device_handle(device);
    int done = fsdpc_torch_lend(self);
    if (done == 0)
        done = fsdpc_py_check(fsdpc_device_adopt(device, self->early_stream));
    for (int i = 0; done == 0 && i < self->n_params; i++) {
        if (self->params[i].early)
            done = add(self, i, self->params[i].early);
    }
    fsdpc_torch_drop_early(self);
    return done == 0 ? fsdpc_py_check(fsdpc_device_adopt(device, now)) : done;
}

void fsdpc_torch_drop_early(fsdpc_py_torch_unit *self)
{
    for (int i = 0; self->early_bytes > 0 && i < self->n_params; i++)
        Py_CLEAR(self->params[i].early);
    self->early_bytes = 0;
}

static int accept(fsdpc_py_torch_unit *self, int index, PyObject *grad)
{
    fsdpc_torch_param *p = &self->params[index];
    if (fsdpc_torch_reach_backward(self) < 0)
        return -1;
    PyObject *plain = dense(self, p, grad);
    if (!plain)
        return -1;
    const fsdpc_unit *unit = fsdpc_torch_unit(self);
    size_t bytes = fsdpc_torch_place(self, index)->numel *
                   fsdpc_dtype_bytes(fsdpc_unit_flat_with(unit, index).wire_dtype);
    uintptr_t stream = fsdpc_device_handle(fsdpc_unit_device(unit));
    bool alike = self->early_bytes == 0 || stream == self->early_stream;
    if (!p->early && alike && fsdpc_torch_can_wait(self, bytes)) {
        p->early = plain;
        self->early_bytes += bytes;
        self->early_stream = stream;
        return 0;
    }
    int done = fsdpc_torch_lend(self) < 0 || fsdpc_torch_add_early(self) < 0
                   ? -1
                   : add(self, index, plain);
    Py_DECREF(plain);
    return done;
}

static PyObject *hook_call(PyObject *capsule, PyObject *full)
{
    hook_data *hook = PyCapsule_GetPointer(capsule, NULL);
    if (!hook->owner)
        return PyErr_Format(
            PyExc_RuntimeError,
            "a gradient for a model that was deleted: keep the model until backward");
    PyObject *grad_name = hook->owner->names.grad, *grad = PyObject_GetAttr(full, grad_name);
    if (!grad)
        return NULL;
    int result = grad == Py_None ? 0 : accept(hook->owner, hook->param, grad);
    Py_DECREF(grad);
    if (result < 0 || PyObject_SetAttr(full, grad_name, Py_None) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef hook_def = {"grad_hook", hook_call, METH_O, "Take a full's gradient."};

PyObject *fsdpc_torch_hook_new(fsdpc_py_torch_unit *self, int param)
{
    hook_data *hook = PyMem_Malloc(sizeof *hook);
    if (!hook)
        return PyErr_NoMemory();
    *hook = (hook_data){.owner = self, .param = param};
    PyObject *capsule = PyCapsule_New(hook, NULL, free_hook_data);
    if (!capsule) {
        PyMem_Free(hook);
        return NULL;
    }
    PyObject *callable = PyCFunction_New(&hook_def, capsule);
    Py_DECREF(capsule);
    return callable;
}

void fsdpc_torch_hook_part(PyObject *callable)
{
    hook_data *hook = PyCapsule_GetPointer(PyCFunction_GET_SELF(callable), NULL);
    hook->owner = NULL;
}

/* ---- between backwards ---- */

int fsdpc_torch_version(const fsdpc_py_torch_unit *self, PyObject *tensor, long long *out)
{
    PyObject *number = PyObject_GetAttr(tensor, self->names._version);
    *out = number ? PyLong_AsLongLong(number) : -1;
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

/* One piece's `.grad`: 1 if there is one, 0 if not, -1.  Copies in what is not the shard itself. */
static int take_one(fsdpc_py_torch_unit *self, fsdpc_torch_param *p, bool live)
{
    PyObject *grad = PyObject_GetAttr(p->piece, self->names.grad);
    if (!grad || grad == Py_None) {
        Py_XDECREF(grad);
        return grad ? 0 : -1;
    }
    long long version = p->version;
    int result = 1;
    bool same = live && grad == p->given;
    if (same && grad != p->grad)
        result = fsdpc_torch_version(self, grad, &version) < 0 ? -1 : 1;
    if (result == 1 && (!same || version != p->version)) {
        bool opened = fsdpc_py_check(fsdpc_unit_take_write(fsdpc_torch_unit(self))) == 0;
        PyObject *copied =
            opened ? PyObject_CallMethodOneArg(p->grad, self->names.copy_, grad) : NULL;
        result = copied ? 1 : -1;
        Py_XDECREF(copied);
        p->version = version;
        if (result == 1 && grad != p->given) {
            PyObject *given = p->given == p->grad ? p->grad : grad;
            result = PyObject_SetAttr(p->piece, self->names.grad, given) < 0 ? -1 : 1;
            Py_SETREF(p->given, Py_NewRef(given));
        }
    }
    Py_DECREF(grad);
    return result;
}

int fsdpc_torch_has_grads(const fsdpc_py_torch_unit *self)
{
    int any = 0;
    for (int i = 0; i < self->n_params; i++) {
        PyObject *grad = PyObject_GetAttr(self->params[i].piece, self->names.grad);
        if (!grad)
            return -1;
        any |= grad != Py_None;
        Py_DECREF(grad);
    }
    return any;
}

/* Takes parameter i's gradient; rows of one that has none are zero. */
static int take_param(fsdpc_py_torch_unit *self, int i, bool live)
{
    int has = take_one(self, &self->params[i], live);
    if (has < 0)
        return -1;
    fsdpc_status status = fsdpc_unit_take_grad(fsdpc_torch_unit(self), i, has == 1);
    return fsdpc_py_check(status);
}

int fsdpc_torch_take_grads(fsdpc_py_torch_unit *self)
{
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    bool was_live = fsdpc_unit_has_grads(unit);
    int any = fsdpc_torch_has_grads(self);
    if (any < 0)
        return -1;
    if (!any)
        return was_live ? fsdpc_torch_zero_grad(self, false) : fsdpc_torch_renew(self, false);
    if ((!was_live && fsdpc_torch_renew(self, false) < 0) || fsdpc_torch_lend(self) < 0)
        return -1;
    fsdpc_status status = fsdpc_unit_take_begin(unit);
    if (fsdpc_py_check(status) < 0)
        return -1;
    for (int i = 0; i < self->n_params; i++) {
        if (take_param(self, i, was_live) < 0)
            return -1;
    }
    return 0;
}

/* The one of a parameter that has one, so that a loop over parameters is linear. */
static int take_grad(fsdpc_py_torch_unit *self, int i)
{
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    if (!fsdpc_unit_has_grads(unit))
        return fsdpc_torch_take_grads(self);
    fsdpc_status status = fsdpc_unit_take_begin(unit);
    return status == FSDPC_OK ? take_param(self, i, true) : (fsdpc_py_raise(status), -1);
}

/* `.grad` has the piece's dtype; the shard is wider where the piece is narrow. */
static PyObject *grad_for(const fsdpc_py_torch_unit *self, const fsdpc_torch_param *p)
{
    if (!p->narrow)
        return Py_NewRef(p->grad);
    PyObject *dtype = PyObject_GetAttr(p->piece, self->names.dtype);
    PyObject *grad = dtype ? PyObject_CallMethodOneArg(p->grad, self->names.to, dtype) : NULL;
    Py_XDECREF(dtype);
    return grad;
}

int fsdpc_torch_give_grads(fsdpc_py_torch_unit *self)
{
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    int waiting = 0;
    bool any;
    fsdpc_status status = fsdpc_unit_give_begin(unit, &any);
    if (fsdpc_py_check(status) < 0)
        return -1;
    for (int i = 0; any && i < self->n_params; i++) {
        fsdpc_torch_param *p = &self->params[i];
        if (!fsdpc_unit_give_grad(unit, i))
            continue;
        PyObject *grad = grad_for(self, p);
        if (!grad)
            return -1;
        Py_XSETREF(p->given, grad);
        if (PyObject_SetAttr(p->piece, self->names.grad, grad) < 0 ||
            (grad != p->grad && fsdpc_torch_version(self, grad, &p->version) < 0))
            return -1;
        PyObject *hooks = PyObject_GetAttr(p->piece, self->names._post_accumulate_grad_hooks);
        if (!hooks)
            return -1;
        waiting |= hooks != Py_None;
        Py_DECREF(hooks);
    }
    return waiting;
}

static PyObject *settle_method(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    if (fsdpc_torch_join(self) < 0)
        return NULL;
    self->taken = false;
    if (fsdpc_unit_settings_of(fsdpc_torch_unit(self))->reshard_after_backward)
        fsdpc_torch_unpin(self);
    if (fsdpc_torch_hide(self) < 0)
        return NULL;
    int waiting = fsdpc_torch_give_grads(self);
    return waiting < 0 ? NULL : PyBool_FromLong(waiting);
}

static PyObject *take_grads_method(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    int i = fsdpc_torch_param_arg(self, args, n);
    if ((i < 0 && PyErr_Occurred()) || fsdpc_torch_join(self) < 0)
        return NULL;
    int result = i < 0 ? fsdpc_torch_take_grads(self) : take_grad(self, i);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* apply_scale(): the next reader of gradients sees them clipped. */
static PyObject *apply_scale_method(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    if (fsdpc_torch_join(self) < 0)
        return NULL;
    fsdpc_status status = fsdpc_unit_apply_scale(fsdpc_torch_unit(self));
    return fsdpc_py_none(status);
}

PyMethodDef fsdpc_py_torch_grads_methods[] = {
    FSDPC_PY_METHOD(TorchUnit, settle, settle_method, METH_NOARGS),
    FSDPC_PY_METHOD(TorchUnit, take_grads, take_grads_method, METH_FASTCALL),
    FSDPC_PY_METHOD(TorchUnit, apply_scale, apply_scale_method, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};
