/* Products by cuBLASLt: descriptors and the heuristic's choice, cached by shape.
 *
 * Our matrices are row-major and cuBLASLt's column-major, so what is computed is C^T = B'^T A'^T:
 * the operands change places and nothing is transposed.  The bias of a row of C is then one of a
 * column, which is what cuBLASLt's epilogue adds.  fp32 inputs are multiplied in fp32 (no TF32);
 * sums are fp32.  Splitting k is allowed only where the partial sums are added up in a fixed order.
 *
 * Everything that a product's descriptors depend on is the key of a small hash table: sizes,
 * strides, dtypes and how far the addresses are aligned, since the heuristic may take only kernels
 * that fit them.  A steady-state product is one lookup and one call.  The workspace is one block of
 * the pool, for the main stream alone; products on other streams get kernels that need none.
 */
#include "cuda/gemm_cublaslt.h"

#include "cuda/cuda_queue.h"
#include "cuda/kernels.h"

#if !defined(FSDPC_CUBLASLT)

fsdpc_status fsdpc_cuda_gemm(const fsdpc_gemm_args *args, fsdpc_stream *stream)
{
    return fsdpc_cuda_gemm_plain(args, stream);
}

void fsdpc_cuda_products_destroy(fsdpc_cuda_products *gemm)
{
    (void)gemm;
}

#else

#include <cublasLt.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 4096, WORKSPACE_BYTES = 32 << 20 };

#define CUBLASLT_SYMBOLS(X)                                                                        \
    X(cublasLtCreate)                                                                              \
    X(cublasLtDestroy)                                                                             \
    X(cublasLtMatmul)                                                                              \
    X(cublasLtMatmulAlgoGetHeuristic)                                                              \
    X(cublasLtMatmulDescCreate)                                                                    \
    X(cublasLtMatmulDescDestroy)                                                                   \
    X(cublasLtMatmulDescSetAttribute)                                                              \
    X(cublasLtMatmulPreferenceCreate)                                                              \
    X(cublasLtMatmulPreferenceDestroy)                                                             \
    X(cublasLtMatmulPreferenceSetAttribute)                                                        \
    X(cublasLtMatrixLayoutCreate)                                                                  \
    X(cublasLtMatrixLayoutDestroy)                                                                 \
    X(cublasLtMatrixLayoutSetAttribute)

typedef struct cublaslt_api {
#define X(name) __typeof__(&name) name;
    CUBLASLT_SYMBOLS(X)
#undef X
} cublaslt_api;

/* Compared as bytes: made from zeroed memory. */
typedef struct product_key {
    size_t m, n, k, lda, ldb, ldc, batch, stride_a, stride_b, stride_c;
    int dtype, c_dtype;
    bool trans_a, trans_b, accumulate, has_bias, has_workspace;
    unsigned char align_a, align_b, align_c; /* addresses are multiples of 2^this */
} product_key;

typedef struct product {
    bool used, taken; /* taken: cuBLASLt has a kernel for it */
    product_key key;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algo;
    size_t workspace_bytes;
} product;

struct fsdpc_cuda_products {
    bool loaded; /* else every product is the plain kernel's */
    cublaslt_api api;
    cublasLtHandle_t handle;
    fsdpc_device *device;
    void *workspace;
    size_t count;
    product products[SLOTS];
};

/* -- loading ----------------------------------------------------------------------------------- */

static void *open_library(void)
{
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
    const size_t count = sizeof names / sizeof names[0];
    void *library = NULL;
    for (size_t i = 0; i < count && !library; i++)
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    for (size_t i = 0; i < count && !library; i++)
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    return library;
}

