/* DLPack export and import (dmlc.github.io/dlpack, versions 0 and 1).
 *
 * Export returns a capsule whose managed tensor holds our Python object; its deleter acquires the
 * GIL, because the consumer may call it from any thread. On import, the producer's managed tensor
 * stays alive as the owner of our storage. Strided or read-only memory is copied. The structs below
 * are defined by the standard.
 *
 * Libraries on the same GPU can share GPU memory in both directions, and work stays in order. A
 * consumer's stream waits for our main stream when it takes a tensor; a producer receives our main
 * stream's handle and orders its work before it. Later work is not ordered: a consumer that uses
 * our tensor on another stream must keep the tensor until that stream has finished. We return
 * imported memory when our main stream has finished with it (bind/import.h).
 */
#include "bind/tensor/ops.h"

#include "bind/stub_args.h"
#include "bind/tensor/tensor.h"

#include <stdio.h>

typedef struct dl_tensor {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *self);
} dl_managed;

typedef struct dl_versioned {
    struct {
        uint32_t major, minor;
    } version;
    void *context;
    void (*deleter)(struct dl_versioned *self);
    uint64_t flags;
    dl_tensor tensor;
} dl_versioned;

enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_BOOL = 6 };
enum { DL_CPU = 1, DL_CUDA = 2 };
enum { DEFAULT_STREAM = 1, NO_STREAM = -1 }; /* as an argument of __dlpack__ */
enum { DL_READ_ONLY = 1, DL_COPIED = 2 };

static const struct {
    uint8_t code, bits;
} codes[] = {
    [FSDPC_F32] = {DL_FLOAT, 32}, [FSDPC_BF16] = {DL_BFLOAT, 16}, [FSDPC_F16] = {DL_FLOAT, 16},
    [FSDPC_F64] = {DL_FLOAT, 64}, [FSDPC_I32] = {DL_INT, 32},     [FSDPC_I64] = {DL_INT, 64},
    [FSDPC_U8] = {DL_UINT, 8},    [FSDPC_BOOL] = {DL_BOOL, 8},
};

static int device_type(const fsdpc_device *device)
{
    return device->remote ? DL_CUDA : DL_CPU;
}

/* ---- out ---- */

/* A single allocation that contains both managed forms, the exported object, and the shape and
 * strides. */
typedef struct exported {
    dl_managed plain;
    dl_versioned versioned;
    PyObject *object;
    int64_t extents[2 * FSDPC_MAX_DIMS];
} exported;

static void release_export(exported *e)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF(e->object);
    PyMem_RawFree(e);
    PyGILState_Release(gil);
}

static void delete_plain(dl_managed *self)
{
    release_export(self->context);
}

static void delete_versioned(dl_versioned *self)
{
    release_export(self->context);
}

/* A consumer renames a capsule when it takes ownership, so a capsule that still has its original
 * name was never consumed. */
static void capsule_destroy(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor"))
        release_export(((dl_managed *)PyCapsule_GetPointer(capsule, "dltensor"))->context);
    else if (PyCapsule_IsValid(capsule, "dltensor_versioned"))
        release_export(
            ((dl_versioned *)PyCapsule_GetPointer(capsule, "dltensor_versioned"))->context);
}

static PyObject *export_tensor(PyObject *object, bool versioned, bool copied)
{
    const fsdpc_tensor *t = fsdpc_py_self(object)->tensor;
    const fsdpc_device *device = t->storage->device;
    exported *e = PyMem_RawCalloc(1, sizeof *e);
    if (!e)
        return PyErr_NoMemory();
    int64_t stride = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        e->extents[i] = (int64_t)t->shape[i];
        e->extents[t->ndim + i] = stride;
        stride *= e->extents[i];
    }
    dl_tensor tensor = {.data = t->data,
                        .device = {device_type(device), device->ordinal},
                        .ndim = t->ndim,
                        .dtype = {codes[t->dtype].code, codes[t->dtype].bits, 1},
                        .shape = e->extents,
                        .strides = e->extents + t->ndim};
    e->object = Py_NewRef(object);
    t->storage->exported = true;
    e->plain = (dl_managed){tensor, e, delete_plain};
    uint64_t flags = (t->storage->readonly ? DL_READ_ONLY : 0) | (copied ? DL_COPIED : 0);
    e->versioned = (dl_versioned){{1, 0}, e, delete_versioned, flags, tensor};
    PyObject *capsule = versioned
                            ? PyCapsule_New(&e->versioned, "dltensor_versioned", capsule_destroy)
                            : PyCapsule_New(&e->plain, "dltensor", capsule_destroy);
    if (!capsule)
        release_export(e);
    return capsule;
}

