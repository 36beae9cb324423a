/* StepGraph: a captured training step, a thin layer over csrc/engine/step_graph.c.
 *
 * The object keeps units and the optimizer alive, and with them most of the memory that the graph
 * uses. The device keeps the caller's tensors alive (csrc/device/device.h); this object keeps
 * tensors over other libraries' memory alive. A replay calls no module, so this file checks whether
 * parameters require gradients, as a call to a unit does.
 *
 * Each dropout operation takes the next random stream. A replay starts at the program's current
 * stream, so its offset from the stream at capture is sent to the device before each replay.
 */
#include "bind/engine.h"

#include "engine/step_graph.h"

typedef struct py_graph {
    PyObject_HEAD fsdpc_step_graph *step;
    fsdpc_unit_ref *ref;
    fsdpc_runtime *runtime;
    uint64_t first_stream, n_streams; /* of the captured step */
    PyObject *units, *optimizer;      /* list of Unit, outermost first */
    fsdpc_py_kept held;
} py_graph;

/* Returns the outermost of the units, which must cover the whole model, or NULL with an exception
 * set. */
static fsdpc_py_unit *model_of(PyObject *module, PyObject *units)
{
    if (PyList_GET_SIZE(units) == 0) {
        PyErr_SetString(PyExc_ValueError, "a graph of no units");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(units); i++) {
        fsdpc_py_unit *unit = fsdpc_py_unit_of(module, PyList_GET_ITEM(units, i));
        if (!unit || fsdpc_py_unit_check_open(unit) < 0)
            return NULL;
    }
    fsdpc_py_unit *outermost = (fsdpc_py_unit *)PyList_GET_ITEM(units, 0);
    const fsdpc_unit *unit = outermost->ref->unit;
    const fsdpc_root *root = fsdpc_unit_root(unit);
    if (root && fsdpc_root_outermost(root) == unit)
        return outermost;
    PyErr_Format(PyExc_RuntimeError,
                 root ? "unit '%s' is inside another one: a graph is of a step of the "
                        "outermost module"
                      : "unit '%s' has made no step: run a step or two without a graph first",
                 fsdpc_unit_name(unit));
    return NULL;
}

static fsdpc_status look_up_trainable(const py_graph *self)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->units); i++) {
        const fsdpc_py_unit *unit = (fsdpc_py_unit *)PyList_GET_ITEM(self->units, i);
        for (Py_ssize_t p = 0; p < unit->n_params; p++)
            FSDPC_TRY(
                fsdpc_unit_set_trainable(unit->ref->unit, (int)p, unit->params[p]->requires_grad));
    }
    return FSDPC_OK;
}

/* Runs in main-stream order, so each graph's key is written before its launch. */
static fsdpc_status send_key(const py_graph *self)
{
    const fsdpc_tape *tape = self->runtime->tape;
    const fsdpc_dropout_key key = {tape->seed, tape->next_stream - self->first_stream};
    return fsdpc_device_copy(self->runtime->device, tape->dropout_key, &key, sizeof key,
                             self->runtime->compute);
}

static fsdpc_status begin(py_graph *self, fsdpc_py_imports *imports, fsdpc_root *root,
                          fsdpc_optim *optim)
{
    const fsdpc_tape *tape = self->runtime->tape;
    self->first_stream = tape->next_stream;
    if (tape->dropout_key && !self->runtime->device->capturing)
        FSDPC_TRY(send_key(self));
    FSDPC_TRY(fsdpc_step_graph_begin(root, optim, &self->step));
    fsdpc_status status = fsdpc_py_imports_keep(imports, &self->held);
    if (status != FSDPC_OK)
        fsdpc_step_graph_abandon(self->step, "no memory to note what the graph uses");
    return status;
}

static PyObject *graph_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    FSDPC_PY_KEYWORDS(names, "units", "optimizer");
    PyObject *units, *optimizer, *module = PyType_GetModule(type);
    fsdpc_runtime *runtime = fsdpc_py_runtime_of_type(type);
    if (!runtime ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "O!O", names, &PyList_Type, &units, &optimizer))
        return NULL;
    fsdpc_py_unit *unit = model_of(module, units);
    fsdpc_optim *optim = unit ? fsdpc_py_optim_of(module, optimizer) : NULL;
    if (!optim)
        return NULL;
    py_graph *self = (py_graph *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->units = Py_NewRef(units);
    self->optimizer = Py_NewRef(optimizer);
    self->ref = fsdpc_unit_ref_acquire(unit->ref);
    self->runtime = runtime;
    fsdpc_py_imports *imports = &((fsdpc_py_state *)PyModule_GetState(module))->imports;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = begin(self, imports, fsdpc_unit_root(unit->ref->unit), optim));
    if (status != FSDPC_OK) {
        Py_DECREF(self);
        return fsdpc_py_raise(status);
    }
    return (PyObject *)self;
}

