/* C (m x n) = or += A B on small packed operands, in AMX tiles.
 *
 * The contract is that of attention_vector_gemm.h, except that units are pairs of bf16, a_col is 1,
 * and m, n and k are multiples of 16. Tiles 0-3 hold a 32 x 32 square of C while k ascends; tiles 4
 * and 5 hold rows of A, and tiles 6 and 7 columns of B. gemm_begin configures the calling thread's
 * tiles.
 */
#ifndef FSDPC_OPS_ATTENTION_TILE_GEMM_H
#define FSDPC_OPS_ATTENTION_TILE_GEMM_H

#include "ops/attention_units.h"

static void gemm_begin(void)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = 16;
    }
    _tile_loadconfig(&config);
}

static void gemm_end(void)
{
    _tile_release();
}

/* 32 x 32 of C */
FSDPC_INLINE void tile_square(const gemm_shape *g, const unit *a, const unit *b, float *c)
{
    size_t a_bytes = 4 * g->a_row, b_bytes = 4 * g->b_row, c_bytes = 4 * g->c_row;
    float *lower = c + 16 * g->c_row;
    if (g->accumulate) {
        _tile_loadd(0, c, c_bytes);
        _tile_loadd(1, c + 16, c_bytes);
        _tile_loadd(2, lower, c_bytes);
        _tile_loadd(3, lower + 16, c_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (size_t kk = 0; kk < g->k; kk += 16) {
        _tile_loadd(4, a + kk, a_bytes);
        _tile_loadd(6, b + kk * g->b_row, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + kk * g->b_row + 16, b_bytes);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + kk + 16 * g->a_row, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + 16, c_bytes);
    _tile_stored(2, lower, c_bytes);
    _tile_stored(3, lower + 16, c_bytes);
}

/* 16 x 16 of C, at the edges of m or n */
FSDPC_INLINE void tile_single(const gemm_shape *g, const unit *a, const unit *b, float *c)
{
    if (g->accumulate)
        _tile_loadd(0, c, 4 * g->c_row);
    else
        _tile_zero(0);
    for (size_t kk = 0; kk < g->k; kk += 16) {
        _tile_loadd(4, a + kk, 4 * g->a_row);
        _tile_loadd(6, b + kk * g->b_row, 4 * g->b_row);
        _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, c, 4 * g->c_row);
}

static void gemm(const gemm_shape *g, const unit *a, const unit *b, float *c)
{
    for (size_t i = 0; i < g->m; i += 32)
        for (size_t j = 0; j < g->n; j += 32) {
            const unit *rows = a + i * g->a_row;
            if (i + 32 <= g->m && j + 32 <= g->n) {
                tile_square(g, rows, b + j, c + i * g->c_row + j);
                continue;
            }
            for (size_t r = i; r < i + 32 && r < g->m; r += 16)
                for (size_t s = j; s < j + 32 && s < g->n; s += 16)
                    tile_single(g, a + r * g->a_row, b + s, c + r * g->c_row + s);
        }
}

#endif
