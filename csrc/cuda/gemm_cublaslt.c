/* cuBLASLt matrix products: descriptors and the heuristic's choice, cached by shape.
 *
 * Our matrices are row-major and cuBLASLt's are column-major, so it computes C^T = B'^T A'^T: the
 * operands are swapped and nothing is transposed. A bias per column of C is then a bias per row for
 * cuBLASLt, and its epilogue adds it. fp32 inputs are multiplied in fp32 (no TF32); sums are fp32.
 * Splitting k is allowed only if the partial sums are added in a fixed order. Before a 16-bit C or
 * a bias is added, cuBLASLt may round the product to 16 bits, as torch also does. The plain kernel
 * rounds only once, but calling it just for this took 73 % of a LLaMA step.
 *
 * One epilogue computes gelu on the sums before they are rounded; another multiplies the product by
 * gelu's slope, for gelu's gradient. `aux` is gelu's input. These epilogues support only tanh gelu
 * and are never used for erf gelu. The epilogue that sums a bias gradient is not used: it rounds
 * the sum to the product's dtype and cannot add to a reduce buffer.
 *
 * A small hash table is keyed by everything that a product's descriptors depend on: sizes, strides,
 * dtypes and address alignment. The heuristic may only choose kernels that match this key. In the
 * steady state, a product takes one lookup and one call. The workspace is one pool block, used only
 * by the main stream; products on other streams use kernels that need no workspace.
 */
#include "cuda/gemm_cublaslt.h"

#include "cuda/queue.h"
#include "cuda/kernels.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/cublaslt_abi.h"

enum { SLOTS = 4096, WORKSPACE_BYTES = 32 << 20 };

typedef struct cublaslt_api {
#define X(result, name, parameters) result(*name) parameters;
    FSDPC_LT_SYMBOLS(X)
#undef X
} cublaslt_api;

/* Compared as bytes: no padding. */
typedef struct product_key {
    size_t m, n, k, lda, ldb, ldc, batch, stride_a, stride_b, stride_c;
    uint32_t epilogue;
    unsigned char dtype, c_dtype, unused;
    bool trans_a, trans_b, accumulate, has_workspace;
    /* addresses are multiples of 2^align; 0 for addresses that the epilogue does not use */
    unsigned char align_a, align_b, align_c, align_bias, align_aux;
} product_key;

typedef struct product {
    bool used, taken; /* taken: cuBLASLt has a kernel for it */
    product_key key;
    fsdpc_lt_desc desc;
    fsdpc_lt_layout a, b, c;
    fsdpc_lt_algo algo;
    size_t workspace_bytes;
} product;

struct fsdpc_cuda_products {
    bool loaded; /* otherwise the plain kernel computes every product */
    cublaslt_api api;
    fsdpc_lt_handle handle;
    fsdpc_device *device;
    void *workspace;
    size_t count;
    product products[SLOTS];
};

/* -- loading ----------------------------------------------------------------------------------- */

static bool has_all(void *library, cublaslt_api *api)
{
    bool complete = true;
#define X(result, name, parameters)                                                                \
    *(void **)&api->name = dlsym(library, #name);                                                  \
    complete = complete && api->name;
    FSDPC_LT_SYMBOLS(X)
#undef X
    return complete;
}

/* Loads the first library that is complete and, if a handle is requested, returns one. A library
 * from a CUDA version newer than the driver may be present but fail to start. A copy already in the
 * process is tried first. */
static bool load_api(cublaslt_api *api, fsdpc_lt_handle *handle_out)
{
    static const struct {
        const char *name;
        int flags;
    } places[] = {{"libcublasLt.so.13", RTLD_NOLOAD},
                  {"libcublasLt.so.12", RTLD_NOLOAD},
                  {"libcublasLt.so.13", 0},
                  {"libcublasLt.so.12", 0}};
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        void *library = dlopen(places[i].name, RTLD_NOW | RTLD_LOCAL | places[i].flags);
        if (library && has_all(library, api) &&
            (!handle_out || api->cublasLtCreate(handle_out) == FSDPC_LT_SUCCESS))
            return true;
    }
    return false;
}

