/* Conversion to and from NumPy, through Python calls and the buffer protocol.
 *
 * The buffer protocol passes dtype, shape and ownership in both directions without a copy, so
 * NumPy's headers are not needed. The extension runs with any NumPy version, and `import
 * fsdpc._core` does not import NumPy. bfloat16 has no format letter, so it is exported as bytes,
 * not elements: NumPy would read its bits as integers. If ml_dtypes is installed, numpy() returns
 * the bits as its bfloat16 type; otherwise it returns a float32 copy. bits() returns the bits.
 *
 * Memory of a remote device is copied in both directions. It is not exported as a buffer, because a
 * buffer must refer to the tensor's own memory.
 */
#include "bind/tensor/ops.h"

#include "bind/stub_args.h"
#include "bind/tensor/tensor.h"

#include <string.h>

/* ---- out ---- */

static const char *format_of(fsdpc_dtype dtype)
{
    static const char *const formats[] = {
        [FSDPC_F32] = "f", [FSDPC_BF16] = "H", [FSDPC_F16] = "e", [FSDPC_F64] = "d",
        [FSDPC_I32] = "i", [FSDPC_I64] = "q",  [FSDPC_U8] = "B",  [FSDPC_BOOL] = "?"};
    return formats[dtype];
}

/* The state of an exported buffer, which keeps the memory alive even if the object switches to
 * another tensor. */
typedef struct exported {
    fsdpc_tensor *tensor;
    Py_ssize_t extents[]; /* the shape, then strides */
} exported;

int fsdpc_py_tensor_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    fsdpc_tensor *t = fsdpc_py_self(object)->tensor;
    view->obj = NULL;
    fsdpc_status status = fsdpc_tensor_check(t);
    if (fsdpc_py_check(status) < 0)
        return -1;
    if (t->storage->device->remote) {
        PyErr_Format(PyExc_BufferError,
                     "the tensor's memory is on device '%s', out of the host's reach: numpy() "
                     "copies it",
                     t->storage->device->ops->name);
        return -1;
    }
    if ((flags & PyBUF_WRITABLE) && t->storage->readonly) {
        PyErr_SetString(PyExc_BufferError, "the tensor stands on read-only memory: clone() it");
        return -1;
    }
    if ((flags & PyBUF_FORMAT) && t->dtype == FSDPC_BF16) {
        PyErr_SetString(PyExc_BufferError,
                        "buffers have no bfloat16: use numpy(), float() or bits()");
        return -1;
    }
    if ((flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS && t->ndim > 1) {
        PyErr_SetString(PyExc_BufferError, "the tensor is row-major");
        return -1;
    }
    exported *e = PyMem_Malloc(sizeof *e + 2 * (size_t)t->ndim * sizeof *e->extents);
    if (!e) {
        PyErr_NoMemory();
        return -1;
    }
    e->tensor = fsdpc_tensor_acquire(t);
    t->storage->exported = true; /* numpy() releases the buffer and keeps only the object */
    Py_ssize_t *extents = e->extents, *strides = extents + t->ndim;
    Py_ssize_t stride = (Py_ssize_t)fsdpc_dtype_bytes(t->dtype);
    for (int i = t->ndim - 1; i >= 0; i--) {
        extents[i] = (Py_ssize_t)t->shape[i];
        strides[i] = stride;
        stride *= extents[i];
    }
    *view = (Py_buffer){.buf = t->data,
                        .obj = Py_NewRef(object),
                        .len = (Py_ssize_t)fsdpc_tensor_bytes(t),
                        .itemsize = (Py_ssize_t)fsdpc_dtype_bytes(t->dtype),
                        .readonly = t->storage->readonly,
                        .ndim = t->ndim,
                        .format = flags & PyBUF_FORMAT ? (char *)format_of(t->dtype) : NULL,
                        .shape = flags & PyBUF_ND ? extents : NULL,
                        .strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? strides : NULL,
                        .internal = e};
    return 0;
}

