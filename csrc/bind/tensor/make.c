/* Creates tensors: filled, random, or without memory. */
#include "bind/tensor/ops.h"
#include "bind/tensor/tensor.h"

#include "base/random.h"
#include "ops/flat_ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MADE_BLOCK = 1024, FEW = 1 << 16 };

/* The arguments of calls such as zeros(2, 3, dtype=..., requires_grad=True). */
typedef struct request {
    fsdpc_runtime *runtime;
    fsdpc_py_state *state;
    int ndim;
    size_t shape[FSDPC_MAX_DIMS];
    fsdpc_dtype dtype;
    bool requires_grad;
    PyObject *seed;
} request;

static int parse_options(request *r, PyObject *dtype, PyObject *requires_grad)
{
    r->dtype = FSDPC_F32;
    r->requires_grad = false;
    if (fsdpc_py_dtype_optional(dtype, &r->dtype) < 0 ||
        fsdpc_py_arg_bool(requires_grad, &r->requires_grad) < 0)
        return -1;
    return fsdpc_py_check_requires_grad(r->requires_grad, r->dtype);
}

static int request_begin(request *r, PyObject *module)
{
    *r = (request){.state = PyModule_GetState(module)};
    r->runtime = fsdpc_py_state_runtime(r->state);
    return r->runtime ? 0 : -1;
}

/* Parses extents by position and options by keyword. */
static int parse_request(request *r, const char *function, PyObject *module, PyObject *const *args,
                         Py_ssize_t nargs, PyObject *keywords, bool takes_seed)
{
    static const char *const names[] = {"dtype", "requires_grad", "seed"};
    PyObject *a[3];
    if (request_begin(r, module) < 0 ||
        fsdpc_py_args(function, takes_seed ? 3 : 2, names, 0, args + nargs, 0, keywords, a) < 0)
        return -1;
    if (takes_seed)
        r->seed = a[2];
    if (parse_options(r, a[0], a[1]) < 0)
        return -1;
    r->ndim = fsdpc_py_shape(function, args, nargs, r->shape);
    return r->ndim < 0 ? -1 : 0;
}

static fsdpc_tensor *request_tensor(const request *r)
{
    fsdpc_tensor *t;
    fsdpc_status status = fsdpc_tensor_create(r->runtime->device, r->dtype, r->ndim, r->shape, &t);
    if (status != FSDPC_OK) {
        fsdpc_py_raise(status);
        return NULL;
    }
    t->requires_grad = r->requires_grad;
    return t;
}

/* Copies `from` into t, in t's dtype; a stride of 0 repeats the first element. */
static fsdpc_status convert(fsdpc_runtime *runtime, fsdpc_tensor *t, const fsdpc_tensor *from,
                            size_t stride)
{
    fsdpc_copy_args args = {.ndim = 1,
                            .shape = {t->numel},
                            .stride_dst = {1},
                            .stride_src = {stride},
                            .dst_dtype = t->dtype,
                            .src_dtype = from->dtype,
                            .dst = t->data,
                            .src = from->data};
    return runtime->device->nn->copy(&args, runtime->compute);
}

/* Sets every element to `value`, which is stored once in t's dtype, then repeated. */
static fsdpc_status fill(fsdpc_runtime *runtime, fsdpc_tensor *t, fsdpc_scalar value)
{
    if (value.real == 0 && !signbit(value.real))
        return fsdpc_device_fill(runtime->device, t->data, 0, fsdpc_tensor_bytes(t),
                                 runtime->compute);
    fsdpc_tensor *one;
    FSDPC_TRY(fsdpc_scalar_tensor(runtime->device, runtime->compute, value, t->dtype, &one));
    fsdpc_status status = convert(runtime, t, one, 0);
    fsdpc_tensor_release(one);
    return status;
}

static PyObject *filled(const request *r, fsdpc_scalar value)
{
    fsdpc_tensor *t = request_tensor(r);
    if (!t)
        return NULL;
    fsdpc_status status;
    FSDPC_PY_RUN(r->runtime, t->numel, status, fill(r->runtime, t, value));
    return fsdpc_py_result(r->state, status, t);
}

