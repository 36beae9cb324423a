/* Calling operations from Python: arguments without format strings. */
#ifndef FSDPC_BIND_TENSOR_OPS_H
#define FSDPC_BIND_TENSOR_OPS_H

#include "bind/state.h"

/* ---- arguments: bind/tensor/ops_args.c ---- */

/* Sorts a fastcall's positional and keyword arguments into out[n]; optional ones (beyond
 * `required`) stay NULL if omitted.  Returns 0, or -1 with TypeError. */
int fsdpc_py_args(const char *function, int n, const char *const *names, int required,
                  PyObject *const *args, Py_ssize_t nargs, PyObject *keywords, PyObject **out);

/* The C parameters of a fastcall with keywords; `self` is its module or object... */
#define FSDPC_PY_FASTCALL(self)                                                                    \
    PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords
/* ... parsed into `a`, an array with one entry per name; returns NULL if that fails. */
#define FSDPC_PY_PARSE(function, required, ...)                                                    \
    static const char *const names[] = {__VA_ARGS__};                                              \
    PyObject *a[sizeof names / sizeof *names];                                                     \
    if (fsdpc_py_args(function, (int)(sizeof names / sizeof *names), names, required, args, nargs, \
                      keywords, a) < 0)                                                            \
    return NULL

/* function##_named: the same function, accepting its one argument by position or name. */
#define FSDPC_PY_NAMED(function, says, argument)                                                   \
    static PyObject *function##_named(FSDPC_PY_FASTCALL(self))                                     \
    {                                                                                              \
        FSDPC_PY_PARSE(says, 1, argument);                                                         \
        return function(self, a[0]);                                                               \
    }

/* These leave *inout unchanged for NULL. */
int fsdpc_py_arg_bool(PyObject *object, bool *inout);
int fsdpc_py_arg_double(PyObject *object, double *inout); /* and for None */
int fsdpc_py_arg_int64(PyObject *object, int64_t *inout);
int fsdpc_py_arg_int(PyObject *object, int *inout);
/* Parses one of two names; sets whether it is the second. */
int fsdpc_py_arg_second(const char *what, const char *const names[2], PyObject *object,
                        bool *inout);
/* Reads a tensor; NULL and None give NULL. */
int fsdpc_py_arg_tensor(PyObject *object, fsdpc_tensor **out);

/* Reads a Python or NumPy number, integers exactly.  False: not a number. */
bool fsdpc_py_number(PyObject *object, fsdpc_scalar *out);

/* Reads extents from one sequence or several integers; returns their number, or -1 with an
 * exception. */
int fsdpc_py_extents(const char *function, PyObject *const *args, Py_ssize_t nargs, int64_t *out);
/* The same, but negative extents are an error. */
int fsdpc_py_shape(const char *function, PyObject *const *args, Py_ssize_t nargs, size_t *out);
/* Reads `n` sizes, none negative; 0, or -1. */
int fsdpc_py_arg_sizes(const char *what, PyObject *object, int n, size_t *out);
/* Reads a sequence of nonnegative numbers into an array that the caller frees; NULL with an
 * exception. */
size_t *fsdpc_py_sizes(const char *what, PyObject *sequence, size_t *n_out);
/* Converts a sequence of tensors to a list or tuple, new reference.  A single tensor is an error,
 * although it has rows. */
PyObject *fsdpc_py_tensors(PyObject *sequence);
/* Reads an int or a sequence of ints; NULL and None select all dimensions. */
int fsdpc_py_dims(const char *function, PyObject *object, int ndim, bool *flags_out);

/* ---- operations that functions and methods share: bind/tensor/ops.c ---- */

/* bind/tensor/index.c: places of the index a[0] in a tensor of shape a[1] along a[2]; None if out
 * of range */
PyObject *fsdpc_py_element_places(fsdpc_py_state *state, PyObject *const *a);
/* bind/tensor/ops_concat.c: the sequence a[0] along dimension a[1], which is new for stack */
PyObject *fsdpc_py_op_concat(fsdpc_py_state *state, PyObject *const *a, bool stack);
PyObject *fsdpc_py_op_cast(fsdpc_py_state *state, fsdpc_tensor *x, fsdpc_dtype dtype);
PyObject *fsdpc_py_op_reshape(fsdpc_py_state *state, fsdpc_tensor *x, int ndim,
                              const int64_t *shape);
/* `dims` may be negative, as in Python. */
PyObject *fsdpc_py_op_permute(fsdpc_py_state *state, fsdpc_tensor *x, int n, const int64_t *dims);
PyObject *fsdpc_py_op_expand(fsdpc_py_state *state, fsdpc_tensor *x, int ndim,
                             const int64_t *shape);

PyObject *fsdpc_py_op_checkpoint(FSDPC_PY_FASTCALL(module));

#endif
