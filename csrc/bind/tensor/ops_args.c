/* Arguments of fastcalls.
 *
 * An operation should take only a few microseconds, so this file builds no tuples and parses no
 * formats: positional arguments are copied, and keywords are compared with a short list of names.
 */
#include "bind/tensor/ops.h"

#include <math.h>
#include <string.h>

int fsdpc_py_args(const char *function, int n, const char *const *names, int required,
                  PyObject *const *args, Py_ssize_t nargs, PyObject *keywords, PyObject **out)
{
    if (nargs > n) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %d arguments, %zd given", function, n,
                     nargs);
        return -1;
    }
    for (int i = 0; i < n; i++)
        out[i] = i < nargs ? args[i] : NULL;
    Py_ssize_t n_keywords = keywords ? PyTuple_GET_SIZE(keywords) : 0;
    for (Py_ssize_t k = 0; k < n_keywords; k++) {
        PyObject *keyword = PyTuple_GET_ITEM(keywords, k);
        int i = 0;
        while (i < n && PyUnicode_CompareWithASCIIString(keyword, names[i]) != 0)
            i++;
        if (i == n || out[i]) {
            PyErr_Format(PyExc_TypeError,
                         i == n ? "%s() got an unexpected argument '%U'"
                                : "%s() got argument '%U' twice",
                         function, keyword);
            return -1;
        }
        out[i] = args[nargs + k];
    }
    for (int i = 0; i < required; i++) {
        if (!out[i]) {
            PyErr_Format(PyExc_TypeError, "%s() needs argument '%s'", function, names[i]);
            return -1;
        }
    }
    return 0;
}

int fsdpc_py_arg_bool(PyObject *object, bool *inout)
{
    if (!object)
        return 0;
    int truth = PyObject_IsTrue(object);
    if (truth >= 0)
        *inout = truth;
    return truth < 0 ? -1 : 0;
}

