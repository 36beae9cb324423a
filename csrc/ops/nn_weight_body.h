/* Reading quantised weights: the table's `dequantize` (ops/weight_code.h).
 *
 * Levels of 4-bit codes are in registers, and a permutation looks up a vector of them. Every path
 * multiplies a level by a scale once, so all have the same bits.
 */

/* Returns the levels of a vector of nibbles. */
FSDPC_INLINE fsdpc_vf weight_nibbles(const float *levels, const uint8_t *codes)
{
#if defined(FSDPC_VEC_AVX512)
    int32_t eight[2];
    memcpy(eight, codes, sizeof eight);
    __m512i words = _mm512_inserti64x4(_mm512_set1_epi32(eight[0]), _mm256_set1_epi32(eight[1]), 1);
    __m512i shifts = _mm512_set_epi32(24, 28, 16, 20, 8, 12, 0, 4, 24, 28, 16, 20, 8, 12, 0, 4);
    return (fsdpc_vf)_mm512_permutexvar_ps(_mm512_srlv_epi32(words, shifts),
                                           _mm512_loadu_ps(levels));
#elif defined(FSDPC_VEC_AVX2)
    int32_t four;
    memcpy(&four, codes, sizeof four);
    __m256i at =
        _mm256_srlv_epi32(_mm256_set1_epi32(four), _mm256_set_epi32(24, 28, 16, 20, 8, 12, 0, 4));
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels), at);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels + 8), at);
    return (fsdpc_vf)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(at, 28));
#else
    fsdpc_vf found;
    for (int i = 0; i < FSDPC_LANES; i++)
        found[i] = levels[codes[i / 2] >> (i % 2 ? 0 : 4) & 15];
    return found;
#endif
}

FSDPC_INLINE fsdpc_vf weight_bytes(const uint8_t *codes)
{
#if defined(FSDPC_VEC_AVX512)
    __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)codes);
    return (fsdpc_vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(FSDPC_VEC_AVX2)
    __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)codes);
    return (fsdpc_vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
    fsdpc_vf found;
    for (int i = 0; i < FSDPC_LANES; i++)
        found[i] = (int8_t)codes[i];
    return found;
#endif
}

/* Writes n elements of a block, of which the first has its code at `codes`. */
FSDPC_INLINE void dequantize_step(const fsdpc_weight_row *row, const uint8_t *codes, float scale,
                                  void *out, size_t at, size_t n, fsdpc_dtype dtype)
{
    uint8_t few[FSDPC_LANES] = {0};
    if (!FSDPC_WHOLE(n))
        codes = memcpy(few, codes, row->nibbles ? (n + 1) / 2 : n);
    fsdpc_vf level = row->nibbles ? weight_nibbles(row->levels, codes) : weight_bytes(codes);
    fsdpc_vf_store_as_n(out, at, dtype, level * scale, n);
}

FSDPC_INLINE void dequantize_range(const fsdpc_dequantize_args *args, size_t first, size_t last,
                                   fsdpc_dtype dtype)
{
    const fsdpc_weight_row *row = &args->row;
    for (size_t r = first; r < last; r++) {
        const uint8_t *bytes = args->codes + r * row->bytes, *codes = bytes + row->codes_at;
        size_t at = r * args->n - args->first, end = args->first + args->n;
        for (size_t col = args->first; col < end;) {
            size_t stop = fsdpc_min_size(col + row->block, end), i = col;
            float scale = fsdpc_weight_scale(row, bytes, col / row->block);
            FSDPC_EACH_VECTOR(i, n, stop,
                              dequantize_step(row, codes + (row->nibbles ? i / 2 : i), scale,
                                              args->out, at + i, n, dtype));
            col = stop;
        }
    }
}

NN_FLOAT_KERNELS(dequantize_range, fsdpc_dequantize_args, fsdpc_dequantize_f64)

static fsdpc_status dequantize(const fsdpc_dequantize_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(nn_check_float(args->dtype, "a quantised weight"));
    nn_for(stream, args->rows, nn_row_grain(args->n), dequantize_range_kernels[args->dtype], args);
    return FSDPC_OK;
}
