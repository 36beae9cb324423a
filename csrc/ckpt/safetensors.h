/* The safetensors format: strict parsing of headers, and the layout of new files.
 *
 *     8 bytes, little endian: header length | header, JSON | tensor data
 *
 * The reader rejects everything else, such as duplicate or unknown keys, unknown dtypes, invalid
 * UTF-8, and numbers that are fractional, negative or too large. It rejects tensors whose shape and
 * dtype imply a size different from their offsets, and tensors that overlap or leave gaps. It
 * rejects headers larger than 100,000,000 bytes, and data that extends past the end of the file.
 * Names may be any text. The reader checks every size against the file size before it allocates
 * memory.
 *
 * The layout of a new file depends only on names, dtypes and shapes, so every rank computes the
 * whole layout. Tensors are stored without gaps, sorted by descending element size and then by name
 * (bytewise). The header is padded with spaces to a multiple of 8 bytes.
 */
#ifndef FSDPC_CKPT_SAFETENSORS_H
#define FSDPC_CKPT_SAFETENSORS_H

#include <stdint.h>

#include "base/dtype.h"
#include "ckpt/json.h"

/* X(name in files, bytes, engine's dtype or -1) */
#define FSDPC_ST_DTYPE_TABLE(X)                                                                    \
    X(BOOL, 1, FSDPC_BOOL)                                                                         \
    X(U8, 1, FSDPC_U8)                                                                             \
    X(I8, 1, -1)                                                                                   \
    X(F8_E5M2, 1, -1)                                                                              \
    X(F8_E4M3, 1, -1)                                                                              \
    X(F8_E8M0, 1, -1)                                                                              \
    X(I16, 2, -1)                                                                                  \
    X(U16, 2, -1)                                                                                  \
    X(F16, 2, FSDPC_F16)                                                                           \
    X(BF16, 2, FSDPC_BF16)                                                                         \
    X(I32, 4, FSDPC_I32)                                                                           \
    X(U32, 4, -1)                                                                                  \
    X(F32, 4, FSDPC_F32)                                                                           \
    X(C64, 8, -1)                                                                                  \
    X(F64, 8, FSDPC_F64)                                                                           \
    X(I64, 8, FSDPC_I64)                                                                           \
    X(U64, 8, -1)

enum { FSDPC_ST_MAX_DIMS = 8 };
#define FSDPC_ST_MAX_HEADER 100000000u

typedef struct fsdpc_st_dtype {
    const char *name;
    size_t bytes;
    int dtype; /* fsdpc_dtype, or -1: used only by the format */
} fsdpc_st_dtype;

/* Finds a dtype by name; returns NULL if it is unknown. */
const fsdpc_st_dtype *fsdpc_st_dtype_find(const char *name);

typedef struct fsdpc_st_tensor {
    const char *name;
    const fsdpc_st_dtype *dtype;
    int ndim;
    uint64_t shape[FSDPC_ST_MAX_DIMS];
    uint64_t begin, end; /* bytes from the beginning of the data */
} fsdpc_st_tensor;

typedef struct fsdpc_st_pair {
    const char *key, *value;
} fsdpc_st_pair;

typedef struct fsdpc_st_header {
    fsdpc_st_tensor *tensors; /* in the order of their data */
    size_t n_tensors;
    fsdpc_st_pair *metadata; /* sorted by key */
    size_t n_metadata;
    uint64_t data_begin; /* bytes into the file */
    char *text;          /* storage for the strings */
} fsdpc_st_header;

/* Parses the header of a file of `file_bytes` bytes. `data` contains the first `bytes` of them, at
 * least the whole header. `what` names the file in messages. */
fsdpc_status fsdpc_st_parse(const void *data, size_t bytes, uint64_t file_bytes, const char *what,
                            fsdpc_st_header *out);
void fsdpc_st_header_fini(fsdpc_st_header *header);

/* Reads and checks the header's length; `data` has at least 8 bytes. */
fsdpc_status fsdpc_st_header_bytes(const void *data, uint64_t file_bytes, const char *what,
                                   uint64_t *out);

/* Reads the header of the file at a path. */
fsdpc_status fsdpc_st_load(const char *path, fsdpc_st_header *out);

/* Lays out a file: fills in each tensor's begin and end (keeping the array's order) and creates the
 * header, including its length and the metadata `{"format": "pt"}`. transformers rejects a file
 * without it. The caller frees it. */
fsdpc_status fsdpc_st_layout(fsdpc_st_tensor *tensors, size_t n_tensors, char **header_out,
                             size_t *header_bytes_out);

/* Writes `"name":{"dtype":"F32","shape":[2,3],`, which begins a tensor's entry in a header or a
 * manifest. */
void fsdpc_st_put_entry(const fsdpc_st_tensor *tensor, bool ascii, fsdpc_json_text *out);

#endif