#define FILLED(name, value)                                                                        \
    static PyObject *make_##name(FSDPC_PY_FASTCALL(module))                                        \
    {                                                                                              \
        request r;                                                                                 \
        if (parse_request(&r, #name, module, args, nargs, keywords, false) < 0)                    \
            return NULL;                                                                           \
        return filled(&r, fsdpc_scalar_whole(value));                                              \
    }
FILLED(zeros, 0)
FILLED(ones, 1)
#undef FILLED

static PyObject *make_empty(FSDPC_PY_FASTCALL(module))
{
    request r;
    if (parse_request(&r, "empty", module, args, nargs, keywords, false) < 0)
        return NULL;
    fsdpc_tensor *t = request_tensor(&r);
    return t ? fsdpc_py_tensor_new(r.state, t) : NULL;
}

static PyObject *make_full(FSDPC_PY_FASTCALL(module))
{
    FSDPC_PY_PARSE("full", 2, "shape", "value", "dtype", "requires_grad");
    request r;
    fsdpc_scalar value;
    if (request_begin(&r, module) < 0 || parse_options(&r, a[2], a[3]) < 0 ||
        (r.ndim = fsdpc_py_shape("full", &a[0], 1, r.shape)) < 0)
        return NULL;
    if (!fsdpc_py_number(a[1], &value))
        return PyErr_Format(PyExc_TypeError, "full: a number is needed, not %s",
                            Py_TYPE(a[1])->tp_name);
    return filled(&r, value);
}

static PyObject *make_empty_deferred(FSDPC_PY_FASTCALL(module))
{
    FSDPC_PY_PARSE("empty_deferred", 1, "shape", "dtype", "requires_grad");
    request r;
    fsdpc_tensor *t;
    if (request_begin(&r, module) < 0 || parse_options(&r, a[1], a[2]) < 0 ||
        (r.ndim = fsdpc_py_shape("empty_deferred", &a[0], 1, r.shape)) < 0)
        return NULL;
    fsdpc_status status = fsdpc_tensor_create_deferred(r.dtype, r.ndim, r.shape, &t);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    t->requires_grad = r.requires_grad;
    return fsdpc_py_tensor_new(r.state, t);
}

/* ---- values that the host generates in blocks, as int64 or fp64, and casts ---- */

typedef union block {
    double reals[MADE_BLOCK];
    int64_t ints[MADE_BLOCK];
} block;

/* How values are generated. */
typedef struct source {
    void (*fill)(const struct source *from, size_t at, size_t n, block *out);
    fsdpc_dtype dtype; /* selects the member of a block to fill */
    size_t numel;
    double start, step, last; /* counted: element i is start + step * i, except for the last */
    int64_t first, by;        /* as above, for integers, modulo 2^64 */
    int64_t low;              /* drawn: from low, inclusive, to low + span, exclusive */
    uint64_t span, seed, stream;
} source;

static void count_whole(const source *from, size_t at, size_t n, block *out)
{
    uint64_t step = (uint64_t)from->by, value = (uint64_t)from->first + step * at;
    for (size_t i = 0; i < n; i++, value += step)
        out->ints[i] = (int64_t)value;
}

static void count_real(const source *from, size_t at, size_t n, block *out)
{
    for (size_t i = 0; i < n; i++)
        out->reals[i] = from->start + from->step * (double)(at + i);
    if (at + n == from->numel)
        out->reals[n - 1] = from->last;
}

/* Uses 32 random bits per element, so probabilities differ by at most a factor of 1 + 2^-16. */
static void draw_few(const source *from, size_t at, size_t n, block *out)
{
    for (size_t i = 0; i < n; i += 4) {
        fsdpc_philox words = fsdpc_philox_block(from->seed, from->stream, (at + i) / 4);
        for (size_t k = 0; k < 4; k++) /* a block has room for all four */
            out->ints[i + k] = from->low + (int64_t)((words.x[k] * from->span) >> 32);
    }
}

static void draw_many(const source *from, size_t at, size_t n, block *out)
{
    for (size_t i = 0; i < n; i += 2) {
        fsdpc_philox words = fsdpc_philox_block(from->seed, from->stream, (at + i) / 2);
        for (size_t k = 0; k < 2; k++) {
            uint64_t bits = words.x[2 * k] | (uint64_t)words.x[2 * k + 1] << 32;
            uint64_t away = (uint64_t)(((unsigned __int128)bits * from->span) >> 64);
            out->ints[i + k] = (int64_t)((uint64_t)from->low + away);
        }
    }
}

static fsdpc_status make_values(fsdpc_runtime *runtime, fsdpc_tensor *t, const source *from)
{
    fsdpc_device *device = runtime->device, *host = device->remote ? device->host : device;
    size_t bytes = fsdpc_tensor_bytes(t), each = fsdpc_dtype_bytes(t->dtype);
    char *values = device->remote ? malloc(bytes + 1) : t->data;
    if (!values)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for %zu values on their way to the device",
                          t->numel);
    block made;
    fsdpc_copy_args args = {.ndim = 1,
                            .stride_dst = {1},
                            .stride_src = {1},
                            .dst_dtype = t->dtype,
                            .src_dtype = from->dtype,
                            .src = &made};
    fsdpc_status status = FSDPC_OK;
    for (size_t at = 0, n; at < t->numel && status == FSDPC_OK; at += n) {
        n = t->numel - at < MADE_BLOCK ? t->numel - at : MADE_BLOCK;
        from->fill(from, at, n, &made);
        args.shape[0] = n;
        args.dst = values + at * each;
        status = host->nn->copy(&args, fsdpc_device_main(host));
    }
    if (device->remote && status == FSDPC_OK)
        status = fsdpc_device_copy(device, t->data, values, bytes, runtime->compute);
    if (device->remote)
        free(values);
    return status;
}

/* Checks that the dtype can hold the first and the last number. */
static fsdpc_status check_ends(const fsdpc_tensor *t, fsdpc_scalar first, fsdpc_scalar last)
{
    int64_t element;
    if (t->numel == 0)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_scalar_store(first, t->dtype, &element));
    return t->numel > 1 ? fsdpc_scalar_store(last, t->dtype, &element) : FSDPC_OK;
}

