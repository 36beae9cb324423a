/* Methods of Unit: pieces, whole values, management. */
#include "py/py_engine.h"

#include <math.h>

#include "ops/flat_ops.h"

static fsdpc_unit *unit_of(PyObject *object)
{
    return ((fsdpc_py_unit *)object)->ref->unit;
}

static int check_index(const fsdpc_unit *unit, int param)
{
    if (param >= 0 && param < unit->layout->n_params)
        return 0;
    PyErr_Format(PyExc_IndexError, "parameter %d of unit '%s', which has %d", param, unit->name,
                 unit->layout->n_params);
    return -1;
}

static int index_arg(PyObject *object, PyObject *arg)
{
    int param = (int)PyLong_AsLong(arg);
    if (param == -1 && PyErr_Occurred())
        return -1;
    return check_index(unit_of(object), param) < 0 ? -1 : param;
}

int fsdpc_py_piece_shape(const fsdpc_place *place, const fsdpc_piece *piece, size_t *shape)
{
    size_t row = place->numel && place->ndim > 0 ? place->numel / place->shape[0] : 1;
    memcpy(shape, place->shape, sizeof place->shape);
    if (place->ndim == 0 && piece->numel == 0) { /* a scalar that another rank owns */
        shape[0] = 0;
        return 1;
    }
    if (place->ndim == 0 || piece->numel == place->numel)
        return place->ndim;
    if (piece->first % row == 0 && piece->numel % row == 0) {
        shape[0] = piece->numel / row;
        return place->ndim;
    }
    for (int d = 0; d < place->ndim - 1; d++)
        shape[d] = 1;
    shape[place->ndim - 1] = piece->numel;
    return place->ndim;
}

static PyObject *piece_tensor(PyObject *object, int param, const fsdpc_piece *piece,
                              fsdpc_dtype dtype, void *data)
{
    size_t shape[FSDPC_MAX_DIMS];
    int ndim = fsdpc_py_piece_shape(&unit_of(object)->layout->params[param], piece, shape);
    return fsdpc_py_unit_tensor(PyType_GetModule(Py_TYPE(object)), ((fsdpc_py_unit *)object)->ref,
                                dtype, ndim, shape, data);
}

static PyObject *unit_local(PyObject *object, PyObject *arg)
{
    int param = index_arg(object, arg);
    if (param < 0)
        return NULL;
    fsdpc_unit *unit = unit_of(object);
    fsdpc_piece piece;
    void *data = fsdpc_unit_master(unit, param, &piece);
    unit->foreign = true; /* whoever holds the tensor may write it: compare from now on */
    return piece_tensor(object, param, &piece, unit->layout->params[param].dtype, data);
}

static PyObject *unit_grad(PyObject *object, PyObject *arg)
{
    int param = index_arg(object, arg);
    if (param < 0)
        return NULL;
    fsdpc_unit *unit = unit_of(object);
    fsdpc_piece piece;
    void *data;
    fsdpc_status status = fsdpc_unit_grad(unit, param, &piece, &data);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    if (!data)
        Py_RETURN_NONE;
    int group = unit->layout->params[param].group;
    return piece_tensor(object, param, &piece, unit->groups[group].grad_dtype, data);
}

static PyObject *unit_write(PyObject *object, PyObject *args)
{
    int param;
    PyObject *value;
    if (!PyArg_ParseTuple(args, "iO", &param, &value) || check_index(unit_of(object), param) < 0)
        return NULL;
    fsdpc_tensor *t = fsdpc_py_tensor_of(value);
    if (!t)
        return NULL;
    const fsdpc_place *place = &unit_of(object)->layout->params[param];
    fsdpc_status status = fsdpc_tensor_check(t);
    if (status == FSDPC_OK && t->numel != place->numel)
        status = fsdpc_fail(FSDPC_ERR_SHAPE, "parameter '%s' has %zu elements, the value %zu",
                            place->name, place->numel, t->numel);
    if (status == FSDPC_OK && !fsdpc_dtype_is_float(t->dtype))
        status = fsdpc_fail(FSDPC_ERR_DTYPE, "parameter '%s' cannot take %s values", place->name,
                            fsdpc_dtype_name(t->dtype));
    if (status == FSDPC_OK)
        status = fsdpc_unit_write(unit_of(object), param, t->data, t->dtype);
    return fsdpc_py_none(status);
}

