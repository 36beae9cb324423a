/* Optimizer: thin over csrc/engine/optim.c.
 *
 * An Optimizer keeps its units alive.  Plain tensors (modules that are not sharded) take the same
 * kernels through adamw_, so that a sharded model and its unsharded twin agree to the bit.
 */
#include "py/py_engine.h"

#include "ops/flat_ops.h"

typedef struct py_optimizer {
    PyObject_HEAD fsdpc_optim *optim;
    PyObject *units; /* list of Unit */
} py_optimizer;

static PyObject *optimizer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"kind", NULL};
    const char *kind;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s", names, &kind))
        return NULL;
    bool adamw = strcmp(kind, "adamw") == 0;
    if (!adamw && strcmp(kind, "adam") != 0)
        return PyErr_Format(PyExc_ValueError, "optimizers are adamw and adam, got '%s'", kind);
    fsdpc_runtime *runtime = fsdpc_py_runtime_of_type(type);
    if (!runtime)
        return NULL;
    py_optimizer *self = (py_optimizer *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->units = PyList_New(0);
    fsdpc_status status = fsdpc_optim_create(adamw ? FSDPC_OPTIM_ADAMW : FSDPC_OPTIM_ADAM,
                                             runtime->device, runtime->trace, &self->optim);
    if (!self->units || status != FSDPC_OK) {
        Py_DECREF(self);
        return status == FSDPC_OK ? NULL : fsdpc_py_raise(status);
    }
    return (PyObject *)self;
}

static int optimizer_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(((py_optimizer *)object)->units);
    Py_VISIT(Py_TYPE(object));
    return 0;
}

static int optimizer_clear(PyObject *object)
{
    py_optimizer *self = (py_optimizer *)object;
    fsdpc_optim_destroy(self->optim); /* before its units may go */
    self->optim = NULL;
    Py_CLEAR(self->units);
    return 0;
}

static void optimizer_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    optimizer_clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

static fsdpc_py_unit *unit_arg(PyObject *self, PyObject *object)
{
    return fsdpc_py_unit_of(PyType_GetModule(Py_TYPE(self)), object);
}

