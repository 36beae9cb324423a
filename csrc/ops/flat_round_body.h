/* Stochastic rounding to bf16, and the random bits for it.
 *
 * Included by flat_cpu_body.h.  The words are those of base/random.h: element e has word e mod 4 of
 * Philox block e / 4, so any slice can be computed by itself.  Blocks are computed side by side in
 * branch-free loops that the compiler turns into vectors; it is integer arithmetic, the same on
 * every path.
 */
enum { PHILOX_BLOCKS = 16, PHILOX_WORDS = 4 * PHILOX_BLOCKS };

static void philox_words(uint32_t *words, uint64_t seed, uint64_t stream, uint64_t block)
{
    uint32_t c[4][PHILOX_BLOCKS];
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int j = 0; j < PHILOX_BLOCKS; j++) {
        c[0][j] = (uint32_t)(block + (uint64_t)j),
        c[1][j] = (uint32_t)((block + (uint64_t)j) >> 32);
        c[2][j] = (uint32_t)stream, c[3][j] = (uint32_t)(stream >> 32);
    }
    for (int round = 0; round < 10; round++) {
        for (int j = 0; j < PHILOX_BLOCKS; j++) {
            uint64_t p0 = (uint64_t)0xD2511F53u * c[0][j], p1 = (uint64_t)0xCD9E8D57u * c[2][j];
            c[0][j] = (uint32_t)(p1 >> 32) ^ c[1][j] ^ k0;
            c[1][j] = (uint32_t)p1;
            c[2][j] = (uint32_t)(p0 >> 32) ^ c[3][j] ^ k1;
            c[3][j] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int j = 0; j < PHILOX_BLOCKS; j++)
        for (int i = 0; i < 4; i++)
            words[4 * j + i] = c[i][j];
}

/* Words of elements first .. first + n - 1, somewhere in `words`, which holds n + 2 PHILOX_WORDS.
 */
static const uint32_t *random_words(uint32_t *words, uint64_t seed, uint64_t stream, uint64_t first,
                                    size_t n)
{
    size_t skip = first % 4;
    for (size_t i = 0; i < n + skip; i += PHILOX_WORDS)
        philox_words(words + i, seed, stream, (first + i) / 4);
    return words + skip;
}

/* Rounds to numbers of bf16, by 16 bits of each word from bit `shift` on: they are added below the
 * bits that stay, and carry as often as what is cut off is large.  NaN and infinity stay. */
static void round_stochastically(float *x, const uint32_t *words, int shift, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = fsdpc_f32_bits(x[i]);
        uint32_t rounded = (bits + (words[i] >> shift & 0xffffu)) & 0xffff0000u;
        x[i] = fsdpc_f32_from_bits(x[i] != x[i] ? bits : rounded);
    }
}
