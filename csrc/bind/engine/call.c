/* Calls a module as a unit, with the engine's steps before and after its forward.
 *
 *     enter -> cast and mark the inputs -> forward -> mark and cast the outputs -> leave
 *
 * The marks are boundaries on the tape. A mark on each output that requires grad tells the engine
 * that the unit's backward begins; a mark on each input tells it that the backward has ended. Each
 * mark records the generation of the weights used by this forward, and keeps the unit alive as long
 * as the graph exists. bind/walk.h finds the tensors. Other objects pass through unchanged, but
 * forward must not return one that contains a tensor that needs gradients.
 *
 * engine/call.h decides how a call, or an exception in it, affects the schedule. It recognises
 * recomputations by the tape's node numbers, which act as a clock.
 */
#include "bind/engine.h"
#include "bind/walk.h"

#include "nn/ops.h"

typedef struct mark {
    fsdpc_unit_ref *ref;
    uint64_t generation;
} mark;

/* Settings for a traversal that processes every tensor in a structure. */
typedef struct walk {
    fsdpc_py_walk base;
    PyObject *module;
    fsdpc_tape *tape;
    fsdpc_py_unit *self;
    bool inputs;
    bool no_marks; /* the unit's first module has already marked the inputs */
    bool dry;      /* no marks: nothing is scheduled */
    int cast_to;   /* -1: no cast */
} walk;

static void release_mark(void *arg)
{
    fsdpc_unit_ref_release(((mark *)arg)->ref);
    PyMem_RawFree(arg);
}

static fsdpc_status end_backward(void *arg, fsdpc_status status)
{
    fsdpc_unit_ref *ref = arg;
    status = fsdpc_call_end_backward(ref->root->root, status);
    fsdpc_unit_ref_release(ref);
    return status;
}

static fsdpc_status begin_backward(fsdpc_unit_ref *ref, uint64_t generation)
{
    if (((const fsdpc_py_comm *)ref->comms[0])->closed)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "backward of unit '%s' after fsdpc.shutdown(): the ranks have parted",
                          fsdpc_unit_name(ref->unit));
    if (fsdpc_call_wants_end(ref->unit)) {
        fsdpc_py_state *state = fsdpc_py_state_of_ref(ref->comms[0]);
        FSDPC_TRY(
            fsdpc_tape_at_end(state->runtime.tape, end_backward, fsdpc_unit_ref_acquire(ref)));
    }
    return fsdpc_call_begin_backward(ref->unit, generation);
}

static fsdpc_status begin_backward_of(void *arg)
{
    const mark *m = arg;
    return begin_backward(m->ref, m->generation);
}

static fsdpc_status end_backward_of(void *arg)
{
    return fsdpc_post_backward(((const mark *)arg)->ref->unit);
}

static fsdpc_status mark_tensor(const walk *w, fsdpc_tensor *t, fsdpc_tensor **out)
{
    mark *m = PyMem_RawMalloc(sizeof *m);
    if (!m)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a boundary");
    m->ref = fsdpc_unit_ref_acquire(w->self->ref);
    m->generation = fsdpc_unit_generation(m->ref->unit);
    fsdpc_status status = fsdpc_tape_boundary(
        w->tape, t, w->inputs ? end_backward_of : begin_backward_of, m, release_mark, out);
    if (status != FSDPC_OK)
        release_mark(m);
    return status;
}

static PyObject *visit_tensor(fsdpc_py_walk *base, PyObject *object)
{
    const walk *w = (const walk *)base;
    fsdpc_tensor *t = fsdpc_py_tensor_peek(w->module, object);
    if (!t)
        return NULL;
    fsdpc_tensor *cast = NULL, *marked = NULL;
    fsdpc_status status = FSDPC_OK;
    if (w->cast_to >= 0 && fsdpc_dtype_is_float(t->dtype) && (int)t->dtype != w->cast_to) {
        status = fsdpc_op_cast(w->tape, t, (fsdpc_dtype)w->cast_to, &cast);
        t = cast;
    }
    bool marks = !w->dry && !(w->inputs && w->no_marks);
    if (status == FSDPC_OK && marks && fsdpc_tape_wants(w->tape, 1, &t))
        status = mark_tensor(w, t, &marked);
    if (status != FSDPC_OK) {
        fsdpc_tensor_release(cast);
        return fsdpc_py_raise(status);
    }
    if (marked) {
        fsdpc_tensor_release(cast);
        return fsdpc_py_tensor_wrap(w->module, marked);
    }
    return cast ? fsdpc_py_tensor_wrap(w->module, cast) : Py_NewRef(object);
}

