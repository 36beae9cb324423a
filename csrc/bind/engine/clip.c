/* Gradient norms and scaling: a thin layer over csrc/engine/clip.c.
 *
 * Every function accepts units, whose gradients are sharded, and plain tensors, which are the
 * gradients of unsharded modules. Both are summed over the same norm leaves, so the norms of a
 * sharded model and its unsharded twin are bitwise equal.
 */
#include "bind/engine.h"

#include <math.h>

#include "engine/clip.h"
#include "engine/grads.h"
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
    g->plain = fsdpc_py_array(PyList_GET_SIZE(list), sizeof *g->plain);
    if (!g->plain)
        return -1;
    for (size_t i = 0; i < g->n_plain; i++) {
        g->plain[i] = fsdpc_py_tensor_of(PyList_GET_ITEM(list, (Py_ssize_t)i));
        if (!g->plain[i] || fsdpc_py_check(fsdpc_tensor_check(g->plain[i])) < 0)
            return -1;
    }
    return 0;
}

/* Borrows from the lists, which must outlive `g`; returns 0, or -1 with an exception. */
static int read_gradients(PyObject *module, PyObject *units, PyObject *plain, gradients *g)
{
    *g = (gradients){.runtime = fsdpc_py_runtime(module)};
    if (!g->runtime || read_plain(plain, g) < 0)
        goto failed;
    g->n_units = (int)PyList_GET_SIZE(units);
    g->units = fsdpc_py_array(g->n_units, sizeof(fsdpc_unit *));
    if (!g->units)
        goto failed;
    for (int i = 0; i < g->n_units; i++) {
        fsdpc_py_unit *unit = fsdpc_py_unit_of(module, PyList_GET_ITEM(units, i));
        if (!unit || fsdpc_py_unit_check_open(unit) < 0 ||
            fsdpc_py_check(fsdpc_unit_refuse_stepped(unit->ref->unit)) < 0)
            goto failed;
        g->units[i] = unit->ref->unit;
    }
    return 0;

failed:
    free_gradients(g);
    return -1;
}

/* Parses units, tensors and one or two numbers; returns 0, or -1 with an exception. */
static int parse(PyObject *module, PyObject *args, const char *format, gradients *g, double *first,
                 double *second)
{
    PyObject *units, *plain;
    if (!PyArg_ParseTuple(args, format, &PyList_Type, &units, &PyList_Type, &plain, first, second))
        return -1;
    return read_gradients(module, units, plain, g);
}

/* Sums over the same leaves that a layout would assign to the tensor, so that the results are
 * bitwise equal. */
static fsdpc_status add_plain(const gradients *g, size_t i, double p, fsdpc_norm *norm)
{
    const fsdpc_tensor *t = g->plain[i];
    return fsdpc_norm_add(norm, p, t->data, t->dtype, t->numel,
                          fsdpc_layout_leaf(t->ndim, t->shape), g->runtime->compute);
}

/* Computes the p-norm of all gradients, in device memory. */
static fsdpc_status total_norm(const gradients *g, double p, fsdpc_norm *norm)
{
    FSDPC_TRY(fsdpc_norm_check(p));
    for (size_t i = 0; i < g->n_plain; i++)
        FSDPC_TRY(add_plain(g, i, p, norm));
    return fsdpc_clip_norms(g->units, g->n_units, p, norm, NULL);
}

static PyObject *grad_norm(PyObject *module, PyObject *args)
{
    double p = 2, value = 0;
    gradients g;
    if (parse(module, args, "O!O!|d", &g, &p, NULL) < 0)
        return NULL;
    fsdpc_norm_scratch norm;
    fsdpc_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = fsdpc_norm_scratch_init(&norm, g.runtime->device, 1);
    if (status == FSDPC_OK)
        status = total_norm(&g, p, norm.at);
    if (status == FSDPC_OK)
        status = fsdpc_norm_read(norm.at, p, g.runtime->device, &value);
    fsdpc_norm_scratch_fini(&norm);
    Py_END_ALLOW_THREADS;
    free_gradients(&g);
    return status == FSDPC_OK ? PyFloat_FromDouble(value) : fsdpc_py_raise(status);
}