void fsdpc_py_tensor_releasebuffer(PyObject *Py_UNUSED(object), Py_buffer *view)
{
    exported *e = view->internal;
    fsdpc_tensor_release(e->tensor);
    PyMem_Free(e);
}

static PyObject *numpy_call(const char *function, PyObject *argument)
{
    PyObject *numpy = PyImport_ImportModule("numpy");
    PyObject *result = numpy ? PyObject_CallMethod(numpy, function, "(O)", argument) : NULL;
    Py_XDECREF(numpy);
    return result;
}

/* Returns ml_dtypes.bfloat16, or NULL; if ml_dtypes is not installed, no exception is set. */
static PyObject *ml_bfloat16(void)
{
    PyObject *module = PyImport_ImportModule("ml_dtypes");
    PyObject *type = module ? PyObject_GetAttrString(module, "bfloat16") : NULL;
    Py_XDECREF(module);
    if (!type &&
        (PyErr_ExceptionMatches(PyExc_ImportError) || PyErr_ExceptionMatches(PyExc_AttributeError)))
        PyErr_Clear();
    return type;
}

/* Copies the tensor's bytes to host memory that Python owns. */
static PyObject *bytes_of_copy(const fsdpc_tensor *t)
{
    PyObject *bytes = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)fsdpc_tensor_bytes(t));
    if (!bytes)
        return NULL;
    char *to = PyByteArray_AS_STRING(bytes);
    fsdpc_status status;
    status = fsdpc_py_tensor_read(t, to);
    if (status == FSDPC_OK)
        return bytes;
    Py_DECREF(bytes);
    return fsdpc_py_raise(status);
}

/* Returns an array that shares the tensor's memory, or a copy if that memory is remote; `type` is a
 * NumPy dtype. */
static PyObject *array_as(PyObject *object, const char *type)
{
    const fsdpc_tensor *t = fsdpc_py_self(object)->tensor;
    fsdpc_status status = fsdpc_tensor_check(t);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    PyObject *bytes = t->storage->device->remote ? bytes_of_copy(t) : Py_NewRef(object);
    PyObject *shape = bytes ? PyObject_GetAttrString(object, "shape") : NULL;
    PyObject *numpy = shape ? PyImport_ImportModule("numpy") : NULL;
    PyObject *array =
        numpy ? PyObject_CallMethod(numpy, "ndarray", "OsO", shape, type, bytes) : NULL;
    Py_XDECREF(bytes);
    Py_XDECREF(shape);
    Py_XDECREF(numpy);
    return array;
}

PyObject *fsdpc_py_tensor_plain(PyObject *object)
{
    const fsdpc_py_tensor *self = fsdpc_py_self(object);
    fsdpc_tensor *leaf;
    if (self->tensor->dtype != FSDPC_BF16)
        return Py_NewRef(object);
    fsdpc_status status = fsdpc_tensor_detach(self->tensor, &leaf);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    PyObject *object_of_leaf = fsdpc_py_tensor_new(self->state, leaf);
    PyObject *wide = object_of_leaf ? fsdpc_py_cast(self->state, object_of_leaf, FSDPC_F32) : NULL;
    Py_XDECREF(object_of_leaf);
    return wide;
}

/* Returns a float32 copy, marked read-only because writes to it would not reach the tensor. */
static PyObject *wide_copy(PyObject *object)
{
    PyObject *wide = fsdpc_py_tensor_plain(object);
    PyObject *array = wide ? array_as(wide, "f") : NULL;
    PyObject *done = array ? PyObject_CallMethod(array, "setflags", "O", Py_False) : NULL;
    Py_XDECREF(wide);
    if (!done)
        Py_CLEAR(array);
    Py_XDECREF(done);
    return array;
}

