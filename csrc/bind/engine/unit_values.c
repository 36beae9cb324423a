/* Unit: access to a parameter's local shard and unsharded values, and the memory of its tensor.
 */
#include "bind/engine.h"

#include "ops/flat_ops.h"

static fsdpc_unit *unit_of(PyObject *object)
{
    return ((fsdpc_py_unit *)object)->ref->unit;
}

static const fsdpc_place *place_of(PyObject *object, int param)
{
    return &fsdpc_unit_layout(unit_of(object))->params[param];
}

int fsdpc_py_unit_check_param(const fsdpc_py_unit *unit, int param)
{
    const fsdpc_layout *layout = fsdpc_unit_layout(unit->ref->unit);
    if (param >= 0 && param < layout->n_params)
        return 0;
    PyErr_Format(PyExc_IndexError, "parameter %d of unit '%s', which has %d", param,
                 fsdpc_unit_name(unit->ref->unit), layout->n_params);
    return -1;
}

int fsdpc_py_unit_param_arg(PyObject *object, PyObject *arg)
{
    int param = (int)PyLong_AsLong(arg);
    if (param == -1 && PyErr_Occurred())
        return -1;
    return fsdpc_py_unit_check_param((fsdpc_py_unit *)object, param) < 0 ? -1 : param;
}

int fsdpc_py_local_shape(const fsdpc_place *place, const fsdpc_local_shard *local, size_t *shape)
{
    size_t row = place->numel && place->ndim > 0 ? place->numel / place->shape[0] : 1;
    memcpy(shape, place->shape, sizeof place->shape);
    if (place->ndim == 0 && local->numel == 0) { /* a scalar that another rank owns */
        shape[0] = 0;
        return 1;
    }
    if (place->ndim == 0 || local->numel == place->numel)
        return place->ndim;
    if (local->first % row == 0 && local->numel % row == 0) {
        shape[0] = local->numel / row;
        return place->ndim;
    }
    for (int d = 0; d < place->ndim - 1; d++)
        shape[d] = 1;
    shape[place->ndim - 1] = local->numel;
    return place->ndim;
}

static PyObject *local_tensor(PyObject *object, int param, const fsdpc_local_shard *local,
                              fsdpc_dtype dtype, void *data)
{
    size_t shape[FSDPC_MAX_DIMS];
    int ndim = fsdpc_py_local_shape(place_of(object, param), local, shape);
    return fsdpc_py_unit_tensor(PyType_GetModule(Py_TYPE(object)), ((fsdpc_py_unit *)object)->ref,
                                dtype, ndim, shape, data);
}

static PyObject *unit_local(PyObject *object, PyObject *arg)
{
    int param = fsdpc_py_unit_param_arg(object, arg);
    if (param < 0)
        return NULL;
    fsdpc_local_shard local;
    if (fsdpc_py_check(fsdpc_unit_check_master(unit_of(object), param)) < 0 ||
        fsdpc_py_check(fsdpc_unit_mark_shared(unit_of(object))) < 0)
        return NULL;
    void *data = fsdpc_unit_master(unit_of(object), param, &local);
    return local_tensor(object, param, &local, place_of(object, param)->dtype, data);
}

/* Parses a method's (param, value) arguments; returns the index, or -1 with an exception. */
static int param_and_value(PyObject *object, PyObject *args, PyObject **value_out)
{
    int param;
    if (!PyArg_ParseTuple(args, "iO", &param, value_out) ||
        fsdpc_py_unit_check_param((fsdpc_py_unit *)object, param) < 0)
        return -1;
    return param;
}

static PyObject *unit_write(PyObject *object, PyObject *args)
{
    PyObject *value;
    int param = param_and_value(object, args, &value);
    fsdpc_tensor *t = param < 0 ? NULL : fsdpc_py_tensor_of(value);
    if (!t)
        return NULL;
    const fsdpc_place *place = place_of(object, param);
    fsdpc_status status = fsdpc_tensor_check(t);
    if (status == FSDPC_OK && t->numel != place->numel)
        status = fsdpc_fail(FSDPC_ERR_SHAPE, "parameter '%s' has %zu elements, the value %zu",
                            place->name, place->numel, t->numel);
    if (status == FSDPC_OK && t->dtype != place->dtype &&
        !(fsdpc_dtype_is_float(t->dtype) && fsdpc_dtype_is_float(place->dtype)))
        status = fsdpc_fail(FSDPC_ERR_DTYPE, "parameter '%s' cannot take %s values", place->name,
                            fsdpc_dtype_name(t->dtype));
    if (status == FSDPC_OK)
        status = fsdpc_unit_write(unit_of(object), param, t->data, t->dtype);
    return fsdpc_py_none(status);
}

static PyObject *unit_init(PyObject *object, PyObject *args)
{
    int param;
    fsdpc_init_kind kind;
    const char *name;
    double a, b;
    unsigned long long seed, stream;
    if (!PyArg_ParseTuple(args, "isddKK", &param, &name, &a, &b, &seed, &stream) ||
        fsdpc_py_unit_check_param((fsdpc_py_unit *)object, param) < 0 ||
        fsdpc_py_init_kind(name, &kind) < 0)
        return NULL;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(
        status = fsdpc_unit_init_param(unit_of(object), param, kind, a, b, seed, stream));
    return fsdpc_py_none(status);
}

/* Returns the caller's tensor, or a new one if none was passed; NULL with an exception if it does
 * not match. */