/* Counts exactly, in integers, if all numbers are integers. */
static fsdpc_status count_up(fsdpc_runtime *runtime, fsdpc_tensor *t, double start, double step,
                             double last)
{
    double exact = 0x1p53;
    bool whole = start == floor(start) && step == floor(step) && fabs(start) <= exact &&
                 fabs(step) <= exact && fabs(last) <= exact;
    source from = {.fill = whole ? count_whole : count_real,
                   .dtype = whole ? FSDPC_I64 : FSDPC_F64,
                   .numel = t->numel,
                   .start = start,
                   .step = step,
                   .last = last,
                   .first = whole ? (int64_t)start : 0,
                   .by = whole ? (int64_t)step : 0};
    FSDPC_TRY(check_ends(t, fsdpc_scalar_real(start), fsdpc_scalar_real(last)));
    return make_values(runtime, t, &from);
}

static fsdpc_status count_integers(fsdpc_runtime *runtime, fsdpc_tensor *t, int64_t first,
                                   int64_t step)
{
    source from = {
        .fill = count_whole, .dtype = FSDPC_I64, .numel = t->numel, .first = first, .by = step};
    uint64_t last = (uint64_t)first + (uint64_t)step * (t->numel - 1);
    FSDPC_TRY(check_ends(t, fsdpc_scalar_whole(first), fsdpc_scalar_whole((int64_t)last)));
    return make_values(runtime, t, &from);
}

/* Returns the number of steps from start, inclusive, to stop, exclusive; at most 2^64. */
static size_t steps_between(int64_t start, int64_t stop, int64_t step)
{
    if (step > 0 ? start >= stop : start <= stop)
        return 0;
    uint64_t span = step > 0 ? (uint64_t)stop - (uint64_t)start : (uint64_t)start - (uint64_t)stop;
    uint64_t by = step > 0 ? (uint64_t)step : 0 - (uint64_t)step;
    return (size_t)((span - 1) / by + 1);
}

static PyObject *make_arange(FSDPC_PY_FASTCALL(module))
{
    FSDPC_PY_PARSE("arange", 1, "start", "stop", "step", "dtype");
    request r;
    fsdpc_scalar start = fsdpc_scalar_whole(0), stop, step = fsdpc_scalar_whole(1);
    if (request_begin(&r, module) < 0)
        return NULL;
    bool one = !a[1] || a[1] == Py_None;
    if (!fsdpc_py_number(a[0], one ? &stop : &start) || (!one && !fsdpc_py_number(a[1], &stop)) ||
        (a[2] && !fsdpc_py_number(a[2], &step)))
        return PyErr_Format(PyExc_TypeError, "arange: start, stop and step are numbers");
    if (step.real == 0 || !isfinite((stop.real - start.real) / step.real))
        return PyErr_Format(PyExc_ValueError, "arange: the step is 0 or the range is not finite");
    bool integers = start.integral && stop.integral && step.integral;
    bool exact = start.fits && stop.fits && step.fits;
    r.dtype = integers ? FSDPC_I64 : FSDPC_F32;
    if (fsdpc_py_dtype_optional(a[3], &r.dtype) < 0)
        return NULL;
    if (integers && !exact)
        return PyErr_Format(PyExc_ValueError, "arange: start, stop or step does not fit int64");
    double count = ceil((stop.real - start.real) / step.real);
    r.ndim = 1;
    r.shape[0] = exact       ? steps_between(start.whole, stop.whole, step.whole)
                 : count > 0 ? (size_t)count
                             : 0;
    fsdpc_tensor *t = request_tensor(&r);
    if (!t)
        return NULL;
    fsdpc_status status =
        exact ? count_integers(r.runtime, t, start.whole, step.whole)
              : count_up(r.runtime, t, start.real, step.real, start.real + step.real * (count - 1));
    return fsdpc_py_result(r.state, status, t);
}

