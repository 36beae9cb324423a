/* Stochastic rounding to bf16, and its random bits.
 *
 * Included by flat_cpu_body.h. The words are those of base/random.h: element e uses word e mod 4 of
 * Philox block e / 4, so any slice can be computed independently. Two vectors of blocks are
 * computed concurrently, which hides the latency of multiplications; integer arithmetic is the same
 * on every path. (For a Lion step with bf16 states of 2^18 elements, plain loops, which the
 * compiler also vectorises, took 1.22 ns per element with AVX-512, instead of 0.87.)
 */
enum { PHILOX_CHAINS = 2, PHILOX_BLOCKS = PHILOX_CHAINS * FSDPC_LANES };
enum { PHILOX_WORDS = 4 * PHILOX_BLOCKS };

typedef struct wide_product {
    fsdpc_vu high, low;
} wide_product;

FSDPC_INLINE wide_product multiply_wide(fsdpc_vu a, uint32_t by)
{
#if defined(FSDPC_VEC_AVX512)
    __m512i factor = _mm512_set1_epi32((int)by);
    __m512i even = _mm512_mul_epu32((__m512i)a, factor);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
    return (wide_product){
        (fsdpc_vu)_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd),
        (fsdpc_vu)_mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32))};
#elif defined(FSDPC_VEC_AVX2)
    __m256i factor = _mm256_set1_epi32((int)by);
    __m256i even = _mm256_mul_epu32((__m256i)a, factor);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), factor);
    return (wide_product){(fsdpc_vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa),
                          (fsdpc_vu)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa)};
#else
    uint32_t lanes[FSDPC_LANES], high[FSDPC_LANES], low[FSDPC_LANES];
    wide_product p;
    memcpy(lanes, &a, sizeof a);
    for (int i = 0; i < FSDPC_LANES; i++) {
        uint64_t product = (uint64_t)lanes[i] * by;
        high[i] = (uint32_t)(product >> 32);
        low[i] = (uint32_t)product;
    }
    memcpy(&p.high, high, sizeof high);
    memcpy(&p.low, low, sizeof low);
    return p;
#endif
}

static void philox_words(uint32_t *words, uint64_t seed, uint64_t stream, uint64_t block)
{
    const fsdpc_vu zero = {0};
    fsdpc_vu c[PHILOX_CHAINS][4];
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int v = 0; v < PHILOX_CHAINS; v++) {
        uint32_t low[FSDPC_LANES], high[FSDPC_LANES];
        for (int j = 0; j < FSDPC_LANES; j++) {
            uint64_t at = block + (uint64_t)(v * FSDPC_LANES + j);
            low[j] = (uint32_t)at, high[j] = (uint32_t)(at >> 32);
        }
        memcpy(&c[v][0], low, sizeof low);
        memcpy(&c[v][1], high, sizeof high);
        c[v][2] = zero + (uint32_t)stream, c[v][3] = zero + (uint32_t)(stream >> 32);
    }
    for (int round = 0; round < 10; round++) {
        for (int v = 0; v < PHILOX_CHAINS; v++) {
            wide_product p0 = multiply_wide(c[v][0], 0xD2511F53u);
            wide_product p1 = multiply_wide(c[v][2], 0xCD9E8D57u);
            c[v][0] = p1.high ^ c[v][1] ^ k0;
            c[v][1] = p1.low;
            c[v][2] = p0.high ^ c[v][3] ^ k1;
            c[v][3] = p0.low;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int v = 0; v < PHILOX_CHAINS; v++) {
        uint32_t lanes[4][FSDPC_LANES];
        memcpy(lanes, c[v], sizeof lanes);
        for (int j = 0; j < FSDPC_LANES; j++)
            for (int i = 0; i < 4; i++)
                words[4 * (v * FSDPC_LANES + j) + i] = lanes[i][j];
    }
}

/* Returns the random words of elements first .. first + n - 1, at some offset in `words`, which has
 * room for n + 2 PHILOX_WORDS.
 */
static const uint32_t *random_words(uint32_t *words, uint64_t seed, uint64_t stream, uint64_t first,
                                    size_t n)
{
    size_t skip = first % 4;
    for (size_t i = 0; i < n + skip; i += PHILOX_WORDS)
        philox_words(words + i, seed, stream, (first + i) / 4);
    return words + skip;
}

/* Rounds to bf16, using 16 bits of each word, beginning at bit `shift`. These bits are added below
 * the kept bits and carry into them with a probability proportional to the truncated part. NaN and
 * infinity are unchanged. */
static void round_stochastically(float *x, const uint32_t *words, int shift, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = fsdpc_f32_bits(x[i]);
        uint32_t rounded = (bits + (words[i] >> shift & 0xffffu)) & 0xffff0000u;
        x[i] = fsdpc_f32_from_bits(x[i] != x[i] ? bits : rounded);
    }
}
