/* Creates and configures the runtime.
 *
 * The number of threads per rank is FSDPC_THREADS if set, else OMP_NUM_THREADS, else usable cores /
 * LOCAL_WORLD_SIZE; it is at least 1. Worker streams may use the cores that this host's ranks leave
 * free; if there are none, every stream of the device runs inline.
 *
 * The device is the CPU unless another was selected before the runtime was created (bind/plugin.c).
 * All tensors are in its memory, and all operations run on its main stream in the order they are
 * called. With several GPUs, a rank uses the GPU whose index is its local rank modulo the number of
 * GPUs.
 */
#include "bind/tensor/ops.h"

#include "bind/stub_args.h"

#include <stdio.h>
#include <stdlib.h>

#include "ops/flat_ops.h"
#include "plugin/plugin.h"

fsdpc_py_state *fsdpc_py_state_of_type(PyTypeObject *type)
{
    /* Python 3.11 and later have PyType_GetModuleByDef for this; a subclass defined in Python has
     * no module. */
    for (PyTypeObject *t = type; t; t = t->tp_base) {
        if (!PyType_HasFeature(t, Py_TPFLAGS_HEAPTYPE))
            break;
        PyObject *module = ((PyHeapTypeObject *)t)->ht_module;
        if (module && PyModule_Check(module) && PyModule_GetDef(module) == &fsdpc_py_module)
            return PyModule_GetState(module);
    }
    PyErr_Format(PyExc_TypeError, "%s is not a type of fsdpc", type->tp_name);
    return NULL;
}

/* Returns a positive integer from an environment variable ("4,2" gives 4), or 0 if unset or
 * malformed. */
static int env_positive(const char *name)
{
    const char *text = getenv(name);
    char *end;
    long value = text ? strtol(text, &end, 10) : 0;
    return text && end != text && value > 0 && value <= 4096 ? (int)value : 0;
}

static void choose_threads(fsdpc_runtime *runtime, int *spare_out)
{
    int cores = fsdpc_usable_cores(), ranks = env_positive("LOCAL_WORLD_SIZE");
    if (!ranks)
        ranks = 1;
    if (!runtime->threads)
        runtime->threads = (int)runtime->env.threads;
    if (!runtime->threads)
        runtime->threads = env_positive("OMP_NUM_THREADS");
    if (!runtime->threads)
        runtime->threads = cores / ranks > 1 ? cores / ranks : 1;
    int spare = cores / ranks - runtime->threads;
    *spare_out = spare > 0 ? spare : 0;
}

static fsdpc_status make_cpu(fsdpc_mem *mem, fsdpc_team *team, fsdpc_isa isa, int spare,
                             fsdpc_device **out)
{
    fsdpc_device *cpu;
    FSDPC_TRY(fsdpc_device_cpu_create(mem, team, isa, spare, &cpu));
    cpu->flat = fsdpc_flat_ops_cpu(isa);
    cpu->nn = fsdpc_nn_ops_cpu(isa);
    *out = cpu;
    return FSDPC_OK;
}

static fsdpc_status make_device(fsdpc_runtime *r, fsdpc_isa isa, int spare)
{
    if (!r->plugin)
        return make_cpu(r->mem, r->team, isa, spare, &r->device);
    int count, local_rank = r->local_rank ? r->local_rank : env_positive("LOCAL_RANK");
    FSDPC_TRY(r->plugin->device_count(&count));
    const char cudnn[] = {(char)('0' + r->env.cudnn), '\0'};
    const fsdpc_plugin_option options[] = {{"cudnn", cudnn}, {NULL, NULL}};
    FSDPC_TRY(r->plugin->device_create(r->mem, local_rank % count, options, &r->device));
    FSDPC_TRY(fsdpc_mem_create(&r->host_mem));
    FSDPC_TRY(make_cpu(r->host_mem, r->team, isa, 0, &r->host));
    r->device->host = r->host;
    return FSDPC_OK;
}

static fsdpc_status read_environment(fsdpc_env *env_out, fsdpc_isa *isa_out)
{
    FSDPC_TRY(fsdpc_env_read(env_out));
    if (fsdpc_isa_parse(env_out->isa, isa_out) == FSDPC_OK)
        return FSDPC_OK;
    char why[256];
    snprintf(why, sizeof why, "%s", fsdpc_last_error());
    return fsdpc_fail(FSDPC_ERR_VALUE, "FSDPC_ISA='%s': %s", env_out->isa, why);
}