PyObject *fsdpc_py_tensor_numpy(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_dtype dtype = fsdpc_py_self(object)->tensor->dtype;
    if (dtype != FSDPC_BF16)
        return array_as(object, format_of(dtype));
    PyObject *type = ml_bfloat16();
    if (!type)
        return PyErr_Occurred() ? NULL : wide_copy(object);
    PyObject *bits = array_as(object, format_of(dtype));
    PyObject *viewed = bits ? PyObject_CallMethod(bits, "view", "O", type) : NULL;
    Py_DECREF(type);
    Py_XDECREF(bits);
    return viewed;
}

static PyObject *tensor_bits(PyObject *object, PyObject *Py_UNUSED(unused))
{
    static const char *const types[] = {[1] = "u1", [2] = "u2", [4] = "u4", [8] = "u8"};
    return array_as(object, types[fsdpc_dtype_bytes(fsdpc_py_self(object)->tensor->dtype)]);
}

/* __array__(dtype=None, copy=None) */
static PyObject *tensor_array(PyObject *object, PyObject *args, PyObject *kwargs)
{
    FSDPC_PY_KEYWORDS(names, "dtype", "copy");
    PyObject *dtype = Py_None, *copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OO:__array__", names, &dtype, &copy))
        return NULL;
    PyObject *array = fsdpc_py_tensor_numpy(object, NULL);
    if (array && dtype != Py_None) {
        PyObject *numpy = PyImport_ImportModule("numpy");
        PyObject *cast = numpy ? PyObject_CallMethod(numpy, "asarray", "OO", array, dtype) : NULL;
        Py_XDECREF(numpy);
        if (cast && copy == Py_False && cast != array) {
            PyErr_SetString(PyExc_ValueError, "__array__: this dtype needs a copy");
            Py_CLEAR(cast);
        }
        Py_DECREF(array);
        array = cast;
    } else if (array && copy == Py_True) {
        PyObject *copied = PyObject_CallMethod(array, "copy", NULL);
        Py_DECREF(array);
        array = copied;
    }
    return array;
}

/* Pickles as tensor(array, dtype, requires_grad); bf16 is stored as fp32, which is exact. */
static PyObject *tensor_reduce(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_tensor *self = fsdpc_py_self(object);
    const fsdpc_tensor *t = self->tensor;
    if (t->node)
        return PyErr_Format(PyExc_RuntimeError,
                            "only leaves can be pickled: detach() this tensor first");
    PyObject *plain = fsdpc_py_tensor_plain(object);
    PyObject *array = plain ? fsdpc_py_tensor_numpy(plain, NULL) : NULL;
    PyObject *module = array ? PyImport_ImportModule("fsdpc._core") : NULL;
    PyObject *make = module ? PyObject_GetAttrString(module, "tensor") : NULL;
    Py_XDECREF(plain);
    Py_XDECREF(module);
    if (!make) {
        Py_XDECREF(array);
        return NULL;
    }
    return Py_BuildValue("N(NOO)", make, array, self->state->dtypes[t->dtype],
                         t->requires_grad ? Py_True : Py_False);
}

/* ---- in ---- */

static void release_buffer(fsdpc_storage *storage)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyBuffer_Release(storage->owner);
    PyMem_Free(storage->owner);
    PyGILState_Release(gil);
}

/* Returns -1 if the format does not match one of our dtypes. */
static int dtype_of_format(const char *format, Py_ssize_t itemsize)
{
    if (*format == '@' || *format == '=' || *format == '<')
        format++;
    if (!*format || format[1])
        return -1;
    switch (*format) {
    case 'f':
        return FSDPC_F32;
    case 'd':
        return FSDPC_F64;
    case 'e':
        return FSDPC_F16;
    case '?':
        return FSDPC_BOOL;
    case 'B':
        return FSDPC_U8;
    case 'i':
    case 'l':
    case 'q':
        return itemsize == 4 ? FSDPC_I32 : itemsize == 8 ? FSDPC_I64 : -1;
    default:
        return -1;
    }
}

