/* Safetensors headers and reading: a thin layer over csrc/ckpt.
 *
 * Headers are passed in and out as lists of tuples. Shards are also tuples; their memory belongs
 * to tensors, which the caller keeps alive. All file access runs without the GIL.
 */
#include "bind/engine/ckpt.h"

#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "base/cpu.h"
#include "ckpt/shards.h"
#include "ckpt/sums.h"

static fsdpc_status call_hook(void *arg, const char *call, const char *path)
{
    fsdpc_status status = FSDPC_OK;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result = PyObject_CallFunction(arg, "ss", call, path);
    if (!result) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        PyErr_NormalizeException(&type, &value, &traceback);
        PyObject *text = value ? PyObject_Str(value) : NULL;
        const char *words = text ? PyUnicode_AsUTF8(text) : NULL;
        status = fsdpc_fail(FSDPC_ERR_OS, "%s '%s': %s", call, path, words ? words : "failed");
        Py_XDECREF(text);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        PyErr_Clear();
    }
    Py_XDECREF(result);
    PyGILState_Release(gil);
    return status;
}

fsdpc_fs fsdpc_py_fs(PyObject *hook)
{
    if (!hook || hook == Py_None)
        return (fsdpc_fs){0};
    return (fsdpc_fs){.hook = call_hook, .arg = hook};
}

/* ---- laying out ---- */

static int read_tensor_tuple(PyObject *item, fsdpc_st_tensor *out)
{
    const char *dtype;
    PyObject *shape;
    if (!PyTuple_Check(item) ||
        !PyArg_ParseTuple(item, "ssO!", &out->name, &dtype, &PyTuple_Type, &shape))
        return -1;
    out->dtype = fsdpc_st_dtype_find(dtype);
    if (!out->dtype) {
        PyErr_Format(PyExc_TypeError, "safetensors has no dtype '%.100s'", dtype);
        return -1;
    }
    if (PyTuple_GET_SIZE(shape) > FSDPC_ST_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "tensor '%s' has %zd dimensions; %d are the most", out->name,
                     PyTuple_GET_SIZE(shape), (int)FSDPC_ST_MAX_DIMS);
        return -1;
    }
    out->ndim = (int)PyTuple_GET_SIZE(shape);
    for (int d = 0; d < out->ndim; d++) {
        out->shape[d] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(shape, d));
        if (PyErr_Occurred())
            return -1;
    }
    return 0;
}

int fsdpc_py_ckpt_tensors(PyObject *list, fsdpc_st_tensor *out)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++)
        if (read_tensor_tuple(PyList_GET_ITEM(list, i), &out[i]) < 0)
            return -1;
    return 0;
}

static PyObject *layout_result(const char *header, size_t header_bytes,
                               const fsdpc_st_tensor *tensors, Py_ssize_t n)
{
    PyObject *places = PyList_New(n);
    for (Py_ssize_t i = 0; places && i < n; i++) {
        unsigned long long begin = header_bytes + tensors[i].begin;
        fsdpc_py_put(&places, i,
                     Py_BuildValue("KK", begin, (unsigned long long)header_bytes + tensors[i].end));
    }
    return places ? Py_BuildValue("y#N", header, (Py_ssize_t)header_bytes, places) : NULL;
}

static PyObject *safetensors_layout(PyObject *Py_UNUSED(module), PyObject *list)
{
    if (!PyList_Check(list))
        return PyErr_Format(PyExc_TypeError, "a list of tensors is laid out");
    size_t n = (size_t)PyList_GET_SIZE(list), header_bytes;
    fsdpc_st_tensor *tensors = fsdpc_py_array((Py_ssize_t)n, sizeof *tensors);
    PyObject *result = NULL;
    char *header;
    if (tensors && fsdpc_py_ckpt_tensors(list, tensors) == 0 &&
        fsdpc_py_check(fsdpc_st_layout(tensors, n, &header, &header_bytes)) == 0) {
        result = layout_result(header, header_bytes, tensors, (Py_ssize_t)n);
        free(header);
    }
    PyMem_Free(tensors);
    return result;
}

/* ---- reading a header ---- */