void fsdpc_cuda_products_describe(char *text, size_t bytes)
{
    cublaslt_api api;
    if (!load_api(&api, NULL)) {
        snprintf(text, bytes, "the plain kernel (no libcublasLt.so.13 or .12)");
        return;
    }
    size_t version = api.cublasLtGetVersion();
    snprintf(text, bytes, "cuBLASLt %zu.%zu.%zu", version / 10000, version / 100 % 100,
             version % 100);
}

static void product_fini(const cublaslt_api *api, product *p)
{
    if (p->desc)
        api->cublasLtMatmulDescDestroy(p->desc);
    fsdpc_lt_layout layouts[] = {p->a, p->b, p->c};
    for (int i = 0; i < 3; i++)
        if (layouts[i])
            api->cublasLtMatrixLayoutDestroy(layouts[i]);
    *p = (product){0};
}

void fsdpc_cuda_products_destroy(fsdpc_cuda_products *gemm)
{
    if (!gemm)
        return;
    for (size_t i = 0; i < SLOTS && gemm->loaded; i++)
        product_fini(&gemm->api, &gemm->products[i]);
    if (gemm->loaded)
        gemm->api.cublasLtDestroy(gemm->handle);
    fsdpc_device_free(gemm->device, gemm->workspace);
    free(gemm);
}

/* Returns the device's cuBLASLt state, which is created at the first product for which a workspace
 * can be allocated. */
static fsdpc_status gemm_of(fsdpc_device *base, fsdpc_cuda_products **out)
{
    fsdpc_cuda_device *device = (fsdpc_cuda_device *)base;
    if (!device->gemm) {
        fsdpc_cuda_products *gemm = calloc(1, sizeof *gemm);
        if (!gemm)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for cuBLASLt's products");
        gemm->device = base;
        gemm->loaded = load_api(&gemm->api, &gemm->handle);
        fsdpc_status status = FSDPC_OK;
        if (gemm->loaded)
            status = fsdpc_device_alloc(base, FSDPC_MEM_OTHER, WORKSPACE_BYTES, &gemm->workspace);
        if (status != FSDPC_OK) {
            fsdpc_cuda_products_destroy(gemm);
            return status;
        }
        device->gemm = gemm;
    }
    *out = device->gemm;
    return FSDPC_OK;
}

/* -- one product's descriptors ----------------------------------------------------------------- */

static fsdpc_lt_type type_of(int dtype)
{
    switch (dtype) {
    case FSDPC_BF16:
        return FSDPC_LT_BF16;
    case FSDPC_F16:
        return FSDPC_LT_F16;
    case FSDPC_F64:
        return FSDPC_LT_F64;
    default:
        return FSDPC_LT_F32;
    }
}

static unsigned char align_of(const void *pointer)
{
    return (unsigned char)__builtin_ctzll((unsigned long long)(uintptr_t)pointer | 256);
}

static product_key key_of(const fsdpc_gemm_args *g, uint32_t epilogue, const void *aux,
                          bool has_workspace)
{
    bool several = g->batch > 1;
    return (product_key){.m = g->m,
                         .n = g->n,
                         .k = g->k,
                         .lda = g->lda,
                         .ldb = g->ldb,
                         .ldc = g->ldc,
                         .batch = several ? g->batch : 1,
                         .stride_a = several ? g->stride_a : 0,
                         .stride_b = several ? g->stride_b : 0,
                         .stride_c = several ? g->stride_c : 0,
                         .epilogue = epilogue,
                         .dtype = (unsigned char)g->dtype,
                         .c_dtype = (unsigned char)g->c_dtype,
                         .trans_a = g->trans_a,
                         .trans_b = g->trans_b,
                         .accumulate = g->accumulate,
                         .has_workspace = has_workspace,
                         .align_a = align_of(g->a),
                         .align_b = align_of(g->b),
                         .align_c = align_of(g->c),
                         .align_bias = g->bias ? align_of(g->bias) : 0,
                         .align_aux = aux ? align_of(aux) : 0};
}