static PyObject *make_linspace(FSDPC_PY_FASTCALL(module))
{
    FSDPC_PY_PARSE("linspace", 3, "start", "stop", "steps", "dtype");
    request r;
    double start, stop;
    int64_t steps;
    if (request_begin(&r, module) < 0 || parse_options(&r, a[3], NULL) < 0 ||
        fsdpc_py_arg_double(a[0], &start) < 0 || fsdpc_py_arg_double(a[1], &stop) < 0 ||
        fsdpc_py_arg_int64(a[2], &steps) < 0)
        return NULL;
    if (steps < 0)
        return PyErr_Format(PyExc_ValueError, "linspace: %lld numbers", (long long)steps);
    r.ndim = 1;
    r.shape[0] = (size_t)steps;
    fsdpc_tensor *t = request_tensor(&r);
    if (!t)
        return NULL;
    double step = steps > 1 ? (stop - start) / (double)(steps - 1) : 0;
    fsdpc_status status = count_up(r.runtime, t, start, step, steps > 1 ? stop : start);
    return fsdpc_py_result(r.state, status, t);
}

static PyObject *make_randint(FSDPC_PY_FASTCALL(module))
{
    FSDPC_PY_PARSE("randint", 3, "low", "high", "shape", "dtype");
    request r;
    int64_t low, high;
    source from = {.dtype = FSDPC_I64};
    if (request_begin(&r, module) < 0 || fsdpc_py_arg_int64(a[0], &low) < 0 ||
        fsdpc_py_arg_int64(a[1], &high) < 0 ||
        (r.ndim = fsdpc_py_shape("randint", &a[2], 1, r.shape)) < 0)
        return NULL;
    r.dtype = FSDPC_I64;
    if (fsdpc_py_dtype_optional(a[3], &r.dtype) < 0)
        return NULL;
    if (low >= high)
        return PyErr_Format(PyExc_ValueError, "randint: there is no integer in [%lld, %lld)",
                            (long long)low, (long long)high);
    int64_t element;
    fsdpc_status fits = fsdpc_scalar_store(fsdpc_scalar_whole(low), r.dtype, &element);
    if (fits == FSDPC_OK)
        fits = fsdpc_scalar_store(fsdpc_scalar_whole(high - 1), r.dtype, &element);
    if (fits != FSDPC_OK)
        return fsdpc_py_raise(fits);
    from.low = low;
    from.span = (uint64_t)high - (uint64_t)low;
    from.fill = from.span <= FEW ? draw_few : draw_many;
    from.seed = r.runtime->tape->seed;
    if (fsdpc_py_take_stream(r.runtime, &from.stream) < 0)
        return NULL;
    fsdpc_tensor *t = request_tensor(&r);
    return t ? fsdpc_py_result(r.state, make_values(r.runtime, t, &from), t) : NULL;
}

static PyObject *make_randn(FSDPC_PY_FASTCALL(module))
{
    request r;
    if (parse_request(&r, "randn", module, args, nargs, keywords, true) < 0)
        return NULL;
    fsdpc_tape *tape = r.runtime->tape;
    fsdpc_init_args init = {
        .dtype = r.dtype, .kind = FSDPC_INIT_NORMAL, .b = 1, .seed = tape->seed};
    if (r.seed && r.seed != Py_None) {
        init.seed = PyLong_AsUnsignedLongLongMask(r.seed);
        if (PyErr_Occurred())
            return NULL;
    } else if (fsdpc_py_take_stream(r.runtime, &init.stream) < 0) {
        return NULL;
    }
    if (!fsdpc_dtype_is_float(r.dtype))
        return PyErr_Format(PyExc_TypeError, "randn: a float dtype is needed, not %s",
                            fsdpc_dtype_name(r.dtype));
    fsdpc_tensor *t = request_tensor(&r);
    if (!t)
        return NULL;
    init.dst = t->data;
    init.numel = t->numel;
    fsdpc_status status;
    FSDPC_PY_RUN(r.runtime, 8 * t->numel, status, fsdpc_flat_init(&init, r.runtime->compute));
    return fsdpc_py_result(r.state, status, t);
}

