/* SwiGLU, forward and backward, and dropout (see nn_internal.h for how bodies are compiled).
 *
 * For element i, dropout uses word first + i of a Philox stream. FSDPC_LANES blocks of four words
 * are computed concurrently; the words are those of base/random.h.
 */

FSDPC_INLINE void swiglu_step(const fsdpc_swiglu_args *args, size_t i, size_t n, fsdpc_dtype dtype)
{
    fsdpc_vf gate = fsdpc_vf_load_as_n(args->gate, i, dtype, n);
    fsdpc_vf up = fsdpc_vf_load_as_n(args->up, i, dtype, n);
    fsdpc_vf_store_as_n(args->out, i, dtype, gate * fsdpc_vf_sigmoid(gate) * up, n);
}

FSDPC_INLINE void swiglu_range(const fsdpc_swiglu_args *args, size_t first, size_t last,
                               fsdpc_dtype dtype)
{
    size_t i = first;
    FSDPC_EACH_VECTOR(i, n, last, swiglu_step(args, i, n, dtype));
}

FSDPC_INLINE void swiglu_backward_step(const fsdpc_swiglu_args *args, size_t i, size_t n,
                                       fsdpc_dtype dtype)
{
    fsdpc_vf gate = fsdpc_vf_load_as_n(args->gate, i, dtype, n);
    fsdpc_vf up = fsdpc_vf_load_as_n(args->up, i, dtype, n);
    fsdpc_vf dout = fsdpc_vf_load_as_n(args->dout, i, dtype, n);
    fsdpc_vf sigmoid = fsdpc_vf_sigmoid(gate);
    fsdpc_vf slope = sigmoid * fsdpc_vf_fma(gate, 1.0f - sigmoid, fsdpc_vf_splat(1.0f));
    fsdpc_vf_store_as_n(args->dgate, i, dtype, dout * up * slope, n);
    fsdpc_vf_store_as_n(args->dup, i, dtype, dout * (gate * sigmoid), n);
}

FSDPC_INLINE void swiglu_backward_range(const fsdpc_swiglu_args *args, size_t first, size_t last,
                                        fsdpc_dtype dtype)
{
    size_t i = first;
    FSDPC_EACH_VECTOR(i, n, last, swiglu_backward_step(args, i, n, dtype));
}

NN_FLOAT_KERNELS(swiglu_range, fsdpc_swiglu_args, fsdpc_nn_swiglu_f64)
NN_FLOAT_KERNELS(swiglu_backward_range, fsdpc_swiglu_args, fsdpc_nn_swiglu_backward_f64)

static fsdpc_status swiglu(const fsdpc_swiglu_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(nn_check_float(args->dtype, "swiglu"));
    nn_for(stream, args->numel, NN_GRAIN, swiglu_range_kernels[args->dtype], args);
    return FSDPC_OK;
}

static fsdpc_status swiglu_backward(const fsdpc_swiglu_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(nn_check_float(args->dtype, "swiglu"));
    nn_for(stream, args->numel, NN_GRAIN, swiglu_backward_range_kernels[args->dtype], args);
    return FSDPC_OK;
}

/* Low and high halves of the 64-bit products a * m. */
typedef struct wide_product {
    fsdpc_vu low, high;
} wide_product;

FSDPC_INLINE wide_product multiply_wide(fsdpc_vu a, uint32_t m)
{
#if defined(FSDPC_VEC_AVX512)
    __m512i factor = _mm512_set1_epi32((int)m);
    __m512i even = _mm512_mul_epu32((__m512i)a, factor);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
    __m512i low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
    __m512i high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    return (wide_product){(fsdpc_vu)low, (fsdpc_vu)high};
#elif defined(FSDPC_VEC_AVX2)
    __m256i factor = _mm256_set1_epi32((int)m);
    __m256i even = _mm256_mul_epu32((__m256i)a, factor);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), factor);
    __m256i low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    __m256i high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    return (wide_product){(fsdpc_vu)low, (fsdpc_vu)high};
#else
    typedef uint64_t quads __attribute__((vector_size(FSDPC_LANES * 4)));
    quads even = ((quads)a & 0xffffffffu) * m, odd = ((quads)a >> 32) * m;
    return (wide_product){(fsdpc_vu)((even & 0xffffffffu) | (odd << 32)),
                          (fsdpc_vu)((even >> 32) | (odd & 0xffffffff00000000u))};