static PyObject *tensor_tuple(const fsdpc_st_header *header, const fsdpc_st_tensor *t)
{
    PyObject *shape = PyTuple_New(t->ndim);
    for (int d = 0; shape && d < t->ndim; d++)
        fsdpc_py_put(&shape, d, PyLong_FromUnsignedLongLong(t->shape[d]));
    return shape ? Py_BuildValue("ssNKK", t->name, t->dtype->name, shape,
                                 (unsigned long long)header->data_begin + t->begin,
                                 (unsigned long long)header->data_begin + t->end)
                 : NULL;
}

static PyObject *safetensors_header(PyObject *Py_UNUSED(module), PyObject *arg)
{
    PyObject *path;
    if (!PyUnicode_FSConverter(arg, &path))
        return NULL;
    fsdpc_st_header header;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_st_load(PyBytes_AS_STRING(path), &header));
    Py_DECREF(path);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    PyObject *result = PyList_New((Py_ssize_t)header.n_tensors);
    for (size_t i = 0; result && i < header.n_tensors; i++)
        fsdpc_py_put(&result, (Py_ssize_t)i, tensor_tuple(&header, &header.tensors[i]));
    fsdpc_st_header_fini(&header);
    return result;
}

/* ---- reading shards ---- */

int fsdpc_py_ckpt_shard(PyObject *item, size_t n_tensors, fsdpc_ckpt_shard *out)
{
    PyObject *value;
    unsigned long long first;
    if (!PyArg_ParseTuple(item, "iKO", &out->tensor, &first, &value))
        return -1;
    fsdpc_tensor *t = fsdpc_py_tensor_of(value);
    if (!t)
        return -1;
    if (out->tensor < 0 || (size_t)out->tensor >= n_tensors) {
        PyErr_SetString(PyExc_ValueError, "a piece of no tensor");
        return -1;
    }
    out->first = first;
    out->memory_dtype = t->dtype;
    out->data = t->data;
    out->numel = t->numel;
    return 0;
}

/* Sets a shard's place in a file from its tensor's (file, dtype, begin, end). */
static int place_piece(PyObject *tensors, Py_ssize_t n_files, fsdpc_ckpt_shard *shard)
{
    int file;
    const char *name;
    unsigned long long begin, end;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(tensors, shard->tensor), "isKK", &file, &name, &begin,
                          &end))
        return -1;
    const fsdpc_st_dtype *dtype = fsdpc_st_dtype_find(name);
    if (!dtype || file < 0 || file >= n_files) {
        PyErr_SetString(PyExc_ValueError, "a tensor of no file or dtype");
        return -1;
    }
    return fsdpc_py_check(fsdpc_ckpt_place(shard, file, dtype, begin, end));
}

static PyObject *words_list(const uint32_t *words, Py_ssize_t n)
{
    PyObject *list = PyList_New(n);
    for (Py_ssize_t i = 0; list && i < n; i++)
        fsdpc_py_put(&list, i, PyLong_FromUnsignedLong(words[i]));
    return list;
}

typedef struct reading {
    fsdpc_runtime *runtime;
    fsdpc_fs fs;
    const fsdpc_ckpt_file *files;
    size_t n_files;
    const fsdpc_ckpt_shard *shards;
    size_t n_shards;
    uint32_t *crcs; /* NULL if not requested */
} reading;

static fsdpc_status read_into(const reading *r, const fsdpc_ckpt_shard *shards)
{
    return fsdpc_ckpt_read(&r->fs, r->files, r->n_files, shards, r->n_shards, r->crcs);
}

static fsdpc_status read_remotely(const reading *r, fsdpc_ckpt_shard *mirrored)
{
    fsdpc_py_ckpt_host host = {0};
    FSDPC_TRY(fsdpc_py_ckpt_mirror(r->runtime, r->shards, r->n_shards, false, mirrored, &host));
    fsdpc_status status = read_into(r, mirrored);
    if (status == FSDPC_OK)
        status = fsdpc_py_ckpt_copy(r->runtime, r->shards, mirrored, r->n_shards);
    fsdpc_py_ckpt_unmirror(r->runtime, &host);
    return status;
}