int fsdpc_py_init_kind(const char *text, fsdpc_init_kind *out)
{
    static const char *const kinds[] = {"constant", "normal", "uniform"};
    for (int i = 0; text && i < 3; i++) {
        if (strcmp(text, kinds[i]) == 0) {
            *out = (fsdpc_init_kind)i;
            return 0;
        }
    }
    if (text)
        PyErr_Format(PyExc_ValueError, "initial values are constant, normal or uniform, got '%s'",
                     text);
    return -1;
}

static PyObject *make_init(FSDPC_PY_FASTCALL(module))
{
    FSDPC_PY_PARSE("init_", 6, "tensor", "kind", "a", "b", "seed", "stream", "first");
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    fsdpc_tensor *t = runtime ? fsdpc_py_tensor_of(a[0]) : NULL;
    int64_t first = 0;
    fsdpc_init_args init;
    if (!t)
        return NULL;
    init = (fsdpc_init_args){.dtype = t->dtype, .numel = t->numel};
    if (fsdpc_py_init_kind(PyUnicode_AsUTF8(a[1]), &init.kind) < 0 ||
        fsdpc_py_arg_double(a[2], &init.a) < 0 || fsdpc_py_arg_double(a[3], &init.b) < 0 ||
        fsdpc_py_arg_int64(a[6], &first) < 0)
        return NULL;
    init.seed = PyLong_AsUnsignedLongLongMask(a[4]);
    init.stream = PyLong_AsUnsignedLongLongMask(a[5]);
    init.first = (uint64_t)first;
    if (PyErr_Occurred())
        return NULL;
    fsdpc_status status = fsdpc_tensor_check_write(t);
    init.dst = t->data;
    if (status == FSDPC_OK)
        FSDPC_PY_RUN(runtime, 8 * t->numel, status, fsdpc_flat_init(&init, runtime->compute));
    return status == FSDPC_OK ? Py_NewRef(a[0]) : fsdpc_py_raise(status);
}

static PyObject *make_tensor(FSDPC_PY_FASTCALL(module))
{
    FSDPC_PY_PARSE("tensor", 1, "data", "dtype", "requires_grad");
    request r;
    if (request_begin(&r, module) < 0 || fsdpc_py_arg_bool(a[2], &r.requires_grad) < 0)
        return NULL;
    bool given = a[1] && a[1] != Py_None;
    if (fsdpc_py_dtype_optional(a[1], &r.dtype) < 0)
        return NULL;
    fsdpc_tensor *t = fsdpc_py_tensor_from_data(r.state, a[0], given ? (int)r.dtype : -1);
    if (!t)
        return NULL;
    if (fsdpc_py_check_requires_grad(r.requires_grad, t->dtype) < 0) {
        fsdpc_tensor_release(t);
        return NULL;
    }
    t->requires_grad = r.requires_grad;
    return fsdpc_py_tensor_new(r.state, t);
}

PyMethodDef fsdpc_py_make_functions[] = {
    FSDPC_PY_FUNCTION(tensor, make_tensor, FSDPC_PY_FAST),
    FSDPC_PY_FUNCTION(zeros, make_zeros, FSDPC_PY_FAST),
    FSDPC_PY_FUNCTION(ones, make_ones, FSDPC_PY_FAST),
    FSDPC_PY_FUNCTION(empty, make_empty, FSDPC_PY_FAST),
    FSDPC_PY_FUNCTION(full, make_full, FSDPC_PY_FAST),
    FSDPC_PY_FUNCTION(arange, make_arange, FSDPC_PY_FAST),
    FSDPC_PY_FUNCTION(linspace, make_linspace, FSDPC_PY_FAST),
    FSDPC_PY_FUNCTION(randint, make_randint, FSDPC_PY_FAST),
    FSDPC_PY_FUNCTION(randn, make_randn, FSDPC_PY_FAST),
    FSDPC_PY_FUNCTION(empty_deferred, make_empty_deferred, FSDPC_PY_FAST),
    FSDPC_PY_FUNCTION(init_, make_init, FSDPC_PY_FAST),
    {NULL, NULL, 0, NULL},
};