/* Makes the consumer's stream wait for our work; None or NULL means CUDA's default stream. */
static int lead(fsdpc_device *device, PyObject *stream)
{
    long long handle = DEFAULT_STREAM;
    if (stream && stream != Py_None)
        handle = PyLong_AsLongLong(stream);
    if (handle == -1 && PyErr_Occurred())
        return -1;
    if (handle == NO_STREAM)
        return 0;
    if (handle <= 0) {
        PyErr_Format(PyExc_ValueError,
                     "__dlpack__(stream=%lld): -1, 1 and 2 for CUDA's default streams, or the "
                     "handle of another",
                     handle);
        return -1;
    }
    fsdpc_status status = fsdpc_device_precede(device, (uintptr_t)handle);
    return fsdpc_py_check(status);
}

/* Raises unless the memory is on the device `wanted`, given as (type, ordinal); None or NULL allows
 * any device. */
static int check_wanted(const fsdpc_device *device, PyObject *wanted)
{
    int type, ordinal;
    if (!wanted || wanted == Py_None)
        return 0;
    if (!PyArg_ParseTuple(wanted, "ii;dl_device is (type, ordinal)", &type, &ordinal))
        return -1;
    if (type == device_type(device) && ordinal == device->ordinal)
        return 0;
    PyErr_Format(PyExc_BufferError,
                 "__dlpack__: the tensor is on %s:%d, and memory of device type %d, ordinal %d is "
                 "asked for: numpy() copies to the host",
                 device->ops->name, device->ordinal, type, ordinal);
    return -1;
}

FSDPC_PY_TENSOR_OP(__dlpack__)
{
    (void)state;
    const fsdpc_tensor *t = a->self;
    fsdpc_status status = fsdpc_tensor_check(t);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    if (t->requires_grad)
        return PyErr_Format(PyExc_BufferError,
                            "a tensor that requires grad is not handed out: detach() it first");
    PyObject *most = a->max_version;
    bool versioned = most && PyTuple_Check(most) && PyTuple_GET_SIZE(most) == 2 &&
                     PyLong_AsLong(PyTuple_GET_ITEM(most, 0)) >= 1;
    if (PyErr_Occurred())
        return NULL;
    fsdpc_device *device = t->storage->device;
    if (check_wanted(device, a->dl_device) < 0)
        return NULL;
    bool copy = a->copy == Py_True;
    if (!copy && t->storage->readonly && !versioned)
        return PyErr_Format(PyExc_BufferError,
                            "read-only memory needs DLPack 1.0: clone() the tensor first");
    PyObject *given = copy ? PyObject_CallMethod(a->object, "clone", NULL) : Py_NewRef(a->object);
    if (!given || (device->remote && lead(device, a->stream) < 0)) {
        Py_XDECREF(given);
        return NULL;
    }
    PyObject *capsule = export_tensor(given, versioned, copy);
    Py_DECREF(given);
    return capsule;
}

static PyObject *tensor_dlpack_device(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const fsdpc_storage *storage = fsdpc_py_self(object)->tensor->storage;
    if (!storage) /* deferred */
        return Py_BuildValue("(ii)", DL_CPU, 0);
    return Py_BuildValue("(ii)", device_type(storage->device), storage->device->ordinal);
}

/* ---- in ---- */

static void give_back_plain(void *owner)
{
    dl_managed *managed = owner;
    if (managed->deleter)
        managed->deleter(managed);
}

static void give_back_versioned(void *owner)
{
    dl_versioned *managed = owner;
    if (managed->deleter)
        managed->deleter(managed);
}

static int find_dtype(const dl_tensor *d)
{
    for (int i = 0; i < FSDPC_DTYPE_COUNT; i++)
        if (d->dtype.code == codes[i].code && d->dtype.bits == codes[i].bits && d->dtype.lanes == 1)
            return i;
    PyErr_Format(PyExc_TypeError, "from_dlpack: no dtype here has code %d with %d bits",
                 d->dtype.code, d->dtype.bits);
    return -1;
}

