/* Optimizer: a thin layer over csrc/engine/optim.c.
 *
 * An Optimizer keeps its units alive, and the tensors over its states keep the Optimizer alive.
 * Plain tensors (those of unsharded modules) use the same kernels through step_alone, so a sharded
 * model and its unsharded twin match bit for bit.
 */
#include "bind/engine.h"

#include "bind/engine/options.h"
#include "engine/optim_backward.h"
#include "ops/flat_ops.h"
#include "ops/matrix_rules.h"

typedef struct py_optimizer {
    PyObject_HEAD fsdpc_optim *optim;
    fsdpc_optim_kind kind;
    bool coded;        /* states may be block codes */
    PyObject *units;   /* list of Unit */
    PyObject *refresh; /* sets the options before a step inside backward; NULL: none */
} py_optimizer;

static PyObject *optimizer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    FSDPC_PY_KEYWORDS(names, "kind", "state_dtype", "seed", "min_coded_numel");
    const char *name;
    PyObject *dtype_object = NULL;
    unsigned long long seed = 0;
    Py_ssize_t min_coded = 0;
    fsdpc_state_format format = {.dtype = FSDPC_F32};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s|OKn", names, &name, &dtype_object, &seed,
                                     &min_coded) ||
        fsdpc_py_dtype_optional(dtype_object, &format.dtype) < 0)
        return NULL;
    int kind = fsdpc_optim_find(name);
    if (kind == FSDPC_OPTIM_KINDS)
        return PyErr_Format(PyExc_ValueError, "no optimizer is named '%s'", name);
    fsdpc_runtime *runtime = fsdpc_py_runtime_of_type(type);
    if (!runtime)
        return NULL;
    py_optimizer *self = (py_optimizer *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    format.min_coded_numel = (size_t)min_coded;
    self->units = PyList_New(0);
    fsdpc_status status = fsdpc_optim_create(kind, runtime->device, runtime->trace, &self->optim);
    if (status == FSDPC_OK)
        status = fsdpc_optim_set_format(self->optim, &format, seed);
    self->coded = format.dtype == FSDPC_U8;
    self->kind = (fsdpc_optim_kind)kind;
    if (!self->units || status != FSDPC_OK) {
        Py_DECREF(self);
        return status == FSDPC_OK ? NULL : fsdpc_py_raise(status);
    }
    return (PyObject *)self;
}

static int optimizer_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(((py_optimizer *)object)->units);
    Py_VISIT(((py_optimizer *)object)->refresh);
    Py_VISIT(Py_TYPE(object));
    return 0;
}

static int optimizer_clear(PyObject *object)
{
    py_optimizer *self = (py_optimizer *)object;
    fsdpc_optim_destroy(self->optim); /* before its units may be freed */
    self->optim = NULL;
    Py_CLEAR(self->units);
    Py_CLEAR(self->refresh);
    return 0;
}

static void optimizer_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    optimizer_clear(object);
    fsdpc_py_free(object);
}

fsdpc_optim *fsdpc_py_optim_of(PyObject *module, PyObject *object)
{
    fsdpc_py_state *state = PyModule_GetState(module);
    if (Py_IS_TYPE(object, (PyTypeObject *)state->optimizer_type))
        return ((py_optimizer *)object)->optim;
    PyErr_Format(PyExc_TypeError, "expected an Optimizer, got %.100s", Py_TYPE(object)->tp_name);
    return NULL;
}

/* Returns the unit passed as an argument, which must have a parameter `param`, or NULL with an
 * exception set. */
static fsdpc_py_unit *unit_arg(PyObject *self, PyObject *object, int param)
{
    fsdpc_py_unit *unit = fsdpc_py_unit_of(PyType_GetModule(Py_TYPE(self)), object);
    return unit && fsdpc_py_unit_check_param(unit, param) == 0 ? unit : NULL;
}