int fsdpc_py_arg_second(const char *what, const char *const names[2], PyObject *object, bool *inout)
{
    const char *given = object ? PyUnicode_AsUTF8(object) : names[0];
    if (!given)
        return -1;
    *inout = strcmp(given, names[1]) == 0;
    if (*inout || strcmp(given, names[0]) == 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s is '%s' or '%s', not '%s'", what, names[0], names[1], given);
    return -1;
}

int fsdpc_py_arg_double(PyObject *object, double *inout)
{
    if (!object || object == Py_None)
        return 0;
    double value = PyFloat_AsDouble(object);
    if (value == -1 && PyErr_Occurred())
        return -1;
    *inout = value;
    return 0;
}

int fsdpc_py_arg_int64(PyObject *object, int64_t *inout)
{
    if (!object)
        return 0;
    PyObject *index = PyNumber_Index(object);
    long long value = index ? PyLong_AsLongLong(index) : -1;
    Py_XDECREF(index);
    if (value == -1 && PyErr_Occurred())
        return -1;
    *inout = value;
    return 0;
}

int fsdpc_py_arg_int(PyObject *object, int *inout)
{
    int64_t value = *inout;
    if (fsdpc_py_arg_int64(object, &value) < 0)
        return -1;
    if (value < INT32_MIN || value > INT32_MAX) {
        PyErr_Format(PyExc_OverflowError, "%lld does not fit an int", (long long)value);
        return -1;
    }
    *inout = (int)value;
    return 0;
}

int fsdpc_py_arg_tensor(PyObject *object, fsdpc_tensor **out)
{
    *out = NULL;
    if (!object || object == Py_None)
        return 0;
    *out = fsdpc_py_tensor_of(object);
    return *out ? 0 : -1;
}

/* Reads an int, or any object that NumPy accepts as an index. */
static bool whole_number(PyObject *object, fsdpc_scalar *out)
{
    int overflow = 0;
    PyObject *index = PyNumber_Index(object);
    long long whole = index ? PyLong_AsLongLongAndOverflow(index, &overflow) : -1;
    *out = fsdpc_scalar_whole(whole);
    if (overflow) {
        *out = (fsdpc_scalar){.integral = true, .real = PyLong_AsDouble(index)};
        if (out->real == -1 && PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Clear();
            out->real = overflow * INFINITY;
        }
    }
    Py_XDECREF(index);
    return !PyErr_Occurred();
}

/* Returns the number in a NumPy scalar or a zero-dimensional array or tensor; otherwise NULL. */
static PyObject *item_of(PyObject *object)
{
    if (!PyObject_CheckBuffer(object) || !PyNumber_Check(object) || PyComplex_Check(object))
        return NULL;
    PyObject *ndim = PyObject_GetAttrString(object, "ndim");
    PyObject *item = ndim && PyLong_Check(ndim) && PyLong_AsLong(ndim) == 0
                         ? PyObject_CallMethod(object, "item", NULL)
                         : NULL;
    Py_XDECREF(ndim);
    return item;
}

bool fsdpc_py_number(PyObject *object, fsdpc_scalar *out)
{
    if (PyFloat_Check(object)) {
        *out = fsdpc_scalar_real(PyFloat_AS_DOUBLE(object));
        return true;
    }
    PyObject *item = PyLong_Check(object) ? Py_NewRef(object) : item_of(object);
    bool number = item != NULL;
    if (number && PyLong_Check(item)) {
        number = whole_number(item, out);
    } else if (number) {
        *out = fsdpc_scalar_real(PyComplex_Check(item) ? -1 : PyFloat_AsDouble(item));
        number = !PyComplex_Check(item) && !PyErr_Occurred();
    }
    Py_XDECREF(item);
    if (!number)
        PyErr_Clear();
    return number;
}

static int extents_of(const char *function, PyObject *const *items, Py_ssize_t n, int64_t *out)
{
    if (n > FSDPC_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%s: %zd dimensions, at most %d", function, n,
                     FSDPC_MAX_DIMS);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (fsdpc_py_arg_int64(items[i], &out[i]) < 0)
            return -1;
    return (int)n;
}

int fsdpc_py_extents(const char *function, PyObject *const *args, Py_ssize_t nargs, int64_t *out)
{
    if (nargs != 1 || PyIndex_Check(args[0]))
        return extents_of(function, args, nargs, out);
    PyObject *fast = PySequence_Fast(args[0], "a shape is an int or a sequence of ints");
    if (!fast)
        return -1;
    int n = extents_of(function, PySequence_Fast_ITEMS(fast), PySequence_Fast_GET_SIZE(fast), out);
    Py_DECREF(fast);
    return n;
}

int fsdpc_py_shape(const char *function, PyObject *const *args, Py_ssize_t nargs, size_t *out)
{
    int64_t extents[FSDPC_MAX_DIMS];
    int n = fsdpc_py_extents(function, args, nargs, extents);
    for (int i = 0; i < n; i++) {
        if (extents[i] < 0) {
            PyErr_Format(PyExc_ValueError, "%s: extent %lld of dimension %d is negative", function,
                         (long long)extents[i], i);
            return -1;
        }
        out[i] = (size_t)extents[i];
    }
    return n;
}

int fsdpc_py_arg_sizes(const char *what, PyObject *object, int n, size_t *out)
{
    size_t sizes[FSDPC_MAX_DIMS];
    int given = fsdpc_py_shape(what, &object, 1, sizes);
    if (given >= 0 && given != n)
        PyErr_Format(PyExc_ValueError, "%s: %d numbers, not %d", what, given, n);
    if (given != n)
        return -1;
    memcpy(out, sizes, (size_t)n * sizeof *out);
    return 0;
}

PyObject *fsdpc_py_tensors(PyObject *sequence)
{
    if (!fsdpc_py_tensor_peek(NULL, sequence))
        return PySequence_Fast(sequence, "a sequence of tensors is needed");
    PyErr_SetString(PyExc_TypeError, "a sequence of tensors is needed, not one tensor");
    return NULL;
}

int fsdpc_py_dims(const char *function, PyObject *object, int ndim, bool *flags_out)
{
    bool all = !object || object == Py_None;
    for (int i = 0; i < FSDPC_MAX_DIMS; i++)
        flags_out[i] = all;
    if (all)
        return 0;
    int64_t dims[FSDPC_MAX_DIMS];
    int n = fsdpc_py_extents(function, &object, 1, dims), count = ndim ? ndim : 1;
    for (int i = 0; i < n; i++) {
        int64_t dim = dims[i] < 0 ? dims[i] + count : dims[i];
        if (dim < 0 || dim >= count) {
            PyErr_Format(PyExc_IndexError, "%s: dimension %lld of a tensor with %d dimensions",
                         function, (long long)dims[i], ndim);
            return -1;
        }
        if (flags_out[dim]) {
            PyErr_Format(PyExc_ValueError, "%s: dimension %lld is named twice", function,
                         (long long)dim);
            return -1;
        }
        flags_out[dim] = true;
    }
    return n < 0 ? -1 : 0;
}

size_t *fsdpc_py_sizes(const char *what, PyObject *sequence, size_t *n_out)
{
    PyObject *fast = PySequence_Fast(sequence, "a sequence of ints is needed");
    if (!fast)
        return NULL;
    *n_out = (size_t)PySequence_Fast_GET_SIZE(fast);
    size_t *sizes = PyMem_New(size_t, *n_out + 1);
    if (!sizes)
        PyErr_NoMemory();
    for (size_t i = 0; sizes && i < *n_out; i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(fast, (Py_ssize_t)i);
        Py_ssize_t size = PyNumber_AsSsize_t(item, PyExc_OverflowError);
        if (size < 0) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "%s: number %zu is %zd", what, i, size);
            PyMem_Free(sizes);
            sizes = NULL;
            break;
        }
        sizes[i] = (size_t)size;
    }
    Py_DECREF(fast);
    return sizes;
}
