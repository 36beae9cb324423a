/* Matrix products for a foreign frontend, on the engine's kernels.
 *
 * Operands are addresses of dense row-major matrices of one dtype; the caller must check shapes and
 * keep the tensors alive. The gradient of a unit's weight is written directly into the unit's
 * reduce buffer, so no other copy exists. `lend` does this for a head, whose operation computes its
 * gradient in forward, on a native leaf.
 */
#include "bind/torch/unit.h"

#include "ops/nn_ops.h"

typedef struct product {
    fsdpc_gemm_args args;
    fsdpc_device *device;
} product;

static fsdpc_status run_product(const product *p)
{
    fsdpc_stream *main = fsdpc_device_main(p->device);
    return fsdpc_nn_ops_of(main)->gemm(&p->args, main);
}

/* Returns the gemm arguments for a product of dense matrices. */
static fsdpc_gemm_args dense_args(Py_ssize_t m, Py_ssize_t n, Py_ssize_t k, bool trans_a,
                                  bool trans_b, fsdpc_dtype dtype)
{
    return (fsdpc_gemm_args){.m = (size_t)m,
                             .n = (size_t)n,
                             .k = (size_t)k,
                             .dtype = dtype,
                             .c_dtype = dtype,
                             .lda = (size_t)(trans_a ? m : k),
                             .trans_a = trans_a,
                             .ldb = (size_t)(trans_b ? k : n),
                             .trans_b = trans_b,
                             .ldc = (size_t)n};
}

static void *address(size_t number)
{
    return (void *)number; /* NOLINT(performance-no-int-to-ptr): it came from data_ptr() */
}

/* product(out, a, b, bias, m, n, k, trans_a, trans_b, dtype) */
static PyObject *run(PyObject *module, PyObject *args)
{
    Py_ssize_t out, a, b, bias, m, n, k;
    int trans_a, trans_b;
    PyObject *dtype_object;
    fsdpc_dtype dtype;
    if (!PyArg_ParseTuple(args, "nnnnnnnppO", &out, &a, &b, &bias, &m, &n, &k, &trans_a, &trans_b,
                          &dtype_object) ||
        fsdpc_py_dtype_parse(dtype_object, &dtype) < 0)
        return NULL;
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    if (!runtime)
        return NULL;
    product p = {dense_args(m, n, k, trans_a != 0, trans_b != 0, dtype), runtime->device};
    p.args.c = address((size_t)out);
    p.args.a = address((size_t)a);
    p.args.b = address((size_t)b);
    p.args.bias = address((size_t)bias);
    fsdpc_status status = fsdpc_py_check_local(runtime->device, "a product of torch's tensors");
    if (status == FSDPC_OK)
        FSDPC_PY_RUN(runtime, m * n, status, run_product(&p));
    return fsdpc_py_none(status);
}

static PyObject *add_product_method(PyObject *object, PyObject *args)
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    Py_ssize_t dy, x, rows, n_out, n_in;
    int param;
    if (!PyArg_ParseTuple(args, "innnnn", &param, &dy, &x, &rows, &n_out, &n_in))
        return NULL;
    if (param < 0 || param >= self->n_params)
        return PyErr_Format(PyExc_IndexError, "parameter %d of %d", param, self->n_params);
    const fsdpc_place *place = fsdpc_torch_place(self, param);
    if (n_out < 0 || n_in < 0 || (size_t)n_out * (size_t)n_in != place->numel)
        return PyErr_Format(PyExc_ValueError, "a gradient of %zd x %zd for '%s' of %zu elements",
                            n_out, n_in, place->name, place->numel);
    const fsdpc_unit_flat flat = fsdpc_unit_flat_with(unit, param);
    fsdpc_dtype dtype = flat.param_dtype, to = flat.reduce_dtype;
    if (to != dtype && to != FSDPC_F32) /* gemm.h: no other output dtype can be written */
        Py_RETURN_FALSE;
    if (fsdpc_torch_reach_backward(self) < 0 || fsdpc_torch_provide_grads(self) < 0 ||
        fsdpc_torch_add_early(self) < 0)
        return NULL;
    product p = {dense_args(n_out, n_in, rows, true, false, dtype), fsdpc_unit_device(unit)};
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(
        status = fsdpc_grad_target_of(unit, param, &p.args.c, &p.args.c_dtype, &p.args.accumulate));
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    p.args.a = address((size_t)dy);
    p.args.b = address((size_t)x);
    fsdpc_runtime *runtime = &fsdpc_py_state_of_ref(self->unit_object)->runtime;
    FSDPC_PY_RUN(runtime, n_out * n_in, status, run_product(&p));
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    Py_RETURN_TRUE;
}

static PyObject *lend_method(PyObject *object, PyObject *args)
{
    const fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    int param;
    PyObject *tensor;
    if (!PyArg_ParseTuple(args, "iO", &param, &tensor))
        return NULL;
    fsdpc_tensor *leaf = fsdpc_py_tensor_of(tensor);
    if (!leaf)
        return NULL;
    if (param < 0 || param >= self->n_params ||
        leaf->numel != fsdpc_torch_place(self, param)->numel)
        return PyErr_Format(PyExc_ValueError, "parameter %d of %d has other elements", param,
                            self->n_params);
    leaf->sink = fsdpc_py_sink_of(self->unit->ref, param);
    Py_RETURN_NONE;
}

static PyObject *accept_method(PyObject *object, PyObject *args)
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    PyObject *tensor;
    int direct;
    if (!PyArg_ParseTuple(args, "Op", &tensor, &direct))
        return NULL;
    fsdpc_tensor *leaf = fsdpc_py_tensor_of(tensor);
    if (!leaf)
        return NULL;
    if (!direct)
        leaf->sink = (fsdpc_grad_sink){0};
    else if (fsdpc_torch_reach_backward(self) < 0 || fsdpc_torch_provide_grads(self) < 0 ||
             fsdpc_torch_add_early(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

PyMethodDef fsdpc_py_torch_product_methods[] = {
    FSDPC_PY_METHOD(TorchUnit, lend, lend_method, METH_VARARGS),
    FSDPC_PY_METHOD(TorchUnit, accept, accept_method, METH_VARARGS),
    FSDPC_PY_METHOD(TorchUnit, add_product, add_product_method, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};

PyMethodDef fsdpc_py_torch_product_functions[] = {
    FSDPC_PY_FUNCTION(product, run, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};