/* Creates a tensor that takes ownership of the buffer and sets *taken_out; on a remote device, the
 * tensor holds a copy instead.
 */
static fsdpc_status tensor_of_buffer(fsdpc_device *device, fsdpc_dtype dtype, const size_t *shape,
                                     Py_buffer *view, bool *taken_out, fsdpc_tensor **out)
{
    if (!device->remote) {
        FSDPC_TRY(fsdpc_tensor_wrap(device, dtype, view->ndim, shape, view->buf, release_buffer,
                                    view, out));
        *taken_out = true;
        return FSDPC_OK;
    }
    fsdpc_tensor *t;
    FSDPC_TRY(fsdpc_tensor_create(device, dtype, view->ndim, shape, &t));
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(
        status = fsdpc_device_copy(device, t->data, view->buf, fsdpc_tensor_bytes(t), NULL));
    if (status != FSDPC_OK) {
        fsdpc_tensor_release(t);
        return status;
    }
    *out = t;
    return FSDPC_OK;
}

/* Wraps a C-contiguous, writable buffer; if `as_bf16` is true, its uint16 elements are bfloat16
 * values. */
static fsdpc_tensor *wrap_buffer(fsdpc_runtime *runtime, PyObject *object, bool as_bf16)
{
    Py_buffer *view = PyMem_Malloc(sizeof *view);
    if (!view)
        return (fsdpc_tensor *)PyErr_NoMemory();
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE) < 0) {
        PyMem_Free(view);
        return NULL;
    }
    size_t shape[FSDPC_MAX_DIMS];
    const char *format = view->format ? view->format : "B";
    int dtype = as_bf16 ? FSDPC_BF16 : dtype_of_format(format, view->itemsize);
    fsdpc_tensor *t = NULL;
    bool taken = false;
    if (dtype < 0) {
        PyErr_Format(PyExc_TypeError,
                     "elements of format '%s' and %zd bytes have no dtype here: convert with "
                     "astype() first",
                     format, view->itemsize);
    } else if (view->ndim > FSDPC_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%d dimensions, at most %d", view->ndim, FSDPC_MAX_DIMS);
    } else {
        for (int i = 0; i < view->ndim; i++)
            shape[i] = (size_t)view->shape[i];
        fsdpc_status status =
            tensor_of_buffer(runtime->device, (fsdpc_dtype)dtype, shape, view, &taken, &t);
        if (status != FSDPC_OK)
            fsdpc_py_raise(status);
    }
    if (!taken) {
        PyBuffer_Release(view);
        PyMem_Free(view);
    }
    return t;
}

/* Clears a missing attribute's error, because the attribute is optional. Other errors stay set,
 * such as Ctrl-C during NumPy's own Python code (dtype.name). Returns whether an error is set. */
static bool clear_missing(void)
{
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_AttributeError))
        PyErr_Clear();
    return PyErr_Occurred() != NULL;
}

static PyObject *dtype_attribute(PyObject *array, const char *name)
{
    PyObject *dtype = PyObject_GetAttrString(array, "dtype");
    PyObject *value = dtype ? PyObject_GetAttrString(dtype, name) : NULL;
    Py_XDECREF(dtype);
    return value;
}

/* Returns -1 with an exception. */
static int is_bfloat16(PyObject *array)
{
    PyObject *name = dtype_attribute(array, "name");
    int result =
        name && PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, "bfloat16") == 0;
    Py_XDECREF(name);
    return clear_missing() ? -1 : result;
}

/* Returns array.dtype.kind, which is one character, or 0 if it is missing, in which case an
 * exception may be set. */
static char dtype_kind(PyObject *array)
{
    PyObject *kind = dtype_attribute(array, "kind");
    const char *text = kind ? PyUnicode_AsUTF8(kind) : NULL;
    char result = text ? *text : 0;
    Py_XDECREF(kind);
    return clear_missing() ? 0 : result;
}