static fsdpc_status runtime_create(fsdpc_runtime *r)
{
    fsdpc_isa isa;
    int spare;
    FSDPC_TRY(read_environment(&r->env, &isa));
    choose_threads(r, &spare);
    FSDPC_TRY(fsdpc_mem_create(&r->mem));
    FSDPC_TRY(fsdpc_team_create(r->threads, &r->team));
    FSDPC_TRY(make_device(r, isa, spare));
    r->device->ordered = r->ordered;
    r->compute = fsdpc_device_main(r->device);
    FSDPC_TRY(fsdpc_tape_create(r->device, r->compute, &r->tape));
    r->tape->few_chunks = r->plugin != NULL;
    FSDPC_TRY(fsdpc_trace_create((size_t)r->env.trace, &r->trace));
    r->ready = true;
    return FSDPC_OK;
}

void fsdpc_py_runtime_destroy(fsdpc_runtime *r)
{
    fsdpc_runtime chosen = {.threads = r->threads,
                            .plugin = r->plugin,
                            .local_rank = r->local_rank,
                            .ordered = r->ordered};
    fsdpc_trace_destroy(r->trace);
    fsdpc_tape_destroy(r->tape);
    fsdpc_device_destroy(r->device);
    fsdpc_device_destroy(r->host);
    fsdpc_team_destroy(r->team);
    fsdpc_mem_destroy(r->host_mem);
    fsdpc_mem_destroy(r->mem);
    *r = chosen;
}

fsdpc_runtime *fsdpc_py_runtime_start(fsdpc_runtime *runtime)
{
    fsdpc_status status = runtime_create(runtime);
    if (status == FSDPC_OK)
        return runtime;
    fsdpc_py_raise(status);
    fsdpc_py_runtime_destroy(runtime);
    return NULL;
}

fsdpc_runtime *fsdpc_py_runtime_of_type(PyTypeObject *type)
{
    fsdpc_py_state *state = fsdpc_py_state_of_type(type);
    return state ? fsdpc_py_state_runtime(state) : NULL;
}

fsdpc_status fsdpc_py_tensor_read(const fsdpc_tensor *t, void *out)
{
    fsdpc_device *device = t->storage->device;
    fsdpc_status status;
    if (!device->remote && t->numel == 1)
        return fsdpc_device_copy(device, out, t->data, fsdpc_tensor_bytes(t), NULL);
    FSDPC_PY_WITHOUT_GIL(status =
                             fsdpc_device_copy(device, out, t->data, fsdpc_tensor_bytes(t), NULL));
    return status;
}

fsdpc_status fsdpc_py_check_local(const fsdpc_device *device, const char *what)
{
    if (!device->remote)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                      "%s on device '%s' is not supported yet: run on device 'cpu'", what,
                      device->ops->name);
}

/* ---- functions of the module ---- */

static PyObject *num_threads(PyObject *module, PyObject *Py_UNUSED(unused))
{
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    return runtime ? PyLong_FromLong(runtime->threads) : NULL;
}

/* set_ordered(bool): whether sums use the same order in every run. */
static PyObject *set_ordered(PyObject *module, PyObject *arg)
{
    fsdpc_runtime *runtime = &((fsdpc_py_state *)PyModule_GetState(module))->runtime;
    runtime->ordered = arg == Py_True;
    if (runtime->ready)
        runtime->device->ordered = runtime->ordered;
    Py_RETURN_NONE;
}

/* Does not create the runtime, which reads this number when it is created. */
static PyObject *set_num_threads(FSDPC_PY_FASTCALL(module))
{
    fsdpc_runtime *runtime = &((fsdpc_py_state *)PyModule_GetState(module))->runtime;
    fsdpc_args_set_num_threads a = FSDPC_DEFAULTS_set_num_threads;
    if (fsdpc_py_parse(&fsdpc_signature_set_num_threads, NULL, args, nargs, keywords, &a) < 0)
        return NULL;
    if (a.threads < 1 || a.threads > 4096)
        return PyErr_Format(PyExc_ValueError, "set_num_threads(%lld): from 1 to 4096",
                            (long long)a.threads);
    int threads = (int)a.threads;
    if (runtime->ready) {
        if (atomic_load_explicit(&runtime->running, memory_order_relaxed))
            return PyErr_Format(PyExc_RuntimeError,
                                "set_num_threads while another thread runs an operation");
        fsdpc_team *team;
        fsdpc_status status = fsdpc_team_create(threads, &team);
        if (status != FSDPC_OK)
            return fsdpc_py_raise(status);
        fsdpc_team_destroy(runtime->team);
        runtime->team = runtime->device->team = team;
        if (runtime->host)
            runtime->host->team = team;
    }
    runtime->threads = threads;
    Py_RETURN_NONE;
}

/* Does not create the runtime, because a query must not start anything. */
static PyObject *engine_threads(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const fsdpc_runtime *r = &((fsdpc_py_state *)PyModule_GetState(module))->runtime;
    int threads = r->ready ? fsdpc_team_workers(r->team) : 0;
    if (r->ready && !r->plugin)
        threads += fsdpc_device_cpu_workers(r->device);
    return PyLong_FromLong(threads);
}

