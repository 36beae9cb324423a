/* plan_root(units, mesh, groups, remote, single, prefetch, n_states, (state_dtype, min_coded_numel),
 * micro_steps): the rows of plan_root.h. plan_unsharded(units, ranks, prefetch, remote): the bytes
 * of unsharded parameters, for estimates that have sizes instead of shapes. */
#include "bind/engine/low_rank.h"
#include "bind/engine/tier.h"

#include "engine/plan_root.h"
#include "engine/slots.h"

/* Gets the granule of this process's GPU. Does not create a runtime if the process has no GPU.
 * Returns false with an exception on failure. */
static bool slot_granule(fsdpc_py_state *state, size_t *out)
{
    *out = FSDPC_SLOT_GRANULE;
    if (!state->runtime.plugin)
        return true;
    const fsdpc_runtime *runtime = fsdpc_py_state_runtime(state);
    if (runtime)
        *out = runtime->device->window_granule;
    return runtime;
}

/* ---- plan_root ---- */

static int read_spec(PyObject *item, fsdpc_param_spec *spec)
{
    PyObject *dtype, *shape;
    int frozen;
    const char *rule = "";
    if (!PyArg_ParseTuple(item, "OO!p|s", &dtype, &PyTuple_Type, &shape, &frozen, &rule) ||
        fsdpc_py_dtype_parse(dtype, &spec->dtype) < 0)
        return -1;
    spec->frozen = frozen;
    spec->matrix = strcmp(rule, "matrix") == 0;
    spec->factored = strcmp(rule, "factored") == 0;
    spec->name = "";
    spec->ndim = (int)PyTuple_GET_SIZE(shape);
    if (spec->ndim > FSDPC_LAYOUT_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%d dimensions; at most %d", spec->ndim,
                     FSDPC_LAYOUT_MAX_DIMS);
        return -1;
    }
    for (int d = 0; d < spec->ndim; d++)
        spec->shape[d] = PyLong_AsSize_t(PyTuple_GET_ITEM(shape, d));
    return PyErr_Occurred() ? -1 : 0;
}

/* The caller frees `specs`, even on failure. */
static int read_unit(PyObject *module, PyObject *item, fsdpc_plan_unit *unit)
{
    PyObject *list, *param_dtype, *reduce_dtype, *offload, *low_rank;
    const char *gather_codec, *reduce_codec;
    fsdpc_unit_options *options = &unit->options;
    int feedback, encloses, keep_grads, rank_dependent, reshards;
    if (!PyArg_ParseTuple(item, "O!OOOsspOpppp", &PyList_Type, &list, &param_dtype, &reduce_dtype,
                          &offload, &gather_codec, &reduce_codec, &feedback, &low_rank, &encloses,
                          &keep_grads, &rank_dependent, &reshards))
        return -1;
    unit->encloses = encloses;
    unit->settings = (fsdpc_unit_settings){.keep_grads = keep_grads,
                                           .rank_dependent = rank_dependent,
                                           .error_feedback = feedback,
                                           .reshard_after_forward = reshards};
    options->cast_params = param_dtype != Py_None;
    options->cast_reduce = reduce_dtype != Py_None;
    if ((options->cast_params && fsdpc_py_dtype_parse(param_dtype, &options->param_dtype) < 0) ||
        (options->cast_reduce && fsdpc_py_dtype_parse(reduce_dtype, &options->reduce_dtype) < 0) ||
        fsdpc_py_offload_parse(module, offload, &options->offload) < 0 ||
        fsdpc_py_check(fsdpc_codec_find(gather_codec, &options->gather_codec)) < 0 ||
        fsdpc_py_check(fsdpc_codec_find(reduce_codec, &unit->settings.reduce_codec)) < 0 ||
        fsdpc_py_low_rank_parse(low_rank, &unit->settings.low_rank) < 0)
        return -1;
    fsdpc_param_spec *specs = fsdpc_py_array(PyList_GET_SIZE(list), sizeof *specs);
    unit->specs = specs;
    unit->n_specs = (int)PyList_GET_SIZE(list);
    for (int i = 0; specs && i < unit->n_specs; i++)
        if (read_spec(PyList_GET_ITEM(list, i), &specs[i]) < 0)
            return -1;
    return specs ? 0 : -1;
}