static uint64_t hash_of(const product_key *key)
{
    uint64_t hash = 1469598103934665603u;
    const unsigned char *bytes = (const unsigned char *)key;
    for (size_t i = 0; i < sizeof *key; i++)
        hash = (hash ^ bytes[i]) * 1099511628211u;
    return hash ^ hash >> 29;
}

/* A row-major rows x cols matrix is a column-major cols x rows matrix. */
static bool layout_make(const cublaslt_api *api, const product_key *key, fsdpc_lt_type type,
                        size_t rows, size_t cols, size_t ld, size_t stride, fsdpc_lt_layout *out)
{
    if (api->cublasLtMatrixLayoutCreate(out, type, cols, rows, (int64_t)ld) != FSDPC_LT_SUCCESS)
        return false;
    if (key->batch == 1)
        return true;
    int32_t batch = (int32_t)key->batch;
    int64_t offset = (int64_t)stride;
    return api->cublasLtMatrixLayoutSetAttribute(*out, FSDPC_LT_LAYOUT_BATCH, &batch,
                                                 sizeof batch) == FSDPC_LT_SUCCESS &&
           api->cublasLtMatrixLayoutSetAttribute(*out, FSDPC_LT_LAYOUT_BATCH_STRIDE, &offset,
                                                 sizeof offset) == FSDPC_LT_SUCCESS;
}

static bool desc_set(const cublaslt_api *api, fsdpc_lt_desc desc, fsdpc_lt_desc_attribute attribute,
                     const void *value, size_t bytes)
{
    return api->cublasLtMatmulDescSetAttribute(desc, attribute, value, bytes) == FSDPC_LT_SUCCESS;
}

/* Sets the epilogue's addresses, which change from call to call. */
static bool desc_point(const cublaslt_api *api, fsdpc_lt_desc desc, const void *bias,
                       const void *aux)
{
    return (!bias || desc_set(api, desc, FSDPC_LT_DESC_BIAS, &bias, sizeof bias)) &&
           (!aux || desc_set(api, desc, FSDPC_LT_DESC_AUX, &aux, sizeof aux));
}

static bool desc_make(const cublaslt_api *api, const product_key *key, fsdpc_lt_desc *out)
{
    bool wide = key->dtype == FSDPC_F64;
    if (api->cublasLtMatmulDescCreate(out, wide ? FSDPC_LT_COMPUTE_F64 : FSDPC_LT_COMPUTE_F32,
                                      wide ? FSDPC_LT_F64 : FSDPC_LT_F32) != FSDPC_LT_SUCCESS)
        return false;
    int32_t first = key->trans_b, second = key->trans_a;
    int64_t aux_ld = (int64_t)key->n;
    return desc_set(api, *out, FSDPC_LT_DESC_TRANS_A, &first, sizeof first) &&
           desc_set(api, *out, FSDPC_LT_DESC_TRANS_B, &second, sizeof second) &&
           desc_set(api, *out, FSDPC_LT_DESC_EPILOGUE, &key->epilogue, sizeof key->epilogue) &&
           (!key->align_aux || desc_set(api, *out, FSDPC_LT_DESC_AUX_LD, &aux_ld, sizeof aux_ld));
}

static bool preference_set(const cublaslt_api *api, fsdpc_lt_preference preference,
                           fsdpc_lt_preference_attribute attribute, const void *value, size_t bytes)
{
    return api->cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, bytes) ==
           FSDPC_LT_SUCCESS;
}

