/* Rows are processed in parts of some 64 Ki elements, so that a part's fp32 numbers and codes stay in
 * a cache between the passes over them.
 */
#include "ops/codec.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/size.h"
#include "ops/block_code.h"
#include "ops/flat_ops.h"

enum { PART = 1 << 16, TEXT_BYTES = 128 };

static const char *const names[] = {
#define X(NAME, name) name,
    FSDPC_CODEC_TABLE(X)
#undef X
};

/* By codec; of those that use one. */
static const fsdpc_code codes_of[] = {
    [FSDPC_CODEC_INT8] = FSDPC_CODE_INT8,
    [FSDPC_CODEC_FP8] = FSDPC_CODE_FP8,
    [FSDPC_CODEC_INT4] = FSDPC_CODE_INT4,
};

/* One part of the rows, and memory for it. */
typedef struct part {
    float *values, *decoded, *scales;
    uint8_t *codes;         /* or narrow numbers */
    size_t at, numel, most; /* elements */
    bool inside;            /* part of one row; otherwise whole rows */
} part;

const char *fsdpc_codec_name(fsdpc_codec codec)
{
    return names[codec];
}

fsdpc_status fsdpc_codec_find(const char *name, fsdpc_codec *out)
{
    char known[TEXT_BYTES] = "";
    for (int i = 0; i < FSDPC_CODEC_COUNT; i++) {
        if (strcmp(name, names[i]) == 0) {
            *out = (fsdpc_codec)i;
            return FSDPC_OK;
        }
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", i ? ", " : "",
                 names[i]);
    }
    return fsdpc_fail(FSDPC_ERR_VALUE, "no codec '%s': choose from %s", name, known);
}

static bool has_blocks(fsdpc_codec codec)
{
    return codec != FSDPC_CODEC_EXACT && codec != FSDPC_CODEC_BF16 && codec != FSDPC_CODEC_FP16;
}

/* Returns the dtype of a codec without blocks. */
static fsdpc_dtype narrow_of(fsdpc_codec codec)
{
    return codec == FSDPC_CODEC_FP16 ? FSDPC_F16 : FSDPC_BF16;
}

bool fsdpc_codec_shortens(fsdpc_codec codec, const fsdpc_codec_rows *rows)
{
    if (codec == FSDPC_CODEC_BF16 || codec == FSDPC_CODEC_FP16)
        return rows->dtype == FSDPC_F32;
    return has_blocks(codec) && rows->row > 0 &&
           (rows->dtype == FSDPC_F32 || rows->dtype == FSDPC_BF16 || rows->dtype == FSDPC_F16);
}

static size_t code_bytes(fsdpc_codec codec, size_t numel)
{
    if (!has_blocks(codec))
        return numel * fsdpc_dtype_bytes(FSDPC_BF16);
    return codec == FSDPC_CODEC_INT4 ? (numel + 1) / 2 : numel;
}

/* Returns the number of blocks before an element that begins one, or in all rows. */
static size_t scales_before(fsdpc_codec codec, const fsdpc_codec_rows *rows, size_t at)
{
    if (!has_blocks(codec))
        return 0;
    fsdpc_code code = codes_of[codec];
    return fsdpc_code_blocks_of(code, at, rows->row) +
           fsdpc_ceil_div(at % rows->row, fsdpc_code_block(code));
}

size_t fsdpc_codec_bytes(fsdpc_codec codec, const fsdpc_codec_rows *rows)
{
    size_t bytes = rows->numel * fsdpc_dtype_bytes(rows->dtype);
    if (fsdpc_codec_shortens(codec, rows))
        bytes = scales_before(codec, rows, rows->numel) * sizeof(float) +
                code_bytes(codec, rows->numel);
    return fsdpc_round_up(bytes, 4);
}

/* Returns whether kernels compute nothing, so that memory has no contents. */
static bool is_null(const fsdpc_stream *stream)
{
    return stream->device->flat == fsdpc_flat_ops_null();
}

/* ---- Parts ---- */

/* Returns rows that parts may cut: numbers of a codec without blocks are one row. */
static fsdpc_codec_rows rows_to_cut(fsdpc_codec codec, const fsdpc_codec_rows *rows)
{
    return (fsdpc_codec_rows){rows->dtype, has_blocks(codec) ? rows->row : rows->numel,
                              rows->numel};
}

/* Chooses parts, which are whole rows or inside one, and allocates memory for one. No part begins
 * inside a byte. */
static fsdpc_status part_begin(fsdpc_codec codec, const fsdpc_codec_rows *rows, part *p)
{
    bool inside = rows->row > PART && (rows->row % 2 == 0 || rows->row == rows->numel);
    size_t even = fsdpc_max_size(PART / rows->row, 2) & ~(size_t)1;
    size_t most = fsdpc_min_size(inside ? PART : even * rows->row, rows->numel);
    size_t scales = scales_before(codec, rows, most) + 1;
    *p = (part){.most = most, .inside = inside};
    p->values = malloc((2 * most + scales) * sizeof(float) + most * sizeof(uint16_t));
    if (!p->values)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to encode %zu elements", most);
    p->decoded = p->values + most;
    p->scales = p->decoded + most;
    p->codes = (uint8_t *)(p->scales + scales);
    return FSDPC_OK;
}

