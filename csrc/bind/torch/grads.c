/* Gradients passed between foreign tensors and the engine.
 *
 * In backward, the foreign autograd stores a gradient in an unsharded parameter's `.grad` and calls
 * our hook, which casts or adds it into the reduce buffer and drops it. The gradient therefore
 * exists only once and only during that parameter's backward, unless it is delayed until the shard
 * has memory (bind/torch/allocator.c).
 *
 * Between backwards, the `.grad` of a sharded parameter belongs to the user. We hand out a tensor
 * over the gradient shard itself, so in-place scaling takes effect in the engine directly. The
 * engine does not see that a gradient was dropped or assigned, so this file detects it by comparing
 * identities. If no sharded parameter has a gradient, the unit's shard is dropped without writing
 * to memory. If only some sharded parameters have no gradient, their rows are set to zero. A
 * `.grad` tensor that is not ours is copied into the shard.
 *
 * A sharded parameter may itself be part of the graph, for example for a parameter penalty; the
 * foreign autograd then stores a gradient in the sharded parameter's `.grad`. Before the unit's
 * backward, that gradient is taken like any other. Later, a reduction may already be writing to the
 * shard. Sharded parameters therefore have no gradient when a backward begins, and any gradient that
 * they have when it ends is then added to the shard.
 */
#include "bind/torch/unit.h"

#include "ops/flat_ops.h"

/* Returns what the unit stores of a gradient, as a dense tensor in the unsharded parameter's dtype.
 * That is nearly always the gradient itself. */
