/* The tile function of paths whose sums stay in vector registers: MR rows of two vectors each.
 *
 * One source for all such paths, included by each path's file after these:
 *
 *     MR, NR           NR is twice FSDPC_LANES; 2 MR sums, two vectors of B and one of A must fit
 *     ROWS             X(0) X(1) ... for MR rows
 *     K_STEP           k in one element: 1, or 2 if elements are pairs of bf16
 *     AHEAD_BYTES      of the next panel of A, prefetched with each k; undefined: none
 *     tile_element     the element of panels
 *     tile_vec         a vector of FSDPC_LANES of them
 *     tile_load(p), tile_splat(element), tile_fma(x, b, sum)
 *
 * A macro declares each sum as a variable, because gcc would move an array of sums through the
 * stack on entry and exit.
 */
static void tile(void *sums, void *a, const void *b, size_t k_count, bool resume,
                 fsdpc_gemm_prefetch *prefetch)
{
    _Static_assert((int)NR == 2 * (int)FSDPC_LANES, "a row of sums is two vectors");
    float *c = sums;
    const tile_element *pa = a, *pb = b;
#define X(i) fsdpc_vf low##i = {0}, top##i = {0};
    ROWS
#undef X
        if (resume)
    {
#define X(i)                                                                                       \
    low##i = fsdpc_vf_load(c + (i)*NR);                                                            \
    top##i = fsdpc_vf_load(c + (i)*NR + FSDPC_LANES);
        ROWS
#undef X
    }
    for (size_t k = 0; k < k_count; k += K_STEP, pa += MR, pb += NR) {
#ifdef AHEAD_BYTES
        if (k % (64 / AHEAD_BYTES) == 0)
            __builtin_prefetch(prefetch->next + k * AHEAD_BYTES, 0, 2);
#endif
        tile_vec b0 = tile_load(pb), b1 = tile_load(pb + FSDPC_LANES);
#define X(i)                                                                                       \
    {                                                                                              \
        tile_vec x = tile_splat(pa[i]);                                                            \
        low##i = tile_fma(x, b0, low##i);                                                          \
        top##i = tile_fma(x, b1, top##i);                                                          \
    }
        ROWS
#undef X
    }
#ifdef AHEAD_BYTES
    prefetch->next += k_count * AHEAD_BYTES;
#else
    (void)prefetch;
#endif
#define X(i)                                                                                       \
    fsdpc_vf_store(c + (i)*NR, low##i);                                                            \
    fsdpc_vf_store(c + (i)*NR + FSDPC_LANES, top##i);
    ROWS
#undef X
}
