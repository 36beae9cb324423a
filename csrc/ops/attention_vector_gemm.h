/* C (m x n) = or += A B on small packed operands, in vector registers.
 *
 * A unit is a float or, with ATTENTION_PAIR 2, two bf16 values that are adjacent along k, with the
 * first in the lower half. Unit (i, kk) of A is a[i * a_row + kk * a_col], with arbitrary strides;
 * row kk of B holds n units, where n is a multiple of 16. C stays in registers while k runs in
 * ascending order. A tile has 6 rows and as many columns as the registers allow: 24 accumulators
 * with AVX-512's 32 registers, and 12 with 16 registers.
 */
#ifndef FSDPC_OPS_ATTENTION_VECTOR_GEMM_H
#define FSDPC_OPS_ATTENTION_VECTOR_GEMM_H

#include "ops/attention_units.h"

enum { TILE_ROWS = 6, TILE_VECTORS = FSDPC_LANES == 16 ? 4 : 2 };

FSDPC_INLINE fsdpc_vf tile_splat(const unit *p)
{
#if ATTENTION_PAIR == 2
    return (fsdpc_vf)_mm512_set1_epi32((int)*p);
#else
    return fsdpc_vf_splat(*p);
#endif
}

/* a . b + c */
FSDPC_INLINE fsdpc_vf tile_dot(fsdpc_vf a, fsdpc_vf b, fsdpc_vf c)
{
#if ATTENTION_PAIR == 2
    return (fsdpc_vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#else
    return fsdpc_vf_fma(a, b, c);
#endif
}

/* Computes one tile; `rows` and `vectors` are constants after inlining. */
FSDPC_INLINE void tile_run(int rows, int vectors, const gemm_shape *g, const unit *a, const unit *b,
                           float *c)
{
    fsdpc_vf sum[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            sum[i][j] = g->accumulate ? fsdpc_vf_load(c + (size_t)i * g->c_row + j * FSDPC_LANES)
                                      : (fsdpc_vf){0};
    for (size_t kk = 0; kk < g->k; kk++, a += g->a_col, b += g->b_row) {
        fsdpc_vf column[TILE_VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            column[j] = unit_load(b + j * FSDPC_LANES);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            fsdpc_vf row = tile_splat(a + (size_t)i * g->a_row);
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++)
                sum[i][j] = tile_dot(row, column[j], sum[i][j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            fsdpc_vf_store(c + (size_t)i * g->c_row + j * FSDPC_LANES, sum[i][j]);
}

/* Computes all rows of a strip of C that is `vectors` vectors wide. */
FSDPC_INLINE void tile_columns(int vectors, const gemm_shape *g, const unit *a, const unit *b,
                               float *c)
{
    size_t i = 0;
    for (; i + TILE_ROWS <= g->m; i += TILE_ROWS)
        tile_run(TILE_ROWS, vectors, g, a + i * g->a_row, b, c + i * g->c_row);
    a += i * g->a_row;
    c += i * g->c_row;
    switch (g->m - i) {
    case 5:
        tile_run(5, vectors, g, a, b, c);
        break;
    case 4:
        tile_run(4, vectors, g, a, b, c);
        break;
    case 3:
        tile_run(3, vectors, g, a, b, c);
        break;
    case 2:
        tile_run(2, vectors, g, a, b, c);
        break;
    case 1:
        tile_run(1, vectors, g, a, b, c);
        break;
    default:
        break;
    }
}

static void gemm(const gemm_shape *g, const unit *a, const unit *b, float *c)
{
    size_t j = 0;
    for (; j + TILE_VECTORS * FSDPC_LANES <= g->n; j += TILE_VECTORS * FSDPC_LANES)
        tile_columns(TILE_VECTORS, g, a, b + j, c + j);
#if defined(FSDPC_VEC_AVX512) /* on other paths a tile is at most 16 columns wide */
    b += j;
    c += j;
    switch ((g->n - j) / FSDPC_LANES) {
    case 3:
        tile_columns(3, g, a, b, c);
        break;
    case 2:
        tile_columns(2, g, a, b, c);
        break;
    case 1:
        tile_columns(1, g, a, b, c);
        break;
    default:
        break;
    }
#endif
}

static void gemm_begin(void) {}

static void gemm_end(void) {}

#endif
