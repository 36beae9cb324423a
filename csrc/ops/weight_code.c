/* The table of schemes, and how rows are encoded.
 *
 * A block's elements are divided by its largest magnitude (multiplied by the inverse, as
 * bitsandbytes does, so that codes are the same) and take the nearest level. Of two levels that are
 * equally near, the lower is taken. Encoding happens once per weight, so it is compiled for the
 * baseline only; the count of levels below a value needs no branch and is vectorised.
 */
#include "ops/weight_code.h"

#include <math.h>
#include <stdlib.h>

typedef struct traits {
    const char *name;
    unsigned bits;
    size_t block;
    bool coded_scales;
} traits;

static const traits schemes[] = {
#define X(NAME, name, bits, block, coded_scales)                                                   \
    [FSDPC_WEIGHT_##NAME] = {name, bits, block, coded_scales},
    FSDPC_WEIGHT_TABLE(X)
#undef X
};

static const float nf4[FSDPC_WEIGHT_LEVELS] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

fsdpc_weight_row fsdpc_weight_row_of(fsdpc_weight_scheme which, size_t cols)
{
    const traits *s = &schemes[which];
    fsdpc_weight_row row = {.block = s->block ? s->block : fsdpc_max_size(cols, 1),
                            .coded_scales = s->coded_scales,
                            .nibbles = s->bits == 4};
    row.blocks = fsdpc_ceil_div(cols, row.block);
    row.scales_at = 2 * sizeof(float);
    row.codes_at = s->coded_scales ? row.scales_at + row.blocks : row.blocks * sizeof(float);
    row.bytes = row.codes_at + fsdpc_ceil_div(cols * s->bits, 8);
    for (int i = 0; i < FSDPC_WEIGHT_LEVELS; i++)
        row.levels[i] = which == FSDPC_WEIGHT_NF4 ? nf4[i] : (float)(i - 8) / 7;
    return row;
}

const char *fsdpc_weight_name(fsdpc_weight_scheme which)
{
    return schemes[which].name;
}

fsdpc_status fsdpc_weight_find(const char *name, fsdpc_weight_scheme *out)
{
    for (int i = 0; i < FSDPC_WEIGHT_SCHEMES; i++)
        if (strcmp(schemes[i].name, name) == 0) {
            *out = (fsdpc_weight_scheme)i;
            return FSDPC_OK;
        }
    return fsdpc_fail(FSDPC_ERR_VALUE,
                      "no scheme of quantised weights is called '%.40s'; there are"
#define X(NAME, text, bits, block, coded_scales) " " text
                      FSDPC_WEIGHT_TABLE(X),
#undef X
                      name);
}

/* ---- encoding ---- */

/* Stores the scales of a row. */
static void store_scales(const fsdpc_weight_row *row, const float *scales, uint8_t *bytes)
{
    if (!row->coded_scales) {
        memcpy(bytes, scales, row->blocks * sizeof *scales);
        return;
    }
    float range[2] = {scales[0], scales[0]};
    for (size_t b = 1; b < row->blocks; b++) {
        range[0] = fminf(range[0], scales[b]);
        range[1] = fmaxf(range[1], scales[b]);
    }
    const float step = (range[1] - range[0]) / 255;
    range[1] = step;
    memcpy(bytes, range, sizeof range);
    for (size_t b = 0; b < row->blocks; b++)
        bytes[row->scales_at + b] =
            step > 0 ? (uint8_t)fminf(rintf((scales[b] - range[0]) / step), 255) : 0;
}

/* Writes the codes of a block's n elements, which are multiplied by `inverse` first. */
static void encode_block(const fsdpc_weight_row *row, const float *x, size_t n, float inverse,
                         uint8_t *codes)
{
    float middles[FSDPC_WEIGHT_LEVELS - 1];
    if (!row->nibbles) {
        for (size_t i = 0; i < n; i++)
            codes[i] = (uint8_t)(int8_t)rintf(fmaxf(fminf(x[i] * inverse, 1), -1) * 127);
        return;
    }
    for (int t = 0; t < FSDPC_WEIGHT_LEVELS - 1; t++)
        middles[t] = (row->levels[t] + row->levels[t + 1]) / 2;
    for (size_t i = 0; i < n; i += 2) {
        int high = 0, low = 0;
        float a = x[i] * inverse, b = i + 1 < n ? x[i + 1] * inverse : 0;
        for (int t = 0; t < FSDPC_WEIGHT_LEVELS - 1; t++) {
            high += a > middles[t];
            low += b > middles[t];
        }
        codes[i / 2] = (uint8_t)(high << 4 | low);
    }
}

fsdpc_status fsdpc_weight_encode(fsdpc_weight_scheme scheme, size_t rows, size_t cols,
                                 const float *values, uint8_t *codes)
{
    const fsdpc_weight_row row = fsdpc_weight_row_of(scheme, cols);
    float *scales = malloc(fsdpc_max_size(row.blocks, 1) * sizeof *scales);
    if (!scales)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to quantise a weight");
    fsdpc_status st = FSDPC_OK;
    if (rows * row.bytes > 0 && cols == 0)
        memset(codes, 0, rows * row.bytes); /* nf4's header */
    for (size_t r = 0; r < rows && cols && st == FSDPC_OK;
         r++, values += cols, codes += row.bytes) {
        float sum = 0;
        for (size_t b = 0; b < row.blocks; b++) {
            size_t at = b * row.block, n = fsdpc_min_size(row.block, cols - at);
            float most = 0;
            for (size_t i = at; i < at + n; i++) {
                most = fmaxf(most, fabsf(values[i]));
                sum += values[i] * 0; /* not 0 if a value is not finite */
            }
            scales[b] = most;
            encode_block(&row, values + at, n, 1 / fmaxf(most, 1e-38f),
                         codes + row.codes_at + (row.nibbles ? at / 2 : at));
        }
        store_scales(&row, scales, codes);
        if (sum != 0)
            st = fsdpc_fail(FSDPC_ERR_VALUE,
                            "row %zu of a weight has infinities or NaN, which %s cannot store", r,
                            fsdpc_weight_name(scheme));
    }
    free(scales);
    return st;
}

void fsdpc_dequantize_f64(const void *arg, size_t first, size_t last)
{
    const fsdpc_dequantize_args *a = arg;
    const fsdpc_weight_row *row = &a->row;
    for (size_t r = first; r < last; r++) {
        const uint8_t *bytes = a->codes + r * row->bytes, *codes = bytes + row->codes_at;
        for (size_t i = 0; i < a->n; i++) {
            size_t col = a->first + i;
            float level = row->nibbles ? row->levels[codes[col / 2] >> (col % 2 ? 0 : 4) & 15]
                                       : (float)(int8_t)codes[col];
            ((double *)a->out)[r * a->n + i] =
                (double)(level * fsdpc_weight_scale(row, bytes, col / row->block));
        }
    }
}
