/* Memory streams: prefetching ahead, and stores that bypass the cache.
 *
 * Included by flat_cpu_body.h. An ordinary store first reads the line that it overwrites; a
 * streaming store does not. With prefetching and streaming, at 2^22 elements and one thread, a
 * cast to bf16 moved 28 GB/s instead of 17, and a sum of two sources 25 instead of 18. Without
 * streaming stores, prefetching makes a norm of 2^26 elements a fifth faster. Below
 * STREAM_NUMEL_MIN elements, a reader may find the output in cache, so ordinary stores are used.
 *
 * Streaming stores need aligned addresses, pay off only if whole lines are written at once (hence
 * pairs of vectors), and are not ordered with later stores. stream_end() must be called before the
 * data is declared complete.
 */
enum { STREAM_NUMEL_MIN = 1 << 20 };

static inline bool can_stream(const void *dst, size_t numel)
{
#if defined(FSDPC_VEC_AVX512) || defined(FSDPC_VEC_AVX2)
    return numel >= STREAM_NUMEL_MIN && (uintptr_t)dst % 64 == 0;
#else
    (void)dst, (void)numel;
    return false;
#endif
}

/* Prefetches the data about 2 KiB ahead. The hardware prefetcher stops at every page boundary, and
 * streams that begin together reach their page boundaries together. */
FSDPC_INLINE void prefetch_ahead(const void *base, size_t i, fsdpc_dtype dtype, size_t numel)
{
    size_t bytes = dtype == FSDPC_F64 ? 8 : dtype == FSDPC_F32 ? 4 : 2;
    uintptr_t at = (uintptr_t)base + i * bytes + 2048; /* past the end, prefetching does nothing */
    for (size_t line = 0; line < numel * bytes; line += 64)
        __builtin_prefetch((const void *)(at + line));
}

FSDPC_INLINE fsdpc_vh to_half(fsdpc_vf v, fsdpc_dtype dtype)
{
    return dtype == FSDPC_BF16 ? fsdpc_vf_to_bf16(v) : fsdpc_vf_to_f16(v);
}

/* Stores elements i .. i + 2 FSDPC_LANES - 1 of an F32, BF16 or F16 array; `base` is aligned to 64
 * bytes and i is a multiple of 2 FSDPC_LANES. */
FSDPC_INLINE void stream_pair(void *base, size_t i, fsdpc_dtype dtype, fsdpc_vf low, fsdpc_vf high)
{
#if defined(FSDPC_VEC_AVX512)
    if (dtype == FSDPC_F32) {
        _mm512_stream_ps((float *)base + i, (__m512)low);
        _mm512_stream_ps((float *)base + i + FSDPC_LANES, (__m512)high);
    } else {
        __m512i both = _mm512_castsi256_si512((__m256i)to_half(low, dtype));
        both = _mm512_inserti64x4(both, (__m256i)to_half(high, dtype), 1);
        _mm512_stream_si512((void *)((uint16_t *)base + i), both);
    }
#elif defined(FSDPC_VEC_AVX2)
    if (dtype == FSDPC_F32) {
        _mm256_stream_ps((float *)base + i, (__m256)low);
        _mm256_stream_ps((float *)base + i + FSDPC_LANES, (__m256)high);
    } else {
        __m256i both =
            _mm256_set_m128i((__m128i)to_half(high, dtype), (__m128i)to_half(low, dtype));
        _mm256_stream_si256((void *)((uint16_t *)base + i), both);
    }
#else
    fsdpc_vf_store_as(base, i, dtype, low);
    fsdpc_vf_store_as(base, i + FSDPC_LANES, dtype, high);
#endif
}

/* Stores the pair, with streaming stores if the constant `stream` is true. */
FSDPC_INLINE void store_pair(void *base, size_t i, fsdpc_dtype dtype, fsdpc_vf low, fsdpc_vf high,
                             bool stream)
{
    if (stream) {
        stream_pair(base, i, dtype, low, high);
    } else {
        fsdpc_vf_store_as(base, i, dtype, low);
        fsdpc_vf_store_as(base, i + FSDPC_LANES, dtype, high);
    }
}

FSDPC_INLINE void stream_end(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
