/* The arithmetic of block codes, and the table's `encode` and `decode`.
 *
 * Included by flat_step_body.h, whose multiply-adds are fused on every path. All other operations
 * are rounded one by one, so every path gives the same bytes.
 */

enum { CODE_1 = 0x3f800000 }; /* bits of 1.0f */

/* Returns whether levels are roots of values, as of states; others are proportional to them. */
FSDPC_INLINE bool code_has_roots(fsdpc_code code)
{
    return code == FSDPC_CODE_ROOT8 || code == FSDPC_CODE_UROOT8;
}

FSDPC_INLINE float code_levels(fsdpc_code code)
{
    return code == FSDPC_CODE_ROOT8 ? 127.0f : 255.0f;
}

/* Loads n bytes as numbers; the lanes after them are 0. (gcc splits __builtin_convertvector of bytes
 * into single elements.) */
FSDPC_INLINE fsdpc_vi code_load(fsdpc_code code, const uint8_t *codes, size_t n)
{
    uint8_t few[FSDPC_LANES] = {0};
    if (!FSDPC_WHOLE(n))
        codes = memcpy(few, codes, n);
#if defined(FSDPC_VEC_AVX512)
    __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)codes);
    fsdpc_vi q = (fsdpc_vi)(code == FSDPC_CODE_ROOT8 ? _mm512_cvtepi8_epi32(bytes)
                                                     : _mm512_cvtepu8_epi32(bytes));
#elif defined(FSDPC_VEC_AVX2)
    __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)codes);
    fsdpc_vi q = (fsdpc_vi)(code == FSDPC_CODE_ROOT8 ? _mm256_cvtepi8_epi32(bytes)
                                                     : _mm256_cvtepu8_epi32(bytes));
#else
    fsdpc_vi q;
    for (int i = 0; i < FSDPC_LANES; i++)
        q[i] = code == FSDPC_CODE_ROOT8 ? (int8_t)codes[i] : codes[i];
#endif
    return q;
}

/* Stores the low bytes of n numbers. */
FSDPC_INLINE void code_store(uint8_t *codes, fsdpc_vi q, size_t n)
{
    uint8_t bytes[FSDPC_LANES];
#if defined(FSDPC_VEC_AVX512)
    _mm_storeu_si128((__m128i *)(void *)bytes, _mm512_cvtepi32_epi8((__m512i)q));
#elif defined(FSDPC_VEC_AVX2)
    __m256i low = _mm256_shuffle_epi8((__m256i)q, _mm256_set1_epi32(0x0c080400));
    _mm_storel_epi64(
        (__m128i *)(void *)bytes,
        _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
#else
    for (int i = 0; i < FSDPC_LANES; i++)
        bytes[i] = (uint8_t)q[i];
#endif
    memcpy(codes, bytes, n);
}

/* Returns the largest level of a code whose values are proportional to its levels, and a power of 2
 * that keeps products of levels and a scale below the scale. */
FSDPC_INLINE float code_top(fsdpc_code code)
{
    return code == FSDPC_CODE_FP8 ? 448.0f : code == FSDPC_CODE_INT4 ? 7.0f : 127.0f;
}

FSDPC_INLINE float code_shrink(fsdpc_code code)
{
    return code == FSDPC_CODE_FP8 ? 0x1p-9f : code == FSDPC_CODE_INT4 ? 0x1p-3f : 0x1p-7f;
}

/* Returns the numbers that e4m3 bytes stand for. */
FSDPC_INLINE fsdpc_vf code_of_fp8(fsdpc_vi q)
{
    fsdpc_vi magnitude = q & 0x7f, small = magnitude < 8;
    fsdpc_vi normal = (magnitude << 20) + (120 << 23);
    fsdpc_vi tiny = (fsdpc_vi)(__builtin_convertvector(magnitude, fsdpc_vf) * 0x1p-9f);
    fsdpc_vu sign = ((fsdpc_vu)q & 0x80u) << 24;
    return (fsdpc_vf)((fsdpc_vu)((normal & ~small) | (tiny & small)) | sign);
}

/* Returns e4m3 bytes, rounded to nearest even, of numbers up to 448; other bits may be set. */
FSDPC_INLINE fsdpc_vi code_to_fp8(fsdpc_vf x)
{
    fsdpc_vf magnitude = fsdpc_vf_abs(x);
    fsdpc_vi bits = (fsdpc_vi)magnitude, small = bits < (121 << 23);
    fsdpc_vi normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);
    fsdpc_vi tiny = (fsdpc_vi)step_fused_by(magnitude, 0x1p9f, fsdpc_vf_splat(0x1.8p23f)) & 0xf;
    fsdpc_vi sign = (fsdpc_vi)(((fsdpc_vu)x >> 24) & 0x80u);
    return (normal & ~small) | (tiny & small) | sign;
}

