/* A cuBLASLt for the emulated device: column-major products by loops, and what callers have wrong.
 *
 * Built as a libcublasLt.so.13 of its own, so that the loader finds in it what it would find in
 * cuBLASLt. It keeps what it was told of the last product for tests to look at, and counts calls
 * that break cuBLASLt's rules: attributes of the wrong size; a heuristic asked before the addresses
 * of an epilogue are known, which it takes for what they are aligned to; an aux whose rows are no
 * multiple of 8 or overlap; a product whose addresses are aligned to less than the heuristic was
 * told, or that has another descriptor's algorithm. One host thread calls it.
 *
 * FAKE_CUBLASLT_REFUSES=name in the environment keeps the copy of that file name from starting.
 */
#include "fake_cublaslt.h"

#include <math.h>
#include <string.h>

#include "base/dtype.h"
#include "cuda/cublaslt_abi.h"
#include "fake_launch.h"

#define EXPORT __attribute__((visibility("default")))

enum { POINTERS = 5 }; /* a, b, c, bias, aux */

struct fsdpc_lt_desc_opaque {
    fsdpc_lt_type scale;
    int32_t trans_a, trans_b;
    uint32_t epilogue;
    const void *bias;
    void *aux;
    int64_t aux_ld;
};

struct fsdpc_lt_layout_opaque {
    fsdpc_lt_type type;
    size_t rows, cols, ld, stride;
    int32_t batch;
};

struct fsdpc_lt_preference_opaque {
    uint64_t workspace_bytes;
    uint32_t reductions, align[4]; /* a, b, c, d */
};

/* A product on its stream; kept until the end, since a graph may run it again. */
typedef struct job {
    struct job *next;
    struct fsdpc_lt_desc_opaque desc;
    struct fsdpc_lt_layout_opaque a_layout, b_layout, c_layout;
    const void *a, *b, *c;
    void *d;
    double alpha, beta;
} job;

static fake_cublaslt_seen seen;
static uint32_t refused;
static job *jobs;

EXPORT void fake_cublaslt_look(fake_cublaslt_seen *out);
EXPORT void fake_cublaslt_refuse(uint32_t epilogue);
#define X(result, name, parameters) EXPORT result name parameters;
FSDPC_LT_SYMBOLS(X)
#undef X

void fake_cublaslt_look(fake_cublaslt_seen *out)
{
    *out = seen;
}

void fake_cublaslt_refuse(uint32_t epilogue)
{
    refused = epilogue;
}

static fsdpc_lt_result forbid(void)
{
    seen.forbidden++;
    return FSDPC_LT_INVALID_VALUE;
}

/* ---- Objects ---- */

static void *make(size_t bytes)
{
    seen.left++;
    return calloc(1, bytes);
}

static fsdpc_lt_result destroy(void *object)
{
    seen.left--;
    free(object);
    return FSDPC_LT_SUCCESS;
}

size_t cublasLtGetVersion(void)
{
    return 130000;
}

fsdpc_lt_result cublasLtCreate(fsdpc_lt_handle *handle)
{
    const char *refusing = getenv("FAKE_CUBLASLT_REFUSES");
    Dl_info own;
    if (refusing && dladdr(&seen, &own) && strstr(own.dli_fname, refusing))
        return FSDPC_LT_NOT_SUPPORTED;
    *handle = make(1);
    return FSDPC_LT_SUCCESS;
}

fsdpc_lt_result cublasLtDestroy(fsdpc_lt_handle handle)
{
    while (jobs) {
        job *next = jobs->next;
        free(jobs);
        jobs = next;
    }
    return destroy(handle);
}

/* Stores an attribute of so many bytes. */
static fsdpc_lt_result take(void *field, size_t field_bytes, const void *value, size_t bytes)
{
    if (bytes != field_bytes)
        return forbid();
    memcpy(field, value, bytes);
    return FSDPC_LT_SUCCESS;
}

#define TAKE(field) take(&(field), sizeof(field), value, bytes)

fsdpc_lt_result cublasLtMatmulDescCreate(fsdpc_lt_desc *desc, fsdpc_lt_compute compute,
                                         fsdpc_lt_type scale)
{
    if ((compute == FSDPC_LT_COMPUTE_F64) != (scale == FSDPC_LT_F64))
        return forbid();
    *desc = make(sizeof **desc);
    (*desc)->scale = scale;
    (*desc)->epilogue = FSDPC_LT_EPILOGUE_NONE;
    return FSDPC_LT_SUCCESS;
}

fsdpc_lt_result cublasLtMatmulDescDestroy(fsdpc_lt_desc desc)
{
    return destroy(desc);
}