/* Returns a list of floats, with None for each parameter without a gradient. */
static PyObject *unit_norms(const fsdpc_unit *unit, const fsdpc_norm *norms, double p)
{
    int n = fsdpc_unit_layout(unit)->n_params;
    PyObject *list = PyList_New(n);
    for (int i = 0; list && i < n; i++)
        fsdpc_py_put(&list, i,
                     fsdpc_unit_has_grad(unit, i)
                         ? PyFloat_FromDouble(fsdpc_norm_value(&norms[i], p))
                         : Py_NewRef(Py_None));
    return list;
}

/* ([[norm or None per parameter] per unit], [norm per tensor]) */
static PyObject *norms_result(const gradients *g, const fsdpc_norm *norms, double p)
{
    PyObject *sharded = PyList_New(g->n_units), *plain = PyList_New((Py_ssize_t)g->n_plain);
    for (int i = 0; sharded && i < g->n_units; i++) {
        fsdpc_py_put(&sharded, i, unit_norms(g->units[i], norms, p));
        norms += fsdpc_unit_layout(g->units[i])->n_params;
    }
    for (size_t i = 0; plain && i < g->n_plain; i++)
        fsdpc_py_put(&plain, (Py_ssize_t)i, PyFloat_FromDouble(fsdpc_norm_value(&norms[i], p)));
    return Py_BuildValue("(NN)", sharded, plain);
}

/* Computes the norms of all the units' parameters, then of the tensors, in host memory. */
static fsdpc_status all_norms(const gradients *g, double p, size_t n_params, fsdpc_norm *out)
{
    size_t n = n_params + g->n_plain;
    fsdpc_norm_scratch scratch; /* the total comes last */
    fsdpc_status status = fsdpc_norm_scratch_init(&scratch, g->runtime->device, n + 1);
    if (status == FSDPC_OK)
        status = fsdpc_clip_norms(g->units, g->n_units, p, &scratch.at[n], scratch.at);
    for (size_t i = 0; status == FSDPC_OK && i < g->n_plain; i++)
        status = add_plain(g, i, p, &scratch.at[n_params + i]);
    if (status == FSDPC_OK && n > 0)
        status = fsdpc_norm_fetch(out, scratch.at, n, g->runtime->device);
    fsdpc_norm_scratch_fini(&scratch);
    return status;
}

static PyObject *grad_norms(PyObject *module, PyObject *args)
{
    double p = 2;
    gradients g;
    if (parse(module, args, "O!O!|d", &g, &p, NULL) < 0)
        return NULL;
    size_t n_params = 0;
    for (int i = 0; i < g.n_units; i++)
        n_params += (size_t)fsdpc_unit_layout(g.units[i])->n_params;
    size_t n = n_params + g.n_plain;
    fsdpc_norm *norms = fsdpc_py_array((Py_ssize_t)n, sizeof *norms);
    PyObject *result = NULL;
    if (norms) {
        fsdpc_status status;
        FSDPC_PY_WITHOUT_GIL(status = all_norms(&g, p, n_params, norms));
        result = status == FSDPC_OK ? norms_result(&g, norms, p) : fsdpc_py_raise(status);
    }
    PyMem_Free(norms);
    free_gradients(&g);
    return result;
}

/* Computes the norms of tensors that hold this rank's rows of parameters; `leaves` identifies the
 * unit and the leaf of each tensor. */
static fsdpc_status rows_norms(const gradients *g, const size_t *leaves, double p, fsdpc_norm *out)
{
    size_t n = g->n_plain;
    fsdpc_norm_scratch scratch;
    FSDPC_TRY(fsdpc_norm_check(p));
    fsdpc_status status = fsdpc_norm_scratch_init(&scratch, g->runtime->device, n);
    for (size_t i = 0; status == FSDPC_OK && i < n; i++) {
        const fsdpc_tensor *t = g->plain[i];
        status = fsdpc_norm_add(&scratch.at[i], p, t->data, t->dtype, t->numel, leaves[i],
                                g->runtime->compute);
    }
    if (status == FSDPC_OK)
        status = fsdpc_norm_all_reduce(scratch.at, n, p, fsdpc_unit_mesh(g->units[0])->shard,
                                       g->runtime->compute);
    if (status == FSDPC_OK)
        status = fsdpc_norm_fetch(out, scratch.at, n, g->runtime->device);
    fsdpc_norm_scratch_fini(&scratch);
    return status;
}

