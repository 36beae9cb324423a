/* Declarations shared by the Tensor type's files. */
#ifndef FSDPC_BIND_TENSOR_TENSOR_H
#define FSDPC_BIND_TENSOR_TENSOR_H

#include "bind/state.h"

/* Creates an object of the type or a subclass; takes ownership of the reference to `t`, even on
 * failure. */
PyObject *fsdpc_py_tensor_make(PyTypeObject *type, fsdpc_py_state *state, fsdpc_tensor *t);
void fsdpc_py_tensor_dealloc(PyObject *object);

/* Returns 0, or -1 with TypeError: only floating point tensors can require grad. */
int fsdpc_py_check_requires_grad(bool requires_grad, fsdpc_dtype dtype);

/* Slots of the type that are defined in other files. */
PyObject *fsdpc_py_tensor_number(PyObject *a, PyObject *b, fsdpc_binary kind);
PyObject *fsdpc_py_tensor_compare(PyObject *a, PyObject *b, int op);
PyObject *fsdpc_py_tensor_getitem(PyObject *self, PyObject *index);
int fsdpc_py_tensor_setitem(PyObject *self, PyObject *index, PyObject *value);
int fsdpc_py_tensor_getbuffer(PyObject *self, Py_buffer *view, int flags);
void fsdpc_py_tensor_releasebuffer(PyObject *self, Py_buffer *view);
PyObject *fsdpc_py_tensor_repr(PyObject *self);

/* Accessors of the Python object. */
static inline fsdpc_py_tensor *fsdpc_py_self(PyObject *object)
{
    return (fsdpc_py_tensor *)object;
}

/* Gradient hooks that are Python callables: the garbage collector visits them through the tensor
 * that holds them. */
int fsdpc_py_hooks_traverse(const fsdpc_tensor *t, visitproc visit, void *arg);
void fsdpc_py_hooks_clear(fsdpc_tensor *t);

/* Access to NumPy through Python calls and the buffer protocol, without NumPy's headers. */
PyObject *fsdpc_py_tensor_numpy(PyObject *self, PyObject *unused);
/* Returns a tensor with the same values in a dtype that NumPy supports: the tensor itself, or a
 * converted copy if it is bfloat16. */
PyObject *fsdpc_py_tensor_plain(PyObject *self);
/* Returns whether the object is a NumPy array or array-like; if not, an exception may be set, but
 * never for a missing attribute.
 */
bool fsdpc_py_is_array(PyObject *object);
/* Converts any object to a new tensor that owns its memory; if dtype < 0, the dtype is inferred
 * from the data. */
fsdpc_tensor *fsdpc_py_tensor_from_data(fsdpc_py_state *state, PyObject *data, int dtype);

/* ---- in place: bind/tensor/write.c ---- */

/* Returns -1 with an exception if this tensor must not be modified in place now. */
int fsdpc_py_tensor_check_inplace(fsdpc_py_tensor *self, const char *what);
/* x[box] = value, broadcast and converted, and recorded if gradients flow; 0, or -1 with an
 * exception that begins with `what`. `operand`: the operand that the value was computed from, or
 * NULL. */
int fsdpc_py_tensor_assign(fsdpc_py_tensor *self, const char *what, const fsdpc_box *box,
                           PyObject *value, PyObject *operand);
/* Returns `result`, a new Tensor made from `object`, or NULL; if they share memory, the result
 * keeps a reference to `object`. */
PyObject *fsdpc_py_tensor_over(PyObject *object, PyObject *result);
/* Releases the objects that this one was made from, if nothing else refers to them. */
void fsdpc_py_tensor_drop_unseen(fsdpc_py_tensor *self);
void fsdpc_py_tensor_whole(const fsdpc_tensor *t, fsdpc_box *out);
/* Switches the object to another tensor and takes ownership of that tensor's reference. */
void fsdpc_py_tensor_replace(fsdpc_py_tensor *self, fsdpc_tensor *t);
/* Slots for `+=` and similar operators, defined in bind/tensor/operator.c. */
#define FSDPC_PY_INPLACE(X)                                                                        \
    X(add, PyNumber_Add, "+")                                                                      \
    X(subtract, PyNumber_Subtract, "-")                                                            \
    X(multiply, PyNumber_Multiply, "*")                                                            \
    X(true_divide, PyNumber_TrueDivide, "/")                                                       \
    X(floor_divide, PyNumber_FloorDivide, "//")                                                    \
    X(remainder, PyNumber_Remainder, "%")                                                          \
    X(matrix_multiply, PyNumber_MatrixMultiply, "@")                                               \
    X(and, PyNumber_And, "&")                                                                      \
    X(or, PyNumber_Or, "|")                                                                        \
    X(xor, PyNumber_Xor, "^")
#define X(name, function, sign) PyObject *fsdpc_py_tensor_inplace_##name(PyObject *a, PyObject *b);
FSDPC_PY_INPLACE(X)
#undef X
PyObject *fsdpc_py_tensor_inplace_power(PyObject *a, PyObject *b, PyObject *modulus);

/* Compares the bytes of two tensors of equal size, waiting until they have been computed. */
fsdpc_status fsdpc_py_tensor_same_bytes(const fsdpc_tensor *x, const fsdpc_tensor *y,
                                        bool *equal_out);

#endif