static PyObject *unit_init(PyObject *object, PyObject *args)
{
    int param, kind;
    const char *name;
    double a, b;
    unsigned long long seed, stream;
    if (!PyArg_ParseTuple(args, "isddKK", &param, &name, &a, &b, &seed, &stream) ||
        check_index(unit_of(object), param) < 0)
        return NULL;
    if (strcmp(name, "constant") == 0)
        kind = FSDPC_INIT_CONSTANT;
    else if (strcmp(name, "normal") == 0)
        kind = FSDPC_INIT_NORMAL;
    else if (strcmp(name, "uniform") == 0)
        kind = FSDPC_INIT_UNIFORM;
    else
        return PyErr_Format(PyExc_ValueError,
                            "initial values are constant, normal or uniform, got '%s'", name);
    fsdpc_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = fsdpc_unit_init_param(unit_of(object), param, kind, a, b, seed, stream);
    Py_END_ALLOW_THREADS;
    return fsdpc_py_none(status);
}

static PyObject *unit_collect(PyObject *object, PyObject *args)
{
    int param, grads;
    if (!PyArg_ParseTuple(args, "ip", &param, &grads) || check_index(unit_of(object), param) < 0 ||
        fsdpc_py_unit_check_open((fsdpc_py_unit *)object) < 0)
        return NULL;
    fsdpc_unit *unit = unit_of(object);
    const fsdpc_place *place = &unit->layout->params[param];
    fsdpc_dtype dtype = grads ? unit->groups[place->group].grad_dtype : place->dtype;
    fsdpc_tensor *t;
    fsdpc_status status = fsdpc_tensor_create(unit->device, dtype, place->ndim, place->shape, &t);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    Py_BEGIN_ALLOW_THREADS;
    status = fsdpc_unit_collect(unit, param, grads != 0, t->data);
    Py_END_ALLOW_THREADS;
    if (status != FSDPC_OK) {
        fsdpc_tensor_release(t);
        return fsdpc_py_raise(status);
    }
    return fsdpc_py_tensor_wrap(PyType_GetModule(Py_TYPE(object)), t);
}

static PyObject *unit_zero_grad(PyObject *object, PyObject *unused)
{
    (void)unused;
    fsdpc_unit_zero_grad(unit_of(object));
    Py_RETURN_NONE;
}

static PyObject *unit_bind(PyObject *object, PyObject *args)
{
    int param;
    PyObject *value;
    if (!PyArg_ParseTuple(args, "iO", &param, &value) || check_index(unit_of(object), param) < 0)
        return NULL;
    fsdpc_py_unit *self = (fsdpc_py_unit *)object;
    fsdpc_tensor *own = self->params[param];
    fsdpc_status status;
    if (value == Py_None) {
        status = fsdpc_py_unit_bind_param(self->ref, param, own);
    } else {
        fsdpc_tensor *t = fsdpc_py_tensor_of(value);
        if (!t)
            return NULL;
        if (t->numel != own->numel)
            return PyErr_Format(PyExc_ValueError, "%zu elements for a parameter of %zu", t->numel,
                                own->numel);
        status = fsdpc_tensor_bind(own, t->dtype, t->storage, t->data);
        own->guard = (fsdpc_guard){0};
        own->sink = (fsdpc_grad_sink){0};
    }
    return fsdpc_py_none(status);
}

static PyObject *unit_set_reshard(PyObject *object, PyObject *arg)
{
    unit_of(object)->reshard_after_forward = PyObject_IsTrue(arg) == 1;
    ((fsdpc_py_unit *)object)->explicit_reshard = true;
    Py_RETURN_NONE;
}

/* take_options(other): what was set on a unit that this one replaces. */
static PyObject *unit_take_options(PyObject *object, PyObject *other)
{
    if (!Py_IS_TYPE(other, Py_TYPE(object)))
        return PyErr_Format(PyExc_TypeError, "take_options takes a Unit, got %.100s",
                            Py_TYPE(other)->tp_name);
    fsdpc_unit *unit = unit_of(object);
    const fsdpc_unit *old = unit_of(other);
    unit->reshard_after_forward = old->reshard_after_forward;
    unit->reshard_after_backward = old->reshard_after_backward;
    unit->requires_sync = old->requires_sync;
    unit->requires_all_reduce = old->requires_all_reduce;
    unit->rank_dependent = old->rank_dependent;
    unit->divide_factor = old->divide_factor;
    ((fsdpc_py_unit *)object)->explicit_reshard = ((fsdpc_py_unit *)other)->explicit_reshard;
    Py_RETURN_NONE;
}