/* Takes the heuristic's first choice; returns false if there is none. */
static bool choose(fsdpc_cuda_products *gemm, product *p)
{
    const cublaslt_api *api = &gemm->api;
    fsdpc_lt_preference preference;
    if (api->cublasLtMatmulPreferenceCreate(&preference) != FSDPC_LT_SUCCESS)
        return false;
    uint64_t workspace_bytes = p->key.has_workspace ? WORKSPACE_BYTES : 0;
    uint32_t reduction = FSDPC_LT_REDUCTION_COMPUTE_TYPE; /* not in place, by atomics */
    uint32_t first = 1u << p->key.align_b, second = 1u << p->key.align_a;
    uint32_t result = 1u << p->key.align_c;
    fsdpc_lt_found found;
    int count = 0;
    bool ok =
        preference_set(api, preference, FSDPC_LT_PREFERENCE_WORKSPACE, &workspace_bytes,
                       sizeof workspace_bytes) &&
        preference_set(api, preference, FSDPC_LT_PREFERENCE_REDUCTIONS, &reduction,
                       sizeof reduction) &&
        preference_set(api, preference, FSDPC_LT_PREFERENCE_ALIGN_A, &first, sizeof first) &&
        preference_set(api, preference, FSDPC_LT_PREFERENCE_ALIGN_B, &second, sizeof second) &&
        preference_set(api, preference, FSDPC_LT_PREFERENCE_ALIGN_C, &result, sizeof result) &&
        preference_set(api, preference, FSDPC_LT_PREFERENCE_ALIGN_D, &result, sizeof result) &&
        api->cublasLtMatmulAlgoGetHeuristic(gemm->handle, p->desc, p->a, p->b, p->c, p->c,
                                            preference, 1, &found, &count) == FSDPC_LT_SUCCESS;
    api->cublasLtMatmulPreferenceDestroy(preference);
    if (!ok || count == 0 || found.result != FSDPC_LT_SUCCESS)
        return false;
    p->algo = found.algo;
    p->workspace_bytes = found.workspace_bytes;
    return true;
}

/* The heuristic assumes the alignment of the epilogue's addresses, so `bias` and `aux` are passed
 * too. */
static void product_init(fsdpc_cuda_products *gemm, const product_key *key, const void *bias,
                         const void *aux, product *p)
{
    const cublaslt_api *api = &gemm->api;
    fsdpc_lt_type type = type_of(key->dtype), c_type = type_of(key->c_dtype);
    p->used = true;
    p->key = *key;
    p->taken = desc_make(api, key, &p->desc) && desc_point(api, p->desc, bias, aux) &&
               layout_make(api, key, type, key->trans_b ? key->n : key->k,
                           key->trans_b ? key->k : key->n, key->ldb, key->stride_b, &p->a) &&
               layout_make(api, key, type, key->trans_a ? key->k : key->m,
                           key->trans_a ? key->m : key->k, key->lda, key->stride_a, &p->b) &&
               layout_make(api, key, c_type, key->m, key->n, key->ldc, key->stride_c, &p->c) &&
               choose(gemm, p);
}

static product *product_of(fsdpc_cuda_products *gemm, const product_key *key, const void *bias,
                           const void *aux)
{
    if (gemm->count == SLOTS / 2) { /* shapes keep changing: start over */
        for (size_t i = 0; i < SLOTS; i++)
            product_fini(&gemm->api, &gemm->products[i]);
        gemm->count = 0;
    }
    size_t at = hash_of(key) % SLOTS;
    while (gemm->products[at].used && memcmp(&gemm->products[at].key, key, sizeof *key) != 0)
        at = (at + 1) % SLOTS;
    product *p = &gemm->products[at];
    if (!p->used) {
        product_init(gemm, key, bias, aux, p);
        gemm->count++;
    }
    return p;
}

/* -- products ---------------------------------------------------------------------------------- */

