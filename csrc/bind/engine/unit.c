/* Unit: the Python object for one fully_shard call.
 *
 * On creation, the parameters' values move into masters, and the tensors release their memory. From
 * then on, the tensors' guards report them as sharded. make_root(units, encloses), at the outermost
 * module's first call, gives each tensor the address of its unsharded parameter, which never
 * changes, and a sink. The sink directs gradients to the reduce buffer.
 *
 * Its methods are grouped by subject: bind/engine/call.c, bind/engine/unit_values.c,
 * bind/engine/unit_schedule.c.
 */
#include "bind/engine.h"
#include "bind/engine/low_rank.h"
#include "bind/engine/tier.h"

#include <stddef.h>
#include <structmember.h>

#include "ops/flat_ops.h"

/* ---- references ---- */

void fsdpc_py_shared_grads_release(fsdpc_shared_grads *block)
{
    if (!block || atomic_fetch_sub_explicit(&block->refs, 1, memory_order_acq_rel) != 1)
        return;
    for (int g = 0; g < block->n_groups; g++)
        fsdpc_device_free(block->device, block->memory[g]);
    PyMem_RawFree(block);
}

static void free_unit_ref(fsdpc_unit_ref *ref)
{
    fsdpc_unit_destroy(ref->unit);
    fsdpc_py_shared_grads_release(ref->handed_out);
    PyGILState_STATE gil = PyGILState_Ensure();
    for (int i = 0; i < 2; i++) {
        if (ref->comms[i])
            ((fsdpc_py_comm *)ref->comms[i])->users--;
        Py_XDECREF(ref->comms[i]);
    }
    Py_XDECREF(ref->tier);
    Py_XDECREF(ref->foreign);
    PyGILState_Release(gil);
    PyMem_RawFree(ref->params);
    PyMem_RawFree(ref);
}

void fsdpc_unit_ref_release(fsdpc_unit_ref *ref)
{
    if (!ref || atomic_fetch_sub_explicit(&ref->refs, 1, memory_order_acq_rel) != 1)
        return;
    fsdpc_root_ref *root = ref->root;
    if (!root) {
        free_unit_ref(ref);
        return;
    }
    if (atomic_fetch_sub_explicit(&root->refs, 1, memory_order_acq_rel) != 1)
        return;
    fsdpc_root_destroy(root->root);
    for (int i = 0; i < root->n_units; i++)
        free_unit_ref(root->units[i]);
    PyMem_RawFree(root->units);
    PyMem_RawFree(root);
}

static void release_storage(fsdpc_storage *storage)
{
    fsdpc_unit_ref_release(storage->owner);
}

static void release_export(fsdpc_storage *storage)
{
    fsdpc_unit_ref *ref = storage->owner;
    fsdpc_unit_export(ref->unit, -1);
    fsdpc_unit_ref_release(ref);
}

PyObject *fsdpc_py_unit_tensor(PyObject *module, fsdpc_unit_ref *ref, fsdpc_dtype dtype, int ndim,
                               const size_t *shape, void *data)
{
    fsdpc_tensor *t;
    fsdpc_status status = fsdpc_tensor_wrap(fsdpc_unit_device(ref->unit), dtype, ndim, shape, data,
                                            release_export, ref, &t);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    fsdpc_unit_ref_acquire(ref);
    fsdpc_unit_export(ref->unit, 1);
    return fsdpc_py_tensor_wrap(module, t);
}

fsdpc_py_unit *fsdpc_py_unit_of(PyObject *module, PyObject *object)
{
    fsdpc_py_state *state = PyModule_GetState(module);
    if (!Py_IS_TYPE(object, (PyTypeObject *)state->unit_type)) {
        PyErr_Format(PyExc_TypeError, "expected a Unit, got %.100s", Py_TYPE(object)->tp_name);
        return NULL;
    }
    return (fsdpc_py_unit *)object;
}

int fsdpc_py_unit_check_open(const fsdpc_py_unit *unit)
{
    return fsdpc_py_comm_of(unit->ref->comms[0]) ? 0 : -1;
}

/* ---- connecting parameters and units ---- */

static fsdpc_status sink_target(void *arg, fsdpc_grad_target *out)
{
    fsdpc_param_ref *p = arg;
    return fsdpc_grad_target_of(p->unit, p->param, &out->data, &out->dtype, &out->accumulate);
}