/* Checks an object whose contents are not searched: if forward returns it, it must not contain a
 * tensor whose backward belongs to the unit. */
static int visit_other(fsdpc_py_walk *base, PyObject *object)
{
    const walk *w = (const walk *)base;
    if (w->inputs || w->dry || !w->tape->grad_enabled)
        return 0;
    PyObject *structures = PyImport_ImportModule("fsdpc.nn._structures");
    if (!structures)
        return -1;
    PyObject *done = PyObject_CallMethod(structures, "refuse_hidden", "Os", object,
                                         fsdpc_unit_name(w->self->ref->unit));
    Py_DECREF(structures);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static PyObject *call_forward(walk *w, PyObject *forward, PyObject *args, PyObject *kwargs)
{
    w->base = (fsdpc_py_walk){.tensor = visit_tensor, .other = visit_other};
    w->inputs = true;
    w->cast_to = w->self->input_dtype;
    PyObject *result = NULL, *new_kwargs = NULL, *new_args = fsdpc_py_rebuild(&w->base, args);
    if (new_args)
        new_kwargs =
            PyDict_GET_SIZE(kwargs) ? fsdpc_py_rebuild(&w->base, kwargs) : Py_NewRef(kwargs);
    if (new_kwargs)
        result = PyObject_Call(forward, new_args, new_kwargs);
    Py_XDECREF(new_args);
    Py_XDECREF(new_kwargs);
    if (!result)
        return NULL;
    w->inputs = false;
    w->cast_to = w->self->output_dtype;
    PyObject *marked = fsdpc_py_rebuild(&w->base, result);
    Py_DECREF(result);
    return marked;
}

static void failed(fsdpc_py_unit *self)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    fsdpc_call_failed(self->ref->unit);
    PyErr_Restore(type, value, traceback);
}

static fsdpc_status enter(fsdpc_unit_ref *ref, fsdpc_tape *tape, bool *first_out)
{
    bool grad = tape->grad_enabled;
    const fsdpc_call call = {.grad = grad,
                             .recomputed = grad && tape->backward_depth > 0,
                             .clock =
                                 atomic_load_explicit(&tape->next_number, memory_order_relaxed),
                             .ran_at = tape->recomputing,
                             .next_stream = &tape->next_stream};
    uint64_t generation;
    if (call.recomputed && fsdpc_call_begins_backward(ref->unit, &call, &generation))
        FSDPC_TRY(begin_backward(ref, generation));
    return fsdpc_call_enter(ref->unit, &call, first_out);
}

static PyObject *call(fsdpc_py_unit *self, PyObject *forward, PyObject *args, PyObject *kwargs)
{
    PyObject *module = PyType_GetModule(Py_TYPE(self));
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    if (!runtime)
        return NULL;
    fsdpc_unit *unit = self->ref->unit;
    if (runtime->dry) {
        walk casts = {.module = module, .tape = runtime->tape, .self = self, .dry = true};
        return call_forward(&casts, forward, args, kwargs);
    }
    if (fsdpc_py_unit_check_open(self) < 0)
        return NULL;
    /* This runs only if gradients are enabled, because inside hold() each rank may evaluate and
     * freeze parameters independently. */
    fsdpc_status status = FSDPC_OK;
    for (Py_ssize_t i = 0; runtime->tape->grad_enabled && i < self->n_params; i++) {
        status = fsdpc_unit_set_trainable(unit, (int)i, self->params[i]->requires_grad);
        if (status != FSDPC_OK)
            return fsdpc_py_raise(status);
    }
    bool first;
    FSDPC_PY_WITHOUT_GIL(status = enter(self->ref, runtime->tape, &first));
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    walk w = {.module = module, .tape = runtime->tape, .self = self, .no_marks = !first};
    PyObject *result = call_forward(&w, forward, args, kwargs);
    if (!result) {
        failed(self);
        return NULL;
    }
    fsdpc_left left;
    status = fsdpc_call_leave(unit, &left);
    if (status != FSDPC_OK) {
        Py_DECREF(result);
        return fsdpc_py_raise(status);
    }
    return result;
}

static PyObject *unit_call(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
    if (n != 3 || !PyTuple_Check(args[1]) || !PyDict_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "call(forward, args, kwargs)");
    return call((fsdpc_py_unit *)object, args[0], args[1], args[2]);
}

PyMethodDef fsdpc_py_unit_call_methods[] = {
    FSDPC_PY_METHOD(Unit, call, unit_call, METH_FASTCALL),
    {NULL, NULL, 0, NULL},
};