fsdpc_lt_result cublasLtMatmulDescSetAttribute(fsdpc_lt_desc desc,
                                               fsdpc_lt_desc_attribute attribute, const void *value,
                                               size_t bytes)
{
    switch (attribute) {
    case FSDPC_LT_DESC_TRANS_A:
        return TAKE(desc->trans_a);
    case FSDPC_LT_DESC_TRANS_B:
        return TAKE(desc->trans_b);
    case FSDPC_LT_DESC_EPILOGUE:
        return TAKE(desc->epilogue);
    case FSDPC_LT_DESC_BIAS:
        return TAKE(desc->bias);
    case FSDPC_LT_DESC_AUX:
        return TAKE(desc->aux);
    case FSDPC_LT_DESC_AUX_LD:
        return TAKE(desc->aux_ld);
    }
    return forbid();
}

fsdpc_lt_result cublasLtMatrixLayoutCreate(fsdpc_lt_layout *layout, fsdpc_lt_type type,
                                           uint64_t rows, uint64_t cols, int64_t ld)
{
    if (ld < (int64_t)rows)
        return forbid();
    *layout = make(sizeof **layout);
    **layout = (struct fsdpc_lt_layout_opaque){type, rows, cols, (size_t)ld, 0, 1};
    return FSDPC_LT_SUCCESS;
}

fsdpc_lt_result cublasLtMatrixLayoutDestroy(fsdpc_lt_layout layout)
{
    return destroy(layout);
}

fsdpc_lt_result cublasLtMatrixLayoutSetAttribute(fsdpc_lt_layout layout,
                                                 fsdpc_lt_layout_attribute attribute,
                                                 const void *value, size_t bytes)
{
    return attribute == FSDPC_LT_LAYOUT_BATCH ? TAKE(layout->batch) : TAKE(layout->stride);
}

fsdpc_lt_result cublasLtMatmulPreferenceCreate(fsdpc_lt_preference *preference)
{
    *preference = make(sizeof **preference);
    return FSDPC_LT_SUCCESS;
}

fsdpc_lt_result cublasLtMatmulPreferenceDestroy(fsdpc_lt_preference preference)
{
    return destroy(preference);
}

fsdpc_lt_result cublasLtMatmulPreferenceSetAttribute(fsdpc_lt_preference preference,
                                                     fsdpc_lt_preference_attribute attribute,
                                                     const void *value, size_t bytes)
{
    if (attribute == FSDPC_LT_PREFERENCE_WORKSPACE)
        return TAKE(preference->workspace_bytes);
    if (attribute == FSDPC_LT_PREFERENCE_REDUCTIONS)
        return TAKE(preference->reductions);
    return TAKE(preference->align[attribute - FSDPC_LT_PREFERENCE_ALIGN_A]);
}

/* ---- Choice: the algorithm holds its descriptor and what addresses are aligned to ---- */

static uint64_t align_of(const void *pointer)
{
    uint64_t address = (uint64_t)(uintptr_t)pointer | 256;
    return address & -address;
}

fsdpc_lt_result cublasLtMatmulAlgoGetHeuristic(fsdpc_lt_handle handle, fsdpc_lt_desc desc,
                                               fsdpc_lt_layout a, fsdpc_lt_layout b,
                                               fsdpc_lt_layout c, fsdpc_lt_layout d,
                                               fsdpc_lt_preference preference, int wanted,
                                               fsdpc_lt_found *found, int *count)
{
    (void)handle, (void)a, (void)b, (void)c;
    seen.heuristics++;
    *count = 0;
    if (wanted < 1 || (desc->epilogue & FSDPC_LT_EPILOGUE_BIAS && !desc->bias) ||
        (desc->epilogue & FSDPC_LT_EPILOGUE_AUX &&
         (!desc->aux || desc->aux_ld % 8 != 0 || desc->aux_ld < (int64_t)d->rows)))
        return forbid();
    bool gelu = desc->epilogue & ~(uint32_t)(FSDPC_LT_EPILOGUE_NONE | FSDPC_LT_EPILOGUE_BIAS);
    if (desc->epilogue == refused || (gelu && desc->scale == FSDPC_LT_F64))
        return FSDPC_LT_NOT_SUPPORTED;
    *found = (fsdpc_lt_found){.result = FSDPC_LT_SUCCESS,
                              .workspace_bytes = preference->workspace_bytes};
    uint64_t held[] = {(uint64_t)(uintptr_t)desc, preference->align[0], preference->align[1],
                       preference->align[3],      align_of(desc->bias), align_of(desc->aux)};
    memcpy(found->algo.data, held, sizeof held);
    *count = 1;
    return FSDPC_LT_SUCCESS;
}

/* ---- Products ---- */

static double load(const void *x, size_t i, fsdpc_lt_type type)
{
    switch (type) {
    case FSDPC_LT_F64:
        return ((const double *)x)[i];
    case FSDPC_LT_F16:
        return fsdpc_f16_to_f32(((const uint16_t *)x)[i]);
    case FSDPC_LT_BF16:
        return fsdpc_bf16_to_f32(((const uint16_t *)x)[i]);
    default:
        return ((const float *)x)[i];
    }
}