typedef struct borrowed {
    fsdpc_loan loan;
    fsdpc_param_ref *param; /* with a reference to its unit; NULL: a plan lends */
} borrowed;

static void release_borrowed(fsdpc_storage *storage)
{
    borrowed *b = storage->owner;
    if (fsdpc_loan_end(&b->loan))
        fsdpc_device_free(storage->device, storage->data);
    if (b->param)
        fsdpc_unit_ref_release(b->param->ref);
    PyMem_RawFree(b);
}

static fsdpc_status settle_borrowed(fsdpc_storage *storage, bool as_gradient, bool *is_gradient_out)
{
    borrowed *b = storage->owner;
    if (!b->param)
        return fsdpc_loan_settle(&b->loan, as_gradient ? storage->data : NULL, is_gradient_out);
    return fsdpc_grad_settle(b->param->unit, b->param->param, &b->loan, as_gradient,
                             is_gradient_out);
}

fsdpc_status fsdpc_py_borrow(fsdpc_device *device, fsdpc_dtype dtype, int ndim, const size_t *shape,
                             fsdpc_lend_fn lend, void *arg, fsdpc_param_ref *param,
                             fsdpc_tensor **out)
{
    fsdpc_tensor *t;
    borrowed *b = PyMem_RawCalloc(1, sizeof *b);
    if (!b)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a loan");
    fsdpc_status status =
        fsdpc_tensor_wrap(device, dtype, ndim, shape, NULL, release_borrowed, b, &t);
    if (status != FSDPC_OK) {
        PyMem_RawFree(b);
        return status;
    }
    b->param = param;
    if (param)
        fsdpc_unit_ref_acquire(param->ref);
    t->storage->settle = settle_borrowed;
    status = lend(arg, dtype, &b->loan, &t->storage->data);
    t->data = t->storage->data;
    if (status == FSDPC_OK && b->loan.lender)
        *out = t;
    else
        fsdpc_tensor_release(t);
    return status;
}

static fsdpc_status lend_place(void *arg, fsdpc_dtype dtype, fsdpc_loan *loan, void **data_out)
{
    const fsdpc_param_ref *p = arg;
    return fsdpc_grad_lend(p->unit, p->param, dtype, loan, data_out);
}

static fsdpc_status sink_lend(void *arg, fsdpc_dtype dtype, int ndim, const size_t *shape,
                              fsdpc_tensor **out)
{
    fsdpc_param_ref *p = arg;
    return fsdpc_py_borrow(fsdpc_unit_device(p->unit), dtype, ndim, shape, lend_place, p, p, out);
}

fsdpc_grad_sink fsdpc_py_sink_of(fsdpc_unit_ref *ref, int param)
{
    return (fsdpc_grad_sink){.target = sink_target, .lend = sink_lend, .arg = &ref->params[param]};
}

static fsdpc_status check_unsharded(void *arg)
{
    fsdpc_param_ref *p = arg;
    return fsdpc_unit_check_unsharded(p->unit, p->param);
}

fsdpc_status fsdpc_py_unit_bind_param(fsdpc_unit_ref *ref, int param, fsdpc_tensor *t)
{
    const fsdpc_unit *unit = ref->unit;
    fsdpc_dtype dtype = fsdpc_unit_flat_with(unit, param).param_dtype;
    fsdpc_storage *storage = calloc(1, sizeof *storage);
    if (!storage)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for parameter '%s'",
                          fsdpc_unit_layout(unit)->params[param].name);
    void *unsharded = fsdpc_unit_unsharded(unit, param);
    storage->refs = 1;
    storage->data = unsharded;
    storage->bytes = t->numel * fsdpc_dtype_bytes(dtype);
    storage->device = fsdpc_unit_device(unit);
    storage->release = release_storage;
    storage->readonly = true; /* publication writes through a separate mapping */
    storage->owner = fsdpc_unit_ref_acquire(ref);
    fsdpc_status status = fsdpc_tensor_bind(t, dtype, storage, unsharded);
    fsdpc_storage_release(storage);
    t->guard = (fsdpc_guard){.check = check_unsharded, .arg = &ref->params[param]};
    t->sink = fsdpc_py_sink_of(ref, param);
    return status;
}