bool fsdpc_py_is_array(PyObject *object)
{
    return PyObject_CheckBuffer(object) && dtype_kind(object) != 0;
}

static fsdpc_tensor *from_array(fsdpc_runtime *runtime, PyObject *array)
{
    int bf16 = is_bfloat16(array);
    if (bf16 < 0)
        return NULL;
    PyObject *plain = bf16 ? PyObject_CallMethod(array, "view", "s", "uint16") : Py_NewRef(array);
    if (!plain)
        return NULL;
    fsdpc_tensor *t = wrap_buffer(runtime, plain, bf16);
    if (!t &&
        (PyErr_ExceptionMatches(PyExc_ValueError) || PyErr_ExceptionMatches(PyExc_BufferError))) {
        /* The array is not contiguous or is read-only, so NumPy makes a copy. */
        PyErr_Clear();
        PyObject *copy = PyObject_CallMethod(plain, "copy", NULL);
        t = copy ? wrap_buffer(runtime, copy, bf16) : NULL;
        Py_XDECREF(copy);
    }
    Py_DECREF(plain);
    return t;
}

FSDPC_PY_FUNCTION_OP(from_numpy)
{
    if (!dtype_kind(a->array))
        return PyErr_Occurred()
                   ? NULL
                   : PyErr_Format(PyExc_TypeError, "from_numpy: a NumPy array is needed, not %s",
                                  Py_TYPE(a->array)->tp_name);
    fsdpc_tensor *t = from_array(&state->runtime, a->array);
    return t ? fsdpc_py_tensor_new(state, t) : NULL;
}

/* Returns a cast, or a copy if t already has the dtype. */
static fsdpc_tensor *own_copy(fsdpc_runtime *runtime, fsdpc_tensor *t, fsdpc_dtype dtype)
{
    fsdpc_tensor *leaf, *y = NULL;
    fsdpc_status status = fsdpc_tensor_detach(t, &leaf);
    if (status == FSDPC_OK) {
        if (leaf->dtype == dtype)
            status = fsdpc_op_clone(runtime->tape, leaf, &y);
        else
            status = fsdpc_op_cast(runtime->tape, leaf, dtype, &y);
        fsdpc_tensor_release(leaf);
    }
    if (status != FSDPC_OK)
        fsdpc_py_raise(status);
    return y;
}

/* Checks array.min() or .max(), as named by `end`; returns -1 with ValueError if the integer dtype
 * cannot hold the value, otherwise 0. */
static int check_end(PyObject *array, const char *end, fsdpc_dtype dtype)
{
    int64_t element;
    fsdpc_scalar number;
    PyObject *found = PyObject_CallMethod(array, end, NULL);
    if (!found)
        return -1;
    fsdpc_status status = fsdpc_py_number(found, &number)
                              ? fsdpc_scalar_store(number, dtype, &element)
                              : fsdpc_fail(FSDPC_ERR_TYPE, "the array's %s is not a number", end);
    Py_DECREF(found);
    return fsdpc_py_check(status);
}

/* Checks all elements by checking the smallest and largest. */
static int check_ends(PyObject *array, fsdpc_dtype dtype)
{
    PyObject *numel = PyObject_GetAttrString(array, "size");
    bool empty = numel && PyLong_AsSize_t(numel) == 0;
    Py_XDECREF(numel);
    if (empty || !numel)
        return numel ? 0 : -1;
    return check_end(array, "min", dtype) < 0 ? -1 : check_end(array, "max", dtype);
}

/* Returns whether all numbers in nested lists are integers.  *wide_out: an integer that does not
 * fit int64, borrowed. */
static bool only_integers(PyObject *data, PyObject **wide_out)
{
    if (PyLong_Check(data)) {
        int overflow;
        PyLong_AsLongLongAndOverflow(data, &overflow);
        if (overflow)
            *wide_out = data;
        return true;
    }
    if (!PyList_Check(data) && !PyTuple_Check(data))
        return false;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(data); i++)
        if (!only_integers(PySequence_Fast_GET_ITEM(data, i), wide_out))
            return false;
    return true;
}

