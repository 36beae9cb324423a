/* Maxima and minima over the ranks' consecutive contributions; the twin is fsdpc_coll_combine.
 *
 * The result is always an unmodified input: the first of equal numbers, or the last NaN if there
 * are any.
 */
#include "map.cuh"

template <typename T, bool MOST> struct extremum_op {
    enum { WIDTH = 1 }; /* contributions may be unaligned */
    const T *gathered;  /* (ranks, numel) */
    int ranks;
    size_t numel;
    T *out;

    template <int N> __device__ __forceinline__ void run(size_t i) const
    {
        T best = gathered[i];
        for (int r = 1; r < ranks; r++) {
            T x = gathered[(size_t)r * numel + i];
            wide<T> a = widen<wide<T>>(x), b = widen<wide<T>>(best);
            if ((MOST ? a > b : a < b) || a != a)
                best = x;
        }
        out[i] = best;
    }
};

template <typename T, bool MOST>
static fsdpc_status extremum_launch(const void *gathered, int ranks, size_t numel, void *out,
                                    const fsdpc_stream *stream)
{
    extremum_op<T, MOST> op = {(const T *)gathered, ranks, numel, (T *)out};
    map_buffer buffers[] = {{gathered, sizeof(T)}, {out, sizeof(T)}};
    return map_launch("extremum", op, numel, buffers, stream);
}

extern "C" fsdpc_status fsdpc_cuda_extremum(bool most, fsdpc_dtype dtype, const void *gathered,
                                            int ranks, size_t numel, void *out,
                                            fsdpc_stream *stream)
{
    FSDPC_FOR_FLOAT(dtype, T, {
        return most ? extremum_launch<T, true>(gathered, ranks, numel, out, stream)
                    : extremum_launch<T, false>(gathered, ranks, numel, out, stream);
    })
    return FSDPC_ERR_DTYPE;
}