static int read_specs(PyObject *names, const fsdpc_py_unit *self, fsdpc_param_spec *specs)
{
    for (Py_ssize_t i = 0; i < self->n_params; i++) {
        const fsdpc_tensor *t = self->params[i];
        const char *name = PyUnicode_AsUTF8(PyList_GET_ITEM(names, i));
        if (!name)
            return -1;
        specs[i] = (fsdpc_param_spec){
            .name = name, .dtype = t->dtype, .ndim = t->ndim, .frozen = !t->requires_grad};
        memcpy(specs[i].shape, t->shape, sizeof t->shape);
    }
    return 0;
}

static int parse_optional_dtype(PyObject *object, bool *given, fsdpc_dtype *out)
{
    *given = object != NULL && object != Py_None;
    return *given ? fsdpc_py_dtype_parse(object, out) : 0;
}

static fsdpc_status take_values(fsdpc_py_unit *self)
{
    fsdpc_unit *unit = self->ref->unit;
    for (int i = 0; i < (int)self->n_params; i++) {
        fsdpc_tensor *t = self->params[i];
        if (t->data)
            FSDPC_TRY(fsdpc_unit_write(unit, i, t->data, t->dtype));
        FSDPC_TRY(fsdpc_py_unit_bind_param(self->ref, i, t));
    }
    return FSDPC_OK;
}

static fsdpc_status make_ref(fsdpc_py_unit *self, const fsdpc_param_spec *specs, int n,
                             const fsdpc_unit_options *options)
{
    fsdpc_unit_ref *ref = PyMem_RawCalloc(1, sizeof *ref);
    fsdpc_param_ref *params = PyMem_RawCalloc(n > 0 ? (size_t)n : 1, sizeof *params);
    fsdpc_unit *unit = NULL;
    fsdpc_status status = FSDPC_OK;
    if (!ref || !params)
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for unit '%s'", options->name);
    if (status == FSDPC_OK)
        status = fsdpc_unit_create(specs, n, options, &unit);
    if (status != FSDPC_OK) {
        PyMem_RawFree(ref);
        PyMem_RawFree(params);
        return status;
    }
    ref->refs = 1;
    ref->unit = unit;
    ref->params = params;
    for (int i = 0; i < n; i++)
        params[i] = (fsdpc_param_ref){.unit = unit, .param = i, .ref = ref};
    self->ref = ref;
    return FSDPC_OK;
}

static int init_unit(fsdpc_py_unit *self, const char *name, PyObject *names, bool band_per_param,
                     PyObject *comms[2], PyObject *param_dtype, PyObject *reduce_dtype,
                     PyObject *offload, const char *codec)
{
    fsdpc_runtime *runtime = fsdpc_py_runtime_of_type(Py_TYPE(self));
    if (!runtime)
        return -1;
    Py_ssize_t n = self->n_params;
    fsdpc_unit_options options = {.name = name,
                                  .device = runtime->device,
                                  .trace = runtime->trace,
                                  .band_per_param = band_per_param,
                                  .reshard_after_forward = true,
                                  .no_alias = runtime->env.no_alias};
    if (fsdpc_py_offload_parse(PyType_GetModule(Py_TYPE(self)), offload, &options.offload) < 0)
        return -1;
    if (fsdpc_py_check(fsdpc_codec_find(codec, &options.gather_codec)) < 0)
        return -1;
    if (!(options.mesh.shard = fsdpc_py_comm_of(comms[0])))
        return -1;
    if (comms[1] && !(options.mesh.replicate = fsdpc_py_comm_of(comms[1])))
        return -1;
    if (parse_optional_dtype(param_dtype, &options.cast_params, &options.param_dtype) < 0 ||
        parse_optional_dtype(reduce_dtype, &options.cast_reduce, &options.reduce_dtype) < 0)
        return -1;
    fsdpc_param_spec *specs = fsdpc_py_array(n, sizeof *specs);
    int result = specs ? read_specs(names, self, specs) : -1;
    if (result == 0)
        result = fsdpc_py_check(make_ref(self, specs, (int)n, &options));
    PyMem_Free(specs);
    if (result < 0)
        return -1;
    if (options.offload.tier)
        self->ref->tier = Py_NewRef(PyTuple_GET_ITEM(offload, 0));
    for (int i = 0; i < 2; i++) {
        self->ref->comms[i] = Py_XNewRef(comms[i]);
        if (comms[i])
            ((fsdpc_py_comm *)comms[i])->users++;
    }
    return fsdpc_py_check(take_values(self));
}