/* Parses (unit, param); returns NULL with an exception on failure. */
static fsdpc_unit *param_args(PyObject *object, PyObject *args, int *param)
{
    PyObject *unit_object;
    if (!PyArg_ParseTuple(args, "Oi", &unit_object, param))
        return NULL;
    fsdpc_py_unit *unit = unit_arg(object, unit_object, *param);
    return unit ? unit->ref->unit : NULL;
}

static PyObject *optimizer_add(PyObject *object, PyObject *args)
{
    py_optimizer *self = (py_optimizer *)object;
    PyObject *unit_object;
    int param, group;
    if (!PyArg_ParseTuple(args, "Oii", &unit_object, &param, &group))
        return NULL;
    fsdpc_py_unit *unit = unit_arg(object, unit_object, param);
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

static PyObject *optimizer_take_number(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromUnsignedLong(fsdpc_optim_take_number(((py_optimizer *)object)->optim));
}

/* ---- options ---- */

static int read_options(const py_optimizer *self, PyObject *options, fsdpc_hyper *out,
                        fsdpc_optim_kind *kind)
{
    return fsdpc_py_read_options(options, self->kind, self->coded, out, kind);
}

static PyObject *optimizer_check(PyObject *object, PyObject *args, PyObject *kwargs)
{
    fsdpc_hyper hyper = {0};
    fsdpc_optim_kind kind;
    if (!PyArg_ParseTuple(args, "") ||
        read_options((py_optimizer *)object, kwargs, &hyper, &kind) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *optimizer_set_hyper(PyObject *object, PyObject *args, PyObject *kwargs)
{
    int group;
    fsdpc_hyper hyper = {0};
    fsdpc_optim_kind kind;
    fsdpc_optim *optim = ((py_optimizer *)object)->optim;
    if (!PyArg_ParseTuple(args, "i", &group) ||
        read_options((py_optimizer *)object, kwargs, &hyper, &kind) < 0)
        return NULL;
    fsdpc_status status = fsdpc_optim_set_kind(optim, group, kind);
    if (status == FSDPC_OK)
        status = fsdpc_optim_set_hyper(optim, group, &hyper);
    return fsdpc_py_none(status);
}

static PyObject *optimizers(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *rows = PyDict_New();
    for (int kind = 0; rows && kind < FSDPC_OPTIM_KINDS; kind++) {
        const fsdpc_optim_row *row = &fsdpc_optim_table[kind];
        fsdpc_hyper hyper = {0};
        int states = fsdpc_optim_states((fsdpc_optim_kind)kind, &hyper);
        PyObject *entry = Py_BuildValue("(si)", row->hypers, states);
        if (!entry || PyDict_SetItemString(rows, row->name, entry) < 0)
            Py_CLEAR(rows);
        Py_XDECREF(entry);
    }
    return rows;
}

/* Returns a tuple with a word for each state that the options of a group require. */
static PyObject *words_of_states(const py_optimizer *self, PyObject *arg,
                                 const char *(*word)(fsdpc_optim_kind, const fsdpc_hyper *, int))
{
    int group = (int)PyLong_AsLong(arg);
    if (group == -1 && PyErr_Occurred())
        return NULL;
    const fsdpc_hyper *hyper = fsdpc_optim_hyper(self->optim, group);
    if (!hyper)
        return PyErr_Format(PyExc_IndexError, "parameter group %d has no hyper-parameters", group);
    fsdpc_optim_kind kind = fsdpc_optim_group_kind(self->optim, group);
    int n = fsdpc_optim_states(kind, hyper);
    PyObject *words = PyTuple_New(n);
    for (int s = 0; words && s < n; s++)
        fsdpc_py_put(&words, s, PyUnicode_FromString(word(kind, hyper, s)));
    return words;
}

static const char *state_name(fsdpc_optim_kind kind, const fsdpc_hyper *hyper, int state)
{
    (void)hyper;
    return fsdpc_optim_state_name(kind, state);
}

static const char *state_code(fsdpc_optim_kind kind, const fsdpc_hyper *hyper, int state)
{
    return fsdpc_py_code_name(fsdpc_state_code(kind, hyper, state));
}

static PyObject *optimizer_state_names(PyObject *object, PyObject *arg)
{
    return words_of_states((py_optimizer *)object, arg, state_name);
}

static PyObject *optimizer_state_codes(PyObject *object, PyObject *arg)
{
    return words_of_states((py_optimizer *)object, arg, state_code);
}

static PyObject *optimizer_step(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_status status;
    PyObject *units = ((py_optimizer *)object)->units;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(units); i++) {
        if (fsdpc_py_unit_check_open((fsdpc_py_unit *)PyList_GET_ITEM(units, i)) < 0)
            return NULL;
    }
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_optim_step(((py_optimizer *)object)->optim));
    return fsdpc_py_none(status);
}

static PyObject *optimizer_outer_begin(PyObject *object, PyObject *arg)
{
    fsdpc_codec codec;
    const char *name = PyUnicode_AsUTF8(arg);
    if (!name || fsdpc_py_check(fsdpc_codec_find(name, &codec)) < 0)
        return NULL;
    return fsdpc_py_none(fsdpc_optim_outer_begin(((py_optimizer *)object)->optim, codec));
}

static PyObject *optimizer_outer_step(PyObject *object, PyObject *arg)
{
    int group = (int)PyLong_AsLong(arg);
    if ((group == -1 && PyErr_Occurred()) ||
        fsdpc_py_check(fsdpc_optim_outer_choose(((py_optimizer *)object)->optim, group)) < 0)
        return NULL;
    return optimizer_step(object, NULL);
}

static fsdpc_status call_refresh(void *arg)
{
    py_optimizer *self = arg;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *done = PyObject_CallNoArgs(self->refresh);
    Py_XDECREF(done);
    PyGILState_Release(gil);
    return done ? FSDPC_OK : FSDPC_ERR_CALLBACK;
}

static PyObject *optimizer_step_in_backward(PyObject *object, PyObject *refresh)
{
    py_optimizer *self = (py_optimizer *)object;
    if (refresh == Py_None)
        return fsdpc_py_none(fsdpc_optim_leave_backward(self->optim));
    Py_XSETREF(self->refresh, Py_NewRef(refresh));
    return fsdpc_py_none(fsdpc_optim_enter_backward(self->optim, call_refresh, self));
}

/* Steps parameters that belong to no unit. */
static PyObject *optimizer_step_alone(PyObject *object, PyObject *args)
{
    py_optimizer *self = (py_optimizer *)object;
    PyObject *p_object, *grad_object, *states, *maxima;
    Py_ssize_t code_row;
    int group, copy_gradient;
    unsigned int number;
    long long step;
    if (!PyArg_ParseTuple(args, "iILpOOO!O!n", &group, &number, &step, &copy_gradient, &p_object,
                          &grad_object, &PyTuple_Type, &states, &PyTuple_Type, &maxima, &code_row))
        return NULL;
    const fsdpc_hyper *hyper = fsdpc_optim_hyper(self->optim, group);
    fsdpc_runtime *runtime = fsdpc_py_runtime_of_type(Py_TYPE(object));
    fsdpc_tensor *p = fsdpc_py_tensor_of(p_object);
    fsdpc_tensor *grad = p ? fsdpc_py_tensor_of(grad_object) : NULL;
    if (!runtime || !grad)
        return NULL;
    fsdpc_optim_kind kind = fsdpc_optim_group_kind(self->optim, group);
    const fsdpc_local_shard all = {.numel = p->numel};
    bool adafactor = kind == FSDPC_OPTIM_ADAFACTOR, factored = adafactor && p->ndim >= 2;
    int n_states = !hyper ? -1 : factored ? 2 * (p->numel > 0) : fsdpc_optim_states(kind, hyper);
    if (PyTuple_GET_SIZE(states) != n_states)
        return PyErr_Format(PyExc_ValueError, "group %d has no hyper-parameters, or not %zd states",
                            group, PyTuple_GET_SIZE(states));
    const fsdpc_factors f = fsdpc_factors_of(p->ndim, p->shape, &all);
    fsdpc_step_args a = {.param = p->data,
                         .param_dtype = p->dtype,
                         .grad = grad->data,
                         .grad_dtype = grad->dtype,
                         .numel = p->numel,
                         .grad_scale = 1,
                         .step = step,
                         .copy_gradient = copy_gradient != 0,
                         .number = number,
                         .code_row = (size_t)code_row};
    bool fits = grad->numel == p->numel && fsdpc_py_code_fits(p->numel, code_row);
    for (Py_ssize_t i = 0; code_row && i < PyTuple_GET_SIZE(maxima); i++) {
        fsdpc_tensor *t =
            i < FSDPC_OPTIM_MAX_STATES ? fsdpc_py_tensor_of(PyTuple_GET_ITEM(maxima, i)) : NULL;
        if (!t)
            return NULL;
        fits &= t->dtype == FSDPC_F32 && t->numel == fsdpc_code_blocks(p->numel, a.code_row);
        a.maxima[i] = t->data;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(states); i++) {
        fsdpc_tensor *state = fsdpc_py_tensor_of(PyTuple_GET_ITEM(states, i));
        if (!state)
            return NULL;
        size_t numel = !factored ? p->numel : i == 0 ? f.n_rows : f.n_cols;
        fits &= state->numel == numel && (i == 0 || state->dtype == a.state_dtype);
        a.states[i] = state->data;
        a.state_dtype = state->dtype;
    }
    fits &= (a.state_dtype == FSDPC_U8) == (code_row > 0);
    if (!fits)
        return PyErr_Format(PyExc_ValueError,
                            "parameter, gradient and states have one number of elements, and the "
                            "states one dtype");
    fsdpc_status status = fsdpc_tensor_check_write(p);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    if (adafactor || fsdpc_matrix_rule_of(kind)) {
        char name[32];
        snprintf(name, sizeof name, "number %u", number);
        FSDPC_PY_WITHOUT_GIL(status =
                                 fsdpc_optim_step_whole_alone(self->optim, group, &a, name, p->ndim,
                                                              p->shape, runtime->compute));
        return fsdpc_py_none(status);
    }
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_optim_step_alone(self->optim, group, &a, runtime->compute));
    return fsdpc_py_none(status);
}

