/* Gradients between foreign tensors and the engine.
 *
 * In backward: the foreign autograd puts a gradient into a full's `.grad` and calls our hook, which
 * writes it into the reduce buffer (a cast, or a sum after the first) and drops it.  So the
 * gradient exists once, for as long as one parameter's backward.
 *
 * Between backwards `.grad` of a piece belongs to the user.  What was handed out is a tensor over
 * the gradient shard itself, so scaling it in place reaches the engine by itself.  Dropping and
 * assigning do not, and are found here by identity: no gradient on any piece drops the unit's shard
 * without touching memory; on some, their rows are zeroed; a tensor that is not ours is copied in.
 */
#include "py/py_door.h"

#include "ops/flat_ops.h"

typedef struct hook_self {
    fsdpc_py_door *door; /* borrowed; NULL once the door has gone */
    int param;
} hook_self;

static void free_hook_self(PyObject *capsule)
{
    PyMem_Free(PyCapsule_GetPointer(capsule, NULL));
}

/* The gradient as a dense tensor of the full's dtype: itself nearly always. */
static PyObject *dense(const fsdpc_py_door *door, const fsdpc_door_param *param, PyObject *grad)
{
    PyObject *its = PyObject_GetAttr(grad, door->names.dtype);
    if (!its)
        return NULL;
    PyObject *result = its == param->dtype
                           ? Py_NewRef(grad)
                           : PyObject_CallMethodOneArg(grad, door->names.to, param->dtype);
    Py_DECREF(its);
    if (!result)
        return NULL;
    PyObject *yes = PyObject_CallMethodNoArgs(result, door->names.is_contiguous);
    if (yes != Py_True) {
        PyObject *copy = yes ? PyObject_CallMethodNoArgs(result, door->names.contiguous) : NULL;
        Py_SETREF(result, copy);
    }
    Py_XDECREF(yes);
    return result;
}

static void *data_of(const fsdpc_py_door *door, PyObject *tensor)
{
    PyObject *number = PyObject_CallMethodNoArgs(tensor, door->names.data_ptr);
    void *data = number ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(number);
    return data;
}

