/* What foreign tensors are made over: the memory of a unit, and where its parameters lie in it.
 *
 * A front door slices the flat tensors that unit_memory returns at the offsets of unit_places: it
 * gets pieces, pieces of gradients and fulls without copying, and all fulls of a flat group are
 * views of one tensor.  The tensors keep the unit's memory alive, no Python object of the model.
 */
#include "py/py_torch_unit.h"

/* unit_places(unit): of each parameter (group, full_offset, first, numel, shard_offset). */
static PyObject *unit_places(PyObject *module, PyObject *object)
{
    fsdpc_py_unit *self = fsdpc_py_unit_of(module, object);
    if (!self)
        return NULL;
    const fsdpc_unit *unit = self->ref->unit;
    const fsdpc_layout *layout = fsdpc_unit_layout(unit);
    PyObject *list = PyList_New(layout->n_params);
    for (int i = 0; list && i < layout->n_params; i++) {
        const fsdpc_place *place = &layout->params[i];
        fsdpc_piece piece = fsdpc_layout_piece(layout, i, fsdpc_unit_mesh(unit)->shard->rank);
        fsdpc_py_put(&list, i,
                     Py_BuildValue("(innnn)", place->group, (Py_ssize_t)place->full_offset,
                                   (Py_ssize_t)piece.first, (Py_ssize_t)piece.numel,
                                   (Py_ssize_t)(piece.numel ? piece.shard_offset : 0)));
    }
    return list;
}

/* unit_memory(unit, kind): "master", "grad" or "full" of every flat group, flat. */
static PyObject *unit_memory(PyObject *module, PyObject *args)
{
    PyObject *object;
    const char *kind;
    if (!PyArg_ParseTuple(args, "Os", &object, &kind))
        return NULL;
    fsdpc_py_unit *self = fsdpc_py_unit_of(module, object);
    if (!self)
        return NULL;
    const fsdpc_unit *unit = self->ref->unit;
    int n_groups = fsdpc_unit_layout(unit)->n_groups;
    PyObject *list = PyList_New(n_groups);
    for (int g = 0; list && g < n_groups; g++) {
        const fsdpc_unit_flat flat = fsdpc_unit_flat_of(unit, g);
        bool full = strcmp(kind, "full") == 0, grad = strcmp(kind, "grad") == 0;
        fsdpc_dtype dtype = full ? flat.wire_dtype : grad ? flat.grad_dtype : flat.dtype;
        size_t numel = full ? flat.full_numel : flat.shard_numel;
        void *data = full ? flat.full : grad ? flat.grad : flat.master;
        fsdpc_py_put(&list, g, fsdpc_py_unit_tensor(module, self->ref, dtype, 1, &numel, data));
    }
    return list;
}

PyMethodDef fsdpc_py_torch_memory_functions[] = {
    FSDPC_PY_FUNCTION(unit_places, unit_places, METH_O),
    FSDPC_PY_FUNCTION(unit_memory, unit_memory, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};