static PyObject *usable_cores(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyLong_FromLong(fsdpc_usable_cores());
}

static int put(PyObject *dict, const char *key, const char *suffix, size_t value)
{
    PyObject *number = PyLong_FromSize_t(value), *name = PyUnicode_FromFormat("%s%s", key, suffix);
    int result = number && name ? PyDict_SetItem(dict, name, number) : -1;
    Py_XDECREF(number);
    Py_XDECREF(name);
    return result;
}

static PyObject *memory_stats(PyObject *module, PyObject *Py_UNUSED(unused))
{
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    PyObject *dict = runtime ? PyDict_New() : NULL;
    if (!dict)
        return NULL;
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(runtime->mem, &stats);
    int bad = 0;
    for (int i = 0; i < FSDPC_MEM_COUNT; i++) {
        const char *name = fsdpc_mem_kind_name((fsdpc_mem_kind)i);
        bad |= put(dict, name, "_bytes", stats.now_bytes[i]);
        bad |= put(dict, name, "_peak_bytes", stats.peak_bytes[i]);
    }
    bad |= put(dict, "total", "_bytes", stats.total_now_bytes);
    bad |= put(dict, "total", "_peak_bytes", stats.total_peak_bytes);
    bad |= put(dict, "cached", "_bytes", stats.cached_bytes);
    bad |= put(dict, "system", "_allocs", (size_t)stats.system_allocs);
    if (bad)
        Py_CLEAR(dict);
    return dict;
}

static PyObject *reset_peak_memory_stats(PyObject *module, PyObject *Py_UNUSED(unused))
{
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    if (!runtime)
        return NULL;
    fsdpc_mem_peak_reset(runtime->mem);
    Py_RETURN_NONE;
}

static PyObject *runtime_config(PyObject *module, PyObject *Py_UNUSED(unused))
{
    fsdpc_runtime *r = fsdpc_py_runtime(module);
    if (!r)
        return NULL;
    return Py_BuildValue("{s:s,s:s,s:i,s:i,s:s,s:s}", "device", r->device->ops->name, "isa",
                         fsdpc_isa_name(r->device->isa), "threads", r->threads, "usable_cores",
                         fsdpc_usable_cores(), "nn_kernels", r->device->nn->name, "flat_kernels",
                         r->device->flat->name);
}

static PyObject *check_environment(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    fsdpc_env env;
    fsdpc_isa isa;
    fsdpc_status status = read_environment(&env, &isa);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
#define VALUE_real PyFloat_FromDouble
#define VALUE_integer PyLong_FromLong
#define VALUE_flag PyBool_FromLong
#define VALUE_text PyUnicode_DecodeFSDefault
    PyObject *values = PyDict_New();
#define X(field, type, variable, fallback, lowest, highest, text)                                  \
    if (values)                                                                                    \
        fsdpc_py_put_item(&values, variable, VALUE_##type(env.field));
    FSDPC_ENV_TABLE(X)
#undef X
    return values;
}

PyMethodDef fsdpc_py_state_functions[] = {
    FSDPC_PY_FUNCTION(num_threads, num_threads, METH_NOARGS),
    FSDPC_PY_FUNCTION(set_ordered, set_ordered, METH_O),
    FSDPC_PY_FUNCTION(set_num_threads, set_num_threads, FSDPC_PY_FAST),
    FSDPC_PY_FUNCTION(engine_threads, engine_threads, METH_NOARGS),
    FSDPC_PY_FUNCTION(usable_cores, usable_cores, METH_NOARGS),
    FSDPC_PY_FUNCTION(memory_stats, memory_stats, METH_NOARGS),
    FSDPC_PY_FUNCTION(reset_peak_memory_stats, reset_peak_memory_stats, METH_NOARGS),
    FSDPC_PY_FUNCTION(check_environment, check_environment, METH_NOARGS),
    FSDPC_PY_FUNCTION(runtime_config, runtime_config, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};

void fsdpc_py_put_item(PyObject **dict_io, const char *key, PyObject *item)
{
    if (!item || PyDict_SetItemString(*dict_io, key, item) < 0)
        Py_CLEAR(*dict_io);
    Py_XDECREF(item);
}

PyObject *fsdpc_py_shape_tuple(int ndim, const size_t *shape)
{
    PyObject *tuple = PyTuple_New(ndim);
    for (int d = 0; tuple && d < ndim; d++)
        fsdpc_py_put(&tuple, d, PyLong_FromSize_t(shape[d]));
    return tuple;
}

void fsdpc_py_put(PyObject **sequence_io, Py_ssize_t i, PyObject *item)
{
    if (!item)
        Py_CLEAR(*sequence_io);
    else if (PyTuple_CheckExact(*sequence_io))
        PyTuple_SET_ITEM(*sequence_io, i, item);
    else
        PyList_SET_ITEM(*sequence_io, i, item);
}