/* ---- states ---- */

/* The objects that a state's tensor keeps alive: the optimizer and, through it, the unit. */
typedef struct exported_state {
    PyObject *optimizer;
    fsdpc_unit_ref *unit;
} exported_state;

static void release_state(fsdpc_storage *storage)
{
    exported_state *exported = storage->owner;
    PyGILState_STATE gil = PyGILState_Ensure();
    fsdpc_unit_export(exported->unit->unit, -1);
    if (((py_optimizer *)exported->optimizer)->optim)
        fsdpc_optim_export(((py_optimizer *)exported->optimizer)->optim, -1);
    fsdpc_unit_ref_release(exported->unit);
    Py_DECREF(exported->optimizer);
    PyMem_Free(exported);
    PyGILState_Release(gil);
}

/* Parses (unit, i, which, write=False); returns NULL with an exception on failure. */
static fsdpc_unit *state_args(PyObject *object, PyObject *args, int *param, int *which, int *write)
{
    PyObject *unit_object;
    if (!PyArg_ParseTuple(args, "Oii|p", &unit_object, param, which, write))
        return NULL;
    fsdpc_py_unit *unit = unit_arg(object, unit_object, *param);
    if (unit && (*which < 0 || *which >= FSDPC_OPTIM_MAX_STATES)) {
        PyErr_Format(PyExc_IndexError, "state %d; there are %d", *which,
                     (int)FSDPC_OPTIM_MAX_STATES);
        return NULL;
    }
    return unit ? unit->ref->unit : NULL;
}