#endif
}

enum { DROPOUT_WORDS = 4 * FSDPC_LANES };

/* Computes words 4 * block .. of the stream: fsdpc_philox_block for FSDPC_LANES blocks at once. */
FSDPC_INLINE void dropout_words(uint64_t seed, uint64_t stream, uint64_t block,
                                uint32_t words[DROPOUT_WORDS])
{
    uint32_t lanes[4][FSDPC_LANES];
    for (uint32_t l = 0; l < FSDPC_LANES; l++) {
        lanes[0][l] = (uint32_t)(block + l);
        lanes[1][l] = (uint32_t)((block + l) >> 32);
        lanes[2][l] = (uint32_t)stream;
        lanes[3][l] = (uint32_t)(stream >> 32);
    }
    fsdpc_vu c[4];
    memcpy(c, lanes, sizeof c);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        wide_product p0 = multiply_wide(c[0], 0xD2511F53u), p1 = multiply_wide(c[2], 0xCD9E8D57u);
        c[0] = p1.high ^ c[1] ^ k0;
        c[1] = p1.low;
        c[2] = p0.high ^ c[3] ^ k1;
        c[3] = p0.low;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    memcpy(lanes, c, sizeof lanes);
    for (int l = 0; l < FSDPC_LANES; l++)
        for (int w = 0; w < 4; w++)
            words[4 * l + w] = lanes[w][l];
}

FSDPC_INLINE void dropout_step(const fsdpc_dropout_args *args, size_t i, size_t n,
                               const uint32_t *words, int32_t threshold, float scale,
                               fsdpc_dtype dtype)
{
    fsdpc_vu word;
    memcpy(&word, words, sizeof word);
    fsdpc_vi keep = (fsdpc_vi)(word >> 8) >= threshold;
    fsdpc_vf x = fsdpc_vf_load_as_n(args->x, i, dtype, n) * scale;
    fsdpc_vf_store_as_n(args->out, i, dtype, fsdpc_vf_select(keep, x, (fsdpc_vf){0}), n);
}

FSDPC_INLINE void dropout_range(const fsdpc_dropout_args *args, size_t first, size_t last,
                                fsdpc_dtype dtype)
{
    /* keep if uniform >= p, in integers: 24 bits against p * 2^24 rounded up */
    int32_t threshold = (int32_t)ceil(args->p * 0x1p24);
    float scale = args->p < 1 ? (float)(1 / (1 - args->p)) : 0.0f;
    uint64_t seed = args->key ? args->key->seed : args->seed;
    uint64_t stream = args->stream + (args->key ? args->key->shift : 0);
    for (size_t i = first, numel; i < last; i += numel) {
        uint32_t words[DROPOUT_WORDS + FSDPC_LANES]; /* the last vector may read past the words */
        uint64_t word = args->first + i;
        size_t skip = word % 4, j = 0;
        dropout_words(seed, stream, word / 4, words);
        memset(words + DROPOUT_WORDS, 0, FSDPC_LANES * sizeof *words);
        numel = fsdpc_min_size(DROPOUT_WORDS - skip, last - i);
        if (dtype == FSDPC_F64) {
            for (; j < numel; j++)
                ((double *)args->out)[i + j] =
                    (int32_t)(words[skip + j] >> 8) >= threshold
                        ? ((const double *)args->x)[i + j] / (1 - args->p)
                        : 0;
            continue;
        }
        FSDPC_EACH_VECTOR(j, n, numel,
                          dropout_step(args, i + j, n, words + skip + j, threshold, scale, dtype));
    }
}

static void dropout_range_f64(const void *args, size_t first, size_t last)
{
    dropout_range(args, first, last, FSDPC_F64);
}

NN_FLOAT_KERNELS(dropout_range, fsdpc_dropout_args, dropout_range_f64)

static fsdpc_status dropout(const fsdpc_dropout_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(nn_check_float(args->dtype, "dropout"));
    if (!(args->p >= 0 && args->p <= 1))
        return fsdpc_fail(FSDPC_ERR_VALUE, "dropout with p = %g: p is a probability, 0 to 1",
                          args->p);
    nn_for(stream, args->numel, NN_GRAIN, dropout_range_kernels[args->dtype], args);
    return FSDPC_OK;
}
