/* Arguments of functions and methods, as declared in python/fsdpc/_core.pyi.
 *
 * A function in that file is a row of a table: its name, its arguments with types and defaults, and
 * its docstring. For `def flip(x: Tensor, dims: Dims) -> Tensor`, the build (tools/stub_args.py)
 * writes a struct, fsdpc_args_flip, with members `fsdpc_tensor *x` and `bool dims[]`, and a
 * signature that tells fsdpc_py_parse how to fill the struct. C then needs one function,
 *
 *     FSDPC_PY_OP(flip)
 *     {
 *         FSDPC_PY_RETURN(a->x->numel, fsdpc_op_flip(r->tape, a->x, a->dims, &y));
 *     }
 *
 * which FSDPC_PY_RETURNS shortens to one line. It receives the module's `state`, whose runtime is
 * ready, and the arguments `a`, where `a->object` is the first argument as passed. It returns a new
 * reference, or NULL with an exception. A method of Tensor is written as
 * FSDPC_PY_TENSOR_OP(flatten).
 */
#ifndef FSDPC_BIND_TENSOR_OPS_H
#define FSDPC_BIND_TENSOR_OPS_H

#include "bind/state.h"

/* ---- arguments: bind/tensor/ops_args.c ---- */

/* The argument types; tools/stub_args.py lists each with its name in the stub and its C type. */
typedef enum fsdpc_py_kind {
    FSDPC_PY_OBJECT,         /* as given; NULL if omitted */
    FSDPC_PY_OBJECT_OR_NONE, /* NULL for None */
    FSDPC_PY_CALLABLE,
    FSDPC_PY_TENSOR,
    FSDPC_PY_TENSOR_OR_NONE, /* NULL for None */
    FSDPC_PY_BOOL,           /* the truth of any object */
    FSDPC_PY_INT,
    FSDPC_PY_INT64,
    FSDPC_PY_BITS64, /* an integer modulo 2^64 */
    FSDPC_PY_DOUBLE, /* None is the default, if there is one */
    FSDPC_PY_COUNT,  /* a nonnegative integer */
    FSDPC_PY_NUMBER, /* a Python or NumPy number, integers exactly */
    FSDPC_PY_TEXT,
    FSDPC_PY_CHOICE, /* one of two texts: whether it is the second */
    FSDPC_PY_DTYPE,
    FSDPC_PY_DTYPE_OR_NONE, /* -1 for None */
    FSDPC_PY_DIMS,    /* dimensions of the first argument, which is a tensor; by default all */
    FSDPC_PY_EXTENTS, /* one integer or a sequence of them */
    FSDPC_PY_SIZES_2, /* two nonnegative integers */
    FSDPC_PY_SIZES_4,
} fsdpc_py_kind;

typedef struct fsdpc_py_param {
    const char *name;
    fsdpc_py_kind kind;
    bool required;
    size_t offset; /* in the struct of arguments */
    const char *choices[2];
} fsdpc_py_param;

typedef struct fsdpc_py_signature {
    const char *name;
    int n, n_positional; /* the other named arguments are accepted only by keyword */
    bool rest;           /* params[n] is the extents that the positional arguments make up */
    const fsdpc_py_param *params;
} fsdpc_py_signature;

enum { FSDPC_PY_MAX_PARAMS = 9 };

typedef struct fsdpc_py_extents {
    int n;
    int64_t at[FSDPC_MAX_DIMS];
} fsdpc_py_extents;

/* The C parameters of a METH_FASTCALL function with keywords; `self` is its module or object. */
#define FSDPC_PY_FASTCALL(self)                                                                    \
    PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords

/* Parses a call's arguments into a struct that holds the defaults. `self` is the first argument of
 * a method, or NULL for a function. Returns 0, or -1 with an exception. */
int fsdpc_py_parse(const fsdpc_py_signature *signature, PyObject *self, PyObject *const *args,
                   Py_ssize_t nargs, PyObject *keywords, void *out);

/* ---- operations ---- */

#define FSDPC_PY_OP(name)                                                                          \
    static PyObject *op_##name(fsdpc_py_state *state, const fsdpc_args_##name *a)

/* Returns the tensor `y` that `expression` computes; the expression may use the runtime `r`. `work`
 * is the number of elements that it accesses. */
#define FSDPC_PY_RETURN(work, expression)                                                          \
    do {                                                                                           \
        fsdpc_runtime *r = &state->runtime;                                                        \
        fsdpc_tensor *y = NULL;                                                                    \
        fsdpc_status status;                                                                       \
        FSDPC_PY_RUN(r, work, status, expression);                                                 \
        return fsdpc_py_result(state, status, y);                                                  \
    } while (0)