/* Returns a tensor over memory of the optimizer. */
static PyObject *export_state(PyObject *object, PyObject *unit_object, fsdpc_dtype dtype, int ndim,
                              const size_t *shape, void *data)
{
    fsdpc_unit_ref *unit = ((fsdpc_py_unit *)unit_object)->ref;
    fsdpc_tensor *t;
    exported_state *exported = fsdpc_py_array(1, sizeof *exported);
    if (!exported)
        return NULL;
    *exported = (exported_state){object, unit};
    fsdpc_status status = fsdpc_tensor_wrap(fsdpc_unit_device(unit->unit), dtype, ndim, shape, data,
                                            release_state, exported, &t);
    if (status != FSDPC_OK) {
        PyMem_Free(exported);
        return fsdpc_py_raise(status);
    }
    Py_INCREF(object);
    fsdpc_unit_export(fsdpc_unit_ref_acquire(unit)->unit, 1);
    fsdpc_optim_export(((py_optimizer *)object)->optim, 1);
    return fsdpc_py_tensor_wrap(PyType_GetModule(Py_TYPE(object)), t);
}

static PyObject *optimizer_state(PyObject *object, PyObject *args)
{
    int param, which, write = 0;
    fsdpc_optim_view view;
    fsdpc_unit *unit = state_args(object, args, &param, &which, &write);
    if (!unit)
        return NULL;
    fsdpc_status status =
        fsdpc_optim_state(((py_optimizer *)object)->optim, unit, param, which, write != 0, &view);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    if (!view.data)
        Py_RETURN_NONE;
    size_t shape[FSDPC_MAX_DIMS];
    int ndim = fsdpc_py_local_shape(&fsdpc_unit_layout(unit)->params[param], &view.local, shape);
    return export_state(object, PyTuple_GET_ITEM(args, 0), view.dtype, ndim, shape, view.data);
}