static PyObject *unit_set_divide_factor(PyObject *object, PyObject *arg)
{
    double factor = PyFloat_AsDouble(arg);
    if (factor == -1 && PyErr_Occurred())
        return NULL;
    unit_of(object)->divide_factor = factor;
    Py_RETURN_NONE;
}

static PyObject *unit_set_trainable(PyObject *object, PyObject *args)
{
    int param, trainable;
    if (!PyArg_ParseTuple(args, "ip", &param, &trainable) ||
        check_index(unit_of(object), param) < 0)
        return NULL;
    unit_of(object)->trainable[param] = trainable != 0;
    Py_RETURN_NONE;
}

static PyObject *unit_call(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
    if (n != 3 || !PyTuple_Check(args[1]) || !PyDict_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "call(forward, args, kwargs)");
        return NULL;
    }
    return fsdpc_py_unit_call((fsdpc_py_unit *)object, args[0], args[1], args[2]);
}

static PyObject *unit_get_has_root(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((fsdpc_py_unit *)object)->ref->root != NULL);
}

static PyObject *unit_get_prefetch(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromLong(((fsdpc_py_unit *)object)->ref->unit->prefetch);
}

static PyObject *unit_get_name(PyObject *object, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(unit_of(object)->name);
}

static int unit_set_name(PyObject *object, PyObject *value, void *unused)
{
    (void)unused;
    const char *name = value ? PyUnicode_AsUTF8(value) : NULL;
    if (!name) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a unit's name cannot be deleted");
        return -1;
    }
    char *copy = strdup(name);
    if (!copy) {
        PyErr_NoMemory();
        return -1;
    }
    free(unit_of(object)->name);
    unit_of(object)->name = copy;
    return 0;
}

/* (name, original dtype, shape) of each parameter */
static PyObject *unit_get_params(PyObject *object, void *unused)
{
    (void)unused;
    const fsdpc_layout *layout = unit_of(object)->layout;
    const fsdpc_py_state *state = PyType_GetModuleState(Py_TYPE(object));
    PyObject *list = PyList_New(layout->n_params);
    for (int i = 0; list && i < layout->n_params; i++) {
        const fsdpc_place *place = &layout->params[i];
        PyObject *item = NULL, *shape = PyTuple_New(place->ndim);
        for (int d = 0; shape && d < place->ndim; d++)
            PyTuple_SET_ITEM(shape, d, PyLong_FromSize_t(place->shape[d]));
        if (shape && !PyErr_Occurred())
            item = Py_BuildValue("(sON)", place->name, state->dtypes[place->dtype], shape);
        if (!item) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, item);
    }
    return list;
}

static PyObject *get_dtype(PyObject *object, bool given, fsdpc_dtype dtype)
{
    const fsdpc_py_state *state = PyType_GetModuleState(Py_TYPE(object));
    return Py_NewRef(given ? state->dtypes[dtype] : Py_None);
}

/* What the policy asked for is known by what the groups became; mixed groups keep their own. */
static PyObject *unit_get_param_dtype(PyObject *object, void *unused)
{
    (void)unused;
    const fsdpc_unit *unit = unit_of(object);
    for (int g = 0; g < unit->layout->n_groups; g++) {
        if (unit->groups[g].wire_dtype != unit->groups[g].plan->dtype)
            return get_dtype(object, true, unit->groups[g].wire_dtype);
    }
    return get_dtype(object, false, FSDPC_F32);
}

static PyObject *unit_get_reduce_dtype(PyObject *object, void *unused)
{
    (void)unused;
    const fsdpc_unit *unit = unit_of(object);
    for (int g = 0; g < unit->layout->n_groups; g++) {
        if (unit->groups[g].reduce_dtype != unit->groups[g].wire_dtype)
            return get_dtype(object, true, unit->groups[g].reduce_dtype);
    }
    return get_dtype(object, false, FSDPC_F32);
}

static PyObject *unit_get_rank_dependent(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(unit_of(object)->rank_dependent);
}

static PyObject *unit_get_keep_grads(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(unit_of(object)->keep_grads);
}

static PyObject *unit_get_mesh_shape(PyObject *object, void *unused)
{
    (void)unused;
    const fsdpc_mesh *mesh = &unit_of(object)->mesh;
    return Py_BuildValue("ii", mesh->replicate ? mesh->replicate->size : 1, mesh->shard->size);
}