static int take_params(fsdpc_py_unit *self, PyObject *params)
{
    Py_ssize_t n = PyList_GET_SIZE(params);
    self->params = fsdpc_py_array(n, sizeof(fsdpc_tensor *));
    if (!self->params)
        return -1;
    for (; self->n_params < n; self->n_params++) {
        fsdpc_tensor *t = fsdpc_py_tensor_of(PyList_GET_ITEM(params, self->n_params));
        if (!t)
            return -1;
        self->params[self->n_params] = fsdpc_tensor_acquire(t);
    }
    return 0;
}

static PyObject *unit_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    FSDPC_PY_KEYWORDS(keywords, "name", "names", "params", "shard", "replicate", "param_dtype",
                      "reduce_dtype", "output_dtype", "cast_forward_inputs",
                      "reshard_after_forward", "keep_grads", "deterministic", "modules", "offload",
                      "band_per_param", "gather_codec", "reduce_codec", "error_feedback",
                      "error_every", "error_budget", "low_rank");
    const char *name;
    PyObject *names, *params, *shard, *replicate = Py_None, *param_dtype = NULL;
    PyObject *reduce_dtype = NULL, *output_dtype = NULL, *reshard = Py_None, *offload = NULL;
    PyObject *low_rank = NULL;
    int cast_inputs = 1, keep_grads = 0, deterministic = 0, n_modules = 1, band_per_param = 0;
    const char *codecs[] = {"exact", "exact"};
    int feedback = 0, error_every = 0;
    double error_budget = 0;
    fsdpc_codec reduce_codec;
    fsdpc_low_rank_options sums;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO!O!O|OOOOpOppiOpsspidO", keywords, &name,
                                     &PyList_Type, &names, &PyList_Type, &params, &shard,
                                     &replicate, &param_dtype, &reduce_dtype, &output_dtype,
                                     &cast_inputs, &reshard, &keep_grads, &deterministic,
                                     &n_modules, &offload, &band_per_param, &codecs[0], &codecs[1],
                                     &feedback, &error_every, &error_budget, &low_rank))
        return NULL;
    if (PyList_GET_SIZE(names) != PyList_GET_SIZE(params))
        return PyErr_Format(PyExc_ValueError, "a unit needs one name for each parameter");
    fsdpc_py_unit *self = (fsdpc_py_unit *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    bool input_given, output_given;
    fsdpc_dtype input = FSDPC_F32, output = FSDPC_F32;
    PyObject *comms[2] = {shard, replicate == Py_None ? NULL : replicate};
    self->explicit_reshard = reshard != Py_None;
    if (take_params(self, params) < 0 ||
        parse_optional_dtype(param_dtype, &input_given, &input) < 0 ||
        parse_optional_dtype(output_dtype, &output_given, &output) < 0 ||
        init_unit(self, name, names, band_per_param != 0, comms, param_dtype, reduce_dtype, offload,
                  codecs[0]) < 0 ||
        fsdpc_py_check(fsdpc_codec_find(codecs[1], &reduce_codec)) < 0 ||
        fsdpc_py_low_rank_parse(low_rank, &sums) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->input_dtype = input_given && cast_inputs ? (int)input : -1;
    self->output_dtype = output_given ? (int)output : -1;
    fsdpc_unit_settings settings = *fsdpc_unit_settings_of(self->ref->unit);
    settings.n_modules = n_modules;
    settings.keep_grads = keep_grads != 0;
    settings.deterministic = deterministic != 0;
    settings.reduce_codec = reduce_codec;
    settings.error_feedback = feedback != 0;
    settings.error_every = error_every;
    settings.error_budget = error_budget;
    settings.low_rank = sums;
    if (self->explicit_reshard)
        settings.reshard_after_forward = PyObject_IsTrue(reshard) == 1;
    if (fsdpc_py_check(fsdpc_unit_configure(self->ref->unit, &settings)) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int unit_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    return 0;
}

static void unit_dealloc(PyObject *object)
{
    fsdpc_py_unit *self = (fsdpc_py_unit *)object;
    PyObject_GC_UnTrack(object);
    if (self->weakrefs)
        PyObject_ClearWeakRefs(object);
    for (Py_ssize_t i = 0; i < self->n_params; i++)
        fsdpc_tensor_release(self->params[i]);
    PyMem_Free(self->params);
    fsdpc_unit_ref_release(self->ref);
    fsdpc_py_free(object);
}

/* ---- make_root(units, encloses) ---- */

static fsdpc_status bind_units(PyObject *units)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(units); i++) {
        fsdpc_py_unit *unit = (fsdpc_py_unit *)PyList_GET_ITEM(units, i);
        for (Py_ssize_t p = 0; p < unit->n_params; p++)
            FSDPC_TRY(fsdpc_py_unit_bind_param(unit->ref, (int)p, unit->params[p]));
    }
    return FSDPC_OK;
}