static bool part_next(const fsdpc_codec_rows *rows, part *p)
{
    p->at += p->numel;
    size_t left = p->inside ? rows->row - p->at % rows->row : rows->numel - p->at;
    p->numel = p->at < rows->numel ? fsdpc_min_size(p->most, left) : 0;
    return p->numel > 0;
}

/* Returns a part's numbers and codes, for the kernels. */
static fsdpc_code_args codes_in(fsdpc_codec codec, const fsdpc_codec_rows *rows, const part *p,
                                float *values)
{
    return (fsdpc_code_args){.code = codes_of[codec],
                             .values = values,
                             .codes = p->codes,
                             .maxima = p->scales,
                             .numel = p->numel,
                             .row = p->inside ? p->numel : rows->row};
}

/* Encodes a part of `values`, with what earlier messages have left out. */
static fsdpc_status part_encode(fsdpc_codec codec, const fsdpc_codec_rows *rows, const part *p,
                                const void *values, const fsdpc_codec_error *error,
                                fsdpc_stream *stream)
{
    const char *from = (const char *)values + p->at * fsdpc_dtype_bytes(rows->dtype);
    FSDPC_TRY(fsdpc_flat_cast(p->values, FSDPC_F32, from, rows->dtype, p->numel, stream));
    if (error && error->residual)
        FSDPC_TRY(fsdpc_flat_accumulate(p->values, FSDPC_F32, error->residual + p->at, FSDPC_F32,
                                        p->numel, stream));
    if (!has_blocks(codec))
        return fsdpc_flat_cast(p->codes, narrow_of(codec), p->values, FSDPC_F32, p->numel, stream);
    fsdpc_code_args args = codes_in(codec, rows, p, p->values);
    return fsdpc_flat_encode(&args, stream);
}

static fsdpc_status part_decode(fsdpc_codec codec, const fsdpc_codec_rows *rows, const part *p,
                                fsdpc_stream *stream)
{
    if (!has_blocks(codec))
        return fsdpc_flat_cast(p->decoded, FSDPC_F32, p->codes, narrow_of(codec), p->numel, stream);
    fsdpc_code_args args = codes_in(codec, rows, p, p->decoded);
    return fsdpc_flat_decode(&args, stream);
}

/* Compares a part's `values` with `decoded`, which it overwrites. */
static fsdpc_status part_compare(const part *p, const fsdpc_codec_error *error,
                                 fsdpc_stream *stream)
{
    enum { LEAF = 64 };
    int nonfinite = 0;
    FSDPC_TRY(fsdpc_flat_scale(p->decoded, FSDPC_F32, p->numel, -1, NULL, &nonfinite, stream));
    FSDPC_TRY(fsdpc_flat_accumulate(p->decoded, FSDPC_F32, p->values, FSDPC_F32, p->numel, stream));
    if (error->meant) {
        FSDPC_TRY(fsdpc_flat_sumsq(p->values, FSDPC_F32, p->numel, LEAF, error->meant, stream));
        FSDPC_TRY(fsdpc_flat_sumsq(p->decoded, FSDPC_F32, p->numel, LEAF, error->left_out, stream));
    }
    if (error->residual && !nonfinite)
        memcpy(error->residual + p->at, p->decoded, p->numel * sizeof(float));
    return FSDPC_OK;
}

/* Where a part's scales and codes are in a message. */
typedef struct part_place {
    size_t scales, codes, scale_bytes;
} part_place;

static part_place place_of(fsdpc_codec codec, const fsdpc_codec_rows *rows, const part *p)
{
    size_t first = scales_before(codec, rows, p->at);
    size_t end = scales_before(codec, rows, p->at + p->numel);
    size_t all = scales_before(codec, rows, rows->numel) * sizeof(float);
    return (part_place){.scales = first * sizeof(float),
                        .codes = all + code_bytes(codec, p->at),
                        .scale_bytes = (end - first) * sizeof(float)};
}

static void pack(fsdpc_codec codec, const part *p, unsigned char *to)
{
    if (codec != FSDPC_CODEC_INT4) {
        memcpy(to, p->codes, code_bytes(codec, p->numel));
        return;
    }
    for (size_t i = 0; i < p->numel / 2; i++)
        to[i] = (unsigned char)((p->codes[2 * i] & 15) | p->codes[2 * i + 1] << 4);
    if (p->numel % 2)
        to[p->numel / 2] = p->codes[p->numel - 1] & 15;
}

/* Extends the sign of the low four bits. */
static uint8_t nibble(unsigned bits)
{
    return (uint8_t)(((bits & 15) ^ 8) - 8);
}

