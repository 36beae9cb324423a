/* The extension module fsdpc._core: joins what the other files of this folder set up.
 *
 * Importing makes types and functions and nothing else: no thread, no socket, no memory; the
 * runtime comes with the first tensor.  State is per module (multi-phase initialisation), types are
 * heap types, there is no static Python object.
 */
#include "py/py_state.h"

#include "py/py_ops.h"
#include "py/py_tensor.h"

#if __has_include("py/py_engine.h")
int fsdpc_py_engine_setup(PyObject *module);
int fsdpc_py_ckpt_setup(PyObject *module);
#define ENGINE_SETUP fsdpc_py_engine_setup, fsdpc_py_ckpt_setup
#endif

static int module_exec(PyObject *module)
{
    static int (*const setups[])(PyObject *) = {
        fsdpc_py_error_setup, fsdpc_py_state_setup, fsdpc_py_dtype_setup,  fsdpc_py_tensor_setup,
        fsdpc_py_hook_setup,  fsdpc_py_shape_setup, fsdpc_py_value_setup,  fsdpc_py_number_setup,
        fsdpc_py_write_setup, fsdpc_py_make_setup,  fsdpc_py_dlpack_setup, fsdpc_py_numpy_setup,
        fsdpc_py_ops_setup,   fsdpc_py_tape_setup,  fsdpc_py_plugin_setup, fsdpc_py_stream_setup,
#ifdef ENGINE_SETUP
        ENGINE_SETUP,
#endif
    };
    for (size_t i = 0; i < sizeof setups / sizeof *setups; i++)
        if (setups[i](module) < 0)
            return -1;
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    fsdpc_py_state *state = PyModule_GetState(module);
    for (int i = 0; i < FSDPC_DTYPE_COUNT; i++)
        Py_VISIT(state->dtypes[i]);
    Py_VISIT(state->dtype_type);
    Py_VISIT(state->tensor_type);
    Py_VISIT(state->handle_type);
    Py_VISIT(state->comm_type);
    Py_VISIT(state->link_type);
    Py_VISIT(state->unit_type);
    Py_VISIT(state->optimizer_type);
    return 0;
}

static int module_clear(PyObject *module)
{
    fsdpc_py_state *state = PyModule_GetState(module);
    for (int i = 0; i < FSDPC_DTYPE_COUNT; i++)
        Py_CLEAR(state->dtypes[i]);
    Py_CLEAR(state->dtype_type);
    Py_CLEAR(state->tensor_type);
    Py_CLEAR(state->handle_type);
    Py_CLEAR(state->comm_type);
    Py_CLEAR(state->link_type);
    Py_CLEAR(state->unit_type);
    Py_CLEAR(state->optimizer_type);
    return 0;
}

/* Every tensor holds its type, which holds the module: no tensor is left when this runs. */
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