/* Returns 0, or -1 with an exception if a tensor cannot hold its parameter's rows. */
static int read_leaves(const gradients *g, PyObject *indices, size_t *leaves)
{
    for (size_t i = 0; i < g->n_plain; i++) {
        const fsdpc_unit *unit = g->units[i];
        const fsdpc_layout *layout = fsdpc_unit_layout(unit);
        int index = (int)PyLong_AsLong(PyList_GET_ITEM(indices, (Py_ssize_t)i));
        if (PyErr_Occurred())
            return -1;
        if (index < 0 || index >= layout->n_params ||
            fsdpc_unit_mesh(unit)->shard != fsdpc_unit_mesh(g->units[0])->shard) {
            PyErr_Format(PyExc_ValueError, "no parameter %d of unit '%s' in this shard group",
                         index, fsdpc_unit_name(unit));
            return -1;
        }
        leaves[i] = layout->params[index].leaf_numel;
    }
    return 0;
}

static PyObject *norms_of_rows(PyObject *module, PyObject *args)
{
    PyObject *units, *indices, *tensors;
    double p;
    gradients g;
    if (!PyArg_ParseTuple(args, "O!O!O!d", &PyList_Type, &units, &PyList_Type, &indices,
                          &PyList_Type, &tensors, &p))
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(tensors);
    if (n == 0 || PyList_GET_SIZE(units) != n || PyList_GET_SIZE(indices) != n)
        return PyErr_Format(PyExc_ValueError, "norms_of_rows: a unit and an index for each tensor");
    if (read_gradients(module, units, tensors, &g) < 0)
        return NULL;
    size_t *leaves = fsdpc_py_array(n, sizeof *leaves);
    fsdpc_norm *norms = fsdpc_py_array(n, sizeof *norms);
    PyObject *result = NULL;
    if (leaves && norms && read_leaves(&g, indices, leaves) == 0) {
        fsdpc_status status;
        FSDPC_PY_WITHOUT_GIL(status = rows_norms(&g, leaves, p, norms));
        result = status == FSDPC_OK ? PyList_New(n) : fsdpc_py_raise(status);
    }
    for (Py_ssize_t i = 0; result && i < n; i++)
        fsdpc_py_put(&result, i, PyFloat_FromDouble(fsdpc_norm_value(&norms[i], p)));
    PyMem_Free(norms);
    PyMem_Free(leaves);
    free_gradients(&g);
    return result;
}

/* Multiplies by `factor` and by the value at `factor_at`, which is in device memory and may be
 * NULL. If `nonfinite_io` is not NULL, sets it to 1 if a NaN or infinity was read. On a remote
 * device this requires a wait. */
static fsdpc_status multiply_plain(const gradients *g, double factor, const double *factor_at,
                                   int *nonfinite_io)
{
    for (size_t i = 0; i < g->n_plain; i++) {
        fsdpc_tensor *t = g->plain[i];
        FSDPC_TRY(fsdpc_tensor_check_write(t));
        FSDPC_TRY(fsdpc_flat_scale(t->data, t->dtype, t->numel, factor, factor_at, nonfinite_io,
                                   g->runtime->compute));
    }
    return FSDPC_OK;
}

/* Applies the factor to plain tensors, and leaves it pending for units. */
static fsdpc_status clip_by(const gradients *g, double norm, double max_norm)
{
    double scale = fsdpc_clip_scale(g->units, g->n_units, norm, max_norm);
    return scale != 1 ? multiply_plain(g, scale, NULL, NULL) : FSDPC_OK;
}