static PyObject *unit_get_reshard_after_forward(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(unit_of(object)->reshard_after_forward);
}

static PyObject *unit_get_state(PyObject *object, void *unused)
{
    (void)unused;
    static const char *const names[] = {"sharded", "gathering", "full"};
    return PyUnicode_FromString(names[unit_of(object)->state]);
}

PyMethodDef fsdpc_py_unit_methods[] = {
    {"call", (PyCFunction)(void (*)(void))unit_call, METH_FASTCALL,
     "call(forward, args, kwargs): run a module's forward as this unit."},
    {"local", unit_local, METH_O, "local(i): this rank's rows of parameter i, original dtype."},
    {"grad", unit_grad, METH_O, "grad(i): their gradient, or None."},
    {"write", unit_write, METH_VARARGS, "write(i, full): take the own rows of a full value."},
    {"init", unit_init, METH_VARARGS, "init(i, kind, a, b, seed, stream): initialise the rows."},
    {"collect", unit_collect, METH_VARARGS, "collect(i, grads): the full value; collective."},
    {"zero_grad", unit_zero_grad, METH_NOARGS, "Drop the gradients."},
    {"bind", unit_bind, METH_VARARGS,
     "bind(i, full): let parameter i stand on a private full; None: on the unit again."},
    {"unshard", fsdpc_py_unit_unshard, METH_NOARGS,
     "Begin to gather and hold; collective. unshard_wait() ends it."},
    {"unshard_wait", fsdpc_py_unit_unshard_wait, METH_NOARGS, "Wait for what unshard began."},
    {"reshard", fsdpc_py_unit_reshard, METH_NOARGS, "Give up what unshard holds."},
    {"reset", fsdpc_py_unit_reset, METH_NOARGS, "Bring all units of the root back to sharded."},
    {"hold", fsdpc_py_unit_hold, METH_O, "hold(begin): fix the root's weights, or end that."},
    {"set_flag", fsdpc_py_unit_set_flag, METH_VARARGS,
     "set_flag(name, value): requires_sync, requires_all_reduce, reshard_after_backward, "
     "rank_dependent or is_last_backward; returns what it was."},
    {"set_ahead", fsdpc_py_unit_set_ahead, METH_VARARGS,
     "set_ahead(backward, units): what to gather ahead when this unit runs; None: as recorded."},
    {"set_prefetch", fsdpc_py_unit_set_prefetch, METH_O,
     "How many units ahead the root gathers; before there is one, the root that it becomes."},
    {"schedule", fsdpc_py_unit_schedule, METH_NOARGS,
     "(uses, acts, prefetch): recorded uses as (unit, backward), what the last step did as (unit, "
     "kind, backward), or None twice; distance."},
    {"set_reshard_after_forward", unit_set_reshard, METH_O, "Whether forward gives fulls up."},
    {"take_options", unit_take_options, METH_O, "What was set on a unit that this one replaces."},
    {"set_divide_factor", unit_set_divide_factor, METH_O, "By what summed gradients are divided."},
    {"set_trainable", unit_set_trainable, METH_VARARGS, "set_trainable(i, flag)."},
    {NULL, NULL, 0, NULL},
};

PyGetSetDef fsdpc_py_unit_getset[] = {
    {"has_root", unit_get_has_root, NULL, "Whether the outermost module has run.", NULL},
    {"prefetch", unit_get_prefetch, NULL,
     "Units that its root gathers ahead, as said before there was one.", NULL},
    {"name", unit_get_name, unit_set_name, "Shown in messages and traces.", NULL},
    {"params", unit_get_params, NULL, "(name, original dtype, shape) of each parameter.", NULL},
    {"param_dtype", unit_get_param_dtype, NULL, "Of fulls, or None: the original.", NULL},
    {"reduce_dtype", unit_get_reduce_dtype, NULL, "Of gradients, or None: that of fulls.", NULL},
    {"rank_dependent", unit_get_rank_dependent, NULL, "Whether some ranks alone may run it.", NULL},
    {"keep_grads", unit_get_keep_grads, NULL, "Whether it has a reduce buffer for good.", NULL},
    {"mesh_shape", unit_get_mesh_shape, NULL, "(replicas, ranks of a shard group).", NULL},
    {"reshard_after_forward", unit_get_reshard_after_forward, NULL,
     "Whether forward gives fulls up.", NULL},
    {"state", unit_get_state, NULL, "'sharded', 'gathering' or 'full'.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