static int graph_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(((py_graph *)object)->units);
    Py_VISIT(((py_graph *)object)->optimizer);
    Py_VISIT(Py_TYPE(object));
    return 0;
}

static int graph_clear(PyObject *object)
{
    py_graph *self = (py_graph *)object;
    fsdpc_step_graph *step = self->step;
    self->step = NULL;
    Py_BEGIN_ALLOW_THREADS;
    fsdpc_step_graph_destroy(step); /* before the memory that it uses is freed */
    Py_END_ALLOW_THREADS;
    fsdpc_py_held_release(&self->held);
    fsdpc_unit_ref_release(self->ref);
    self->ref = NULL;
    Py_CLEAR(self->optimizer);
    Py_CLEAR(self->units);
    return 0;
}

static void graph_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    graph_clear(object);
    fsdpc_py_free(object);
}

/* Rewinds the random streams to where the capture began and releases the memory held for it. */
static void forget(py_graph *self)
{
    self->runtime->tape->next_stream = self->first_stream;
    fsdpc_py_held_release(&self->held);
}

static PyObject *graph_end(PyObject *object, PyObject *Py_UNUSED(unused))
{
    py_graph *self = (py_graph *)object;
    self->n_streams = self->runtime->tape->next_stream - self->first_stream;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_step_graph_end(self->step));
    if (status == FSDPC_OK)
        Py_RETURN_NONE;
    fsdpc_py_raise(status);
    forget(self);
    return NULL;
}

static PyObject *graph_abandon(PyObject *object, PyObject *why)
{
    const char *text = PyUnicode_AsUTF8(why);
    if (!text)
        return NULL;
    py_graph *self = (py_graph *)object;
    Py_BEGIN_ALLOW_THREADS;
    fsdpc_step_graph_abandon(self->step, text);
    Py_END_ALLOW_THREADS;
    forget(self);
    Py_RETURN_NONE;
}

static PyObject *graph_replay(PyObject *object, PyObject *Py_UNUSED(unused))
{
    py_graph *self = (py_graph *)object;
    if (fsdpc_py_unit_check_open((fsdpc_py_unit *)PyList_GET_ITEM(self->units, 0)) < 0)
        return NULL;
    if (fsdpc_py_check(look_up_trainable(self)) < 0)
        return NULL;
    fsdpc_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = self->n_streams ? send_key(self) : FSDPC_OK;
    if (status == FSDPC_OK)
        status = fsdpc_step_graph_replay(self->step);
    Py_END_ALLOW_THREADS;
    if (status == FSDPC_OK)
        self->runtime->tape->next_stream += self->n_streams;
    return fsdpc_py_none(status);
}

static PyMethodDef graph_methods[] = {
    FSDPC_PY_METHOD(StepGraph, end, graph_end, METH_NOARGS),
    FSDPC_PY_METHOD(StepGraph, abandon, graph_abandon, METH_O),
    FSDPC_PY_METHOD(StepGraph, replay, graph_replay, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot graph_slots[] = {
    {Py_tp_new, graph_new},
    {Py_tp_dealloc, graph_dealloc},
    {Py_tp_traverse, graph_traverse},
    {Py_tp_clear, graph_clear},
    {Py_tp_methods, graph_methods},
    {Py_tp_doc, (void *)fsdpc_doc_StepGraph},
    {0, NULL},
};

FSDPC_PY_TYPE(graph, StepGraph, py_graph, Py_TPFLAGS_HAVE_GC, graph_slots);

/* Does not create the runtime. */
static PyObject *is_capturing(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const fsdpc_runtime *r = &((fsdpc_py_state *)PyModule_GetState(module))->runtime;
    return PyBool_FromLong(r->ready && r->device->capturing);
}

PyMethodDef fsdpc_py_graph_functions[] = {
    FSDPC_PY_FUNCTION(is_capturing, is_capturing, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};