static PyObject *dense(const fsdpc_py_torch_unit *self, const fsdpc_torch_param *param,
                       PyObject *grad)
{
    PyObject *result = param->stored ? PyObject_CallOneArg(param->stored, grad) : Py_NewRef(grad);
    PyObject *its = result ? PyObject_GetAttr(result, self->names.dtype) : NULL;
    if (its && its != param->dtype)
        Py_SETREF(result, PyObject_CallMethodOneArg(result, self->names.to, param->dtype));
    if (!its || !result) {
        Py_XDECREF(its);
        Py_XDECREF(result);
        return NULL;
    }
    Py_DECREF(its);
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

/* Runs on the stream of the delayed gradients, so any later use of their memory on that stream is
 * ordered after it. */
int fsdpc_torch_add_early(fsdpc_py_torch_unit *self)
{
    if (self->early_bytes == 0)
        return 0;
    fsdpc_device *device = fsdpc_unit_device(fsdpc_torch_unit(self));
    uintptr_t now = fsdpc_device_handle(device);
    int done = fsdpc_torch_provide_grads(self);
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

int fsdpc_torch_accept_grad(fsdpc_py_torch_unit *self, int index, PyObject *grad)
{
    fsdpc_torch_param *p = &self->params[index];
    PyObject *plain = dense(self, p, grad);
    if (!plain)
        return -1;
    const fsdpc_unit *unit = fsdpc_torch_unit(self);
    size_t bytes = fsdpc_torch_place(self, index)->numel *
                   fsdpc_dtype_bytes(fsdpc_unit_flat_with(unit, index).param_dtype);
    uintptr_t stream = fsdpc_device_handle(fsdpc_unit_device(unit));
    bool alike = self->early_bytes == 0 || stream == self->early_stream;
    if (!p->early && alike && fsdpc_torch_can_wait(self, bytes)) {
        p->early = plain;
        self->early_bytes += bytes;
        self->early_stream = stream;
        return 0;
    }
    int done = fsdpc_torch_provide_grads(self) < 0 || fsdpc_torch_add_early(self) < 0
                   ? -1
                   : add(self, index, plain);
    Py_DECREF(plain);
    return done;
}

/* ---- between backwards ---- */

static PyObject *get_grad(const fsdpc_py_torch_unit *self, const fsdpc_torch_param *p)
{
    return PyObject_GetAttr(p->sharded, self->names.grad);
}

static int write_grad(const fsdpc_py_torch_unit *self, const fsdpc_torch_param *p, PyObject *grad)
{
    return PyObject_SetAttr(p->sharded, self->names.grad, grad);
}

/* 1 if hooks of the sharded parameter wait for its gradient, otherwise 0, or -1. */
static int set_grad(const fsdpc_py_torch_unit *self, const fsdpc_torch_param *p, PyObject *grad)
{
    if (write_grad(self, p, grad) < 0)
        return -1;
    PyObject *hooks = PyObject_GetAttr(p->sharded, self->names._post_accumulate_grad_hooks);
    Py_XDECREF(hooks);
    return hooks ? hooks != Py_None : -1;
}

/* rows.how(grad): copy_ or add_. */
static int write_rows(fsdpc_py_torch_unit *self, const fsdpc_torch_param *p, PyObject *how,
                      PyObject *grad)
{
    if (fsdpc_py_check(fsdpc_unit_take_write(fsdpc_torch_unit(self))) < 0)
        return -1;
    PyObject *plain = PyObject_CallMethodNoArgs(grad, self->names.detach); /* from create_graph */
    PyObject *done = plain ? PyObject_CallMethodOneArg(p->grad, how, plain) : NULL;
    Py_XDECREF(plain);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Copies a sharded parameter's `.grad` into the shard if it is not the shard itself. If the sharded
 * parameter's dtype differs from the shard's, both its `.grad` and the shard are kept. */
static int copy_in(fsdpc_py_torch_unit *self, fsdpc_torch_param *p, PyObject *grad)
{
    PyObject *given = p->narrow ? grad : p->grad;
    if (write_rows(self, p, self->names.copy_, grad) < 0 || write_grad(self, p, given) < 0)
        return -1;
    given = get_grad(self, p);
    if (!given)
        return -1;
    Py_SETREF(p->given, given);
    return given == p->grad ? 0 : fsdpc_torch_version(self, given, &p->version);
}

/* Takes one sharded parameter's `.grad`; returns 1 if it exists, 0 if not, -1 on error. */
static int take_one(fsdpc_py_torch_unit *self, fsdpc_torch_param *p, bool live)
{
    PyObject *grad = get_grad(self, p);
    if (!grad || grad == Py_None) {
        Py_XDECREF(grad);
        return grad ? 0 : -1;
    }
    long long version = p->version;
    int result = 0;
    bool same = live && grad == p->given;
    if (same && grad != p->grad)
        result = fsdpc_torch_version(self, grad, &version);
    if (result == 0 && (!same || version != p->version))
        result = copy_in(self, p, grad);
    Py_DECREF(grad);
    return result < 0 ? -1 : 1;
}

/* Takes the gradient of parameter i, or sets its rows to zero if it has none. */
static int take_param(fsdpc_py_torch_unit *self, int i, bool live)
{
    int has = take_one(self, &self->params[i], live);
    if (has < 0)
        return -1;
    fsdpc_status status = fsdpc_unit_take_grad(fsdpc_torch_unit(self), i, has == 1);
    return fsdpc_py_check(status);
}

/* Users may give gradients to frozen parameters. */
static int make_room(fsdpc_py_torch_unit *self)
{
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    for (int i = 0; i < self->n_params; i++) {
        if (fsdpc_torch_place(self, i)->group < fsdpc_unit_trained_groups(unit))
            continue;
        PyObject *grad = get_grad(self, &self->params[i]);
        Py_XDECREF(grad);
        if (!grad || (grad != Py_None && (fsdpc_torch_set_trainable(self, i, true) < 0 ||
                                          fsdpc_torch_set_trainable(self, i, false) < 0)))
            return -1;
    }
    return 0;
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
    if ((!was_live && fsdpc_torch_renew(self, false) < 0) || make_room(self) < 0 ||
        fsdpc_torch_provide_grads(self) < 0)
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

/* Takes only one parameter's gradient if the unit already has gradients, so a loop over the
 * parameters takes linear time. */
static int take_grad(fsdpc_py_torch_unit *self, int i)
{
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    if (!fsdpc_unit_has_grads(unit))
        return fsdpc_torch_take_grads(self);
    fsdpc_status status = fsdpc_unit_take_begin(unit);
    return status == FSDPC_OK ? take_param(self, i, true) : (fsdpc_py_raise(status), -1);
}

/* `.grad` has the sharded parameter's dtype; for a narrow sharded parameter the shard is wider. */
static PyObject *grad_for(const fsdpc_py_torch_unit *self, const fsdpc_torch_param *p)
{
    if (!p->narrow)
        return Py_NewRef(p->grad);
    PyObject *dtype = PyObject_GetAttr(p->sharded, self->names.dtype);
    PyObject *grad = dtype ? PyObject_CallMethodOneArg(p->grad, self->names.to, dtype) : NULL;
    Py_XDECREF(dtype);
    return grad;
}

/* Hands out the sum of the reduced gradient and the one that the graph gave to the sharded
 * parameter itself. `new`: the gradient has grown. Returns 1 if the sharded parameter has hooks
 * that wait for its gradient, 0 if not, or -1 on error. */
static int give_one(fsdpc_py_torch_unit *self, fsdpc_torch_param *p, bool new)
{
    if (p->own && write_rows(self, p, self->names.add_, p->own) < 0)
        return -1;
    if (new || p->own) {
        PyObject *grad = grad_for(self, p);
        if (!grad)
            return -1;
        Py_XSETREF(p->given, grad);
    }
    p->aside = false;
    int waits = set_grad(self, p, p->given);
    if (waits < 0 || (p->given != p->grad && fsdpc_torch_version(self, p->given, &p->version) < 0))
        return -1;
    return waits;
}

static void forget_own(fsdpc_py_torch_unit *self)
{
    for (int i = 0; i < self->n_params; i++)
        Py_CLEAR(self->params[i].own);
}

/* Looks for sharded parameters' gradients that were not handed out; returns 1 if there are any, 0
 * if not, or -1 on error. */
static int find_own(fsdpc_py_torch_unit *self)
{
    int any = 0;
    for (int i = 0; i < self->n_params && any >= 0; i++) {
        fsdpc_torch_param *p = &self->params[i];
        PyObject *grad = get_grad(self, p);
        if (grad && grad != Py_None && grad != p->given && grad != p->grad) {
            Py_XSETREF(p->own, Py_NewRef(grad));
            any = 1;
        }
        Py_XDECREF(grad);
        if (!grad)
            any = -1;
    }
    return any;
}

/* Waits for the reduction, because the sharded parameters' own gradients are added to its result.
 */
static int wait_for_reduction(fsdpc_py_torch_unit *self)
{
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    fsdpc_status status = FSDPC_OK;
    if (fsdpc_grad_is_posted(unit))
        FSDPC_PY_WITHOUT_GIL(status = fsdpc_grad_wait(unit));
    return fsdpc_py_check(status);
}

static int give_found(fsdpc_py_torch_unit *self, bool *left_out)
{
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    int waiting = 0;
    bool any;
    fsdpc_status status = fsdpc_unit_give_begin(unit, &any);
    *left_out = false;
    if (fsdpc_py_check(status) < 0)
        return -1;
    for (int i = 0; i < self->n_params; i++) {
        fsdpc_torch_param *p = &self->params[i];
        bool new = any &&fsdpc_unit_give_grad(unit, i);
        *left_out |= p->own && !new && !p->aside;
        int waits = new || p->aside ? give_one(self, p, new) : 0;
        if (waits < 0)
            return -1;
        waiting |= new &&waits;
    }
    return waiting;
}

/* Hands out the reduced gradients; *left_out reports whether sharded parameters also have gradients
 * of their own. `ended`: a backward has ended. */
static int give_grads(fsdpc_py_torch_unit *self, bool ended, bool *left_out)
{
    int own = find_own(self), waiting = -1;
    if (own == 0 || (own == 1 && (!ended || wait_for_reduction(self) == 0)))
        waiting = give_found(self, left_out);
    forget_own(self);
    return waiting;
}

int fsdpc_torch_begin_grads(fsdpc_py_torch_unit *self)
{
    bool left;
    /* A reduction that an earlier backward did not wait for may have completed by now. */
    if (give_grads(self, false, &left) < 0 || fsdpc_torch_take_grads(self) < 0)
        return -1;
    if (!fsdpc_unit_has_grads(fsdpc_torch_unit(self)))
        return 0;
    int done = 0;
    for (int i = 0; i < self->n_params && done == 0; i++) {
        fsdpc_torch_param *p = &self->params[i];
        PyObject *grad = get_grad(self, p);
        p->aside = grad && grad != Py_None;
        Py_XDECREF(grad);
        if (!grad || (p->aside && write_grad(self, p, Py_None) < 0))
            done = -1;
    }
    return done;
}

int fsdpc_torch_restore_grads(fsdpc_py_torch_unit *self)
{
    int done = 0;
    for (int i = 0; i < self->n_params && done == 0; i++) {
        fsdpc_torch_param *p = &self->params[i];
        PyObject *before = p->aside ? p->given : Py_None;
        p->aside = false;
        done = write_grad(self, p, before);
    }
    return done;
}

static PyObject *settle_method(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    if (fsdpc_torch_join(self) < 0)
        return NULL;
    self->taken = false;
    if (fsdpc_unit_settings_of(fsdpc_torch_unit(self))->reshard_after_backward)
        fsdpc_torch_unpin(self);
    bool left;
    if (fsdpc_torch_hide(self) < 0)
        return NULL;
    int waiting = give_grads(self, true, &left);
    if (waiting < 0 || (left && fsdpc_torch_take_grads(self) < 0))
        return NULL;
    return PyBool_FromLong(waiting);
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

/* apply_scale(): afterwards, readers see clipped gradients. */
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