static PyObject *optimizer_add(PyObject *object, PyObject *args)
{
    py_optimizer *self = (py_optimizer *)object;
    PyObject *unit_object;
    int param, group;
    if (!PyArg_ParseTuple(args, "Oii", &unit_object, &param, &group))
        return NULL;
    fsdpc_py_unit *unit = unit_arg(object, unit_object);
    if (!unit)
        return NULL;
    fsdpc_status status = fsdpc_optim_add(self->optim, unit->ref->unit, param, group);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    int known = PySequence_Contains(self->units, unit_object);
    if (known < 0 || (known == 0 && PyList_Append(self->units, unit_object) < 0))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *optimizer_set_hyper(PyObject *object, PyObject *args)
{
    int group, maximize;
    fsdpc_hyper hyper;
    if (!PyArg_ParseTuple(args, "idddddp", &group, &hyper.lr, &hyper.beta1, &hyper.beta2,
                          &hyper.eps, &hyper.weight_decay, &maximize))
        return NULL;
    hyper.maximize = maximize != 0;
    fsdpc_status status = fsdpc_optim_set_hyper(((py_optimizer *)object)->optim, group, &hyper);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    Py_RETURN_NONE;
}

static PyObject *optimizer_step(PyObject *object, PyObject *unused)
{
    (void)unused;
    fsdpc_status status;
    PyObject *units = ((py_optimizer *)object)->units;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(units); i++) {
        if (fsdpc_py_unit_check_open((fsdpc_py_unit *)PyList_GET_ITEM(units, i)) < 0)
            return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    status = fsdpc_optim_step(((py_optimizer *)object)->optim);
    Py_END_ALLOW_THREADS;
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    Py_RETURN_NONE;
}

static PyObject *optimizer_state(PyObject *object, PyObject *args)
{
    PyObject *unit_object;
    int param, which;
    if (!PyArg_ParseTuple(args, "Oii", &unit_object, &param, &which))
        return NULL;
    fsdpc_py_unit *unit = unit_arg(object, unit_object);
    if (!unit)
        return NULL;
    if (which < 0 || which >= FSDPC_OPTIM_MAX_STATES)
        return PyErr_Format(PyExc_IndexError, "state %d; there are %d", which,
                            (int)FSDPC_OPTIM_MAX_STATES);
    fsdpc_piece piece;
    float *data;
    fsdpc_status status = fsdpc_optim_state(((py_optimizer *)object)->optim, unit->ref->unit, param,
                                            which, &piece, &data);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    /* A copy: the states belong to the optimizer, which may go before the tensor. */
    fsdpc_tensor *t;
    status = fsdpc_tensor_create(unit->ref->unit->device, FSDPC_F32, 1, &piece.numel, &t);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    memcpy(t->data, data, piece.numel * sizeof(float));
    return fsdpc_py_tensor_wrap(PyType_GetModule(Py_TYPE(object)), t);
}

static PyObject *optimizer_step_count(PyObject *object, PyObject *args)
{
    PyObject *unit_object;
    int param;
    if (!PyArg_ParseTuple(args, "Oi", &unit_object, &param))
        return NULL;
    fsdpc_py_unit *unit = unit_arg(object, unit_object);
    if (!unit)
        return NULL;
    int64_t *count;
    fsdpc_status status =
        fsdpc_optim_step_count(((py_optimizer *)object)->optim, unit->ref->unit, param, &count);
    return status == FSDPC_OK ? PyLong_FromLongLong(*count) : fsdpc_py_raise(status);
}

/* ---- functions ---- */

static PyObject *adamw_plain(PyObject *module, PyObject *args)
{
    PyObject *objects[4];
    long long step;
    int maximize;
    fsdpc_adamw_args a = {.grad_scale = 1, .decoupled = true};
    if (!PyArg_ParseTuple(args, "OOOOLdddddp", &objects[0], &objects[1], &objects[2], &objects[3],
                          &step, &a.lr, &a.beta1, &a.beta2, &a.eps, &a.weight_decay, &maximize))
        return NULL;
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    if (!runtime)
        return NULL;
    fsdpc_tensor *t[4];
    for (int i = 0; i < 4; i++) {
        if (!(t[i] = fsdpc_py_tensor_of(objects[i])))
            return NULL;
        if (t[i]->numel != t[0]->numel)
            return PyErr_Format(PyExc_ValueError, "adamw_: %zu elements and %zu", t[0]->numel,
                                t[i]->numel);
    }
    if (t[2]->dtype != FSDPC_F32 || t[3]->dtype != FSDPC_F32)
        return PyErr_Format(PyExc_TypeError, "adamw_: states must be float32");
    a.param = t[0]->data;
    a.param_dtype = t[0]->dtype;
    a.grad = t[1]->data;
    a.grad_dtype = t[1]->dtype;
    a.exp_avg = t[2]->data;
    a.exp_avg_sq = t[3]->data;
    a.numel = t[0]->numel;
    a.step = step;
    a.maximize = maximize != 0;
    fsdpc_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = fsdpc_flat_adamw(&a, runtime->compute);
    Py_END_ALLOW_THREADS;
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    Py_RETURN_NONE;
}

static PyMethodDef optimizer_methods[] = {
    {"add", optimizer_add, METH_VARARGS, "add(unit, i, group): take over a parameter."},
    {"set_hyper", optimizer_set_hyper, METH_VARARGS,
     "set_hyper(group, lr, beta1, beta2, eps, weight_decay, maximize)"},
    {"step", optimizer_step, METH_NOARGS, "One update; collective."},
    {"state", optimizer_state, METH_VARARGS, "state(unit, i, which): a flat copy of the rows."},
    {"step_count", optimizer_step_count, METH_VARARGS, "step_count(unit, i)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot optimizer_slots[] = {
    {Py_tp_new, optimizer_new},
    {Py_tp_dealloc, optimizer_dealloc},
    {Py_tp_traverse, optimizer_traverse},
    {Py_tp_clear, optimizer_clear},
    {Py_tp_methods, optimizer_methods},
    {Py_tp_doc, "Optimizer(kind): 'adamw' or 'adam'."},
    {0, NULL},
};

static PyType_Spec optimizer_spec = {
    .name = "fsdpc._core.Optimizer",
    .basicsize = sizeof(py_optimizer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = optimizer_slots,
};

static PyMethodDef functions[] = {
    {"adamw_", adamw_plain, METH_VARARGS,
     "adamw_(p, grad, exp_avg, exp_avg_sq, step, lr, b1, b2, eps, weight_decay, maximize)"},
    {NULL, NULL, 0, NULL},
};

int fsdpc_py_optim_setup(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &optimizer_spec, NULL);
    if (!type)
        return -1;
    int result = PyModule_AddObjectRef(module, "Optimizer", type);
    Py_DECREF(type);
    return result < 0 ? -1 : PyModule_AddFunctions(module, functions);
}