/* Scales the gradients by a norm that is in a remote device's memory. */
static fsdpc_status clip_by_remote(const gradients *g, const double *norm, double max_norm)
{
    fsdpc_stream *stream = g->runtime->compute;
    FSDPC_TRY(fsdpc_clip_scale_remote(g->units, g->n_units, norm, max_norm, stream));
    if (g->n_plain == 0)
        return FSDPC_OK;
    fsdpc_tensor *factor;
    FSDPC_TRY(fsdpc_tensor_create(g->runtime->device, FSDPC_F64, 0, NULL, &factor));
    fsdpc_clip_args args = {.norm = norm, .max_norm = max_norm, .n = 1, .factors = {factor->data}};
    fsdpc_status status = fsdpc_flat_clip(&args, stream);
    if (status == FSDPC_OK)
        status = multiply_plain(g, 1, factor->data, NULL);
    fsdpc_tensor_release(factor);
    return status;
}

/* Computes the norm and clips in one call; `norm_out` receives the norm, in device memory. */
static fsdpc_status clip_all(const gradients *g, double p, double max_norm, double *norm_out)
{
    bool remote = g->runtime->device->remote;
    fsdpc_norm_scratch norm;
    fsdpc_status status = fsdpc_norm_scratch_init(&norm, g->runtime->device, 1);
    if (status == FSDPC_OK)
        status = total_norm(g, p, norm.at);
    if (status == FSDPC_OK && remote)
        status = fsdpc_norm_put(norm.at, p, norm_out, g->runtime->compute);
    else if (status == FSDPC_OK)
        *norm_out = fsdpc_norm_value(norm.at, p);
    fsdpc_norm_scratch_fini(&norm);
    FSDPC_TRY(status);
    return remote ? clip_by_remote(g, norm_out, max_norm) : clip_by(g, *norm_out, max_norm);
}

static PyObject *clip_grads(PyObject *module, PyObject *args)
{
    double p, max_norm;
    fsdpc_tensor *norm = NULL;
    gradients g;
    if (parse(module, args, "O!O!dd", &g, &p, &max_norm) < 0)
        return NULL;
    fsdpc_status status = fsdpc_tensor_create(g.runtime->device, FSDPC_F64, 0, NULL, &norm);
    if (status == FSDPC_OK)
        FSDPC_PY_WITHOUT_GIL(status = clip_all(&g, p, max_norm, norm->data));
    free_gradients(&g);
    return fsdpc_py_result(PyModule_GetState(module), status, norm);
}

static PyObject *scale_grads(PyObject *module, PyObject *args)
{
    double norm, max_norm;
    gradients g;
    if (parse(module, args, "O!O!dd", &g, &norm, &max_norm) < 0)
        return NULL;
    fsdpc_status status = clip_by(&g, norm, max_norm);
    free_gradients(&g);
    return fsdpc_py_none(status);
}

static PyObject *multiply_grads(PyObject *module, PyObject *args)
{
    double factor;
    int nonfinite = 0;
    gradients g;
    if (parse(module, args, "O!O!d", &g, &factor, NULL) < 0)
        return NULL;
    fsdpc_clip_multiply(g.units, g.n_units, factor);
    fsdpc_status status = multiply_plain(&g, factor, NULL, &nonfinite);
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
    FSDPC_PY_WITHOUT_GIL(status = clamp_plain(&g, limit));
    free_gradients(&g);
    return fsdpc_py_none(status);
}

PyMethodDef fsdpc_py_clip_functions[] = {
    FSDPC_PY_FUNCTION(grad_norm, grad_norm, METH_VARARGS),
    FSDPC_PY_FUNCTION(grad_norms, grad_norms, METH_VARARGS),
    FSDPC_PY_FUNCTION(norms_of_rows, norms_of_rows, METH_VARARGS),
    FSDPC_PY_FUNCTION(clip_grads, clip_grads, METH_VARARGS),
    FSDPC_PY_FUNCTION(scale_grads, scale_grads, METH_VARARGS),
    FSDPC_PY_FUNCTION(multiply_grads, multiply_grads, METH_VARARGS),
    FSDPC_PY_FUNCTION(clamp_, clamp, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};
