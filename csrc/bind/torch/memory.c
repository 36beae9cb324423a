/* The memory that foreign tensors use: a unit's memory, and the offsets of its parameters.
 *
 * A frontend slices the flat tensors from unit_memory at the offsets from unit_places: it gets
 * sharded parameters and unsharded parameters without copying, and all of a flat group's unsharded
 * parameters are views of one tensor. The tensors keep the unit's memory alive, but none of the
 * model's Python objects. Gradients are in memory owned by the tensors over it (grad_memory, or the
 * foreign library's): bind/torch/allocator.c.
 */
#include "bind/torch/unit.h"

/* unit_places(unit): (group, unsharded_offset, first, numel, shard_offset, master_offset) per
 * parameter. */
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
        fsdpc_local_shard local =
            fsdpc_layout_local_shard(layout, i, fsdpc_unit_mesh(unit)->shard->rank);
        size_t at = local.numel ? local.shard_offset : 0;
        size_t master = local.numel ? fsdpc_unit_master_offset(unit, i) : 0;
        fsdpc_py_put(&list, i,
                     Py_BuildValue("(innnnn)", place->group, (Py_ssize_t)place->unsharded_offset,
                                   (Py_ssize_t)local.first, (Py_ssize_t)local.numel, (Py_ssize_t)at,
                                   (Py_ssize_t)master));
    }
    return list;
}

/* unit_memory(unit, kind): returns the "master", "grad" or "unsharded" of every flat group that has
 * one, as flat tensors. */
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
    bool unsharded = strcmp(kind, "unsharded") == 0, grad = strcmp(kind, "grad") == 0;
    if (!unsharded && !grad && strcmp(kind, "master") != 0)
        return PyErr_Format(PyExc_ValueError, "memory of kind '%s'", kind);
    int n_groups = grad ? fsdpc_unit_trained_groups(unit) : fsdpc_unit_layout(unit)->n_groups;
    PyObject *list = PyList_New(n_groups);
    for (int g = 0; list && g < n_groups; g++) {
        const fsdpc_unit_flat flat = fsdpc_unit_flat_of(unit, g);
        fsdpc_dtype dtype = unsharded ? flat.param_dtype : grad ? flat.grad_dtype : flat.dtype;
        size_t numel = unsharded ? flat.unsharded_numel
                       : grad    ? flat.shard_numel
                                 : flat.master_numel;
        void *data = unsharded ? flat.unsharded : grad ? flat.grad : flat.master;
        fsdpc_py_put(&list, g, fsdpc_py_unit_tensor(module, self->ref, dtype, 1, &numel, data));
    }
    return list;
}

static void free_block(fsdpc_storage *storage)
{
    fsdpc_device_free(storage->device, storage->data);
}

/* grad_memory(unit): allocates zeroed memory for the gradient shards of trained flat groups. */
static PyObject *grad_memory(PyObject *module, PyObject *object)
{
    fsdpc_py_unit *self = fsdpc_py_unit_of(module, object);
    if (!self)
        return NULL;
    const fsdpc_unit *unit = self->ref->unit;
    fsdpc_device *device = fsdpc_unit_device(unit);
    int n_groups = fsdpc_unit_trained_groups(unit);
    PyObject *list = PyList_New(n_groups);
    for (int g = 0; list && g < n_groups; g++) {
        const fsdpc_unit_flat flat = fsdpc_unit_flat_of(unit, g);
        void *data;
        fsdpc_tensor *t = NULL;
        fsdpc_status status = fsdpc_unit_alloc_grad(unit, g, &data);
        if (status == FSDPC_OK)
            status = fsdpc_tensor_wrap(device, flat.grad_dtype, 1, &flat.shard_numel, data,
                                       free_block, NULL, &t);
        if (status != FSDPC_OK)
            fsdpc_device_free(device, data);
        fsdpc_py_put(&list, g,
                     status == FSDPC_OK ? fsdpc_py_tensor_wrap(module, t) : fsdpc_py_raise(status));
    }
    return list;
}

PyMethodDef fsdpc_py_torch_memory_functions[] = {
    FSDPC_PY_FUNCTION(unit_places, unit_places, METH_O),
    FSDPC_PY_FUNCTION(unit_memory, unit_memory, METH_VARARGS),
    FSDPC_PY_FUNCTION(grad_memory, grad_memory, METH_O),
    {NULL, NULL, 0, NULL},
};