static PyObject *optimizer_maxima(PyObject *object, PyObject *args)
{
    int param, which, write = 0;
    fsdpc_optim_view view;
    fsdpc_unit *unit = state_args(object, args, &param, &which, &write);
    if (!unit)
        return NULL;
    fsdpc_status status =
        fsdpc_optim_state(((py_optimizer *)object)->optim, unit, param, which, write != 0, &view);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    if (!view.codes.maxima)
        Py_RETURN_NONE;
    size_t blocks = fsdpc_code_blocks(view.local.numel, view.codes.row);
    return export_state(object, PyTuple_GET_ITEM(args, 0), FSDPC_F32, 1, &blocks,
                        view.codes.maxima);
}

/* Returns means by row (which: 0) or by column, own or collected. */
static PyObject *make_means(PyObject *object, PyObject *unit_object, const fsdpc_factor_view *view,
                            const fsdpc_place *place, int which, bool whole)
{
    fsdpc_unit *unit = ((fsdpc_py_unit *)unit_object)->ref->unit;
    float *own = which == 0 ? view->row_var : view->col_var;
    size_t shape[FSDPC_MAX_DIMS];
    bool all = whole || (which == 1 && view->factors.spread);
    int ndim = fsdpc_py_local_shape(place, &view->local, shape);
    shape[0] = all ? place->shape[0] : shape[0];
    shape[which == 0 ? ndim - 1 : ndim - 2] = 1;
    if (!whole)
        return export_state(object, unit_object, FSDPC_F32, ndim, shape, own);
    fsdpc_tensor *t = NULL;
    fsdpc_status status = fsdpc_tensor_create(fsdpc_unit_device(unit), FSDPC_F32, ndim, shape, &t);
    if (status == FSDPC_OK)
        FSDPC_PY_WITHOUT_GIL(
            status = fsdpc_optim_collect_means(unit, view, which == 1, t->data, t->numel));
    return fsdpc_py_result(PyType_GetModuleState(Py_TYPE(object)), status, t);
}

