/* Creates tensors: filled, random, or without memory. */
#include "bind/tensor/ops.h"

#include "bind/stub_args.h"
#include "bind/tensor/tensor.h"

#include "base/random.h"
#include "ops/flat_ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MADE_BLOCK = 1024, FEW = 1 << 16 };

/* Creates a tensor, in float32 if dtype < 0; returns NULL with an exception on failure. */
static fsdpc_tensor *create(fsdpc_py_state *state, const char *function,
                            const fsdpc_py_extents *extents, int dtype, bool requires_grad)
{
    size_t shape[FSDPC_MAX_DIMS];
    fsdpc_tensor *t;
    fsdpc_dtype of = dtype < 0 ? FSDPC_F32 : (fsdpc_dtype)dtype;
    if (fsdpc_py_check_requires_grad(requires_grad, of) < 0 ||
        fsdpc_py_shape(function, extents, shape) < 0)
        return NULL;
    fsdpc_status status = fsdpc_tensor_create(state->runtime.device, of, extents->n, shape, &t);
    if (fsdpc_py_check(status) < 0)
        return NULL;
    t->requires_grad = requires_grad;
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

/* Sets every element to `value`, which is converted to t's dtype once and then repeated. */
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

static PyObject *filled(fsdpc_py_state *state, fsdpc_tensor *t, fsdpc_scalar value)
{
    fsdpc_status status;
    if (!t)
        return NULL;
    FSDPC_PY_RUN(&state->runtime, t->numel, status, fill(&state->runtime, t, value));
    return fsdpc_py_result(state, status, t);
}

FSDPC_PY_FUNCTION_OP(zeros)
{
    fsdpc_tensor *t = create(state, "zeros", &a->shape, a->dtype, a->requires_grad);
    return filled(state, t, fsdpc_scalar_whole(0));
}

FSDPC_PY_FUNCTION_OP(ones)
{
    fsdpc_tensor *t = create(state, "ones", &a->shape, a->dtype, a->requires_grad);
    return filled(state, t, fsdpc_scalar_whole(1));
}

FSDPC_PY_FUNCTION_OP(full)
{
    return filled(state, create(state, "full", &a->shape, a->dtype, a->requires_grad), a->value);
}

FSDPC_PY_FUNCTION_OP(empty)
{
    fsdpc_tensor *t = create(state, "empty", &a->shape, a->dtype, a->requires_grad);
    return t ? fsdpc_py_tensor_new(state, t) : NULL;
}

FSDPC_PY_FUNCTION_OP(empty_deferred)
{
    size_t shape[FSDPC_MAX_DIMS];
    fsdpc_tensor *t = NULL;
    fsdpc_dtype dtype = a->dtype < 0 ? FSDPC_F32 : (fsdpc_dtype)a->dtype;
    if (fsdpc_py_check_requires_grad(a->requires_grad, dtype) < 0 ||
        fsdpc_py_shape("empty_deferred", &a->shape, shape) < 0)
        return NULL;
    fsdpc_status status = fsdpc_tensor_create_deferred(dtype, a->shape.n, shape, &t);
    if (status == FSDPC_OK)
        t->requires_grad = a->requires_grad;
    return fsdpc_py_result(state, status, t);
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

/* Checks that the dtype can represent the first and last numbers. */
static fsdpc_status check_ends(const fsdpc_tensor *t, fsdpc_scalar first, fsdpc_scalar last)
{
    int64_t element;
    if (t->numel == 0)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_scalar_store(first, t->dtype, &element));
    return t->numel > 1 ? fsdpc_scalar_store(last, t->dtype, &element) : FSDPC_OK;
}

/* If all numbers are integers, the count is computed exactly, in integers. */
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

FSDPC_PY_FUNCTION_OP(arange)
{
    fsdpc_scalar start = a->start, stop = start, step = a->step;
    if (!a->stop)
        start = fsdpc_scalar_whole(0);
    else if (fsdpc_py_arg_number("arange", "stop", a->stop, &stop) < 0)
        return NULL;
    if (step.real == 0 || !isfinite((stop.real - start.real) / step.real))
        return PyErr_Format(PyExc_ValueError, "arange: the step is 0 or the range is not finite");
    bool integers = start.integral && stop.integral && step.integral;
    bool exact = start.fits && stop.fits && step.fits;
    if (integers && !exact)
        return PyErr_Format(PyExc_ValueError, "arange: start, stop or step does not fit int64");
    double count = ceil((stop.real - start.real) / step.real);
    size_t n = exact       ? steps_between(start.whole, stop.whole, step.whole)
               : count > 0 ? (size_t)count
                           : 0;
    fsdpc_py_extents shape = {1, {n > INT64_MAX ? INT64_MAX : (int64_t)n}};
    int dtype = a->dtype < 0 && integers ? FSDPC_I64 : a->dtype;
    fsdpc_tensor *t = create(state, "arange", &shape, dtype, false);
    if (!t)
        return NULL;
    fsdpc_runtime *r = &state->runtime;
    fsdpc_status status =
        exact ? count_integers(r, t, start.whole, step.whole)
              : count_up(r, t, start.real, step.real, start.real + step.real * (count - 1));
    return fsdpc_py_result(state, status, t);
}

FSDPC_PY_FUNCTION_OP(linspace)
{
    fsdpc_py_extents shape = {1, {(int64_t)a->steps}};
    fsdpc_tensor *t = create(state, "linspace", &shape, a->dtype, false);
    if (!t)
        return NULL;
    double step = a->steps > 1 ? (a->stop - a->start) / (double)(a->steps - 1) : 0;
    fsdpc_status status =
        count_up(&state->runtime, t, a->start, step, a->steps > 1 ? a->stop : a->start);
    return fsdpc_py_result(state, status, t);
}

FSDPC_PY_FUNCTION_OP(randint)
{
    fsdpc_runtime *r = &state->runtime;
    int dtype = a->dtype < 0 ? FSDPC_I64 : a->dtype;
    if (a->low >= a->high)
        return PyErr_Format(PyExc_ValueError, "randint: there is no integer in [%lld, %lld)",
                            (long long)a->low, (long long)a->high);
    source from = {.dtype = FSDPC_I64,
                   .low = a->low,
                   .span = (uint64_t)a->high - (uint64_t)a->low,
                   .seed = r->tape->seed};
    from.fill = from.span <= FEW ? draw_few : draw_many;
    int64_t element;
    fsdpc_status fits =
        fsdpc_scalar_store(fsdpc_scalar_whole(a->low), (fsdpc_dtype)dtype, &element);
    if (fits == FSDPC_OK)
        fits = fsdpc_scalar_store(fsdpc_scalar_whole(a->high - 1), (fsdpc_dtype)dtype, &element);
    if (fits != FSDPC_OK)
        return fsdpc_py_raise(fits);
    if (fsdpc_py_take_stream(r, &from.stream) < 0)
        return NULL;
    fsdpc_tensor *t = create(state, "randint", &a->shape, dtype, false);
    return t ? fsdpc_py_result(state, make_values(r, t, &from), t) : NULL;
}

FSDPC_PY_FUNCTION_OP(randn)
{
    fsdpc_runtime *r = &state->runtime;
    fsdpc_dtype dtype = a->dtype < 0 ? FSDPC_F32 : (fsdpc_dtype)a->dtype;
    fsdpc_init_args init = {
        .dtype = dtype, .kind = FSDPC_INIT_NORMAL, .b = 1, .seed = r->tape->seed};
    if (a->seed) {
        init.seed = PyLong_AsUnsignedLongLongMask(a->seed);
        if (PyErr_Occurred())
            return NULL;
    } else if (fsdpc_py_take_stream(r, &init.stream) < 0) {
        return NULL;
    }
    if (!fsdpc_dtype_is_float(dtype))
        return PyErr_Format(PyExc_TypeError, "randn: a float dtype is needed, not %s",
                            fsdpc_dtype_name(dtype));
    fsdpc_tensor *t = create(state, "randn", &a->shape, dtype, a->requires_grad);
    if (!t)
        return NULL;
    init.dst = t->data;
    init.numel = t->numel;
    fsdpc_status status;
    FSDPC_PY_RUN(r, 8 * t->numel, status, fsdpc_flat_init(&init, r->compute));
    return fsdpc_py_result(state, status, t);
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

FSDPC_PY_FUNCTION_OP(init_)
{
    fsdpc_runtime *r = &state->runtime;
    fsdpc_init_args init = {.dtype = a->tensor->dtype,
                            .numel = a->tensor->numel,
                            .a = a->a,
                            .b = a->b,
                            .seed = a->seed,
                            .stream = a->stream,
                            .first = (uint64_t)a->first};
    if (fsdpc_py_init_kind(a->kind, &init.kind) < 0)
        return NULL;
    fsdpc_status status = fsdpc_tensor_check_write(a->tensor);
    init.dst = a->tensor->data;
    if (status == FSDPC_OK)
        FSDPC_PY_RUN(r, 8 * init.numel, status, fsdpc_flat_init(&init, r->compute));
    return status == FSDPC_OK ? Py_NewRef(a->object) : fsdpc_py_raise(status);
}

FSDPC_PY_FUNCTION_OP(tensor)
{
    fsdpc_tensor *t = fsdpc_py_tensor_from_data(state, a->data, a->dtype);
    if (!t)
        return NULL;
    if (fsdpc_py_check_requires_grad(a->requires_grad, t->dtype) < 0) {
        fsdpc_tensor_release(t);
        return NULL;
    }
    t->requires_grad = a->requires_grad;
    return fsdpc_py_tensor_new(state, t);
}

PyMethodDef fsdpc_py_make_functions[] = {
    FSDPC_PY_FUNCTION_ROW(tensor),   FSDPC_PY_FUNCTION_ROW(zeros),
    FSDPC_PY_FUNCTION_ROW(ones),     FSDPC_PY_FUNCTION_ROW(empty),
    FSDPC_PY_FUNCTION_ROW(full),     FSDPC_PY_FUNCTION_ROW(arange),
    FSDPC_PY_FUNCTION_ROW(linspace), FSDPC_PY_FUNCTION_ROW(randint),
    FSDPC_PY_FUNCTION_ROW(randn),    FSDPC_PY_FUNCTION_ROW(empty_deferred),
    FSDPC_PY_FUNCTION_ROW(init_),    {NULL, NULL, 0, NULL},
};
