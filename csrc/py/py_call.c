/* A module's call as a unit: what happens around forward.
 *
 *     pre_forward -> cast and mark the inputs -> forward -> mark and cast the outputs ->
 * post_forward
 *
 * The marks are boundaries on the tape.  One on each output that needs gradients tells the schedule
 * that the unit's backward begins; one on each input tells it that it has ended.  They carry the
 * generation of the weights that this forward saw, and keep the unit alive as long as the graph.
 * Tensors are found in tuples, lists and dicts, any depth; other objects pass through as they are.
 *
 * A forward with gradients while the tape runs backward is a recomputation.  Where a checkpoint
 * stands around the outermost unit no boundary has been met by then, so the unit's backward begins
 * here; and no boundary carries the generation of its first run, so the tape's numbers say whether
 * the weights have changed since.
 *
 * An exception in forward resets the root when it leaves the outermost unit, so that the next call
 * starts clean; the exception itself goes on unchanged.
 */
#include "py/py_engine.h"

#include "nn/ops.h"

typedef struct mark {
    fsdpc_unit_ref *ref;
    uint64_t generation;
} mark;

/* What to do to every tensor of a structure. */
typedef struct walk {
    PyObject *module;
    fsdpc_tape *tape;
    fsdpc_py_unit *self;
    bool inputs;
    bool no_marks; /* the unit's inputs are those of the first of its modules */
    bool dry;      /* no marks at all: nothing is scheduled */
    int cast_to;   /* -1: no cast */
    int marked;
} walk;

static void release_mark(void *arg)
{
    fsdpc_unit_ref_release(((mark *)arg)->ref);
    PyMem_RawFree(arg);
}

static fsdpc_status end_backward(void *arg, fsdpc_status status)
{
    fsdpc_unit_ref *ref = arg;
    fsdpc_root_ref *root = ref->root;
    root->end_asked = false;
    if (status == FSDPC_OK)
        status = fsdpc_backward_end(root->root);
    if (status != FSDPC_OK)
        fsdpc_root_reset(root->root);
    fsdpc_unit_ref_release(ref);
    return status;
}

static fsdpc_status begin_backward_of(void *arg)
{
    const mark *m = arg;
    fsdpc_root_ref *root = m->ref->root;
    if (((const fsdpc_py_comm *)m->ref->comms[0])->closed)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "backward of unit '%s' after fsdpc.shutdown(): the ranks have parted",
                          m->ref->unit->name);
    if (!root->end_asked) {
        fsdpc_py_state *state = fsdpc_py_state_of_ref(m->ref->comms[0]);
        FSDPC_TRY(
            fsdpc_tape_at_end(state->runtime.tape, end_backward, fsdpc_unit_ref_acquire(m->ref)));
        root->end_asked = true;
    }
    return fsdpc_pre_backward(m->ref->unit, m->generation);
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

static PyObject *visit_tensor(walk *w, PyObject *object, fsdpc_tensor *t)
{
    fsdpc_tensor *cast = NULL, *marked = NULL;
    fsdpc_status status = FSDPC_OK;
    if (w->cast_to >= 0 && fsdpc_dtype_is_float(t->dtype) && (int)t->dtype != w->cast_to) {
        status = fsdpc_op_cast(w->tape, t, (fsdpc_dtype)w->cast_to, &cast);
        t = cast;
    }
    bool marks = !w->dry && !(w->inputs && w->no_marks);
    if (status == FSDPC_OK && marks && fsdpc_tape_wants(w->tape, 1, &t)) {
        status = mark_tensor(w, t, &marked);
        w->marked++;
    }
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

static PyObject *visit(walk *w, PyObject *object);

static PyObject *visit_sequence(walk *w, PyObject *object)
{
    bool is_tuple = PyTuple_CheckExact(object);
    Py_ssize_t n = PySequence_Fast_GET_SIZE(object);
    PyObject *copy = is_tuple ? PyTuple_New(n) : PyList_New(n);
    for (Py_ssize_t i = 0; copy && i < n; i++) {
        PyObject *item = visit(w, PySequence_Fast_GET_ITEM(object, i));
        if (!item) {
            Py_CLEAR(copy);
        } else if (is_tuple) {
            PyTuple_SET_ITEM(copy, i, item);
        } else {
            PyList_SET_ITEM(copy, i, item);
        }
    }
    return copy;
}

static PyObject *visit_dict(walk *w, PyObject *object)
{
    PyObject *copy = PyDict_New(), *key, *value;
    Py_ssize_t position = 0;
    while (copy && PyDict_Next(object, &position, &key, &value)) {
        PyObject *item = visit(w, value);
        if (!item || PyDict_SetItem(copy, key, item) < 0)
            Py_CLEAR(copy);
        Py_XDECREF(item);
    }
    return copy;
}

/* A structure with its tensors cast and marked; the same object where nothing changes. */
static PyObject *visit(walk *w, PyObject *object)
{
    fsdpc_tensor *t = fsdpc_py_tensor_peek(w->module, object);
    if (t)
        return visit_tensor(w, object, t);
    if (PyTuple_CheckExact(object) || PyList_CheckExact(object))
        return visit_sequence(w, object);
    if (PyDict_CheckExact(object))
        return visit_dict(w, object);
    return Py_NewRef(object);
}

static PyObject *call_forward(walk *w, PyObject *forward, PyObject *args, PyObject *kwargs)
{
    w->inputs = true;
    w->cast_to = w->self->input_dtype;
    PyObject *result = NULL, *new_kwargs = NULL, *new_args = visit(w, args);
    if (new_args)
        new_kwargs = PyDict_GET_SIZE(kwargs) ? visit(w, kwargs) : Py_NewRef(kwargs);
    if (new_kwargs)
        result = PyObject_Call(forward, new_args, new_kwargs);
    Py_XDECREF(new_args);
    Py_XDECREF(new_kwargs);
    if (!result)
        return NULL;
    w->inputs = false;
    w->cast_to = w->self->output_dtype;
    PyObject *marked = visit(w, result);
    Py_DECREF(result);
    return marked;
}

static void reset_after_exception(fsdpc_py_unit *self)
{
    fsdpc_root *root = self->ref->unit->root;
    if (root->in_backward)
        return; /* a recomputation: the running backward resets at its end */
    if (--root->forward_depth <= 0) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        fsdpc_root_reset(root);
        PyErr_Restore(type, value, traceback);
    }
}

