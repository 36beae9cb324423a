/* What a test can ask of the fake cuBLASLt beside cuBLASLt's own functions; looked up by name. */
#ifndef FSDPC_TESTS_EMU_FAKE_CUBLASLT_H
#define FSDPC_TESTS_EMU_FAKE_CUBLASLT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fake_cublaslt_seen {
    long heuristics, products; /* calls so far */
    long gelus, slopes;        /* products with gelu, and with its slope */
    long forbidden;            /* that cuBLASLt's rules forbid */
    long left;                 /* handles, descriptors, layouts and preferences that live */
    uint32_t epilogue;         /* of the last product, from here on, as cuBLASLt was told */
    bool trans_a, trans_b;
    double beta;
    const void *bias, *aux;
    int64_t aux_ld;
    size_t rows, cols, k; /* column-major */
} fake_cublaslt_seen;

/* fake_cublaslt_look */
typedef void (*fake_cublaslt_look_fn)(fake_cublaslt_seen *out);
/* fake_cublaslt_refuse: heuristics find nothing for this epilogue from now on; 0: for none. */
typedef void (*fake_cublaslt_refuse_fn)(uint32_t epilogue);

#endif
