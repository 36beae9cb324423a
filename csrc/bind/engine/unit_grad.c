/* Unit: gradients handed out to the user.
 *
 * Gradients are tensors over the gradient shards. A gradient that the user keeps after zero_grad
 * retains its values, as in PyTorch. The unit then allocates new memory, and the old memory is
 * freed with the last tensor that uses it. All gradients between two zero_grad calls share a
 * reference-counted block.
 */
#include "bind/engine.h"

#include <stdatomic.h>

static void release_grad(fsdpc_storage *storage)
{
    fsdpc_shared_grads *block = storage->owner;
    fsdpc_unit_ref *ref = block->ref;
    fsdpc_unit_export(ref->unit, -1);
    fsdpc_py_shared_grads_release(block);
    fsdpc_unit_ref_release(ref);
}

/* Returns the block of the unit's gradients. */
static fsdpc_status block_of(fsdpc_unit_ref *ref, fsdpc_shared_grads **out)
{
    if (!ref->handed_out) {
        int n = fsdpc_unit_layout(ref->unit)->n_groups;
        fsdpc_shared_grads *block =
            PyMem_RawCalloc(1, sizeof *block + (size_t)n * sizeof *block->memory);
        if (!block)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to hand out a gradient");
        block->refs = 1;
        block->ref = ref;
        block->device = fsdpc_unit_device(ref->unit);
        block->n_groups = n;
        ref->handed_out = block;
    }
    *out = ref->handed_out;
    return FSDPC_OK;
}

static fsdpc_status hand_out(fsdpc_unit_ref *ref, int param, fsdpc_tensor **out)
{
    size_t shape[FSDPC_MAX_DIMS];
    fsdpc_shared_grads *block = NULL;
    fsdpc_local_shard local;
    void *data;
    *out = NULL;
    FSDPC_TRY(fsdpc_unit_grad(ref->unit, param, true, &local, &data));
    if (!data)
        return FSDPC_OK;
    FSDPC_TRY(block_of(ref, &block));
    int ndim = fsdpc_py_local_shape(&fsdpc_unit_layout(ref->unit)->params[param], &local, shape);
    FSDPC_TRY(fsdpc_tensor_wrap(block->device, fsdpc_unit_flat_with(ref->unit, param).grad_dtype,
                                ndim, shape, data, release_grad, block, out));
    atomic_fetch_add_explicit(&block->refs, 1, memory_order_relaxed);
    fsdpc_unit_ref_acquire(ref);
    fsdpc_unit_export(ref->unit, 1);
    return FSDPC_OK;
}

static PyObject *unit_grad(PyObject *object, PyObject *arg)
{
    fsdpc_py_unit *self = (fsdpc_py_unit *)object;
    int param = fsdpc_py_unit_param_arg(object, arg);
    fsdpc_tensor *t;
    if (param < 0 || fsdpc_py_check(hand_out(self->ref, param, &t)) < 0)
        return NULL;
    if (!t)
        Py_RETURN_NONE;
    return fsdpc_py_tensor_wrap(PyType_GetModule(Py_TYPE(object)), t);
}

static PyObject *unit_zero_grad(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_unit_ref *ref = ((fsdpc_py_unit *)object)->ref;
    fsdpc_shared_grads *block = ref->handed_out;
    bool parted = false;
    bool kept = block && atomic_load_explicit(&block->refs, memory_order_acquire) > 1;
    fsdpc_status status = kept ? fsdpc_unit_apply_scale(ref->unit) : FSDPC_OK; /* clipped */
    fsdpc_unit_zero_grad(ref->unit);
    if (kept && status == FSDPC_OK)
        status = fsdpc_unit_part_grads(ref->unit, block->memory, &parted);
    if (parted) {
        ref->handed_out = NULL;
        fsdpc_py_shared_grads_release(block);
    }
    return fsdpc_py_none(status);
}

static PyObject *unit_refuse_stepped(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return fsdpc_py_none(fsdpc_unit_refuse_stepped(((fsdpc_py_unit *)object)->ref->unit));
}

PyMethodDef fsdpc_py_unit_grad_methods[] = {
    FSDPC_PY_METHOD(Unit, grad, unit_grad, METH_O),
    FSDPC_PY_METHOD(Unit, zero_grad, unit_zero_grad, METH_NOARGS),
    FSDPC_PY_METHOD(Unit, refuse_stepped, unit_refuse_stepped, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};