int fsdpc_py_unit_count_run(fsdpc_py_unit *self, bool recomputed)
{
    fsdpc_unit *unit = self->ref->unit;
    if (self->n_modules == 1 || recomputed)
        return 0;
    if (self->run_epoch != unit->root->wire->epoch)
        self->runs = 0;
    self->run_epoch = unit->root->wire->epoch;
    int before = self->runs;
    self->runs = (self->runs + 1) % self->n_modules;
    unit->stays = self->runs > 0;
    return before;
}

/* Deterministic mode: dropout draws by contribution = forward * ranks + rank, not by rank, so that
 * masks do not see how ranks and accumulation split a batch.  A step's streams begin at the next
 * multiple of 2^40, the same however many were taken; a contribution has 2^20 of them.  Forwards
 * with gradients are counted, so there is to be one a micro-step. */
static void key_streams(fsdpc_py_unit *self, fsdpc_tape *tape)
{
    const fsdpc_unit *unit = self->ref->unit;
    fsdpc_root_ref *ref = self->ref->root;
    if (!unit->deterministic || unit->root->forward_depth != 1 || unit->root->in_backward)
        return;
    uint64_t step = unit->root->steps + 1;
    if (ref->streams_step != step) {
        ref->streams_step = step;
        ref->step_streams = ((tape->next_stream >> 40) + 1) << 40;
        ref->step_forwards = 0;
    }
    const fsdpc_mesh *mesh = &unit->mesh;
    uint64_t rank = (uint64_t)mesh->shard->rank;
    if (mesh->replicate)
        rank += (uint64_t)mesh->replicate->rank * (uint64_t)mesh->shard->size;
    uint64_t contribution = ref->step_forwards++ * (uint64_t)fsdpc_mesh_ranks(mesh) + rank;
    tape->next_stream = ref->step_streams + (contribution << 20);
}

static void note_generation(fsdpc_py_unit *self, fsdpc_tape *tape)
{
    uint64_t now = fsdpc_unit_generation(self->ref->unit);
    if (self->seen_generation != now)
        self->seen_from = atomic_load_explicit(&tape->next_number, memory_order_relaxed);
    self->seen_generation = now;
}

/* Of the weights that the forward saw which is being recomputed; without a checkpoint (a hook that
 * calls a module) that of the last forward. */
static uint64_t recomputed_generation(const fsdpc_py_unit *self, const fsdpc_tape *tape)
{
    return tape->recomputing < self->seen_from ? FSDPC_GENERATION_PAST : self->seen_generation;
}

static fsdpc_status begin_recomputation(const fsdpc_py_unit *self, const fsdpc_tape *tape)
{
    const fsdpc_unit *unit = self->ref->unit;
    uint64_t generation = recomputed_generation(self, tape);
    if (!unit->root->in_backward)
        return begin_backward_of(&(mark){self->ref, generation});
    if (tape->recomputing == FSDPC_NOT_RECOMPUTING)
        return FSDPC_OK;
    return fsdpc_unit_check_generation(unit, generation);
}

/* After pre_forward.  A forward without gradients inside a recomputation (a checkpoint inside a
 * checkpoint, a teacher) is one like others, whose epoch may have brought newer weights. */
static fsdpc_status note_or_check_generation(fsdpc_py_unit *self, fsdpc_tape *tape)
{
    if (tape->recomputing != FSDPC_NOT_RECOMPUTING)
        return fsdpc_unit_check_generation(self->ref->unit, recomputed_generation(self, tape));
    note_generation(self, tape);
    return FSDPC_OK;
}

PyObject *fsdpc_py_unit_call(fsdpc_py_unit *self, PyObject *forward, PyObject *args,
                             PyObject *kwargs)
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
    for (Py_ssize_t i = 0; i < self->n_params; i++)
        unit->trainable[i] = self->params[i]->requires_grad;
    fsdpc_tape *tape = runtime->tape;
    bool grad = tape->grad_enabled;
    walk w = {.module = module, .tape = tape, .self = self};
    bool recomputed = grad && tape->backward_depth > 0;
    fsdpc_status status = FSDPC_OK;
    Py_BEGIN_ALLOW_THREADS;
    if (recomputed)
        status = begin_recomputation(self, tape);
    if (status == FSDPC_OK)
        status = fsdpc_pre_forward(unit, grad);
    Py_END_ALLOW_THREADS;
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    if (grad && !recomputed)
        key_streams(self, tape);
    if (!recomputed && (status = note_or_check_generation(self, tape)) != FSDPC_OK) {
        fsdpc_py_raise(status);
        reset_after_exception(self);
        return NULL;
    }
    w.no_marks = fsdpc_py_unit_count_run(self, recomputed) > 0;
    PyObject *result = call_forward(&w, forward, args, kwargs);
    if (!result) {
        reset_after_exception(self);
        return NULL;
    }
    status = fsdpc_post_forward(unit, grad);
    if (status != FSDPC_OK) {
        Py_DECREF(result);
        return fsdpc_py_raise(status);
    }
    return result;
}
