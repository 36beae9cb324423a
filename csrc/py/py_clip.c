/* Norms and scales of gradients: thin over csrc/engine/clip.c.
 *
 * Every function takes units, whose gradients are sharded, and plain tensors, the gradients of
 * modules that are not.  Both are summed over the same leaves, so a sharded model and its unsharded
 * twin have the same norm to the bit.
 */
#include "py/py_engine.h"

#include <math.h>

#include "engine/clip.h"
#include "ops/flat_ops.h"

typedef struct gradients {
    fsdpc_runtime *runtime;
    fsdpc_unit **units;
    int n_units;
    fsdpc_tensor **plain;
    size_t n_plain;
} gradients;

static void free_gradients(gradients *g)
{
    PyMem_Free(g->units);
    PyMem_Free(g->plain);
}

static int read_plain(PyObject *list, gradients *g)
{
    g->n_plain = (size_t)PyList_GET_SIZE(list);
    g->plain = PyMem_Calloc(g->n_plain + 1, sizeof *g->plain);
    if (!g->plain) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < g->n_plain; i++) {
        g->plain[i] = fsdpc_py_tensor_of(PyList_GET_ITEM(list, (Py_ssize_t)i));
        if (!g->plain[i])
            return -1;
        fsdpc_status status = fsdpc_tensor_check(g->plain[i]);
        if (status != FSDPC_OK) {
            fsdpc_py_raise(status);
            return -1;
        }
    }
    return 0;
}

/* Borrows from the lists, which must outlive it; 0, or -1 with an exception. */
static int read_gradients(PyObject *module, PyObject *units, PyObject *plain, gradients *g)
{
    *g = (gradients){.runtime = fsdpc_py_runtime(module)};
    if (!g->runtime || read_plain(plain, g) < 0)
        goto failed;
    g->n_units = (int)PyList_GET_SIZE(units);
    g->units = PyMem_Calloc((size_t)g->n_units + 1, sizeof(fsdpc_unit *));
    if (!g->units) {
        PyErr_NoMemory();
        goto failed;
    }
    for (int i = 0; i < g->n_units; i++) {
        fsdpc_py_unit *unit = fsdpc_py_unit_of(module, PyList_GET_ITEM(units, i));
        if (!unit || fsdpc_py_unit_check_open(unit) < 0)
            goto failed;
        g->units[i] = unit->ref->unit;
    }
    return 0;

failed:
    free_gradients(g);
    return -1;
}

/* Over the leaves that a layout would give the tensor: the same sums, so the same bits. */
static fsdpc_status add_plain(const gradients *g, size_t i, double p, fsdpc_norm *norm)
{
    const fsdpc_tensor *t = g->plain[i];
    return fsdpc_norm_add(norm, p, t->data, t->dtype, t->numel,
                          fsdpc_layout_leaf(t->ndim, t->shape), g->runtime->compute);
}

static PyObject *grad_norm(PyObject *module, PyObject *args)
{
    PyObject *units, *plain;
    double p = 2;
    gradients g;
    if (!PyArg_ParseTuple(args, "O!O!|d", &PyList_Type, &units, &PyList_Type, &plain, &p) ||
        read_gradients(module, units, plain, &g) < 0)
        return NULL;
    fsdpc_norm norm = {{{0}, 0, 0}};
    fsdpc_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = fsdpc_norm_check(p);
    for (size_t i = 0; status == FSDPC_OK && i < g.n_plain; i++)
        status = add_plain(&g, i, p, &norm);
    if (status == FSDPC_OK)
        status = fsdpc_clip_norms(g.units, g.n_units, p, &norm, NULL);
    Py_END_ALLOW_THREADS;
    free_gradients(&g);
    return status == FSDPC_OK ? PyFloat_FromDouble(fsdpc_norm_value(&norm, p))
                              : fsdpc_py_raise(status);
}

/* A list of floats, None where a parameter has no gradient. */
static PyObject *unit_norms(const fsdpc_unit *unit, const fsdpc_norm *norms, double p)
{
    int n = unit->layout->n_params;
    PyObject *list = PyList_New(n);
    for (int i = 0; list && i < n; i++) {
        bool has = unit->grad_live && unit->trainable[i];
        PyObject *value =
            has ? PyFloat_FromDouble(fsdpc_norm_value(&norms[i], p)) : Py_NewRef(Py_None);
        if (!value)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, value);
    }
    return list;
}

/* ([[norm or None of each parameter] of each unit], [norm of each tensor]) */
static PyObject *norms_result(const gradients *g, const fsdpc_norm *norms, double p)
{
    PyObject *sharded = PyList_New(g->n_units), *plain = PyList_New((Py_ssize_t)g->n_plain);
    bool ok = sharded && plain;
    for (int i = 0; ok && i < g->n_units; i++) {
        PyObject *list = unit_norms(g->units[i], norms, p);
        norms += g->units[i]->layout->n_params;
        ok = list && PyList_SetItem(sharded, i, list) == 0;
    }
    for (size_t i = 0; ok && i < g->n_plain; i++) {
        PyObject *value = PyFloat_FromDouble(fsdpc_norm_value(&norms[i], p));
        ok = value && PyList_SetItem(plain, (Py_ssize_t)i, value) == 0;
    }
    PyObject *result = ok ? PyTuple_Pack(2, sharded, plain) : NULL;
    Py_XDECREF(sharded);
    Py_XDECREF(plain);
    return result;
}