/* Returns the values of n codes that are proportional to their levels. */
FSDPC_INLINE fsdpc_vf code_decode_linear(fsdpc_code code, const uint8_t *codes, float scale,
                                         size_t n)
{
    fsdpc_vi q = code_load(FSDPC_CODE_ROOT8, codes, n);
    fsdpc_vf level = code == FSDPC_CODE_FP8 ? code_of_fp8(q) : __builtin_convertvector(q, fsdpc_vf);
    return level * (scale * code_shrink(code)) / (code_top(code) * code_shrink(code));
}

FSDPC_INLINE void code_encode_linear(fsdpc_code code, uint8_t *codes, fsdpc_vf value, float inverse,
                                     size_t n)
{
    fsdpc_vi q = code == FSDPC_CODE_FP8
                     ? code_to_fp8(value * inverse * (1 / code_shrink(code)))
                     : (fsdpc_vi)step_fused_by(value, inverse, fsdpc_vf_splat(0x1.8p23f));
    code_store(codes, q & 0xff, n);
}

/* Returns the values of n codes. Shifting the bits of a root that is at most 1 drops its sign. */
FSDPC_INLINE fsdpc_vf code_decode(fsdpc_code code, const uint8_t *codes, float maximum, size_t n)
{
    if (!code_has_roots(code))
        return code_decode_linear(code, codes, maximum, n);
    fsdpc_vi q = code_load(code, codes, n);
    fsdpc_vf root = __builtin_convertvector(q, fsdpc_vf) * (1 / code_levels(code));
    fsdpc_vi share = (fsdpc_vi)(((fsdpc_vu)root << 2) - 3u * CODE_1);
    if (code == FSDPC_CODE_UROOT8)
        return (fsdpc_vf)share * maximum;
    return fsdpc_vf_copysign((fsdpc_vf)(share & ~(q == 0)), root) * maximum;
}

/* Encodes n values of a block; `inverse` is the inverse of its maximum. Adding 1.5 * 2^23 rounds to
 * an integer, which is then in the low bits. */
FSDPC_INLINE void code_encode(fsdpc_code code, uint8_t *codes, fsdpc_vf value, float inverse,
                              size_t n)
{
    if (!code_has_roots(code)) {
        code_encode_linear(code, codes, value, inverse, n);
        return;
    }
    const float levels = code_levels(code);
    fsdpc_vi share = (fsdpc_vi)(fsdpc_vf_abs(value) * inverse);
    fsdpc_vf root = (fsdpc_vf)((share >> 2) + (CODE_1 - CODE_1 / 4));
    if (code == FSDPC_CODE_UROOT8)
        root = fsdpc_vf_max(root, fsdpc_vf_splat(1 / levels));
    else
        root = (fsdpc_vf)((fsdpc_vu)root | ((fsdpc_vu)value & 0x80000000u));
    fsdpc_vi q = (fsdpc_vi)step_fused_by(root, levels, fsdpc_vf_splat(0x1.8p23f));
    code_store(codes, q, n);
}

/* Returns the larger magnitude of each lane as bits, which sort like magnitudes with NaN last. */
FSDPC_INLINE fsdpc_vi code_most(fsdpc_vi most, fsdpc_vf value)
{
    fsdpc_vi bits = (fsdpc_vi)fsdpc_vf_abs(value);
#if defined(FSDPC_VEC_AVX512)
    return (fsdpc_vi)_mm512_max_epi32((__m512i)bits, (__m512i)most);
#elif defined(FSDPC_VEC_AVX2)
    return (fsdpc_vi)_mm256_max_epi32((__m256i)bits, (__m256i)most);
#else
    fsdpc_vi above = bits > most;
    return (bits & above) | (most & ~above);
#endif
}