static PyObject *optimizer_factors(PyObject *object, PyObject *args)
{
    PyObject *unit_object;
    int param, whole = 0;
    fsdpc_factor_view view;
    if (!PyArg_ParseTuple(args, "Oi|p", &unit_object, &param, &whole))
        return NULL;
    fsdpc_py_unit *unit = unit_arg(object, unit_object, param);
    if (!unit)
        return NULL;
    const fsdpc_place *place = &fsdpc_unit_layout(unit->ref->unit)->params[param];
    if (fsdpc_py_check(fsdpc_optim_factors(((py_optimizer *)object)->optim, unit->ref->unit, param,
                                           &view)) < 0)
        return NULL;
    if (!view.row_var)
        return PyErr_Format(PyExc_KeyError, "'%s' has no means by row and by column", place->name);
    PyObject *found = PyTuple_New(2);
    for (int which = 0; found && which < 2; which++)
        fsdpc_py_put(&found, which, make_means(object, unit_object, &view, place, which, whole));
    return found;
}

static PyObject *optimizer_make_states(PyObject *object, PyObject *args)
{
    int param;
    fsdpc_unit *unit = param_args(object, args, &param);
    if (!unit)
        return NULL;
    return fsdpc_py_none(fsdpc_optim_make_states(((py_optimizer *)object)->optim, unit, param));
}

static PyObject *optimizer_write(PyObject *object, PyObject *args)
{
    PyObject *unit_object, *value;
    int param, which;
    if (!PyArg_ParseTuple(args, "OiiO", &unit_object, &param, &which, &value))
        return NULL;
    fsdpc_py_unit *unit = unit_arg(object, unit_object, param);
    fsdpc_tensor *t = unit ? fsdpc_py_tensor_of(value) : NULL;
    if (!t)
        return NULL;
    const fsdpc_place *place = &fsdpc_unit_layout(unit->ref->unit)->params[param];
    if (which < 0 || which >= FSDPC_OPTIM_MAX_STATES || t->numel != place->numel ||
        !fsdpc_dtype_is_float(t->dtype))
        return PyErr_Format(PyExc_ValueError,
                            "state %d of parameter '%s', %zu elements, from %zu of %s", which,
                            place->name, place->numel, t->numel, fsdpc_dtype_name(t->dtype));
    fsdpc_status status = fsdpc_tensor_check(t);
    if (status == FSDPC_OK)
        status = fsdpc_optim_write(((py_optimizer *)object)->optim, unit->ref->unit, param, which,
                                   t->data, t->dtype);
    return fsdpc_py_none(status);
}

static PyObject *optimizer_collect(PyObject *object, PyObject *args)
{
    int param, which, write = 0;
    fsdpc_optim_view view;
    fsdpc_optim *optim = ((py_optimizer *)object)->optim;
    fsdpc_unit *unit = state_args(object, args, &param, &which, &write);
    if (!unit || fsdpc_py_unit_check_open((fsdpc_py_unit *)PyTuple_GET_ITEM(args, 0)) < 0)
        return NULL;
    const fsdpc_place *place = &fsdpc_unit_layout(unit)->params[param];
    fsdpc_tensor *t = NULL;
    fsdpc_status status = fsdpc_optim_state(optim, unit, param, which, false, &view);
    if (status == FSDPC_OK)
        status = fsdpc_tensor_create(fsdpc_unit_device(unit),
                                     view.dtype == FSDPC_U8 ? FSDPC_F32 : view.dtype, place->ndim,
                                     place->shape, &t);
    if (status == FSDPC_OK)
        FSDPC_PY_WITHOUT_GIL(status = fsdpc_optim_collect(optim, unit, param, which, t->data));
    return fsdpc_py_result(PyType_GetModuleState(Py_TYPE(object)), status, t);
}