static PyObject *grad_norms(PyObject *module, PyObject *args)
{
    PyObject *units, *plain;
    double p = 2;
    gradients g;
    if (!PyArg_ParseTuple(args, "O!O!|d", &PyList_Type, &units, &PyList_Type, &plain, &p) ||
        read_gradients(module, units, plain, &g) < 0)
        return NULL;
    size_t n_params = 0;
    for (int i = 0; i < g.n_units; i++)
        n_params += (size_t)g.units[i]->layout->n_params;
    fsdpc_norm total = {{{0}, 0, 0}};
    fsdpc_norm *norms = PyMem_Calloc(n_params + g.n_plain + 1, sizeof *norms);
    PyObject *result = NULL;
    if (norms) {
        fsdpc_status status;
        Py_BEGIN_ALLOW_THREADS;
        status = fsdpc_clip_norms(g.units, g.n_units, p, &total, norms);
        for (size_t i = 0; status == FSDPC_OK && i < g.n_plain; i++)
            status = add_plain(&g, i, p, &norms[n_params + i]);
        Py_END_ALLOW_THREADS;
        result = status == FSDPC_OK ? norms_result(&g, norms, p) : fsdpc_py_raise(status);
    } else {
        PyErr_NoMemory();
    }
    PyMem_Free(norms);
    free_gradients(&g);
    return result;
}

/* `nonfinite_io` becomes 1 where a NaN or infinity was read. */
static fsdpc_status multiply_plain(const gradients *g, double factor, int *nonfinite_io)
{
    for (size_t i = 0; i < g->n_plain; i++) {
        fsdpc_tensor *t = g->plain[i];
        FSDPC_TRY(fsdpc_tensor_check_write(t));
        FSDPC_TRY(fsdpc_flat_scale(t->data, t->dtype, t->numel, factor, nonfinite_io,
                                   g->runtime->compute));
    }
    return FSDPC_OK;
}

static PyObject *scale_grads(PyObject *module, PyObject *args)
{
    PyObject *units, *plain;
    double norm, max_norm;
    int nonfinite = 0;
    gradients g;
    if (!PyArg_ParseTuple(args, "O!O!dd", &PyList_Type, &units, &PyList_Type, &plain, &norm,
                          &max_norm) ||
        read_gradients(module, units, plain, &g) < 0)
        return NULL;
    double scale = max_norm / (norm + 1e-6);
    fsdpc_clip_scale(g.units, g.n_units, norm, max_norm);
    fsdpc_status status = scale < 1 ? multiply_plain(&g, scale, &nonfinite) : FSDPC_OK;
    free_gradients(&g);
    return fsdpc_py_none(status);
}

static PyObject *multiply_grads(PyObject *module, PyObject *args)
{
    PyObject *units, *plain;
    double factor;
    int nonfinite = 0;
    gradients g;
    if (!PyArg_ParseTuple(args, "O!O!d", &PyList_Type, &units, &PyList_Type, &plain, &factor) ||
        read_gradients(module, units, plain, &g) < 0)
        return NULL;
    fsdpc_clip_multiply(g.units, g.n_units, factor);
    fsdpc_status status = multiply_plain(&g, factor, &nonfinite);
    free_gradients(&g);
    return status == FSDPC_OK ? PyBool_FromLong(nonfinite) : fsdpc_py_raise(status);
}

static fsdpc_status clamp_plain(const gradients *g, double limit)
{
    for (size_t i = 0; i < g->n_plain; i++) {
        fsdpc_tensor *t = g->plain[i];
        FSDPC_TRY(fsdpc_tensor_check_write(t));
        FSDPC_TRY(fsdpc_flat_clamp(t->data, t->dtype, t->numel, limit, g->runtime->compute));
    }
    return FSDPC_OK;
}

static PyObject *clamp(PyObject *module, PyObject *args)
{
    PyObject *tensors, *units = PyList_New(0);
    double limit;
    gradients g;
    bool ok = units && PyArg_ParseTuple(args, "O!d", &PyList_Type, &tensors, &limit) &&
              read_gradients(module, units, tensors, &g) == 0;
    Py_XDECREF(units);
    if (!ok)
        return NULL;
    fsdpc_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = clamp_plain(&g, limit);
    Py_END_ALLOW_THREADS;
    free_gradients(&g);
    return fsdpc_py_none(status);
}

static PyMethodDef functions[] = {
    {"grad_norm", grad_norm, METH_VARARGS,
     "grad_norm(units, tensors, p=2): the global p-norm, exactly summed; collective."},
    {"grad_norms", grad_norms, METH_VARARGS,
     "grad_norms(units, tensors, p=2): of each parameter of each unit, of each tensor; "
     "collective."},
    {"scale_grads", scale_grads, METH_VARARGS,
     "scale_grads(units, tensors, norm, max_norm): leave the clipping factor to be applied."},
    {"multiply_grads", multiply_grads, METH_VARARGS,
     "multiply_grads(units, tensors, factor): leave a factor to be applied; whether a NaN or "
     "infinity was seen in the tensors."},
    {"clamp_", clamp, METH_VARARGS, "clamp_(tensors, limit): in place, to [-limit, limit]."},
    {NULL, NULL, 0, NULL},
};

int fsdpc_py_clip_setup(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
