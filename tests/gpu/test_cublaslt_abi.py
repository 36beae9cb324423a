"""What csrc/cuda/cublaslt_abi.h declares of cuBLASLt is what cublasLt.h declares.

Needs nvcc and pip's nvidia-cublas, or a toolkit that has the header.
"""

from __future__ import annotations

from pathlib import Path

import abi
import pytest

HEADER = "cublasLt.h"

pytestmark = pytest.mark.skipif(not abi.is_there(HEADER),
                                reason=f"there is no toolkit with {HEADER}")

SAME_ABI = r"""
SAME(FSDPC_LT_SUCCESS, CUBLAS_STATUS_SUCCESS);
SAME(FSDPC_LT_INVALID_VALUE, CUBLAS_STATUS_INVALID_VALUE);
SAME(FSDPC_LT_NOT_SUPPORTED, CUBLAS_STATUS_NOT_SUPPORTED);
SAME(FSDPC_LT_F32, CUDA_R_32F);
SAME(FSDPC_LT_F64, CUDA_R_64F);
SAME(FSDPC_LT_F16, CUDA_R_16F);
SAME(FSDPC_LT_BF16, CUDA_R_16BF);
SAME(FSDPC_LT_COMPUTE_F32, CUBLAS_COMPUTE_32F);
SAME(FSDPC_LT_COMPUTE_F64, CUBLAS_COMPUTE_64F);
SAME(0, CUBLAS_OP_N);
SAME(1, CUBLAS_OP_T);
SAME(FSDPC_LT_DESC_TRANS_A, CUBLASLT_MATMUL_DESC_TRANSA);
SAME(FSDPC_LT_DESC_TRANS_B, CUBLASLT_MATMUL_DESC_TRANSB);
SAME(FSDPC_LT_DESC_EPILOGUE, CUBLASLT_MATMUL_DESC_EPILOGUE);
SAME(FSDPC_LT_DESC_BIAS, CUBLASLT_MATMUL_DESC_BIAS_POINTER);
SAME(FSDPC_LT_DESC_AUX, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
SAME(FSDPC_LT_DESC_AUX_LD, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
SAME(FSDPC_LT_EPILOGUE_NONE, CUBLASLT_EPILOGUE_DEFAULT);
SAME(FSDPC_LT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_BIAS);
SAME(FSDPC_LT_EPILOGUE_GELU, CUBLASLT_EPILOGUE_GELU);
SAME(FSDPC_LT_EPILOGUE_GELU | FSDPC_LT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU_BIAS);
SAME(FSDPC_LT_EPILOGUE_GELU | FSDPC_LT_EPILOGUE_AUX, CUBLASLT_EPILOGUE_GELU_AUX);
SAME(FSDPC_LT_EPILOGUE_GELU | FSDPC_LT_EPILOGUE_AUX | FSDPC_LT_EPILOGUE_BIAS,
     CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
SAME(FSDPC_LT_EPILOGUE_DGELU, CUBLASLT_EPILOGUE_DGELU);
SAME(FSDPC_LT_LAYOUT_BATCH, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT);
SAME(FSDPC_LT_LAYOUT_BATCH_STRIDE, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET);
SAME(FSDPC_LT_PREFERENCE_WORKSPACE, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
SAME(FSDPC_LT_PREFERENCE_REDUCTIONS, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
SAME(FSDPC_LT_PREFERENCE_ALIGN_A, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
SAME(FSDPC_LT_PREFERENCE_ALIGN_B, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
SAME(FSDPC_LT_PREFERENCE_ALIGN_C, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
SAME(FSDPC_LT_PREFERENCE_ALIGN_D, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
SAME(FSDPC_LT_REDUCTION_COMPUTE_TYPE, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
SAME(sizeof(fsdpc_lt_result), sizeof(cublasStatus_t));
SAME(sizeof(fsdpc_lt_type), sizeof(cudaDataType));
SAME(sizeof(fsdpc_lt_compute), sizeof(cublasComputeType_t));
SAME(sizeof(fsdpc_lt_desc_attribute), sizeof(cublasLtMatmulDescAttributes_t));
SAME(sizeof(fsdpc_lt_layout_attribute), sizeof(cublasLtMatrixLayoutAttribute_t));
SAME(sizeof(fsdpc_lt_preference_attribute), sizeof(cublasLtMatmulPreferenceAttributes_t));
SAME(sizeof(fsdpc_lt_algo), sizeof(cublasLtMatmulAlgo_t));
SAME(sizeof(fsdpc_lt_found), sizeof(cublasLtMatmulHeuristicResult_t));
SAME(offsetof(fsdpc_lt_found, workspace_bytes),
     offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
SAME(offsetof(fsdpc_lt_found, result), offsetof(cublasLtMatmulHeuristicResult_t, state));
/* Functions: a call that fits ours fits theirs. */
cublasStatus_t call(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                    cublasLtMatrixLayout_t layout, cublasLtMatmulPreference_t preference,
                    cublasLtMatmulHeuristicResult_t *found, const void *value, void *memory,
                    cudaStream_t stream)
{
    size_t bytes = cublasLtGetVersion();
    int count;
    cublasLtCreate(&handle);
    cublasLtMatmulDescCreate(&desc, (cublasComputeType_t)FSDPC_LT_COMPUTE_F32,
                             (cudaDataType_t)FSDPC_LT_F32);
    cublasLtMatmulDescSetAttribute(desc, (cublasLtMatmulDescAttributes_t)FSDPC_LT_DESC_AUX, value,
                                   bytes);
    cublasLtMatrixLayoutCreate(&layout, (cudaDataType)FSDPC_LT_F32, (uint64_t)1, (uint64_t)1,
                               (int64_t)1);
    cublasLtMatrixLayoutSetAttribute(
        layout, (cublasLtMatrixLayoutAttribute_t)FSDPC_LT_LAYOUT_BATCH, value, bytes);
    cublasLtMatmulPreferenceCreate(&preference);
    cublasLtMatmulPreferenceSetAttribute(
        preference, (cublasLtMatmulPreferenceAttributes_t)FSDPC_LT_PREFERENCE_ALIGN_A, value,
        bytes);
    cublasLtMatmulAlgoGetHeuristic(handle, desc, layout, layout, layout, layout, preference, 1,
                                   found, &count);
    cublasLtMatmul(handle, desc, value, value, layout, value, layout, value, value, layout, memory,
                   layout, &found->algo, memory, bytes, stream);
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulDescDestroy(desc);
    return cublasLtDestroy(handle);
}
"""


def test_it_is_the_header_s(tmp_path: Path) -> None:
    abi.check_compiles(tmp_path, HEADER, "cublaslt_abi.h", SAME_ABI)