FSDPC_INLINE float code_maximum(fsdpc_vi most)
{
    int32_t lanes[FSDPC_LANES];
    memcpy(lanes, &most, sizeof most);
    for (int half = FSDPC_LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    float maximum = fsdpc_f32_from_bits((uint32_t)lanes[0]);
    return maximum < 0x1p-120f ? 0 : maximum;
}

/* Returns a block's scale. If rounding up would overflow, the largest element has a level's rounding
 * error. */
FSDPC_INLINE float code_scale(fsdpc_code code, float maximum)
{
    uint32_t bits = fsdpc_f32_bits(maximum), up = (bits + 0xff) & ~0xffu;
    if (code_has_roots(code) || bits >= 0x7f800000u)
        return maximum;
    return fsdpc_f32_from_bits(up >= 0x7f800000u ? bits & ~0xffu : up);
}

/* Encodes a block of n values with this scale; `values` has room for a whole vector more. */
FSDPC_INLINE void code_block(fsdpc_code code, uint8_t *codes, const float *values, float scale,
                             size_t n)
{
    /* 448 / scale might overflow. */
    float top = code == FSDPC_CODE_FP8 ? code_top(code) * code_shrink(code) : code_top(code);
    float inverse = scale == 0 ? 0 : (code_has_roots(code) ? 1 : top) / scale;
    size_t i = 0;
    for (; i + FSDPC_LANES <= n; i += FSDPC_LANES)
        code_encode(code, codes + i, fsdpc_vf_load(values + i), inverse, FSDPC_LANES);
    if (i < n)
        code_encode(code, codes + i, fsdpc_vf_load(values + i), inverse, n - i);
}

static void encode_part(void *arg, size_t begin, size_t end)
{
    const fsdpc_code_args *a = arg;
    float values[FSDPC_CODE_BLOCK + FSDPC_LANES];
    float *scale = a->maxima + fsdpc_code_blocks_of(a->code, begin, a->row);
    const size_t block = fsdpc_code_block(a->code);
    for (size_t at = begin, n; at < end; at += n, scale++) {
        fsdpc_vi most = {0};
        n = fsdpc_min_size(block, a->row - at % a->row);
        memcpy(values, a->values + at, n * sizeof *values);
        memset(values + n, 0, FSDPC_LANES * sizeof *values);
        for (size_t i = 0; i < n; i += FSDPC_LANES)
            most = code_most(most, fsdpc_vf_load(values + i));
        *scale = code_scale(a->code, code_maximum(most));
        switch (a->code) {
#define X(NAME, name, block)                                                                       \
    case FSDPC_CODE_##NAME:                                                                        \
        code_block(FSDPC_CODE_##NAME, a->codes + at, values, *scale, n);                           \
        break;
            FSDPC_CODE_TABLE(X)
#undef X
        }
    }
}

FSDPC_INLINE void decode_block(fsdpc_code code, const uint8_t *codes, float *values, float scale,
                               size_t n)
{
    for (size_t i = 0; i < n; i += FSDPC_LANES) {
        size_t some = fsdpc_min_size(FSDPC_LANES, n - i);
        fsdpc_vf_store_n(values + i, code_decode(code, codes + i, scale, some), some);
    }
}

static void decode_part(void *arg, size_t begin, size_t end)
{
    const fsdpc_code_args *a = arg;
    const float *scale = a->maxima + fsdpc_code_blocks_of(a->code, begin, a->row);
    const size_t block = fsdpc_code_block(a->code);
    for (size_t at = begin, n; at < end; at += n, scale++) {
        n = fsdpc_min_size(block, a->row - at % a->row);
        switch (a->code) {
#define X(NAME, name, block)                                                                       \
    case FSDPC_CODE_##NAME:                                                                        \
        decode_block(FSDPC_CODE_##NAME, a->codes + at, a->values + at, *scale, n);                 \
        break;
            FSDPC_CODE_TABLE(X)
#undef X
        }
    }
}

static fsdpc_status flat_encode(const fsdpc_code_args *args, fsdpc_stream *stream)
{
    fsdpc_code_args a = *args;
    fsdpc_flat_split(stream, a.numel, a.row, encode_part, &a);
    return FSDPC_OK;
}

static fsdpc_status flat_decode(const fsdpc_code_args *args, fsdpc_stream *stream)
{
    fsdpc_code_args a = *args;
    fsdpc_flat_split(stream, a.numel, a.row, decode_part, &a);
    return FSDPC_OK;
}