static int accept(fsdpc_py_door *door, int index, PyObject *grad)
{
    fsdpc_unit *unit = fsdpc_door_unit(door);
    if (fsdpc_door_join(door) < 0)
        return -1;
    if (!fsdpc_root_in_backward(fsdpc_unit_root(unit)) && /* the unit's outputs were by-passed */
        fsdpc_door_begin_backward(door, fsdpc_unit_generation(unit)) < 0)
        return -1;
    PyObject *plain = dense(door, &door->params[index], grad);
    if (!plain)
        return -1;
    void *data = data_of(door, plain);
    fsdpc_status status = FSDPC_OK;
    if (!PyErr_Occurred()) {
        fsdpc_runtime *runtime = &fsdpc_py_state_of_ref(door->unit_object)->runtime;
        FSDPC_PY_RUN(runtime, fsdpc_door_place(door, index)->numel, status,
                     fsdpc_grad_add(unit, index, data));
    }
    Py_DECREF(plain);
    if (status != FSDPC_OK)
        fsdpc_py_raise(status);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *hook_call(PyObject *capsule, PyObject *full)
{
    hook_self *self = PyCapsule_GetPointer(capsule, NULL);
    if (!self->door) {
        PyErr_SetString(PyExc_RuntimeError,
                        "a gradient for a model that was deleted: keep the model until backward");
        return NULL;
    }
    PyObject *grad_name = self->door->names.grad, *grad = PyObject_GetAttr(full, grad_name);
    if (!grad)
        return NULL;
    int result = grad == Py_None ? 0 : accept(self->door, self->param, grad);
    Py_DECREF(grad);
    if (result < 0 || PyObject_SetAttr(full, grad_name, Py_None) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef hook_def = {"grad_hook", hook_call, METH_O, "Take a full's gradient."};

PyObject *fsdpc_door_hook_new(fsdpc_py_door *door, int param)
{
    hook_self *self = PyMem_Malloc(sizeof *self);
    if (!self)
        return PyErr_NoMemory();
    *self = (hook_self){.door = door, .param = param};
    PyObject *capsule = PyCapsule_New(self, NULL, free_hook_self);
    if (!capsule) {
        PyMem_Free(self);
        return NULL;
    }
    PyObject *hook = PyCFunction_New(&hook_def, capsule);
    Py_DECREF(capsule);
    return hook;
}

void fsdpc_door_hook_part(PyObject *hook)
{
    hook_self *self = PyCapsule_GetPointer(PyCFunction_GET_SELF(hook), NULL);
    self->door = NULL;
}

/* ---- between backwards ---- */

static int read_version(const fsdpc_py_door *door, PyObject *tensor, long long *out)
{
    PyObject *number = PyObject_GetAttr(tensor, door->names._version);
    *out = number ? PyLong_AsLongLong(number) : -1;
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

/* One piece's `.grad`: 1 if there is one, 0 if not, -1.  Copies in what is not the shard itself. */
static int take_one(fsdpc_py_door *door, fsdpc_door_param *p, bool live)
{
    PyObject *grad = PyObject_GetAttr(p->piece, door->names.grad);
    if (!grad || grad == Py_None) {
        Py_XDECREF(grad);
        return grad ? 0 : -1;
    }
    long long version = p->version;
    int result = 1;
    bool same = live && grad == p->given;
    if (same && grad != p->grad)
        result = read_version(door, grad, &version) < 0 ? -1 : 1;
    if (result == 1 && (!same || version != p->version)) {
        PyObject *copied = PyObject_CallMethodOneArg(p->grad, door->names.copy_, grad);
        result = copied ? 1 : -1;
        Py_XDECREF(copied);
        p->version = version;
        if (result == 1 && grad != p->given) {
            PyObject *given = p->given == p->grad ? p->grad : grad;
            result = PyObject_SetAttr(p->piece, door->names.grad, given) < 0 ? -1 : 1;
            Py_SETREF(p->given, Py_NewRef(given));
        }
    }
    Py_DECREF(grad);
    return result;
}

int fsdpc_door_has_grads(const fsdpc_py_door *door)
{
    int any = 0;
    for (int i = 0; i < door->n_params; i++) {
        PyObject *grad = PyObject_GetAttr(door->params[i].piece, door->names.grad);
        if (!grad)
            return -1;
        any |= grad != Py_None;
        Py_DECREF(grad);
    }
    return any;
}

/* Takes parameter i's gradient; rows of one that has none are zero. */
static int take_param(fsdpc_py_door *door, int i, bool live)
{
    int has = take_one(door, &door->params[i], live);
    if (has < 0)
        return -1;
    fsdpc_status status = fsdpc_unit_take_grad(fsdpc_door_unit(door), i, has == 1);
    return status == FSDPC_OK ? 0 : (fsdpc_py_raise(status), -1);
}

int fsdpc_door_take_grads(fsdpc_py_door *door)
{
    fsdpc_unit *unit = fsdpc_door_unit(door);
    bool was_live = fsdpc_unit_has_grads(unit);
    int any = fsdpc_door_has_grads(door);
    if (any < 0)
        return -1;
    if (!any) {
        if (was_live)
            fsdpc_unit_zero_grad(unit);
        return 0;
    }
    fsdpc_status status = fsdpc_unit_take_begin(unit);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status), -1;
    for (int i = 0; i < door->n_params; i++) {
        if (take_param(door, i, was_live) < 0)
            return -1;
    }
    return 0;
}

/* The one of a parameter that has one, so that a loop over parameters is linear. */
static int take_grad(fsdpc_py_door *door, int i)
{
    fsdpc_unit *unit = fsdpc_door_unit(door);
    if (!fsdpc_unit_has_grads(unit))
        return fsdpc_door_take_grads(door);
    fsdpc_status status = fsdpc_unit_take_begin(unit);
    return status == FSDPC_OK ? take_param(door, i, true) : (fsdpc_py_raise(status), -1);
}

/* `.grad` has the piece's dtype; the shard is wider where the piece is narrow. */
static PyObject *grad_for(const fsdpc_py_door *door, const fsdpc_door_param *p)
{
    if (!p->narrow)
        return Py_NewRef(p->grad);
    PyObject *dtype = PyObject_GetAttr(p->piece, door->names.dtype);
    PyObject *grad = dtype ? PyObject_CallMethodOneArg(p->grad, door->names.to, dtype) : NULL;
    Py_XDECREF(dtype);
    return grad;
}

int fsdpc_door_give_grads(fsdpc_py_door *door)
{
    fsdpc_unit *unit = fsdpc_door_unit(door);
    int waiting = 0;
    bool any;
    fsdpc_status status = fsdpc_unit_give_begin(unit, &any);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status), -1;
    for (int i = 0; any && i < door->n_params; i++) {
        fsdpc_door_param *p = &door->params[i];
        if (!fsdpc_unit_give_grad(unit, i))
            continue;
        PyObject *grad = grad_for(door, p);
        if (!grad)
            return -1;
        Py_XSETREF(p->given, grad);
        if (PyObject_SetAttr(p->piece, door->names.grad, grad) < 0 ||
            (grad != p->grad && read_version(door, grad, &p->version) < 0))
            return -1;
        PyObject *hooks = PyObject_GetAttr(p->piece, door->names._post_accumulate_grad_hooks);
        if (!hooks)
            return -1;
        waiting |= hooks != Py_None;
        Py_DECREF(hooks);
    }
    return waiting;
}

PyObject *fsdpc_door_settle_method(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    if (fsdpc_door_join(door) < 0)
        return NULL;
    door->taken = false;
    if (fsdpc_unit_settings_of(fsdpc_door_unit(door))->reshard_after_backward)
        fsdpc_door_unpin(door);
    if (fsdpc_door_hide(door) < 0)
        return NULL;
    int waiting = fsdpc_door_give_grads(door);
    return waiting < 0 ? NULL : PyBool_FromLong(waiting);
}

PyObject *fsdpc_door_take_grads_method(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    int i = fsdpc_door_param_arg(door, args, n);
    if ((i < 0 && PyErr_Occurred()) || fsdpc_door_join(door) < 0)
        return NULL;
    int result = i < 0 ? fsdpc_door_take_grads(door) : take_grad(door, i);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* apply_scale(): whoever reads gradients next sees them clipped. */
PyObject *fsdpc_door_apply_scale_method(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    if (fsdpc_door_join(door) < 0)
        return NULL;
    fsdpc_status status = fsdpc_unit_apply_scale(fsdpc_door_unit(door));
    return fsdpc_py_none(status);
}