static fsdpc_tensor *destination(const fsdpc_unit *unit, const fsdpc_place *place,
                                 fsdpc_dtype dtype, PyObject *given)
{
    fsdpc_tensor *t = NULL;
    if (!given) {
        fsdpc_py_check(
            fsdpc_tensor_create(fsdpc_unit_device(unit), dtype, place->ndim, place->shape, &t));
        return t;
    }
    t = fsdpc_py_tensor_of(given);
    if (!t || fsdpc_py_check(fsdpc_tensor_check_write(t)) < 0)
        return NULL;
    if (t->numel == place->numel && t->dtype == dtype)
        return t;
    PyErr_Format(PyExc_ValueError,
                 "the destination has %zu elements of %s, and the value %zu of %s", t->numel,
                 fsdpc_dtype_name(t->dtype), place->numel, fsdpc_dtype_name(dtype));
    return NULL;
}

static PyObject *unit_collect(PyObject *object, PyObject *args)
{
    int param;
    PyObject *what, *given = NULL;
    if (!PyArg_ParseTuple(args, "iO|O", &param, &what, &given) ||
        fsdpc_py_unit_check_param((fsdpc_py_unit *)object, param) < 0 ||
        fsdpc_py_unit_check_open((fsdpc_py_unit *)object) < 0)
        return NULL;
    fsdpc_unit *unit = unit_of(object);
    const fsdpc_place *place = place_of(object, param);
    const bool grads = what == Py_True;
    fsdpc_dtype dtype = grads ? fsdpc_unit_flat_with(unit, param).grad_dtype : place->dtype;
    fsdpc_tensor *rows = NULL;
    if (!PyBool_Check(what)) {
        const fsdpc_local_shard local = fsdpc_layout_local_shard(
            fsdpc_unit_layout(unit), param, fsdpc_unit_mesh(unit)->shard->rank);
        rows = fsdpc_py_tensor_of(what);
        if (!rows)
            return NULL;
        if (rows->numel != local.numel)
            return PyErr_Format(PyExc_ValueError, "%zu elements, and this rank's rows have %zu",
                                rows->numel, local.numel);
        dtype = rows->dtype;
    }
    given = given == Py_None ? NULL : given;
    fsdpc_tensor *t = destination(unit, place, dtype, given);
    if (!t)
        return NULL;
    fsdpc_status status;
    if (rows)
        FSDPC_PY_WITHOUT_GIL(status =
                                 fsdpc_unit_collect_rows(unit, param, dtype, rows->data, t->data));
    else
        FSDPC_PY_WITHOUT_GIL(status = fsdpc_unit_collect(unit, param, grads, t->data));
    if (given)
        return status == FSDPC_OK ? Py_NewRef(given) : fsdpc_py_none(status);
    return fsdpc_py_result(PyType_GetModuleState(Py_TYPE(object)), status, t);
}

static PyObject *unit_bind(PyObject *object, PyObject *args)
{
    PyObject *value;
    int param = param_and_value(object, args, &value);
    if (param < 0)
        return NULL;
    fsdpc_py_unit *self = (fsdpc_py_unit *)object;
    fsdpc_tensor *own = self->params[param];
    if (value == Py_None)
        return fsdpc_py_none(fsdpc_py_unit_bind_param(self->ref, param, own));
    fsdpc_tensor *t = fsdpc_py_tensor_of(value);
    if (!t)
        return NULL;
    if (t->numel != own->numel)
        return PyErr_Format(PyExc_ValueError, "%zu elements for a parameter of %zu", t->numel,
                            own->numel);
    fsdpc_status status = fsdpc_tensor_bind(own, t->dtype, t->storage, t->data);
    own->guard = (fsdpc_guard){0};
    own->sink = (fsdpc_grad_sink){0};
    return fsdpc_py_none(status);
}

/* (name, original dtype, shape) per parameter */
static PyObject *get_params(PyObject *object, void *Py_UNUSED(unused))
{
    const fsdpc_layout *layout = fsdpc_unit_layout(unit_of(object));
    const fsdpc_py_state *state = PyType_GetModuleState(Py_TYPE(object));
    PyObject *list = PyList_New(layout->n_params);
    for (int i = 0; list && i < layout->n_params; i++) {
        const fsdpc_place *place = &layout->params[i];
        fsdpc_py_put(&list, i,
                     Py_BuildValue("(sON)", place->name, state->dtypes[place->dtype],
                                   fsdpc_py_shape_tuple(place->ndim, place->shape)));
    }
    return list;
}

PyMethodDef fsdpc_py_unit_value_methods[] = {
    FSDPC_PY_METHOD(Unit, local, unit_local, METH_O),
    FSDPC_PY_METHOD(Unit, write, unit_write, METH_VARARGS),
    FSDPC_PY_METHOD(Unit, init, unit_init, METH_VARARGS),
    FSDPC_PY_METHOD(Unit, collect, unit_collect, METH_VARARGS),
    FSDPC_PY_METHOD(Unit, bind, unit_bind, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};

static PyObject *get_offload(PyObject *object, void *Py_UNUSED(closure))
{
    const fsdpc_offload offload = fsdpc_unit_offload(unit_of(object));
    if (!offload.tier && !offload.host)
        Py_RETURN_NONE;
    return Py_BuildValue("(zOOOOd)", offload.host ? "host" : NULL,
                         offload.params ? Py_True : Py_False, offload.masters ? Py_True : Py_False,
                         offload.states ? Py_True : Py_False,
                         offload.gradients ? Py_True : Py_False, offload.part);
}

PyGetSetDef fsdpc_py_unit_value_getset[] = {
    FSDPC_PY_ATTRIBUTE(Unit, offload, get_offload, NULL),
    FSDPC_PY_ATTRIBUTE(Unit, params, get_params, NULL),
    {NULL, NULL, NULL, NULL, NULL},
};