static bool is_dense(const dl_tensor *d)
{
    int64_t stride = 1;
    for (int i = d->ndim - 1; d->strides && i >= 0; i--) {
        if (d->shape[i] > 1 && d->strides[i] != stride)
            return false;
        stride *= d->shape[i];
    }
    return true;
}

/* Copies strided memory to dense memory. */
static fsdpc_status copy_strided(fsdpc_runtime *runtime, const dl_tensor *d, fsdpc_dtype dtype,
                                 const size_t *shape, fsdpc_tensor **out)
{
    fsdpc_copy_args args = {.ndim = d->ndim,
                            .dst_dtype = dtype,
                            .src_dtype = dtype,
                            .src = (const char *)d->data + d->byte_offset};
    fsdpc_tensor *t;
    FSDPC_TRY(fsdpc_tensor_create(runtime->device, dtype, d->ndim, shape, &t));
    size_t stride = 1;
    for (int i = d->ndim - 1; i >= 0; i--) {
        int64_t given = d->strides ? d->strides[i] : (int64_t)stride;
        if (given < 0) {
            fsdpc_tensor_release(t);
            return fsdpc_fail(FSDPC_ERR_VALUE,
                              "from_dlpack: negative strides; make the source contiguous");
        }
        args.shape[i] = shape[i];
        args.stride_dst[i] = stride;
        args.stride_src[i] = (size_t)given;
        stride *= shape[i];
    }
    args.dst = t->data;
    fsdpc_status status = runtime->device->nn->copy(&args, runtime->compute);
    Py_BEGIN_ALLOW_THREADS;
    if (status == FSDPC_OK) /* returns the memory at once */
        status = fsdpc_stream_sync(runtime->compute);
    Py_END_ALLOW_THREADS;
    if (status != FSDPC_OK) {
        fsdpc_tensor_release(t);
        return status;
    }
    *out = t;
    return FSDPC_OK;
}

static const char *device_text(int type, int ordinal, char text[64])
{
    if (type == DL_CPU)
        return "the CPU";
    if (type == DL_CUDA)
        snprintf(text, 64, "cuda:%d", ordinal);
    else
        snprintf(text, 64, "DLPack's device type %d", type);
    return text;
}

/* Raises unless type and ordinal identify memory of `device`. */
static int check_home(const fsdpc_device *device, int type, int ordinal)
{
    char there[64], here[64];
    int own = device_type(device);
    if (type == own && (type == DL_CPU || ordinal == device->ordinal))
        return 0;
    const char *hint = own == DL_CPU    ? "copy it to the host first, or call "
                                          "fsdpc.set_default_device(\"cuda\") before anything else"
                       : type == DL_CPU ? "fsdpc.tensor(array) copies it there"
                                        : "copy it there first";
    PyErr_Format(PyExc_BufferError,
                 "from_dlpack: memory of %s, and this process computes on %s: %s",
                 device_text(type, ordinal, there), device_text(own, device->ordinal, here), hint);
    return -1;
}

/* Creates a tensor over `d`. Sets *taken_out if the tensor now owns `lender`. */
static fsdpc_tensor *import_tensor(fsdpc_py_state *state, const dl_tensor *d, bool readonly,
                                   fsdpc_py_lender lender, bool *taken_out)
{
    fsdpc_runtime *runtime = &state->runtime;
    size_t shape[FSDPC_MAX_DIMS];
    *taken_out = false;
    int dtype = find_dtype(d);
    if (dtype < 0)
        return NULL;
    if (check_home(runtime->device, d->device.type, d->device.id) < 0)
        return NULL;
    if (d->ndim > FSDPC_MAX_DIMS)
        return (fsdpc_tensor *)PyErr_Format(PyExc_BufferError,
                                            "from_dlpack: %d dimensions, and there are at most %d",
                                            d->ndim, FSDPC_MAX_DIMS);
    for (int i = 0; i < d->ndim; i++)
        shape[i] = (size_t)d->shape[i];
    fsdpc_tensor *t = NULL;
    fsdpc_status status;
    if (is_dense(d) && !readonly) {
        status = fsdpc_py_import(state, (fsdpc_dtype)dtype, d->ndim, shape,
                                 (char *)d->data + d->byte_offset, lender, &t);
        *taken_out = status == FSDPC_OK;
    } else {
        status = copy_strided(runtime, d, (fsdpc_dtype)dtype, shape, &t);
    }
    if (status != FSDPC_OK)
        fsdpc_py_raise(status);
    return t;
}

