/* The extension module fsdpc._core, which combines the other files in this folder through the
 * tables at the top of bind/state.h.
 *
 * Importing only creates types and functions: it starts no thread, opens no socket and allocates no
 * tensor memory. The runtime is created with the first tensor. State is per module (multi-phase
 * initialisation), types are heap types, and there are no static Python objects.
 */
#include "bind/state.h"

#include <string.h>

#include "engine/plan.h"
#include "ops/weight_code.h"

/* Adds the type to the module under the last component of its name. */
static PyObject *make_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type && PyModule_AddObjectRef(module, strrchr(spec->name, '.') + 1, type) < 0)
        Py_CLEAR(type);
    return type;
}

static int set_descriptor(PyObject *type, const char *name, PyObject *descriptor)
{
    int result = descriptor ? PyObject_SetAttrString(type, name, descriptor) : -1;
    Py_XDECREF(descriptor);
    return result;
}

static int add_methods(PyObject *type, PyMethodDef *methods)
{
    for (PyMethodDef *m = methods; m->ml_name; m++)
        if (set_descriptor(type, m->ml_name, PyDescr_NewMethod((PyTypeObject *)type, m)) < 0)
            return -1;
    return 0;
}

static int add_getset(PyObject *type, PyGetSetDef *getset)
{
    for (PyGetSetDef *g = getset; g->name; g++)
        if (set_descriptor(type, g->name, PyDescr_NewGetSet((PyTypeObject *)type, g)) < 0)
            return -1;
    return 0;
}

/* Adds the names of the schemes of quantised weights, as a tuple. */
static int add_schemes(PyObject *module)
{
    PyObject *names = PyTuple_New(FSDPC_WEIGHT_SCHEMES);
    for (int i = 0; names && i < FSDPC_WEIGHT_SCHEMES; i++) {
        PyObject *name = PyUnicode_FromString(fsdpc_weight_name((fsdpc_weight_scheme)i));
        if (!name)
            Py_CLEAR(names);
        else
            PyTuple_SET_ITEM(names, i, name);
    }
    int result = names ? PyModule_AddObjectRef(module, "weight_schemes", names) : -1;
    Py_XDECREF(names);
    return result;
}

static int module_exec(PyObject *module)
{
    fsdpc_py_state *state = PyModule_GetState(module);
    fsdpc_py_imports_init(&state->imports);
#define X(name)                                                                                    \
    if (!(state->name##_type = make_type(module, &fsdpc_py_##name##_spec)))                        \
        return -1;
    FSDPC_PY_TYPES(X)
#undef X
#define X(type, part)                                                                              \
    if (add_methods(state->type##_type, fsdpc_py_##part##_methods) < 0)                            \
        return -1;
    FSDPC_PY_METHODS(X)
#undef X
#define X(type, part)                                                                              \
    if (add_getset(state->type##_type, fsdpc_py_##part##_getset) < 0)                              \
        return -1;
    FSDPC_PY_GETSETS(X)
#undef X
#define X(part)                                                                                    \
    if (PyModule_AddFunctions(module, fsdpc_py_##part##_functions) < 0)                            \
        return -1;
    FSDPC_PY_FUNCTIONS(X)
#undef X
    if (fsdpc_py_error_setup(module) < 0 || fsdpc_py_dtype_setup(module) < 0)
        return -1;
    /* NumPy's operators then defer to the tensor in any expression that contains one. */
    if (PyObject_SetAttrString(state->tensor_type, "__array_ufunc__", Py_None) < 0)
        return -1;
    if (add_schemes(module) < 0)
        return -1;
    return PyModule_AddIntConstant(module, "pooled_buffers", FSDPC_POOLED_BUFFERS);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    fsdpc_py_state *state = PyModule_GetState(module);
    for (int i = 0; i < FSDPC_DTYPE_COUNT; i++)
        Py_VISIT(state->dtypes[i]);
    Py_VISIT(state->reclaim);
#define X(name) Py_VISIT(state->name##_type);
    FSDPC_PY_TYPES(X)
#undef X
    return 0;
}

static int module_clear(PyObject *module)
{
    fsdpc_py_state *state = PyModule_GetState(module);
    for (int i = 0; i < FSDPC_DTYPE_COUNT; i++)
        Py_CLEAR(state->dtypes[i]);
    Py_CLEAR(state->reclaim);
#define X(name) Py_CLEAR(state->name##_type);
    FSDPC_PY_TYPES(X)
#undef X
    return 0;
}

/* Every tensor refers to its type, which refers to the module, so no tensor is left when this
 * runs. */
static void module_free(void *module)
{
    module_clear(module);
    fsdpc_py_runtime_destroy(&((fsdpc_py_state *)PyModule_GetState(module))->runtime);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030c0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

PyModuleDef fsdpc_py_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "fsdpc._core",
    .m_doc = "The C side of fsdpc: tensors, autograd, operations and the sharding engine.",
    .m_size = sizeof(fsdpc_py_state),
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&fsdpc_py_module);
}
