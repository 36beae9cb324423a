/* Checkpoint access to the engine: pieces of masters and optimizer states, step counts and random
 * state.
 *
 * The tensors are flat views of the engine's own memory, so pieces are saved and loaded without a
 * copy.  Requesting a writable piece marks its unit as written, as loading does.  A user may write
 * to `local` at any time, so `local` makes later epochs compare values; a piece does not.
 */
#include "bind/engine/ckpt.h"

/* (tensor, first element, replica, number of replicas) */
static PyObject *piece_tuple(PyObject *module, fsdpc_py_unit *unit, fsdpc_dtype dtype,
                             const fsdpc_piece *piece, void *data)
{
    const fsdpc_comm *replicate = fsdpc_unit_mesh(unit->ref->unit)->replicate;
    PyObject *tensor = fsdpc_py_unit_tensor(module, unit->ref, dtype, 1, &piece->numel, data);
    if (!tensor)
        return NULL;
    return Py_BuildValue("Nnii", tensor, (Py_ssize_t)piece->first, replicate ? replicate->rank : 0,
                         replicate ? replicate->size : 1);
}

static PyObject *master_piece(PyObject *module, PyObject *args)
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
    fsdpc_piece piece;
    void *data = fsdpc_unit_master(unit->ref->unit, param, &piece);
    return piece_tuple(module, unit, fsdpc_unit_flat_with(unit->ref->unit, param).dtype, &piece,
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
    FSDPC_PY_FUNCTION(master_piece, master_piece, METH_VARARGS),
    FSDPC_PY_FUNCTION(rng_state, rng_state, METH_NOARGS),
    FSDPC_PY_FUNCTION(set_rng_state, set_rng_state, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};
