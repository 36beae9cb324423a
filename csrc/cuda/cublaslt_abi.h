/* The codes and functions of cuBLASLt's binary interface that we use, as in CUDA 12 and 13.
 *
 * These declarations make the plugin the same wherever it is built, with or without cublasLt.h;
 * tests/gpu/test_cublaslt_abi.py checks them against a real header.
 */
#ifndef FSDPC_CUDA_CUBLASLT_ABI_H
#define FSDPC_CUDA_CUBLASLT_ABI_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

typedef enum fsdpc_lt_result {
    FSDPC_LT_SUCCESS = 0,
    FSDPC_LT_INVALID_VALUE = 7,
    FSDPC_LT_NOT_SUPPORTED = 15,
} fsdpc_lt_result;

typedef enum fsdpc_lt_type { /* cudaDataType */
                             FSDPC_LT_F32 = 0,
                             FSDPC_LT_F64 = 1,
                             FSDPC_LT_F16 = 2,
                             FSDPC_LT_BF16 = 14,
} fsdpc_lt_type;

typedef enum fsdpc_lt_compute {
    FSDPC_LT_COMPUTE_F32 = 68, /* no TF32 */
    FSDPC_LT_COMPUTE_F64 = 70,
} fsdpc_lt_compute;

/* Attributes of a product; the comments give the types of their values. */
typedef enum fsdpc_lt_desc_attribute {
    FSDPC_LT_DESC_TRANS_A = 3, /* int32_t: 0, 1 */
    FSDPC_LT_DESC_TRANS_B = 4,
    FSDPC_LT_DESC_EPILOGUE = 7, /* uint32_t */
    FSDPC_LT_DESC_BIAS = 8,     /* pointer */
    FSDPC_LT_DESC_AUX = 11,     /* pointer */
    FSDPC_LT_DESC_AUX_LD = 12,  /* int64_t, a multiple of 8 */
} fsdpc_lt_desc_attribute;

typedef enum fsdpc_lt_epilogue {
    FSDPC_LT_EPILOGUE_NONE = 1,
    FSDPC_LT_EPILOGUE_BIAS = 4,
    FSDPC_LT_EPILOGUE_GELU = 32,       /* tanh; may be combined with the two others */
    FSDPC_LT_EPILOGUE_AUX = 128,       /* with GELU: stores its input */
    FSDPC_LT_EPILOGUE_DGELU = 64 | 128 /* times gelu's slope at aux */
} fsdpc_lt_epilogue;

typedef enum fsdpc_lt_layout_attribute {
    FSDPC_LT_LAYOUT_BATCH = 5,        /* int32_t */
    FSDPC_LT_LAYOUT_BATCH_STRIDE = 6, /* int64_t, elements */
} fsdpc_lt_layout_attribute;

typedef enum fsdpc_lt_preference_attribute {
    FSDPC_LT_PREFERENCE_WORKSPACE = 1,  /* uint64_t, bytes */
    FSDPC_LT_PREFERENCE_REDUCTIONS = 3, /* uint32_t: 2, partial sums in the compute type */
    FSDPC_LT_PREFERENCE_ALIGN_A = 5,    /* uint32_t, bytes */
    FSDPC_LT_PREFERENCE_ALIGN_B = 6,
    FSDPC_LT_PREFERENCE_ALIGN_C = 7,
    FSDPC_LT_PREFERENCE_ALIGN_D = 8,
} fsdpc_lt_preference_attribute;

enum { FSDPC_LT_REDUCTION_COMPUTE_TYPE = 2 };

typedef struct cublasLtContext *fsdpc_lt_handle;
typedef struct fsdpc_lt_desc_opaque *fsdpc_lt_desc;
typedef struct fsdpc_lt_layout_opaque *fsdpc_lt_layout;
typedef struct fsdpc_lt_preference_opaque *fsdpc_lt_preference;

typedef struct fsdpc_lt_algo {
    uint64_t data[8];
} fsdpc_lt_algo;

typedef struct fsdpc_lt_found {
    fsdpc_lt_algo algo;
    size_t workspace_bytes;
    fsdpc_lt_result result;
    float waves;
    int reserved[4];
} fsdpc_lt_found;

/* X(result, name, parameters) */
#define FSDPC_LT_SYMBOLS(X)                                                                        \
    X(size_t, cublasLtGetVersion, (void))                                                          \
    X(fsdpc_lt_result, cublasLtCreate, (fsdpc_lt_handle * handle))                                 \
    X(fsdpc_lt_result, cublasLtDestroy, (fsdpc_lt_handle handle))                                  \
    X(fsdpc_lt_result, cublasLtMatmulDescCreate,                                                   \
      (fsdpc_lt_desc * desc, fsdpc_lt_compute compute, fsdpc_lt_type scale))                       \
    X(fsdpc_lt_result, cublasLtMatmulDescDestroy, (fsdpc_lt_desc desc))                            \
    X(fsdpc_lt_result, cublasLtMatmulDescSetAttribute,                                             \
      (fsdpc_lt_desc desc, fsdpc_lt_desc_attribute attribute, const void *value, size_t bytes))    \
    X(fsdpc_lt_result, cublasLtMatrixLayoutCreate,                                                 \
      (fsdpc_lt_layout * layout, fsdpc_lt_type type, uint64_t rows, uint64_t cols, int64_t ld))    \
    X(fsdpc_lt_result, cublasLtMatrixLayoutDestroy, (fsdpc_lt_layout layout))                      \
    X(fsdpc_lt_result, cublasLtMatrixLayoutSetAttribute,                                           \
      (fsdpc_lt_layout layout, fsdpc_lt_layout_attribute attribute, const void *value,             \
       size_t bytes))                                                                              \
    X(fsdpc_lt_result, cublasLtMatmulPreferenceCreate, (fsdpc_lt_preference * preference))         \
    X(fsdpc_lt_result, cublasLtMatmulPreferenceDestroy, (fsdpc_lt_preference preference))          \
    X(fsdpc_lt_result, cublasLtMatmulPreferenceSetAttribute,                                       \
      (fsdpc_lt_preference preference, fsdpc_lt_preference_attribute attribute, const void *value, \
       size_t bytes))                                                                              \
    X(fsdpc_lt_result, cublasLtMatmulAlgoGetHeuristic,                                             \
      (fsdpc_lt_handle handle, fsdpc_lt_desc desc, fsdpc_lt_layout a, fsdpc_lt_layout b,           \
       fsdpc_lt_layout c, fsdpc_lt_layout d, fsdpc_lt_preference preference, int wanted,           \
       fsdpc_lt_found *found, int *count))                                                         \
    X(fsdpc_lt_result, cublasLtMatmul,                                                             \
      (fsdpc_lt_handle handle, fsdpc_lt_desc desc, const void *alpha, const void *a,               \
       fsdpc_lt_layout a_layout, const void *b, fsdpc_lt_layout b_layout, const void *beta,        \
       const void *c, fsdpc_lt_layout c_layout, void *d, fsdpc_lt_layout d_layout,                 \
       const fsdpc_lt_algo *algo, void *workspace, size_t workspace_bytes, cudaStream_t stream))

#endif