static void store(void *x, size_t i, fsdpc_lt_type type, double value)
{
    if (type == FSDPC_LT_F64)
        ((double *)x)[i] = value;
    else if (type == FSDPC_LT_F16)
        ((uint16_t *)x)[i] = fsdpc_f32_to_f16((float)value);
    else if (type == FSDPC_LT_BF16)
        ((uint16_t *)x)[i] = fsdpc_f32_to_bf16((float)value);
    else
        ((float *)x)[i] = (float)value;
}

static double gelu_of(double x, double *slope_out)
{
    const double root = 0.79788456080286535588;
    double t = tanh(root * (x + 0.044715 * x * x * x));
    *slope_out = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x);
    return 0.5 * x * (1 + t);
}

/* What an epilogue makes of element (row, col). */
static double finish(const job *j, size_t row, size_t col, double value)
{
    const struct fsdpc_lt_desc_opaque *desc = &j->desc;
    fsdpc_lt_type type = j->c_layout.type;
    size_t at = row + col * (size_t)desc->aux_ld;
    double slope;
    if (desc->epilogue & FSDPC_LT_EPILOGUE_BIAS)
        value += load(desc->bias, row, type);
    if (desc->epilogue & FSDPC_LT_EPILOGUE_GELU) {
        if (desc->epilogue & FSDPC_LT_EPILOGUE_AUX)
            store(desc->aux, at, type, value);
        return gelu_of(value, &slope);
    }
    if (desc->epilogue != FSDPC_LT_EPILOGUE_DGELU)
        return value;
    gelu_of(load(desc->aux, at, type), &slope);
    return value * slope;
}

static size_t index_of(const struct fsdpc_lt_layout_opaque *layout, int batch, bool trans,
                       size_t row, size_t col)
{
    size_t first = (size_t)batch * layout->stride;
    return first + (trans ? col + row * layout->ld : row + col * layout->ld);
}

static void job_run(void *arg)
{
    const job *j = arg;
    const struct fsdpc_lt_layout_opaque *a = &j->a_layout, *b = &j->b_layout, *c = &j->c_layout;
    bool ta = j->desc.trans_a, tb = j->desc.trans_b;
    size_t k = ta ? a->rows : a->cols;
    for (int batch = 0; batch < c->batch; batch++)
        for (size_t col = 0; col < c->cols; col++)
            for (size_t row = 0; row < c->rows; row++) {
                double sum = 0;
                for (size_t l = 0; l < k; l++)
                    sum += load(j->a, index_of(a, batch, ta, row, l), a->type) *
                           load(j->b, index_of(b, batch, tb, l, col), b->type);
                size_t at = index_of(c, batch, false, row, col);
                double old = j->beta == 0 ? 0 : j->beta * load(j->c, at, c->type);
                store(j->d, at, c->type, finish(j, row, col, j->alpha * sum + old));
            }
}

fsdpc_lt_result cublasLtMatmul(fsdpc_lt_handle handle, fsdpc_lt_desc desc, const void *alpha,
                               const void *a, fsdpc_lt_layout a_layout, const void *b,
                               fsdpc_lt_layout b_layout, const void *beta, const void *c,
                               fsdpc_lt_layout c_layout, void *d, fsdpc_lt_layout d_layout,
                               const fsdpc_lt_algo *algo, void *workspace, size_t workspace_bytes,
                               cudaStream_t stream)
{
    (void)handle;
    const void *addresses[POINTERS] = {a, b, d, desc->bias, desc->aux};
    for (int i = 0; i < POINTERS; i++)
        if (align_of(addresses[i]) < algo->data[i + 1])
            return forbid();
    if (algo->data[0] != (uint64_t)(uintptr_t)desc || c != d || c_layout != d_layout ||
        (workspace_bytes && !workspace))
        return forbid();
    job *j = malloc(sizeof *j);
    *j = (job){.next = jobs,
               .desc = *desc,
               .a_layout = *a_layout,
               .b_layout = *b_layout,
               .c_layout = *c_layout,
               .a = a,
               .b = b,
               .c = c,
               .d = d,
               .alpha = load(alpha, 0, desc->scale),
               .beta = load(beta, 0, desc->scale)};
    jobs = j;
    seen.products++;
    seen.gelus += (desc->epilogue & FSDPC_LT_EPILOGUE_GELU) != 0;
    seen.slopes += desc->epilogue == FSDPC_LT_EPILOGUE_DGELU;
    seen.epilogue = desc->epilogue;
    seen.trans_a = desc->trans_a, seen.trans_b = desc->trans_b;
    seen.beta = j->beta;
    seen.bias = desc->bias, seen.aux = desc->aux, seen.aux_ld = desc->aux_ld;
    seen.rows = d_layout->rows, seen.cols = d_layout->cols;
    seen.k = desc->trans_a ? a_layout->rows : a_layout->cols;
    fake_launch(stream, job_run, j, true);
    return FSDPC_LT_SUCCESS;
}
