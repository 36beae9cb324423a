/* Block codes (csrc/ops/block_code.h) of tensors. */
#include "bind/engine.h"

#include "ops/flat_ops.h"

/* By fsdpc_code. */
static const char *const code_names[] = {
#define X(NAME, name, block) [FSDPC_CODE_##NAME] = name,
    FSDPC_CODE_TABLE(X)
#undef X
};

const char *fsdpc_py_code_name(fsdpc_code code)
{
    return code_names[code];
}

bool fsdpc_py_code_fits(size_t numel, Py_ssize_t row)
{
    return row >= 0 && (row == 0 || numel % (size_t)row == 0);
}

static PyObject *code_row(PyObject *Py_UNUSED(module), PyObject *arg)
{
    size_t shape[FSDPC_LAYOUT_MAX_DIMS];
    PyObject *dims = PySequence_Tuple(arg);
    Py_ssize_t ndim = dims ? PyTuple_GET_SIZE(dims) : 0;
    for (Py_ssize_t i = 0; i < ndim && i < FSDPC_LAYOUT_MAX_DIMS; i++)
        shape[i] = PyLong_AsSize_t(PyTuple_GET_ITEM(dims, i));
    Py_XDECREF(dims);
    if (PyErr_Occurred())
        return NULL;
    if (ndim > FSDPC_LAYOUT_MAX_DIMS)
        return PyErr_Format(PyExc_ValueError, "%zd dimensions; at most %d", ndim,
                            FSDPC_LAYOUT_MAX_DIMS);
    return PyLong_FromSize_t(fsdpc_layout_code_row((int)ndim, shape));
}

/* Parses (code, tensor[, maxima], row). */
static int code_args(PyObject *args, bool decode, fsdpc_code_args *out, fsdpc_tensor **from)
{
    const char *name;
    PyObject *object, *maxima = NULL;
    Py_ssize_t row;
    size_t code = 0, n_codes = sizeof code_names / sizeof code_names[0];
    if (!(decode ? PyArg_ParseTuple(args, "sOOn", &name, &object, &maxima, &row)
                 : PyArg_ParseTuple(args, "sOn", &name, &object, &row)))
        return -1;
    while (code < n_codes && strcmp(name, code_names[code]) != 0)
        code++;
    fsdpc_tensor *t = fsdpc_py_tensor_of(object);
    fsdpc_tensor *m = t && decode ? fsdpc_py_tensor_of(maxima) : NULL;
    if (!t || (decode && !m))
        return -1;
    *from = t;
    bool fits = code < n_codes && row > 0 && fsdpc_py_code_fits(t->numel, row) &&
                t->dtype == (decode ? FSDPC_U8 : FSDPC_F32);
    if (fits && m)
        fits = m->dtype == FSDPC_F32 &&
               m->numel == fsdpc_code_blocks_of((fsdpc_code)code, t->numel, (size_t)row);
    if (!fits) {
        PyErr_Format(PyExc_ValueError, "code '%s': %zu elements of %s in rows of %zd", name,
                     t->numel, fsdpc_dtype_name(t->dtype), row);
        return -1;
    }
    *out = (fsdpc_code_args){.code = (fsdpc_code)code,
                             .maxima = m ? m->data : NULL,
                             .numel = t->numel,
                             .row = (size_t)row};
    return 0;
}

static PyObject *encode_blocks(PyObject *module, PyObject *args)
{
    fsdpc_code_args a;
    fsdpc_tensor *from, *codes = NULL, *maxima = NULL;
    fsdpc_py_state *state = PyModule_GetState(module);
    const fsdpc_runtime *runtime = fsdpc_py_state_runtime(state);
    if (!runtime || code_args(args, false, &a, &from) < 0)
        return NULL;
    size_t blocks = fsdpc_code_blocks_of(a.code, a.numel, a.row);
    fsdpc_status status =
        fsdpc_tensor_create(from->storage->device, FSDPC_U8, from->ndim, from->shape, &codes);
    if (status == FSDPC_OK)
        status = fsdpc_tensor_create(from->storage->device, FSDPC_F32, 1, &blocks, &maxima);
    if (status == FSDPC_OK) {
        a.values = from->data;
        a.codes = codes->data;
        a.maxima = maxima->data;
        FSDPC_PY_WITHOUT_GIL(status = fsdpc_flat_encode(&a, runtime->compute));
    }
    PyObject *first = fsdpc_py_result(state, status, codes);
    PyObject *second = fsdpc_py_result(state, status, maxima);
    PyObject *both = first && second ? PyTuple_Pack(2, first, second) : NULL;
    Py_XDECREF(first);
    Py_XDECREF(second);
    return both;
}

static PyObject *decode_blocks(PyObject *module, PyObject *args)
{
    fsdpc_code_args a;
    fsdpc_tensor *from, *values = NULL;
    fsdpc_py_state *state = PyModule_GetState(module);
    const fsdpc_runtime *runtime = fsdpc_py_state_runtime(state);
    if (!runtime || code_args(args, true, &a, &from) < 0)
        return NULL;
    fsdpc_status status =
        fsdpc_tensor_create(from->storage->device, FSDPC_F32, from->ndim, from->shape, &values);
    if (status == FSDPC_OK) {
        a.values = values->data;
        a.codes = from->data;
        FSDPC_PY_WITHOUT_GIL(status = fsdpc_flat_decode(&a, runtime->compute));
    }
    return fsdpc_py_result(state, status, values);
}

static PyObject *codec_bytes(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *name;
    Py_ssize_t numel;
    fsdpc_codec codec;
    if (!PyArg_ParseTuple(args, "sn", &name, &numel) ||
        fsdpc_py_check(fsdpc_codec_find(name, &codec)) < 0)
        return NULL;
    const fsdpc_codec_rows rows = {FSDPC_F32, (size_t)numel, (size_t)numel};
    return PyLong_FromSize_t(fsdpc_codec_bytes(codec, &rows));
}

PyMethodDef fsdpc_py_code_functions[] = {
    FSDPC_PY_FUNCTION(code_row, code_row, METH_O),
    FSDPC_PY_FUNCTION(encode_blocks, encode_blocks, METH_VARARGS),
    FSDPC_PY_FUNCTION(decode_blocks, decode_blocks, METH_VARARGS),
    FSDPC_PY_FUNCTION(codec_bytes, codec_bytes, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};