/* The root stays unsharded after forward, because backward needs it first. */
static void stay_for_backward(fsdpc_unit *unit)
{
    fsdpc_unit_settings settings = *fsdpc_unit_settings_of(unit);
    settings.reshard_after_forward = false;
    (void)fsdpc_unit_configure(unit, &settings); /* never fixed */
}

static PyObject *make_root(PyObject *module, PyObject *args)
{
    PyObject *units, *encloses;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &units, &PyList_Type, &encloses))
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(units);
    if (n == 0 || n != PyList_GET_SIZE(encloses))
        return PyErr_Format(PyExc_ValueError,
                            "make_root takes as many flags as units, at least one");
    fsdpc_root_ref *root = PyMem_RawCalloc(1, sizeof *root);
    fsdpc_unit_ref **refs = PyMem_RawCalloc((size_t)n, sizeof *refs);
    fsdpc_unit **plain = PyMem_Calloc((size_t)n, sizeof *plain);
    bool *flags = PyMem_Calloc((size_t)n, sizeof *flags);
    fsdpc_status status = FSDPC_OK;
    if (!root || !refs || !plain || !flags)
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the root of %zd units", n);
    for (Py_ssize_t i = 0; status == FSDPC_OK && i < n; i++) {
        fsdpc_py_unit *unit = fsdpc_py_unit_of(module, PyList_GET_ITEM(units, i));
        if (!unit || fsdpc_py_unit_check_open(unit) < 0)
            goto free;
        refs[i] = unit->ref;
        plain[i] = unit->ref->unit;
        flags[i] = PyObject_IsTrue(PyList_GET_ITEM(encloses, i)) == 1;
        if (i == 0 && !unit->explicit_reshard)
            stay_for_backward(unit->ref->unit);
    }
    if (status == FSDPC_OK) {
        FSDPC_PY_WITHOUT_GIL(status = fsdpc_root_create(plain, flags, (int)n, &root->root));
    }
    if (status != FSDPC_OK)
        goto free;
    root->refs = (int)n;
    root->units = refs;
    root->n_units = (int)n;
    for (Py_ssize_t i = 0; i < n; i++)
        refs[i]->root = root;
    PyMem_Free(plain);
    PyMem_Free(flags);
    status = bind_units(units);
    return fsdpc_py_none(status);

free:
    PyMem_RawFree(root);
    PyMem_RawFree(refs);
    PyMem_Free(plain);
    PyMem_Free(flags);
    return status == FSDPC_OK ? NULL : fsdpc_py_raise(status);
}

/* ---- the type ---- */

static PyMemberDef unit_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(fsdpc_py_unit, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot unit_slots[] = {
    {Py_tp_new, unit_new},
    {Py_tp_dealloc, unit_dealloc},
    {Py_tp_traverse, unit_traverse},
    {Py_tp_members, unit_members},
    {Py_tp_doc, (void *)fsdpc_doc_Unit},
    {0, NULL},
};

FSDPC_PY_TYPE(unit, Unit, fsdpc_py_unit, Py_TPFLAGS_HAVE_GC, unit_slots);

PyMethodDef fsdpc_py_unit_functions[] = {
    FSDPC_PY_FUNCTION(make_root, make_root, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};