/* Defines an operation that only returns an expression's tensor. */
#define FSDPC_PY_RETURNS(name, work, expression)                                                   \
    FSDPC_PY_OP(name)                                                                              \
    {                                                                                              \
        FSDPC_PY_RETURN(work, expression);                                                         \
    }

/* Defines function_NAME or method_NAME, which parses the arguments and calls op_NAME. */
#define FSDPC_PY_DEFINE(of, name, self_or_null, state_)                                            \
    static PyObject *of##_##name(FSDPC_PY_FASTCALL(self))                                          \
    {                                                                                              \
        fsdpc_py_state *state = state_;                                                            \
        fsdpc_args_##name a = FSDPC_DEFAULTS_##name;                                               \
        if (fsdpc_py_parse(&fsdpc_signature_##name, self_or_null, args, nargs, keywords, &a) < 0)  \
            return NULL;                                                                           \
        return fsdpc_py_state_runtime(state) ? op_##name(state, &a) : NULL;                        \
    }
#define FSDPC_PY_DEFINE_FUNCTION(name)                                                             \
    FSDPC_PY_DEFINE(function, name, NULL, PyModule_GetState(self))
#define FSDPC_PY_DEFINE_METHOD(name)                                                               \
    FSDPC_PY_DEFINE(method, name, self, ((fsdpc_py_tensor *)self)->state)

/* Like FSDPC_PY_OP, but for a function or method that is not in one of the stub's lists. */
#define FSDPC_PY_FUNCTION_OP(name)                                                                 \
    FSDPC_PY_OP(name);                                                                             \
    FSDPC_PY_DEFINE_FUNCTION(name)                                                                 \
    FSDPC_PY_OP(name)
#define FSDPC_PY_TENSOR_OP(name)                                                                   \
    FSDPC_PY_OP(Tensor_##name);                                                                    \
    FSDPC_PY_DEFINE_METHOD(Tensor_##name)                                                          \
    FSDPC_PY_OP(Tensor_##name)

/* Rows of method tables. */
#define FSDPC_PY_FUNCTION_ROW(name) FSDPC_PY_FUNCTION(name, function_##name, FSDPC_PY_FAST)
#define FSDPC_PY_TENSOR_ROW(name) FSDPC_PY_METHOD(Tensor, name, method_Tensor_##name, FSDPC_PY_FAST)

/* Arguments for FSDPC_OPERATIONS(F, M), the lists that the build generates from the stub: they
 * define the callers of op_NAME, and the table rows. */
#define FSDPC_PY_DEFINE_BOTH(name) FSDPC_PY_DEFINE_FUNCTION(name) FSDPC_PY_DEFINE_METHOD(name)
#define FSDPC_PY_FUNCTIONS_ROW(name) FSDPC_PY_FUNCTION_ROW(name),
#define FSDPC_PY_METHODS_ROW(name) FSDPC_PY_METHOD(Tensor, name, method_##name, FSDPC_PY_FAST),
#define FSDPC_PY_NO_ROW(name)

/* Returns the object itself if it has the dtype. */
PyObject *fsdpc_py_cast(fsdpc_py_state *state, PyObject *object, fsdpc_dtype dtype);
/* Its function takes any arguments, so it parses its own: bind/tensor/ops_checkpoint.c */
PyObject *fsdpc_py_checkpoint(FSDPC_PY_FASTCALL(module));
PyObject *fsdpc_py_checkpoint_products(FSDPC_PY_FASTCALL(module));

/* ---- arguments that an operation reads itself ---- */

/* These return 0, or -1 with an exception. */
int fsdpc_py_arg_double(PyObject *object, double *out);
int fsdpc_py_arg_int64(PyObject *object, int64_t *out);
/* Reads a tensor; None is read as NULL. */
int fsdpc_py_arg_tensor(PyObject *object, fsdpc_tensor **out);

int fsdpc_py_arg_number(const char *function, const char *name, PyObject *object,
                        fsdpc_scalar *out);
/* Reads a Python or NumPy number; integers are exact. False: not a number. */
bool fsdpc_py_number(PyObject *object, fsdpc_scalar *out);

/* Reads a sequence of nonnegative numbers into an array that the caller must free; returns NULL
 * with an exception on failure. */
size_t *fsdpc_py_sizes(const char *what, PyObject *sequence, size_t *n_out);
/* Converts the extents to sizes and returns their number, or -1 with an exception if one is
 * negative. */
int fsdpc_py_shape(const char *function, const fsdpc_py_extents *extents, size_t *out);
/* Converts a sequence of tensors to a list or tuple and returns a new reference. A single tensor is
 * an error, although it could be iterated by rows. */
PyObject *fsdpc_py_tensors(PyObject *sequence);

#endif