/* Returns 0, or -1 with ValueError if no integer dtype can hold all the integers, which NumPy would
 * convert to floats. */
static int check_integers(PyObject *data)
{
    PyObject *wide = NULL;
    if (!only_integers(data, &wide) || !wide)
        return 0;
    PyErr_Format(PyExc_ValueError,
                 "the number %S does not fit int64: give floats, or a dtype of floats", wide);
    return -1;
}

/* Converts Python numbers and lists. Floats become float32. */
static PyObject *as_array(PyObject *data, int dtype, bool *python_io)
{
    *python_io = !dtype_kind(data);
    PyObject *array = PyErr_Occurred() ? NULL : numpy_call("asarray", data);
    char kind = array ? dtype_kind(array) : 0;
    bool known = array && (kind == 'f' || kind == 'b' || is_bfloat16(array) > 0);
    if (PyErr_Occurred())
        Py_CLEAR(array);
    bool narrows = dtype >= 0 && !fsdpc_dtype_is_float(dtype) && dtype != FSDPC_BOOL;
    if (array && narrows && strchr("iuf", kind) && check_ends(array, dtype) < 0)
        Py_CLEAR(array);
    if (array && dtype < 0 && kind == 'f' && *python_io && check_integers(data) < 0)
        Py_CLEAR(array);
    if (!array || known)
        return array;
    if (kind != 'i' && kind != 'u') {
        PyErr_Format(PyExc_TypeError, "a tensor cannot hold %.80R (NumPy's kind '%c')", data, kind);
        Py_DECREF(array);
        return NULL;
    }
    PyObject *itemsize = PyObject_GetAttrString(array, "itemsize");
    long bytes = itemsize ? PyLong_AsLong(itemsize) : 0;
    Py_XDECREF(itemsize);
    if ((kind == 'i' && bytes >= 4) || (kind == 'u' && bytes == 1))
        return array;
    bool floats = dtype >= 0 && fsdpc_dtype_is_float(dtype);
    PyObject *wide = bytes == 8 && !floats && check_ends(array, FSDPC_I64) < 0
                         ? NULL
                         : PyObject_CallMethod(array, "astype", "s", floats ? "float64" : "int64");
    Py_DECREF(array);
    return wide;
}

fsdpc_tensor *fsdpc_py_tensor_from_data(fsdpc_py_state *state, PyObject *data, int dtype)
{
    fsdpc_runtime *runtime = fsdpc_py_state_runtime(state);
    if (!runtime)
        return NULL;
    fsdpc_tensor *source = fsdpc_py_tensor_peek(NULL, data), *t;
    bool python = false;
    if (source) {
        fsdpc_tensor_acquire(source);
    } else {
        PyObject *array = as_array(data, dtype, &python);
        source = array ? from_array(runtime, array) : NULL;
        Py_XDECREF(array);
    }
    if (!source)
        return NULL;
    if (dtype < 0)
        dtype = python && source->dtype == FSDPC_F64 ? FSDPC_F32 : source->dtype;
    t = own_copy(runtime, source, (fsdpc_dtype)dtype);
    fsdpc_tensor_release(source);
    return t;
}

PyMethodDef fsdpc_py_numpy_methods[] = {
    FSDPC_PY_METHOD(Tensor, numpy, fsdpc_py_tensor_numpy, METH_NOARGS),
    FSDPC_PY_METHOD(Tensor, bits, tensor_bits, METH_NOARGS),
    FSDPC_PY_METHOD(Tensor, __array__, tensor_array, METH_VARARGS | METH_KEYWORDS),
    {"__reduce__", tensor_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

PyMethodDef fsdpc_py_numpy_functions[] = {
    FSDPC_PY_FUNCTION_ROW(from_numpy),
    {NULL, NULL, 0, NULL},
};