static bool load_api(cublaslt_api *api)
{
    void *library = open_library();
    if (!library)
        return false;
    bool complete = true;
#define X(name)                                                                                    \
    *(void **)&api->name = dlsym(library, #name);                                                  \
    complete = complete && api->name;
    CUBLASLT_SYMBOLS(X)
#undef X
    return complete;
}

static fsdpc_status gemm_of(fsdpc_device *base, fsdpc_cuda_products **out)
{
    fsdpc_cuda_device *device = (fsdpc_cuda_device *)base;
    if (!device->gemm) {
        fsdpc_cuda_products *gemm = calloc(1, sizeof *gemm);
        if (!gemm)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for cuBLASLt's products");
        gemm->device = base;
        device->gemm = gemm;
        gemm->loaded = load_api(&gemm->api) &&
                       gemm->api.cublasLtCreate(&gemm->handle) == CUBLAS_STATUS_SUCCESS;
        if (gemm->loaded)
            FSDPC_TRY(fsdpc_device_alloc(base, FSDPC_MEM_OTHER, WORKSPACE_BYTES, &gemm->workspace));
    }
    *out = device->gemm;
    return FSDPC_OK;
}

static void product_fini(const cublaslt_api *api, product *p)
{
    if (p->desc)
        api->cublasLtMatmulDescDestroy(p->desc);
    cublasLtMatrixLayout_t layouts[] = {p->a, p->b, p->c};
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

/* -- one product's descriptors ----------------------------------------------------------------- */

static cudaDataType_t type_of(int dtype)
{
    switch (dtype) {
    case FSDPC_BF16:
        return CUDA_R_16BF;
    case FSDPC_F16:
        return CUDA_R_16F;
    case FSDPC_F64:
        return CUDA_R_64F;
    default:
        return CUDA_R_32F;
    }
}

static unsigned char align_of(const void *pointer)
{
    return (unsigned char)__builtin_ctzll((unsigned long long)(uintptr_t)pointer | 256);
}

static product_key key_of(const fsdpc_gemm_args *g, bool has_workspace)
{
    product_key key;
    memset(&key, 0, sizeof key);
    key.m = g->m, key.n = g->n, key.k = g->k;
    key.lda = g->lda, key.ldb = g->ldb, key.ldc = g->ldc;
    key.batch = g->batch ? g->batch : 1;
    if (key.batch > 1)
        key.stride_a = g->stride_a, key.stride_b = g->stride_b, key.stride_c = g->stride_c;
    key.dtype = g->dtype, key.c_dtype = g->c_dtype;
    key.trans_a = g->trans_a, key.trans_b = g->trans_b;
    key.accumulate = g->accumulate, key.has_bias = g->bias != NULL;
    key.has_workspace = has_workspace;
    key.align_a = align_of(g->a), key.align_b = align_of(g->b), key.align_c = align_of(g->c);
    return key;
}

static uint64_t hash_of(const product_key *key)
{
    uint64_t hash = 1469598103934665603u;
    const unsigned char *bytes = (const unsigned char *)key;
    for (size_t i = 0; i < sizeof *key; i++)
        hash = (hash ^ bytes[i]) * 1099511628211u;
    return hash ^ hash >> 29;
}

/* A row-major matrix of rows by cols is column-major of cols by rows. */
static bool layout_make(const cublaslt_api *api, const product_key *key, cudaDataType_t type,
                        size_t rows, size_t cols, size_t ld, size_t stride,
                        cublasLtMatrixLayout_t *out)
{
    if (api->cublasLtMatrixLayoutCreate(out, type, cols, rows, (int64_t)ld) !=
        CUBLAS_STATUS_SUCCESS)
        return false;
    if (key->batch == 1)
        return true;
    int32_t batch = (int32_t)key->batch;
    int64_t offset = (int64_t)stride;
    return api->cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch,
                                                 sizeof batch) == CUBLAS_STATUS_SUCCESS &&
           api->cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                 &offset, sizeof offset) == CUBLAS_STATUS_SUCCESS;
}

static bool desc_make(const cublaslt_api *api, const product_key *key, cublasLtMatmulDesc_t *out)
{
    bool wide = key->dtype == FSDPC_F64;
    if (api->cublasLtMatmulDescCreate(out, wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                      wide ? CUDA_R_64F : CUDA_R_32F) != CUBLAS_STATUS_SUCCESS)
        return false;
    int32_t first = key->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    int32_t second = key->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue =
        key->has_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    return api->cublasLtMatmulDescSetAttribute(*out, CUBLASLT_MATMUL_DESC_TRANSA, &first,
                                               sizeof first) == CUBLAS_STATUS_SUCCESS &&
           api->cublasLtMatmulDescSetAttribute(*out, CUBLASLT_MATMUL_DESC_TRANSB, &second,
                                               sizeof second) == CUBLAS_STATUS_SUCCESS &&
           api->cublasLtMatmulDescSetAttribute(*out, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                               sizeof epilogue) == CUBLAS_STATUS_SUCCESS;
}

static bool preference_set(const cublaslt_api *api, cublasLtMatmulPreference_t preference,
                           cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
                           size_t bytes)
{
    return api->cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, bytes) ==
           CUBLAS_STATUS_SUCCESS;
}

/* The heuristic's first choice; false if there is none. */
static bool choose(fsdpc_cuda_products *gemm, product *p)
{
    const cublaslt_api *api = &gemm->api;
    cublasLtMatmulPreference_t preference;
    if (api->cublasLtMatmulPreferenceCreate(&preference) != CUBLAS_STATUS_SUCCESS)
        return false;
    uint64_t workspace_bytes = p->key.has_workspace ? WORKSPACE_BYTES : 0;
    uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; /* not in place, by atomics */
    uint32_t first = 1u << p->key.align_b, second = 1u << p->key.align_a;
    uint32_t result = 1u << p->key.align_c;
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    bool ok =
        preference_set(api, preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                       sizeof workspace_bytes) &&
        preference_set(api, preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction,
                       sizeof reduction) &&
        preference_set(api, preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &first,
                       sizeof first) &&
        preference_set(api, preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &second,
                       sizeof second) &&
        preference_set(api, preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &result,
                       sizeof result) &&
        preference_set(api, preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &result,
                       sizeof result) &&
        api->cublasLtMatmulAlgoGetHeuristic(gemm->handle, p->desc, p->a, p->b, p->c, p->c,
                                            preference, 1, &found, &count) == CUBLAS_STATUS_SUCCESS;
    api->cublasLtMatmulPreferenceDestroy(preference);
    if (!ok || count == 0 || found.state != CUBLAS_STATUS_SUCCESS)
        return false;
    p->algo = found.algo;
    p->workspace_bytes = found.workspaceSize;
    return true;
}