static fsdpc_tensor *import_capsule(fsdpc_py_state *state, PyObject *capsule)
{
    bool taken;
    fsdpc_tensor *t;
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        dl_versioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (managed->version.major != 1)
            return (fsdpc_tensor *)PyErr_Format(PyExc_BufferError, "from_dlpack: DLPack %u",
                                                managed->version.major);
        t = import_tensor(state, &managed->tensor, managed->flags & DL_READ_ONLY,
                          (fsdpc_py_lender){managed, give_back_versioned}, &taken);
        if (taken)
            PyCapsule_SetName(capsule, "used_dltensor_versioned");
        return t;
    }
    dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
    if (!managed)
        return NULL;
    t = import_tensor(state, &managed->tensor, false, (fsdpc_py_lender){managed, give_back_plain},
                      &taken);
    if (taken)
        PyCapsule_SetName(capsule, "used_dltensor");
    return t;
}

/* This is checked before the memory is requested, because a producer on another device would not
 * know our stream. */
static int check_source(const fsdpc_device *device, PyObject *source)
{
    int type, ordinal;
    PyObject *there = PyObject_CallMethod(source, "__dlpack_device__", NULL);
    if (!there)
        return -1;
    int result = PyArg_ParseTuple(there, "ii;__dlpack_device__ is (type, ordinal)", &type, &ordinal)
                     ? check_home(device, type, ordinal)
                     : -1;
    Py_DECREF(there);
    return result;
}

/* Returns the `stream` argument for __dlpack__, which is the stream that will read the memory. */
static unsigned long long stream_of(const fsdpc_device *device)
{
    uintptr_t handle = fsdpc_device_handle(device);
    return handle ? handle : DEFAULT_STREAM;
}

/* Requests the producer's capsule, using the 1.0 protocol or, failing that, the older one. */
static PyObject *ask_capsule(const fsdpc_device *device, PyObject *source)
{
    if (device->remote && check_source(device, source) < 0)
        return NULL;
    PyObject *method = PyObject_GetAttrString(source, "__dlpack__");
    PyObject *none = PyTuple_New(0), *capsule = NULL;
    PyObject *options = device->remote
                            ? Py_BuildValue("{s:(ii),s:K}", "max_version", 1, 0, "stream",
                                            (unsigned long long)stream_of(device))
                            : Py_BuildValue("{s:(ii)}", "max_version", 1, 0);
    bool fine = method && none && options;
    if (fine)
        capsule = PyObject_Call(method, none, options);
    if (fine && !capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        if (PyDict_DelItemString(options, "max_version") == 0)
            capsule = PyObject_Call(method, none, options);
    }
    Py_XDECREF(method);
    Py_XDECREF(none);
    Py_XDECREF(options);
    return capsule;
}

FSDPC_PY_FUNCTION_OP(from_dlpack)
{
    fsdpc_device *device = state->runtime.device;
    if (device->capturing)
        return fsdpc_py_raise(
            fsdpc_fail(FSDPC_ERR_STATE,
                       "from_dlpack() inside a captured step, whose replays would not wait for the "
                       "library that lends the memory: call it before the step, and copy_() new "
                       "values before each replay"));
    PyObject *capsule =
        PyCapsule_CheckExact(a->source) ? Py_NewRef(a->source) : ask_capsule(device, a->source);
    if (!capsule)
        return NULL;
    fsdpc_tensor *t = import_capsule(state, capsule);
    Py_DECREF(capsule);
    return t ? fsdpc_py_tensor_new(state, t) : NULL;
}

PyMethodDef fsdpc_py_dlpack_methods[] = {
    FSDPC_PY_TENSOR_ROW(__dlpack__),
    FSDPC_PY_METHOD(Tensor, __dlpack_device__, tensor_dlpack_device, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};

PyMethodDef fsdpc_py_dlpack_functions[] = {
    FSDPC_PY_FUNCTION_ROW(from_dlpack),
    {NULL, NULL, 0, NULL},
};