static void unpack(fsdpc_codec codec, const part *p, const unsigned char *from)
{
    if (codec != FSDPC_CODEC_INT4) {
        memcpy(p->codes, from, p->numel);
        return;
    }
    for (size_t i = 0; i < p->numel; i++)
        p->codes[i] = nibble((unsigned)from[i / 2] >> (i % 2 ? 4 : 0));
}

/* ---- All rows ---- */

static fsdpc_status encode_parts(fsdpc_codec codec, const fsdpc_codec_rows *rows,
                                 const void *values, unsigned char *message,
                                 const fsdpc_codec_error *error, fsdpc_stream *stream)
{
    part p;
    FSDPC_TRY(part_begin(codec, rows, &p));
    fsdpc_status status = FSDPC_OK;
    while (status == FSDPC_OK && part_next(rows, &p)) {
        part_place at = place_of(codec, rows, &p);
        status = part_encode(codec, rows, &p, values, error, stream);
        memcpy(message + at.scales, p.scales, at.scale_bytes);
        pack(codec, &p, message + at.codes);
        if (status == FSDPC_OK && error)
            status = part_decode(codec, rows, &p, stream);
        if (status == FSDPC_OK && error)
            status = part_compare(&p, error, stream);
    }
    free(p.values);
    return status;
}

fsdpc_status fsdpc_codec_encode(fsdpc_codec codec, const fsdpc_codec_rows *rows, const void *values,
                                unsigned char *message, const fsdpc_codec_error *error,
                                fsdpc_stream *stream)
{
    size_t bytes = fsdpc_codec_bytes(codec, rows);
    if (bytes == 0 || is_null(stream))
        return FSDPC_OK;
    memset(message + bytes - 4, 0, 4);
    if (!fsdpc_codec_shortens(codec, rows)) {
        memcpy(message, values, rows->numel * fsdpc_dtype_bytes(rows->dtype));
        return FSDPC_OK;
    }
    if (!has_blocks(codec) && !error)
        return fsdpc_flat_cast(message, narrow_of(codec), values, rows->dtype, rows->numel, stream);
    fsdpc_codec_rows cut = rows_to_cut(codec, rows);
    return encode_parts(codec, &cut, values, message, error, stream);
}

fsdpc_status fsdpc_codec_decode(fsdpc_codec codec, const fsdpc_codec_rows *rows,
                                const unsigned char *message, void *values, fsdpc_stream *stream)
{
    if (is_null(stream))
        return FSDPC_OK;
    size_t element = fsdpc_dtype_bytes(rows->dtype);
    if (!fsdpc_codec_shortens(codec, rows)) {
        memcpy(values, message, rows->numel * element);
        return FSDPC_OK;
    }
    if (!has_blocks(codec))
        return fsdpc_flat_cast(values, rows->dtype, message, narrow_of(codec), rows->numel, stream);
    part p;
    FSDPC_TRY(part_begin(codec, rows, &p));
    fsdpc_status status = FSDPC_OK;
    while (status == FSDPC_OK && part_next(rows, &p)) {
        part_place at = place_of(codec, rows, &p);
        memcpy(p.scales, message + at.scales, at.scale_bytes);
        unpack(codec, &p, message + at.codes);
        status = part_decode(codec, rows, &p, stream);
        if (status == FSDPC_OK)
            status = fsdpc_flat_cast((char *)values + p.at * element, rows->dtype, p.decoded,
                                     FSDPC_F32, p.numel, stream);
    }
    free(p.values);
    return status;
}

/* Rounds a part in place, through its codes. */
static fsdpc_status part_round(fsdpc_codec codec, const fsdpc_codec_rows *rows, const part *p,
                               void *values, const fsdpc_codec_error *error, fsdpc_stream *stream)
{
    char *to = (char *)values + p->at * fsdpc_dtype_bytes(rows->dtype);
    FSDPC_TRY(part_encode(codec, rows, p, values, NULL, stream));
    FSDPC_TRY(part_decode(codec, rows, p, stream));
    FSDPC_TRY(fsdpc_flat_cast(to, rows->dtype, p->decoded, FSDPC_F32, p->numel, stream));
    if (!error)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_flat_cast(p->decoded, FSDPC_F32, to, rows->dtype, p->numel, stream));
    return part_compare(p, error, stream);
}

fsdpc_status fsdpc_codec_round(fsdpc_codec codec, const fsdpc_codec_rows *rows, void *values,
                               const fsdpc_codec_error *error, fsdpc_stream *stream)
{
    if (!fsdpc_codec_shortens(codec, rows) || rows->numel == 0 || is_null(stream))
        return FSDPC_OK;
    fsdpc_codec_rows cut = rows_to_cut(codec, rows);
    part p;
    FSDPC_TRY(part_begin(codec, &cut, &p));
    fsdpc_status status = FSDPC_OK;
    while (status == FSDPC_OK && part_next(&cut, &p))
        status = part_round(codec, &cut, &p, values, error, stream);
    free(p.values);
    return status;
}