static void product_init(fsdpc_cuda_products *gemm, const product_key *key, product *p)
{
    const cublaslt_api *api = &gemm->api;
    cudaDataType_t type = type_of(key->dtype), c_type = type_of(key->c_dtype);
    p->used = true;
    p->key = *key;
    p->taken = desc_make(api, key, &p->desc) &&
               layout_make(api, key, type, key->trans_b ? key->n : key->k,
                           key->trans_b ? key->k : key->n, key->ldb, key->stride_b, &p->a) &&
               layout_make(api, key, type, key->trans_a ? key->k : key->m,
                           key->trans_a ? key->m : key->k, key->lda, key->stride_a, &p->b) &&
               layout_make(api, key, c_type, key->m, key->n, key->ldc, key->stride_c, &p->c) &&
               choose(gemm, p);
}

static product *product_of(fsdpc_cuda_products *gemm, const product_key *key)
{
    if (gemm->count == SLOTS / 2) { /* shapes keep changing: begin again */
        for (size_t i = 0; i < SLOTS; i++)
            product_fini(&gemm->api, &gemm->products[i]);
        gemm->count = 0;
    }
    size_t at = hash_of(key) % SLOTS;
    while (gemm->products[at].used && memcmp(&gemm->products[at].key, key, sizeof *key) != 0)
        at = (at + 1) % SLOTS;
    product *p = &gemm->products[at];
    if (!p->used) {
        product_init(gemm, key, p);
        gemm->count++;
    }
    return p;
}

/* -- products ---------------------------------------------------------------------------------- */

static bool suits(const fsdpc_gemm_args *g)
{
    bool shared_c = g->batch > 1 && g->stride_c == 0; /* products that add up take turns */
    bool mixed_bias = g->bias && g->c_dtype != g->dtype;
    /* cuBLASLt rounds a product to 16 bits before it adds a 16-bit C (seen on an H200): not ours,
     * where C + product is rounded once.  Gradients accumulate in fp32, so little is lost. */
    bool rounds_twice = g->accumulate && (g->c_dtype == FSDPC_BF16 || g->c_dtype == FSDPC_F16);
    return g->m && g->n && g->k && !shared_c && !mixed_bias && !rounds_twice &&
           g->batch < INT32_MAX;
}

fsdpc_status fsdpc_cuda_gemm(const fsdpc_gemm_args *g, fsdpc_stream *stream)
{
    fsdpc_cuda_products *gemm = NULL;
    FSDPC_TRY(gemm_of(stream->device, &gemm));
    if (!gemm->loaded || !suits(g))
        return fsdpc_cuda_gemm_plain(g, stream);
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    bool on_main = queue == &((fsdpc_cuda_device *)stream->device)->main->queue;
    product_key key = key_of(g, on_main);
    product *p = product_of(gemm, &key);
    if (!p->taken)
        return fsdpc_cuda_gemm_plain(g, stream);
    if (g->bias &&
        gemm->api.cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                 &g->bias, sizeof g->bias) != CUBLAS_STATUS_SUCCESS)
        return fsdpc_fail(FSDPC_ERR_INTERNAL, "cuBLASLt refused a bias");
    const float one_f32 = 1, beta_f32 = g->accumulate ? 1 : 0;
    const double one_f64 = 1, beta_f64 = g->accumulate ? 1 : 0;
    bool wide = g->dtype == FSDPC_F64;
    cublasStatus_t status = gemm->api.cublasLtMatmul(
        gemm->handle, p->desc, wide ? (const void *)&one_f64 : &one_f32, g->b, p->a, g->a, p->b,
        wide ? (const void *)&beta_f64 : &beta_f32, g->c, p->c, g->c, p->c, &p->algo,
        on_main ? gemm->workspace : NULL, p->workspace_bytes, queue->raw);
    if (status != CUBLAS_STATUS_SUCCESS)
        return fsdpc_fail(FSDPC_ERR_INTERNAL,
                          "cuBLASLt failed with %d on a product of (%zu, %zu) and (%zu, %zu)",
                          (int)status, g->m, g->k, g->k, g->n);
    return FSDPC_OK;
}

#endif
