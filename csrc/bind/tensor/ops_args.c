/* Arguments of fastcalls.
 *
 * A small operation takes a tenth of a microsecond, so this file builds no tuples and reads no
 * format strings: positional arguments are copied, keywords are compared with a short list of
 * names, and the signature, which the build writes, has a kind and an offset per argument.
 */
#include "bind/tensor/ops.h"

#include <math.h>
#include <string.h>

int fsdpc_py_arg_double(PyObject *object, double *out)
{
    double value = PyFloat_AsDouble(object);
    if (value == -1 && PyErr_Occurred())
        return -1;
    *out = value;
    return 0;
}

int fsdpc_py_arg_int64(PyObject *object, int64_t *out)
{
    PyObject *index = PyLong_Check(object) ? Py_NewRef(object) : PyNumber_Index(object);
    long long value = index ? PyLong_AsLongLong(index) : -1;
    Py_XDECREF(index);
    if (value == -1 && PyErr_Occurred())
        return -1;
    *out = value;
    return 0;
}

int fsdpc_py_arg_tensor(PyObject *object, fsdpc_tensor **out)
{
    *out = object == Py_None ? NULL : fsdpc_py_tensor_of(object);
    return *out || object == Py_None ? 0 : -1;
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

/* Returns the number in a NumPy scalar or a zero-dimensional array or tensor; NULL for any other
 * object. */
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

int fsdpc_py_arg_number(const char *function, const char *name, PyObject *object, fsdpc_scalar *out)
{
    if (fsdpc_py_number(object, out))
        return 0;
    PyErr_Format(PyExc_TypeError, "%s: a number is needed for %s, not %s", function, name,
                 Py_TYPE(object)->tp_name);
    return -1;
}

/* ---- shapes and dimensions ---- */

static int extents_of(const char *function, PyObject *const *items, Py_ssize_t n,
                      fsdpc_py_extents *out)
{
    if (n > FSDPC_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%s: %zd dimensions, at most %d", function, n,
                     FSDPC_MAX_DIMS);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (fsdpc_py_arg_int64(items[i], &out->at[i]) < 0)
            return -1;
    out->n = (int)n;
    return 0;
}

static int extents(const char *function, PyObject *object, fsdpc_py_extents *out)
{
    if (PyIndex_Check(object))
        return extents_of(function, &object, 1, out);
    PyObject *fast = PySequence_Fast(object, "a shape is an int or a sequence of ints");
    if (!fast)
        return -1;
    int status =
        extents_of(function, PySequence_Fast_ITEMS(fast), PySequence_Fast_GET_SIZE(fast), out);
    Py_DECREF(fast);
    return status;
}

int fsdpc_py_shape(const char *function, const fsdpc_py_extents *extents, size_t *out)
{
    for (int i = 0; i < extents->n; i++) {
        if (extents->at[i] < 0) {
            PyErr_Format(PyExc_ValueError, "%s: extent %lld of dimension %d is negative", function,
                         (long long)extents->at[i], i);
            return -1;
        }
        out[i] = (size_t)extents->at[i];
    }
    return extents->n;
}

PyObject *fsdpc_py_tensors(PyObject *sequence)
{
    if (!fsdpc_py_tensor_peek(NULL, sequence))
        return PySequence_Fast(sequence, "a sequence of tensors is needed");
    PyErr_SetString(PyExc_TypeError, "a sequence of tensors is needed, not one tensor");
    return NULL;
}

static int dims(const char *function, PyObject *object, int ndim, bool *flags_out)
{
    fsdpc_py_extents given;
    for (int i = 0; i < FSDPC_MAX_DIMS; i++)
        flags_out[i] = object == Py_None;
    if (object == Py_None)
        return 0;
    if (extents(function, object, &given) < 0)
        return -1;
    for (int i = 0, count = ndim ? ndim : 1; i < given.n; i++) {
        int64_t dim = given.at[i] < 0 ? given.at[i] + count : given.at[i];
        if (dim < 0 || dim >= count) {
            PyErr_Format(PyExc_IndexError, "%s: dimension %lld of a tensor with %d dimensions",
                         function, (long long)given.at[i], ndim);
            return -1;
        }
        if (flags_out[dim]) {
            PyErr_Format(PyExc_ValueError, "%s: dimension %lld is named twice", function,
                         (long long)dim);
            return -1;
        }
        flags_out[dim] = true;
    }
    return 0;
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

/* ---- calls ---- */

static int integer(PyObject *object, int *out)
{
    int64_t value;
    if (fsdpc_py_arg_int64(object, &value) < 0)
        return -1;
    *out = (int)value;
    if (*out == value)
        return 0;
    PyErr_Format(PyExc_OverflowError, "%lld does not fit an int", (long long)value);
    return -1;
}

static int count(const char *function, const char *name, PyObject *object, size_t *out)
{
    int64_t value;
    if (fsdpc_py_arg_int64(object, &value) < 0)
        return -1;
    *out = (size_t)value;
    if (value >= 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: %s is %lld and cannot be negative", function, name,
                 (long long)value);
    return -1;
}

static int choice(const char *function, const fsdpc_py_param *p, PyObject *object, bool *out)
{
    const char *given = PyUnicode_Check(object) ? PyUnicode_AsUTF8(object) : NULL;
    *out = given && strcmp(given, p->choices[1]) == 0;
    if (*out || (given && strcmp(given, p->choices[0]) == 0))
        return 0;
    if (!PyErr_Occurred())
        PyErr_Format(PyUnicode_Check(object) ? PyExc_ValueError : PyExc_TypeError,
                     "%s: %s is '%s' or '%s', not %R", function, p->name, p->choices[0],
                     p->choices[1], object);
    return -1;
}

static int sizes(const char *function, const fsdpc_py_param *p, PyObject *object, int n,
                 size_t *out)
{
    char what[64];
    fsdpc_py_extents given;
    size_t all[FSDPC_MAX_DIMS];
    PyOS_snprintf(what, sizeof what, "%s: %s", function, p->name);
    if (extents(what, object, &given) < 0 || fsdpc_py_shape(what, &given, all) < 0)
        return -1;
    if (given.n != n) {
        PyErr_Format(PyExc_ValueError, "%s: %d numbers, not %d", what, given.n, n);
        return -1;
    }
    memcpy(out, all, (size_t)n * sizeof *out);
    return 0;
}

/* Converts one argument; `x` is the first argument if that is a tensor. */
static int convert(const char *function, const fsdpc_py_param *p, PyObject *object, fsdpc_tensor *x,
                   void *out)
{
    int truth;
    switch (p->kind) {
    case FSDPC_PY_OBJECT_OR_NONE:
        *(PyObject **)out = object == Py_None ? NULL : object;
        return 0;
    case FSDPC_PY_CALLABLE:
        *(PyObject **)out = object;
        if (PyCallable_Check(object))
            return 0;
        PyErr_Format(PyExc_TypeError, "%s: %s cannot be called", function,
                     Py_TYPE(object)->tp_name);
        return -1;
    case FSDPC_PY_TENSOR_OR_NONE:
        return fsdpc_py_arg_tensor(object, out);
    case FSDPC_PY_BOOL:
        truth = PyObject_IsTrue(object);
        *(bool *)out = truth > 0;
        return truth < 0 ? -1 : 0;
    case FSDPC_PY_INT:
        return integer(object, out);
    case FSDPC_PY_INT64:
        return fsdpc_py_arg_int64(object, out);
    case FSDPC_PY_COUNT:
        return count(function, p->name, object, out);
    case FSDPC_PY_BITS64:
        *(uint64_t *)out = PyLong_AsUnsignedLongLongMask(object);
        return PyErr_Occurred() ? -1 : 0;
    case FSDPC_PY_DOUBLE:
        return object == Py_None && !p->required ? 0 : fsdpc_py_arg_double(object, out);
    case FSDPC_PY_NUMBER:
        return fsdpc_py_arg_number(function, p->name, object, out);
    case FSDPC_PY_TEXT:
        *(const char **)out = PyUnicode_AsUTF8(object);
        return *(const char **)out ? 0 : -1;
    case FSDPC_PY_CHOICE:
        return choice(function, p, object, out);
    case FSDPC_PY_DTYPE:
        return fsdpc_py_dtype_parse(object, out);
    case FSDPC_PY_DTYPE_OR_NONE: {
        fsdpc_dtype dtype;
        if (object == Py_None)
            return 0;
        if (fsdpc_py_dtype_parse(object, &dtype) < 0)
            return -1;
        *(int *)out = (int)dtype;
        return 0;
    }
    case FSDPC_PY_DIMS:
        return dims(function, object, x->ndim, out);
    case FSDPC_PY_EXTENTS:
        return extents(function, object, out);
    case FSDPC_PY_SIZES_2:
        return sizes(function, p, object, 2, out);
    case FSDPC_PY_SIZES_4:
        return sizes(function, p, object, 4, out);
    default: /* OBJECT and TENSOR: the caller converts them */
        Py_UNREACHABLE();
    }
}

static int find(const fsdpc_py_signature *s, int from, int to, PyObject *keyword)
{
    while (from < to && PyUnicode_CompareWithASCIIString(keyword, s->params[from].name) != 0)
        from++;
    return from;
}

/* Adds keyword arguments to `out`, whose entries from `begin` to `taken` were passed by position;
 * entries for omitted arguments stay NULL. */
static int add_keywords(const fsdpc_py_signature *s, int begin, int taken, PyObject *keywords,
                        PyObject *const *values, PyObject **out)
{
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(keywords); k++) {
        PyObject *keyword = PyTuple_GET_ITEM(keywords, k);
        int i = find(s, taken, s->n, keyword);
        if (i == s->n) {
            bool twice = find(s, begin, taken, keyword) < taken;
            PyErr_Format(PyExc_TypeError,
                         twice ? "%s() got argument '%U' twice"
                               : "%s() got an unexpected argument '%U'",
                         s->name, keyword);
            return -1;
        }
        out[i] = values[k];
    }
    return 0;
}

int fsdpc_py_parse(const fsdpc_py_signature *s, PyObject *self, PyObject *const *args,
                   Py_ssize_t nargs, PyObject *keywords, void *out)
{
    PyObject *given[FSDPC_PY_MAX_PARAMS];
    const fsdpc_py_param *params = s->params;
    int n = s->n, begin = self != NULL;
    Py_ssize_t most = s->n_positional - begin, by_position = nargs < most ? nargs : most;
    if (nargs > most && !s->rest) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %zd arguments, %zd given", s->name, most,
                     nargs);
        return -1;
    }
    given[0] = self;
    for (int i = begin; i < n; i++)
        given[i] = i - begin < by_position ? args[i - begin] : NULL;
    int taken = begin + (int)by_position;
    if (keywords && add_keywords(s, begin, taken, keywords, args + nargs, given) < 0)
        return -1;
    for (int i = begin; i < n; i++) {
        if (!given[i] && params[i].required) {
            PyErr_Format(PyExc_TypeError, "%s() needs argument '%s'", s->name, params[i].name);
            return -1;
        }
    }
    fsdpc_tensor *x = NULL;
    *(PyObject **)out = given[0];
    for (int i = 0; i < n; i++) {
        void *member = (char *)out + params[i].offset;
        if (!given[i] && params[i].kind == FSDPC_PY_DIMS)
            given[i] = Py_None;
        if (!given[i])
            continue;
        if (params[i].kind == FSDPC_PY_OBJECT) {
            *(PyObject **)member = given[i];
        } else if (params[i].kind == FSDPC_PY_TENSOR) {
            fsdpc_tensor *t = fsdpc_py_tensor_of(given[i]);
            if (!t)
                return -1;
            *(fsdpc_tensor **)member = t;
            x = x ? x : t;
        } else if (convert(s->name, &params[i], given[i], x, member) < 0) {
            return -1;
        }
    }
    if (!s->rest)
        return 0;
    fsdpc_py_extents *rest = (void *)((char *)out + params[n].offset);
    Py_ssize_t others = nargs - by_position;
    return others == 1 ? extents(s->name, args[by_position], rest)
                       : extents_of(s->name, args + by_position, others, rest);
}