static PyObject *read_shards(PyObject *module, PyObject *args)
{
    PyObject *paths, *tensors, *list, *hook = NULL, *result = NULL;
    int check;
    if (!PyArg_ParseTuple(args, "O!O!O!p|O", &PyList_Type, &paths, &PyList_Type, &tensors,
                          &PyList_Type, &list, &check, &hook))
        return NULL;
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    if (!runtime)
        return NULL;
    Py_ssize_t n_files = PyList_GET_SIZE(paths), n_tensors = PyList_GET_SIZE(tensors);
    Py_ssize_t n = PyList_GET_SIZE(list);
    fsdpc_ckpt_file *files = fsdpc_py_array(n_files, sizeof *files);
    fsdpc_ckpt_shard *shards = fsdpc_py_array(2 * n, sizeof *shards); /* for shards and mirrors */
    uint32_t *crcs = fsdpc_py_array(n_tensors, sizeof *crcs);
    if (!files || !shards || !crcs)
        goto free_arrays;
    for (Py_ssize_t i = 0; i < n_files; i++)
        if (!(files[i].path = PyBytes_AsString(PyList_GET_ITEM(paths, i))))
            goto free_arrays;
    for (Py_ssize_t i = 0; i < n; i++)
        if (fsdpc_py_ckpt_shard(PyList_GET_ITEM(list, i), (size_t)n_tensors, &shards[i]) < 0 ||
            place_piece(tensors, n_files, &shards[i]) < 0)
            goto free_arrays;
    reading r = {runtime,   fsdpc_py_fs(hook),  files, (size_t)n_files, shards,
                 (size_t)n, check ? crcs : NULL};
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = runtime->device->remote ? read_remotely(&r, shards + n)
                                                          : read_into(&r, shards));
    result = status == FSDPC_OK ? words_list(crcs, n_tensors) : fsdpc_py_raise(status);

free_arrays:
    PyMem_Free(files);
    PyMem_Free(shards);
    PyMem_Free(crcs);
    return result;
}

/* ---- checksums only ---- */

/* (file, offset, bytes) */
static int read_run_tuple(PyObject *item, PyObject *paths, fsdpc_ckpt_run *out)
{
    Py_ssize_t file;
    unsigned long long offset, bytes;
    if (!PyArg_ParseTuple(item, "nKK", &file, &offset, &bytes))
        return -1;
    if (file < 0 || file >= PyList_GET_SIZE(paths)) {
        PyErr_SetString(PyExc_ValueError, "a run of no file");
        return -1;
    }
    out->path = PyBytes_AsString(PyList_GET_ITEM(paths, file));
    out->offset = offset;
    out->bytes = bytes;
    return out->path ? 0 : -1;
}

static PyObject *sum_runs(PyObject *Py_UNUSED(module), PyObject *args)
{
    enum { MAX_READERS = 8 }; /* with more, disk or memory is the bottleneck */
    PyObject *paths, *list, *result = NULL;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &paths, &PyList_Type, &list))
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(list);
    fsdpc_ckpt_run *runs = fsdpc_py_array(n, sizeof *runs);
    uint32_t *crcs = fsdpc_py_array(n, sizeof *crcs);
    if (!runs || !crcs)
        goto free_arrays;
    for (Py_ssize_t i = 0; i < n; i++)
        if (read_run_tuple(PyList_GET_ITEM(list, i), paths, &runs[i]) < 0)
            goto free_arrays;
    int cores = fsdpc_usable_cores();
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(
        status = fsdpc_ckpt_sum(runs, (size_t)n, cores < MAX_READERS ? cores : MAX_READERS, crcs));
    result = status == FSDPC_OK ? words_list(crcs, n) : fsdpc_py_raise(status);

free_arrays:
    PyMem_Free(runs);
    PyMem_Free(crcs);
    return result;
}

static PyObject *crc32c_combine(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long a, b;
    unsigned long long bytes;
    if (!PyArg_ParseTuple(args, "kkK", &a, &b, &bytes))
        return NULL;
    return PyLong_FromUnsignedLong(fsdpc_crc32c_combine((uint32_t)a, (uint32_t)b, bytes));
}

PyMethodDef fsdpc_py_ckpt_functions[] = {
    FSDPC_PY_FUNCTION(crc32c_combine, crc32c_combine, METH_VARARGS),
    FSDPC_PY_FUNCTION(safetensors_layout, safetensors_layout, METH_O),
    FSDPC_PY_FUNCTION(safetensors_header, safetensors_header, METH_O),
    FSDPC_PY_FUNCTION(read_shards, read_shards, METH_VARARGS),
    FSDPC_PY_FUNCTION(sum_runs, sum_runs, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};
