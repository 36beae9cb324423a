/* dry_run(params, dtypes, lent, fn): measures the memory that a computation would use, without
 * running it. play(fn, orders): records the schedule that the engine would run, in a world of any
 * size.
 *
 * fn() runs on a separate runtime with a null device: kernels do nothing, and memory is counted but
 * never touched, so no pages are used. A model of any size costs almost no time or memory. During
 * the run, the parameters also use null memory, in the given dtypes. A sink for their gradients
 * acts like a unit's reduce buffer, and lends memory of the dtype in `lent`, if not None. Units only
 * cast their inputs and outputs. No epoch begins, so a single rank can make the plan. Returns the
 * peak memory that fn used, excluding parameters and their gradients, the memory still allocated
 * afterwards, and the floating point operations of its products.
 *
 * play's fn creates the model, communicators without an address and units, and then trains: only
 * kernels and peers are missing. An operation completes when the engine waits for it (or, with
 * `orders`, when the main stream does, as on GPUs), so the trace shows the waits. Each event is
 * stamped with the number of preceding floating point operations instead of a time.
 *
 * Objects that fn creates must be freed before these functions return, because their values were
 * never computed. Any that remain keep the null runtime alive, and the caller reports this.
 */
#include "bind/engine.h"

#include "ops/flat_ops.h"

/* A parameter's original storage, which is restored afterwards, and what its gradient has
 * meanwhile. Loans are those of one root. */
typedef struct stand_in {
    fsdpc_tensor *t;
    bool lends;
    fsdpc_dtype reduce_dtype;
    fsdpc_device *device;
    fsdpc_lender *lender;
    void *grad;
    fsdpc_dtype dtype;
    fsdpc_storage *storage;
    void *data;
    fsdpc_guard guard;
    fsdpc_grad_sink sink;
} stand_in;

static fsdpc_status stand_target(void *arg, fsdpc_grad_target *out)
{
    const stand_in *s = arg;
    *out = (fsdpc_grad_target){.data = s->grad, .dtype = FSDPC_F32};
    return fsdpc_loan_move(s->lender, s->grad, 1);
}

static fsdpc_status lend_grad(void *arg, fsdpc_dtype dtype, fsdpc_loan *loan, void **data_out)
{
    const stand_in *s = arg;
    *loan = (fsdpc_loan){.device = s->device,
                         .param = "",
                         .unit = "",
                         .data = data_out,
                         .bytes = s->t->numel * fsdpc_dtype_bytes(dtype)};
    if (s->lends && dtype == s->reduce_dtype)
        (void)fsdpc_loan_begin(s->lender, s->grad, loan);
    return FSDPC_OK;
}

static fsdpc_status stand_lend(void *arg, fsdpc_dtype dtype, int ndim, const size_t *shape,
                               fsdpc_tensor **out)
{
    const stand_in *s = arg;
    return fsdpc_py_borrow(s->device, dtype, ndim, shape, lend_grad, arg, NULL, out);
}

enum { DRY_EVENTS = 16, PLAYED_EVENTS = 1 << 20 };

static fsdpc_status null_runtime_create(const fsdpc_runtime *like, size_t events, fsdpc_runtime *r)
{
    *r = (fsdpc_runtime){.env = like->env, .threads = like->threads, .ready = true, .dry = true};
    FSDPC_TRY(fsdpc_mem_create(&r->mem));
    FSDPC_TRY(fsdpc_device_null_create(r->mem, true, &r->device));
    r->device->flat = fsdpc_flat_ops_null();
    r->device->nn = fsdpc_nn_ops_null();
    FSDPC_TRY(fsdpc_stream_create(r->device, "dry run", false, &r->compute));
    FSDPC_TRY(fsdpc_tape_create(r->device, r->compute, &r->tape));
    r->tape->few_chunks = like->plugin != NULL;
    return fsdpc_trace_create(events, &r->trace);
}

static fsdpc_status move_over(fsdpc_runtime *r, stand_in *s, fsdpc_dtype dtype)
{
    fsdpc_tensor *t = s->t, *fresh;
    s->device = r->device;
    FSDPC_TRY(fsdpc_tensor_create(r->device, dtype, t->ndim, t->shape, &fresh));
    fsdpc_status status = fsdpc_device_alloc(r->device, FSDPC_MEM_OTHER, t->numel * 4, &s->grad);
    if (status != FSDPC_OK) {
        fsdpc_tensor_release(fresh);
        return status;
    }
    s->dtype = t->dtype;
    s->storage = t->storage;
    s->data = t->data;
    s->guard = t->guard;
    s->sink = t->sink;
    t->storage = NULL; /* held by `s` now */
    status = fsdpc_tensor_bind(t, dtype, fresh->storage, fresh->data);
    fsdpc_tensor_release(fresh);
    t->guard = (fsdpc_guard){0};
    t->sink = (fsdpc_grad_sink){.target = stand_target, .lend = stand_lend, .arg = s};
    return status;
}

static void move_back(stand_in *s)
{
    fsdpc_storage_release(s->t->storage);
    s->t->dtype = s->dtype;
    s->t->storage = s->storage;
    s->t->data = s->data;
    s->t->guard = s->guard;
    s->t->sink = s->sink;
    fsdpc_device_free(s->device, s->grad);
}

