/* Gives checkpoints access to engine state: local shards of masters and optimizer states, step
 * counts and random state.
 *
 * The tensors are flat views of the engine's own memory, so local shards are saved and loaded
 * without a copy. Requesting a writable local shard marks its unit as written, as loading does.
 * Requesting `local` makes later epochs compare values, because users may write to it at any time;
 * requesting a local shard does not.
 */
#include "bind/engine/ckpt.h"

/* (tensor, first element, replica, number of replicas) */
static PyObject *shard_tuple(PyObject *module, fsdpc_py_unit *unit, fsdpc_dtype dtype,
                             const fsdpc_local_shard *local, void *data)
{
    const fsdpc_comm *replicate = fsdpc_unit_mesh(unit->ref->unit)->replicate;
    PyObject *tensor = fsdpc_py_unit_tensor(module, unit->ref, dtype, 1, &local->numel, data);
    if (!tensor)
        return NULL;
    return Py_BuildValue("Nnii", tensor, (Py_ssize_t)local->first, replicate ? replicate->rank : 0,
                         replicate ? replicate->size : 1);
}

static PyObject *master_shard(PyObject *module, PyObject *args)
{
    PyObject *object;
    int param, write;
    if (!PyArg_ParseTuple(args, "Oip", &object, &param, &write))
        return NULL;
    fsdpc_py_unit *unit = fsdpc_py_unit_of(module, object);
    if (!unit || fsdpc_py_unit_check_param(unit, param) < 0)
        return NULL;
    if (fsdpc_py_check(write ? fsdpc_unit_mark_written(unit->ref->unit)
                             : fsdpc_unit_check_master(unit->ref->unit, param)) < 0)
        return NULL;
    fsdpc_local_shard local;
    void *data = fsdpc_unit_master(unit->ref->unit, param, &local);
    return shard_tuple(module, unit, fsdpc_unit_flat_with(unit->ref->unit, param).dtype, &local,
                       data);
}

static PyObject *rng_state(PyObject *module, PyObject *Py_UNUSED(unused))
{
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    return runtime ? Py_BuildValue("KK", (unsigned long long)runtime->tape->seed,
                                   (unsigned long long)runtime->tape->next_stream)
                   : NULL;
}

static PyObject *set_rng_state(PyObject *module, PyObject *args)
{
    unsigned long long seed, stream;
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    if (!runtime || !PyArg_ParseTuple(args, "KK", &seed, &stream))
        return NULL;
    runtime->tape->seed = seed;
    runtime->tape->next_stream = stream;
    Py_RETURN_NONE;
}

PyMethodDef fsdpc_py_ckpt_state_functions[] = {
    FSDPC_PY_FUNCTION(master_shard, master_shard, METH_VARARGS),
    FSDPC_PY_FUNCTION(rng_state, rng_state, METH_NOARGS),
    FSDPC_PY_FUNCTION(set_rng_state, set_rng_state, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};
