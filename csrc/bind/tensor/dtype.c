/* dtype: eight immutable singletons, compared by identity. */
#include "bind/tensor/tensor.h"

#include <string.h>
#include <structmember.h>

typedef struct fsdpc_py_dtype {
    PyObject_HEAD fsdpc_dtype dtype;
} fsdpc_py_dtype;

static void dtype_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *dtype_repr(PyObject *self)
{
    fsdpc_dtype dtype = ((fsdpc_py_dtype *)self)->dtype;
    return PyUnicode_FromFormat("fsdpc.%s%s", fsdpc_dtype_name(dtype),
                                dtype == FSDPC_BOOL ? "_" : "");
}

FSDPC_PY_GETTER(dtype_name,
                PyUnicode_FromString(fsdpc_dtype_name(((fsdpc_py_dtype *)object)->dtype)))
FSDPC_PY_GETTER(dtype_itemsize,
                PyLong_FromSize_t(fsdpc_dtype_bytes(((fsdpc_py_dtype *)object)->dtype)))
FSDPC_PY_GETTER(dtype_is_float,
                PyBool_FromLong(fsdpc_dtype_is_float(((fsdpc_py_dtype *)object)->dtype)))

/* Pickling and copying store only the dtype's name, so they restore the singleton. */
static PyObject *dtype_reduce(PyObject *self, PyObject *Py_UNUSED(unused))
{
    PyObject *module = PyImport_ImportModule("fsdpc._core");
    PyObject *parse = module ? PyObject_GetAttrString(module, "as_dtype") : NULL;
    Py_XDECREF(module);
    if (!parse)
        return NULL;
    return Py_BuildValue("N(s)", parse, fsdpc_dtype_name(((fsdpc_py_dtype *)self)->dtype));
}

static PyMethodDef dtype_methods[] = {
    {"__reduce__", dtype_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef dtype_getset[] = {
    FSDPC_PY_ATTRIBUTE(dtype, name, dtype_name, NULL),
    FSDPC_PY_ATTRIBUTE(dtype, itemsize, dtype_itemsize, NULL),
    FSDPC_PY_ATTRIBUTE(dtype, is_floating_point, dtype_is_float, NULL),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot dtype_slots[] = {
    {Py_tp_dealloc, dtype_dealloc},       {Py_tp_repr, dtype_repr},
    {Py_tp_getset, dtype_getset},         {Py_tp_methods, dtype_methods},
    {Py_tp_doc, (void *)fsdpc_doc_dtype}, {0, NULL},
};

PyType_Spec fsdpc_py_dtype_spec = {
    .name = "fsdpc._core.dtype",
    .basicsize = sizeof(fsdpc_py_dtype),
    .flags = Py_TPFLAGS_DEFAULT
#if PY_VERSION_HEX >= 0x030a0000
             | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE
#endif
    ,
    .slots = dtype_slots,
};

/* Recognises names that are not in the table, such as Python types and abbreviations. */
static bool alias(const char *name, fsdpc_dtype *out)
{
    static const struct {
        const char *name;
        fsdpc_dtype dtype;
    } aliases[] = {{"float", FSDPC_F32},   {"double", FSDPC_F64}, {"half", FSDPC_F16},
                   {"bf16", FSDPC_BF16},   {"fp16", FSDPC_F16},   {"fp32", FSDPC_F32},
                   {"int", FSDPC_I64},     {"bool_", FSDPC_BOOL}, {"long", FSDPC_I64},
                   {"longlong", FSDPC_I64}};
    for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++) {
        if (strcmp(name, aliases[i].name) == 0) {
            *out = aliases[i].dtype;
            return true;
        }
    }
    return false;
}

static int parse_name(PyObject *name, fsdpc_dtype *out)
{
    const char *text = PyUnicode_AsUTF8(name);
    if (!text)
        return -1;
    if (alias(text, out))
        return 0;
    fsdpc_status status = fsdpc_dtype_parse(text, out);
    return fsdpc_py_check(status);
}

int fsdpc_py_dtype_parse(PyObject *object, fsdpc_dtype *out)
{
    if (Py_TYPE(object)->tp_dealloc == dtype_dealloc) {
        *out = ((fsdpc_py_dtype *)object)->dtype;
        return 0;
    }
    if (PyUnicode_Check(object))
        return parse_name(object, out);
    /* np.dtype has .name; np.float32, float, ml_dtypes.bfloat16 are types */
    PyObject *name = PyObject_GetAttrString(object, PyType_Check(object) ? "__name__" : "name");
    if (!name && !PyErr_ExceptionMatches(PyExc_AttributeError))
        return -1;
    if (!name || !PyUnicode_Check(name)) {
        PyErr_Clear();
        Py_XDECREF(name);
        PyErr_Format(PyExc_TypeError, "%R is not a dtype: use fsdpc.float32, 'float32' or NumPy's",
                     object);
        return -1;
    }
    int result = parse_name(name, out);
    Py_DECREF(name);
    return result;
}

int fsdpc_py_dtype_optional(PyObject *object, fsdpc_dtype *inout)
{
    return object && object != Py_None ? fsdpc_py_dtype_parse(object, inout) : 0;
}

static PyObject *as_dtype(PyObject *module, PyObject *object)
{
    fsdpc_dtype dtype;
    if (fsdpc_py_dtype_parse(object, &dtype) < 0)
        return NULL;
    fsdpc_py_state *state = PyModule_GetState(module);
    return Py_NewRef(state->dtypes[dtype]);
}

PyMethodDef fsdpc_py_dtype_functions[] = {
    FSDPC_PY_FUNCTION(as_dtype, as_dtype, METH_O),
    {NULL, NULL, 0, NULL},
};

int fsdpc_py_dtype_setup(PyObject *module)
{
    fsdpc_py_state *state = PyModule_GetState(module);
    PyTypeObject *type = (PyTypeObject *)state->dtype_type;
    for (int i = 0; i < FSDPC_DTYPE_COUNT; i++) {
        PyObject *object = type->tp_alloc(type, 0);
        if (!object)
            return -1;
        state->dtypes[i] = object;
        ((fsdpc_py_dtype *)object)->dtype = (fsdpc_dtype)i;
        const char *name = i == FSDPC_BOOL ? "bool_" : fsdpc_dtype_name((fsdpc_dtype)i);
        if (PyModule_AddObjectRef(module, name, object) < 0)
            return -1;
    }
    return 0;
}
