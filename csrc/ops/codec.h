/* Codecs: the forms in which numbers travel between hosts.
 *
 *     exact              as they are
 *     bf16, fp16         fp32 numbers, rounded to nearest
 *     int8, fp8, int4    block codes (block_code.h), whose blocks end with each row
 *
 * A codec changes only numbers that it can shorten: bf16 and fp16 fp32 ones, block codes those of fp32, bf16
 * and fp16 that have a row. All others travel as they are.
 *
 * A sender first rounds its numbers in place (fsdpc_codec_round) and computes with the result, too.
 * Encoding rounded numbers loses nothing: decoding gives the same bits. Rounding them again changes
 * nothing. It therefore does not matter who encodes the numbers, or how often.
 *
 * A message has the scales of a rows' blocks in fp32, then its codes (int4: two per byte, the first
 * in the low half), then zeros up to a multiple of 4 bytes.
 */
#ifndef FSDPC_OPS_CODEC_H
#define FSDPC_OPS_CODEC_H

#include "base/dtype.h"
#include "base/status.h"
#include "device/device.h"
#include "ops/exact_sum.h"

/* X(NAME, name) */
#define FSDPC_CODEC_TABLE(X)                                                                       \
    X(EXACT, "exact")                                                                              \
    X(BF16, "bf16")                                                                                \
    X(FP16, "fp16")                                                                                \
    X(INT8, "int8")                                                                                \
    X(FP8, "fp8")                                                                                  \
    X(INT4, "int4")

typedef enum fsdpc_codec {
#define X(NAME, name) FSDPC_CODEC_##NAME,
    FSDPC_CODEC_TABLE(X)
#undef X
        FSDPC_CODEC_COUNT
} fsdpc_codec;

/* Consecutive numbers: whole rows, or a row of 0 if blocks would depend on who cuts them. */
typedef struct fsdpc_codec_rows {
    fsdpc_dtype dtype;
    size_t row, numel;
} fsdpc_codec_rows;

/* What messages leave out: the difference between numbers and what their messages decode to. Parts
 * of some 64 Ki elements that contain a NaN or an infinity, or decode to one, leave `residual` as
 * it was. */
typedef struct fsdpc_codec_error {
    float *residual; /* added to the numbers before they are encoded, and then what this message
                      * leaves out; NULL: none */
    fsdpc_exact_sum *left_out, *meant; /* the squares of what this message leaves out, and of the
                                        * numbers with `residual`, are added; NULL: neither */
} fsdpc_codec_error;

const char *fsdpc_codec_name(fsdpc_codec codec);

/* Finds a codec; the error lists all. */
fsdpc_status fsdpc_codec_find(const char *name, fsdpc_codec *out);

/* Returns whether the codec shortens such numbers. */
bool fsdpc_codec_shortens(fsdpc_codec codec, const fsdpc_codec_rows *rows);

/* Returns the length of a message, which is a multiple of 4. */
size_t fsdpc_codec_bytes(fsdpc_codec codec, const fsdpc_codec_rows *rows);

/* All three run in the calling thread and the stream's threads; messages are aligned to 4 bytes.
 * Fail only if memory for a part of them is lacking. `error` may be NULL; a codec that does not
 * shorten the numbers ignores it. */
fsdpc_status fsdpc_codec_encode(fsdpc_codec codec, const fsdpc_codec_rows *rows, const void *values,
                                unsigned char *message, const fsdpc_codec_error *error,
                                fsdpc_stream *stream);
fsdpc_status fsdpc_codec_decode(fsdpc_codec codec, const fsdpc_codec_rows *rows,
                                const unsigned char *message, void *values, fsdpc_stream *stream);
/* `error` must not have a residual. */
fsdpc_status fsdpc_codec_round(fsdpc_codec codec, const fsdpc_codec_rows *rows, void *values,
                               const fsdpc_codec_error *error, fsdpc_stream *stream);

#endif