static PyObject *optimizer_step_count(PyObject *object, PyObject *args)
{
    int param;
    fsdpc_unit *unit = param_args(object, args, &param);
    if (!unit)
        return NULL;
    int64_t count;
    fsdpc_status status =
        fsdpc_optim_step_count(((py_optimizer *)object)->optim, unit, param, &count);
    return status == FSDPC_OK ? PyLong_FromLongLong(count) : fsdpc_py_raise(status);
}

static PyObject *optimizer_set_step_count(PyObject *object, PyObject *args)
{
    PyObject *unit_object;
    int param;
    long long steps;
    if (!PyArg_ParseTuple(args, "OiL", &unit_object, &param, &steps))
        return NULL;
    fsdpc_py_unit *unit = unit_arg(object, unit_object, param);
    if (!unit)
        return NULL;
    return fsdpc_py_none(
        fsdpc_optim_set_step_count(((py_optimizer *)object)->optim, unit->ref->unit, param, steps));
}

static PyMethodDef optimizer_methods[] = {
    FSDPC_PY_METHOD(Optimizer, add, optimizer_add, METH_VARARGS),
    FSDPC_PY_METHOD(Optimizer, take_number, optimizer_take_number, METH_NOARGS),
    FSDPC_PY_METHOD(Optimizer, check, optimizer_check, METH_VARARGS | METH_KEYWORDS),
    FSDPC_PY_METHOD(Optimizer, set_hyper, optimizer_set_hyper, METH_VARARGS | METH_KEYWORDS),
    FSDPC_PY_METHOD(Optimizer, step, optimizer_step, METH_NOARGS),
    FSDPC_PY_METHOD(Optimizer, outer_begin, optimizer_outer_begin, METH_O),
    FSDPC_PY_METHOD(Optimizer, outer_step, optimizer_outer_step, METH_O),
    FSDPC_PY_METHOD(Optimizer, step_in_backward, optimizer_step_in_backward, METH_O),
    FSDPC_PY_METHOD(Optimizer, step_alone, optimizer_step_alone, METH_VARARGS),
    FSDPC_PY_METHOD(Optimizer, state_names, optimizer_state_names, METH_O),
    FSDPC_PY_METHOD(Optimizer, state_codes, optimizer_state_codes, METH_O),
    FSDPC_PY_METHOD(Optimizer, state, optimizer_state, METH_VARARGS),
    FSDPC_PY_METHOD(Optimizer, maxima, optimizer_maxima, METH_VARARGS),
    FSDPC_PY_METHOD(Optimizer, factors, optimizer_factors, METH_VARARGS),
    FSDPC_PY_METHOD(Optimizer, make_states, optimizer_make_states, METH_VARARGS),
    FSDPC_PY_METHOD(Optimizer, write, optimizer_write, METH_VARARGS),
    FSDPC_PY_METHOD(Optimizer, collect, optimizer_collect, METH_VARARGS),
    FSDPC_PY_METHOD(Optimizer, step_count, optimizer_step_count, METH_VARARGS),
    FSDPC_PY_METHOD(Optimizer, set_step_count, optimizer_set_step_count, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot optimizer_slots[] = {
    {Py_tp_new, optimizer_new},
    {Py_tp_dealloc, optimizer_dealloc},
    {Py_tp_traverse, optimizer_traverse},
    {Py_tp_clear, optimizer_clear},
    {Py_tp_methods, optimizer_methods},
    {Py_tp_doc, (void *)fsdpc_doc_Optimizer},
    {0, NULL},
};

FSDPC_PY_TYPE(optimizer, Optimizer, py_optimizer, Py_TPFLAGS_HAVE_GC, optimizer_slots);

PyMethodDef fsdpc_py_optim_functions[] = {
    FSDPC_PY_FUNCTION(optimizers, optimizers, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};
