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
    float *values, *scales;
    uint8_t *codes;
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
    return codec == FSDPC_CODEC_INT4 ? (numel + 1) / 2 : numel;
}

/* Returns the number of blocks before an element that begins one, or in all rows. */
static size_t scales_before(fsdpc_codec codec, const fsdpc_codec_rows *rows, size_t at)
{
    fsdpc_code code = codes_of[codec];
    return fsdpc_code_blocks_of(code, at, rows->row) +
           fsdpc_ceil_div(at % rows->row, fsdpc_code_block(code));
}

size_t fsdpc_codec_bytes(fsdpc_codec codec, const fsdpc_codec_rows *rows)
{
    size_t bytes = rows->numel * fsdpc_dtype_bytes(rows->dtype);
    if (fsdpc_codec_shortens(codec, rows))
        bytes = has_blocks(codec) ? scales_before(codec, rows, rows->numel) * sizeof(float) +
                                        code_bytes(codec, rows->numel)
                                  : rows->numel * fsdpc_dtype_bytes(FSDPC_BF16);
    return fsdpc_round_up(bytes, 4);
}

/* Returns whether kernels compute nothing, so that memory has no contents. */
static bool is_null(const fsdpc_stream *stream)
{
    return stream->device->flat == fsdpc_flat_ops_null();
}

/* ---- Parts ---- */

/* Chooses parts, which are whole rows or inside one, and allocates memory for one. No part begins
 * inside a byte. */
static fsdpc_status part_begin(fsdpc_codec codec, const fsdpc_codec_rows *rows, part *p)
{
    bool inside = rows->row > PART && (rows->row % 2 == 0 || rows->row == rows->numel);
    size_t even = fsdpc_max_size(PART / rows->row, 2) & ~(size_t)1;
    size_t most = fsdpc_min_size(inside ? PART : even * rows->row, rows->numel);
    size_t scales = scales_before(codec, rows, most) + 1;
    *p = (part){.most = most, .inside = inside};
    p->values = malloc((most + scales) * sizeof(float) + most);
    if (!p->values)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to encode %zu elements", most);
    p->scales = p->values + most;
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

/* Returns the codes of a part, for the kernels. */
static fsdpc_code_args codes_in(fsdpc_codec codec, const fsdpc_codec_rows *rows, const part *p)
{
    return (fsdpc_code_args){.code = codes_of[codec],
                             .values = p->values,
                             .codes = p->codes,
                             .maxima = p->scales,
                             .numel = p->numel,
                             .row = p->inside ? p->numel : rows->row};
}

static fsdpc_status part_encode(fsdpc_codec codec, const fsdpc_codec_rows *rows, const part *p,
                                const void *values, fsdpc_stream *stream)
{
    const char *from = (const char *)values + p->at * fsdpc_dtype_bytes(rows->dtype);
    FSDPC_TRY(fsdpc_flat_cast(p->values, FSDPC_F32, from, rows->dtype, p->numel, stream));
    fsdpc_code_args args = codes_in(codec, rows, p);
    return fsdpc_flat_encode(&args, stream);
}

static fsdpc_status part_decode(fsdpc_codec codec, const fsdpc_codec_rows *rows, const part *p,
                                void *values, fsdpc_stream *stream)
{
    char *to = (char *)values + p->at * fsdpc_dtype_bytes(rows->dtype);
    fsdpc_code_args args = codes_in(codec, rows, p);
    FSDPC_TRY(fsdpc_flat_decode(&args, stream));
    return fsdpc_flat_cast(to, rows->dtype, p->values, FSDPC_F32, p->numel, stream);
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
        memcpy(to, p->codes, p->numel);
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

fsdpc_status fsdpc_codec_encode(fsdpc_codec codec, const fsdpc_codec_rows *rows, const void *values,
                                unsigned char *message, fsdpc_stream *stream)
{
    size_t bytes = fsdpc_codec_bytes(codec, rows);
    if (bytes == 0 || is_null(stream))
        return FSDPC_OK;
    memset(message + bytes - 4, 0, 4);
    if (!fsdpc_codec_shortens(codec, rows)) {
        memcpy(message, values, rows->numel * fsdpc_dtype_bytes(rows->dtype));
        return FSDPC_OK;
    }
    if (!has_blocks(codec))
        return fsdpc_flat_cast(message, narrow_of(codec), values, rows->dtype, rows->numel, stream);
    part p;
    FSDPC_TRY(part_begin(codec, rows, &p));
    fsdpc_status status = FSDPC_OK;
    while (status == FSDPC_OK && part_next(rows, &p)) {
        part_place at = place_of(codec, rows, &p);
        status = part_encode(codec, rows, &p, values, stream);
        memcpy(message + at.scales, p.scales, at.scale_bytes);
        pack(codec, &p, message + at.codes);
    }
    free(p.values);
    return status;
}

fsdpc_status fsdpc_codec_decode(fsdpc_codec codec, const fsdpc_codec_rows *rows,
                                const unsigned char *message, void *values, fsdpc_stream *stream)
{
    if (is_null(stream))
        return FSDPC_OK;
    if (!fsdpc_codec_shortens(codec, rows)) {
        memcpy(values, message, rows->numel * fsdpc_dtype_bytes(rows->dtype));
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
        status = part_decode(codec, rows, &p, values, stream);
    }
    free(p.values);
    return status;
}

/* Rounds fp32 to a narrower dtype through memory of its own, a part at a time. */
static fsdpc_status round_narrow(fsdpc_dtype dtype, const fsdpc_codec_rows *rows, float *values,
                                 fsdpc_stream *stream)
{
    size_t most = fsdpc_min_size(PART, rows->numel);
    void *narrow = malloc(most * fsdpc_dtype_bytes(FSDPC_BF16) + 1);
    fsdpc_status status =
        narrow ? FSDPC_OK : fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to encode %zu elements", most);
    for (size_t at = 0, n; status == FSDPC_OK && at < rows->numel; at += n) {
        n = fsdpc_min_size(most, rows->numel - at);
        status = fsdpc_flat_cast(narrow, dtype, values + at, FSDPC_F32, n, stream);
        if (status == FSDPC_OK)
            status = fsdpc_flat_cast(values + at, FSDPC_F32, narrow, dtype, n, stream);
    }
    free(narrow);
    return status;
}

fsdpc_status fsdpc_codec_round(fsdpc_codec codec, const fsdpc_codec_rows *rows, void *values,
                               fsdpc_stream *stream)
{
    if (!fsdpc_codec_shortens(codec, rows) || rows->numel == 0 || is_null(stream))
        return FSDPC_OK;
    if (!has_blocks(codec))
        return round_narrow(narrow_of(codec), rows, values, stream);
    part p;
    FSDPC_TRY(part_begin(codec, rows, &p));
    fsdpc_status status = FSDPC_OK;
    while (status == FSDPC_OK && part_next(rows, &p)) {
        status = part_encode(codec, rows, &p, values, stream);
        if (status == FSDPC_OK)
            status = part_decode(codec, rows, &p, values, stream);
    }
    free(p.values);
    return status;
}