static int read_options(PyObject *module, PyObject *args, PyObject **units_out,
                        fsdpc_root_options *out)
{
    PyObject *state_dtype;
    Py_ssize_t min_coded;
    const char *outer_codec = NULL;
    int remote, single;
    if (!PyArg_ParseTuple(args, "O!(ii)((ii)(ii))ppii(On)i|z", &PyList_Type, units_out,
                          &out->replicate, &out->shard, &out->shards.hosts, &out->shards.local_size,
                          &out->replicas.hosts, &out->replicas.local_size, &remote, &single,
                          &out->prefetch, &out->n_states, &state_dtype, &min_coded,
                          &out->micro_steps, &outer_codec) ||
        fsdpc_py_dtype_parse(state_dtype, &out->format.dtype) < 0 ||
        (outer_codec && fsdpc_py_check(fsdpc_codec_find(outer_codec, &out->outer_codec)) < 0))
        return -1;
    out->format.min_coded_numel = (size_t)min_coded;
    out->remote = remote;
    out->single = single;
    out->apart = outer_codec != NULL;
    bool moves = remote && out->shard > 1;
    return moves && !slot_granule(PyModule_GetState(module), &out->granule) ? -1 : 0;
}

static fsdpc_status add_row(void *list, const fsdpc_plan_row *row)
{
    static const char *const where[] = {[FSDPC_PLAN_MEMORY] = "memory",
                                        [FSDPC_PLAN_PINNED] = "pinned",
                                        [FSDPC_PLAN_FILE] = "file",
                                        [FSDPC_PLAN_MESSAGE] = "message"};
    PyObject *item =
        Py_BuildValue("(ssnns)", row->name, fsdpc_mem_kind_name(row->kind), (Py_ssize_t)row->bytes,
                      (Py_ssize_t)row->count, where[row->where]);
    int result = item ? PyList_Append(list, item) : -1;
    Py_XDECREF(item);
    return result < 0 ? FSDPC_ERR_NOMEM : FSDPC_OK; /* with an exception */
}

static PyObject *plan_root(PyObject *module, PyObject *args)
{
    PyObject *list;
    fsdpc_root_options options = {0};
    if (read_options(module, args, &list, &options) < 0)
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(list);
    fsdpc_plan_unit *units = fsdpc_py_array(n, sizeof *units);
    PyObject *rows = units ? PyList_New(0) : NULL;
    bool fine = rows;
    for (Py_ssize_t i = 0; fine && i < n; i++)
        fine = read_unit(module, PyList_GET_ITEM(list, i), &units[i]) == 0;
    if (fine) {
        fsdpc_status status = fsdpc_plan_root(units, (int)n, &options, add_row, rows);
        fine = !PyErr_Occurred() && fsdpc_py_check(status) == 0;
    }
    for (Py_ssize_t i = 0; units && i < n; i++)
        PyMem_Free((void *)units[i].specs);
    PyMem_Free(units);
    if (!fine)
        Py_CLEAR(rows);
    return rows;
}

/* ---- plan_unsharded ---- */

static PyObject *plan_unsharded(PyObject *module, PyObject *args)
{
    PyObject *list;
    int ranks, prefetch, remote;
    if (!PyArg_ParseTuple(args, "O!iip", &PyList_Type, &list, &ranks, &prefetch, &remote))
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(list);
    bool moves = remote && ranks > 1; /* otherwise they are read in place */
    size_t bytes = 0, granule = 0;
    if (moves && !slot_granule(PyModule_GetState(module), &granule))
        return NULL;
    fsdpc_slot_want *wants = fsdpc_py_array(n, sizeof *wants);
    bool fine = wants;
    for (Py_ssize_t i = 0; fine && i < n; i++) {
        Py_ssize_t unsharded, own_slices;
        int unshared;
        fine =
            PyArg_ParseTuple(PyList_GET_ITEM(list, i), "nnp", &unsharded, &own_slices, &unshared);
        if (!fine)
            break;
        wants[i] = (fsdpc_slot_want){.bytes = (size_t)unsharded, .unshared = unshared};
        bytes += moves ? (size_t)own_slices : 0;
    }
    if (fine)
        fsdpc_slots_assign(wants, (int)n, prefetch + 1, granule);
    for (Py_ssize_t i = 0; fine && i < n; i++)
        bytes += wants[i].block_bytes * (size_t)wants[i].n_blocks;
    PyMem_Free(wants);
    return fine ? PyLong_FromSize_t(bytes) : NULL;
}

PyMethodDef fsdpc_py_plan_functions[] = {
    FSDPC_PY_FUNCTION(plan_root, plan_root, METH_VARARGS),
    FSDPC_PY_FUNCTION(plan_unsharded, plan_unsharded, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};