static bool suits(const fsdpc_gemm_args *g)
{
    bool shared_c = g->batch > 1 && g->stride_c == 0; /* products must run in order */
    bool mixed_bias = g->bias && g->c_dtype != g->dtype;
    return g->m && g->n && g->k && !shared_c && !mixed_bias && g->batch < INT32_MAX;
}

/* *done_out: whether cuBLASLt is available, has a kernel for this product and epilogue, and was
 * called. */
static fsdpc_status multiply(const fsdpc_gemm_args *g, uint32_t epilogue, const void *aux,
                             fsdpc_stream *stream, bool *done_out)
{
    *done_out = false;
    fsdpc_cuda_products *gemm = NULL;
    FSDPC_TRY(gemm_of(stream->device, &gemm));
    if (!gemm->loaded || !suits(g))
        return FSDPC_OK;
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    bool on_main = queue == &((fsdpc_cuda_device *)stream->device)->main->queue;
    product_key key = key_of(g, epilogue, aux, on_main);
    product *p = product_of(gemm, &key, g->bias, aux);
    if (!p->taken)
        return FSDPC_OK;
    if (!desc_point(&gemm->api, p->desc, g->bias, aux))
        return fsdpc_fail(FSDPC_ERR_INTERNAL, "cuBLASLt refused the addresses of an epilogue");
    const float one_f32 = 1, beta_f32 = g->accumulate ? 1 : 0;
    const double one_f64 = 1, beta_f64 = g->accumulate ? 1 : 0;
    bool wide = g->dtype == FSDPC_F64;
    fsdpc_lt_result result = gemm->api.cublasLtMatmul(
        gemm->handle, p->desc, wide ? (const void *)&one_f64 : &one_f32, g->b, p->a, g->a, p->b,
        wide ? (const void *)&beta_f64 : &beta_f32, g->c, p->c, g->c, p->c, &p->algo,
        on_main ? gemm->workspace : NULL, p->workspace_bytes, queue->raw);
    if (result != FSDPC_LT_SUCCESS)
        return fsdpc_fail(FSDPC_ERR_INTERNAL,
                          "cuBLASLt failed with %d on a product of (%zu, %zu) and (%zu, %zu)",
                          (int)result, g->m, g->k, g->k, g->n);
    *done_out = true;
    return FSDPC_OK;
}

fsdpc_status fsdpc_cuda_gemm(const fsdpc_gemm_args *g, fsdpc_stream *stream)
{
    bool done;
    uint32_t epilogue = g->bias ? FSDPC_LT_EPILOGUE_BIAS : FSDPC_LT_EPILOGUE_NONE;
    FSDPC_TRY(multiply(g, epilogue, NULL, stream, &done));
    return done ? FSDPC_OK : fsdpc_cuda_gemm_plain(g, stream);
}

/* cuBLASLt does not document the accuracy of tanh in its epilogues, so they are only used for
 * 16-bit results. Without tensor cores, gelu costs little compared to the product anyway. The row
 * length of aux must be a multiple of 8.
 */
static bool gelu_suits(const fsdpc_gemm_gelu_args *args)
{
    bool narrow = args->gemm.dtype == FSDPC_BF16 || args->gemm.dtype == FSDPC_F16;
    return narrow && (!args->before || args->gemm.n % 8 == 0);
}

fsdpc_status fsdpc_cuda_gemm_gelu(const fsdpc_gemm_gelu_args *args, fsdpc_stream *stream)
{
    uint32_t epilogue = FSDPC_LT_EPILOGUE_DGELU;
    if (!args->backward)
        epilogue = FSDPC_LT_EPILOGUE_GELU | (args->before ? FSDPC_LT_EPILOGUE_AUX : 0) |
                   (args->gemm.bias ? FSDPC_LT_EPILOGUE_BIAS : 0);
    bool done = false;
    if (gelu_suits(args))
        FSDPC_TRY(multiply(&args->gemm, epilogue, args->before, stream, &done));
    return done ? FSDPC_OK : fsdpc_gemm_gelu_by_parts(args, stream);
}