static size_t held(fsdpc_runtime *r, bool peak)
{
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(r->mem, &stats);
    return peak ? stats.peak_bytes[FSDPC_MEM_ACTIVATION] : stats.now_bytes[FSDPC_MEM_ACTIVATION];
}

/* Runs fn with the parameters in null memory; returns -1 with an exception on failure. */
static Py_ssize_t measure(fsdpc_py_state *state, fsdpc_runtime *dry, PyObject *fn)
{
    fsdpc_runtime real = state->runtime;
    size_t before = held(dry, false);
    fsdpc_mem_peak_reset(dry->mem);
    state->runtime = *dry;
    PyObject *result = PyObject_CallNoArgs(fn);
    state->runtime = real;
    if (!result)
        return -1;
    Py_DECREF(result);
    return (Py_ssize_t)(held(dry, true) - before);
}

static PyObject *run(fsdpc_py_state *state, stand_in *stands, const fsdpc_dtype *dtypes,
                     Py_ssize_t n, PyObject *fn)
{
    fsdpc_runtime dry;
    fsdpc_status status = null_runtime_create(&state->runtime, DRY_EVENTS, &dry);
    fsdpc_lender *lender = PyMem_RawCalloc(1, sizeof *lender);
    if (!lender)
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a plan");
    else
        fsdpc_lender_init(lender);
    Py_ssize_t moved = 0, peak = -1, left = 0;
    for (; status == FSDPC_OK && moved < n; moved++) {
        stands[moved].lender = lender;
        status = move_over(&dry, &stands[moved], dtypes[moved]);
    }
    if (status == FSDPC_OK)
        peak = measure(state, &dry, fn);
    while (moved > 0)
        move_back(&stands[--moved]);
    long long flops = 0;
    if (dry.device) {
        left = (Py_ssize_t)held(&dry, false);
        flops = *fsdpc_device_null_flops(dry.device);
    }
    if (dry.device && left == 0)
        fsdpc_py_runtime_destroy(&dry);
    if (left == 0) /* otherwise, what fn left may hold a loan */
        PyMem_RawFree(lender);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    return peak < 0 ? NULL : Py_BuildValue("(nnL)", peak, left, flops);
}

static PyObject *dry_run(PyObject *module, PyObject *args)
{
    PyObject *params, *kinds, *lent, *fn;
    if (!PyArg_ParseTuple(args, "O!O!O!O", &PyList_Type, &params, &PyList_Type, &kinds,
                          &PyList_Type, &lent, &fn))
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(params);
    if (n != PyList_GET_SIZE(kinds) || n != PyList_GET_SIZE(lent))
        return PyErr_Format(PyExc_ValueError, "dry_run takes two dtypes for each parameter");
    fsdpc_py_state *state = PyModule_GetState(module);
    if (!fsdpc_py_state_runtime(state))
        return NULL;
    stand_in *stands = fsdpc_py_array(n, sizeof *stands);
    fsdpc_dtype *dtypes = fsdpc_py_array(n, sizeof *dtypes);
    PyObject *result = NULL;
    if (!stands || !dtypes)
        goto free;
    for (Py_ssize_t i = 0; i < n; i++) {
        stands[i].t = fsdpc_py_tensor_of(PyList_GET_ITEM(params, i));
        PyObject *reduce = PyList_GET_ITEM(lent, i);
        stands[i].lends = reduce != Py_None;
        if (!stands[i].t || fsdpc_py_dtype_parse(PyList_GET_ITEM(kinds, i), &dtypes[i]) < 0 ||
            (stands[i].lends && fsdpc_py_dtype_parse(reduce, &stands[i].reduce_dtype) < 0))
            goto free;
    }
    result = run(state, stands, dtypes, n, fn);

free:
    PyMem_Free(stands);
    PyMem_Free(dtypes);
    return result;
}

static PyObject *play(PyObject *module, PyObject *args)
{
    PyObject *fn;
    int orders;
    fsdpc_py_state *state = PyModule_GetState(module);
    if (!PyArg_ParseTuple(args, "Op", &fn, &orders) || !fsdpc_py_state_runtime(state))
        return NULL;
    fsdpc_runtime played, real = state->runtime;
    PyObject *result = NULL;
    fsdpc_status status = null_runtime_create(&real, PLAYED_EVENTS, &played);
    if (status == FSDPC_OK) {
        played.dry = played.env.no_alias = false;
        played.played = true;
        played.orders = orders;
        fsdpc_trace_set_clock(played.trace, fsdpc_device_null_flops(played.device));
        state->runtime = played;
        result = PyObject_CallNoArgs(fn);
        state->runtime = real;
    }
    fsdpc_mem_stats left = {0};
    if (played.mem)
        fsdpc_mem_stats_read(played.mem, &left);
    if (left.total_now_bytes == 0)
        fsdpc_py_runtime_destroy(&played);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    return result ? Py_BuildValue("(NK)", result, (unsigned long long)left.total_now_bytes) : NULL;
}

static PyObject *in_dry_run(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const fsdpc_py_state *state = PyModule_GetState(module);
    return PyBool_FromLong(state->runtime.dry);
}

PyMethodDef fsdpc_py_dry_run_functions[] = {
    FSDPC_PY_FUNCTION(dry_run, dry_run, METH_VARARGS),
    FSDPC_PY_FUNCTION(play, play, METH_VARARGS),
    FSDPC_PY_FUNCTION(in_dry_run, in_dry_run, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};
