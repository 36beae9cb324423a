/* Adds sums of squares, or of powers of magnitudes, over whole leaves to an exact accumulator; twin
 * of csrc/ops/flat_sumsq_body.h.
 *
 * A leaf's summation order is part of the result. Element i is added to fp64 partial sum i mod 16.
 * The sixteen sums are then folded: sum j is combined with sum j + 8, then j + 4, j + 2 and j + 1.
 * On the GPU, 16 / V lanes share a leaf, where V is the number of elements in 16 bytes. Lane q
 * holds partials q V .. q V + V - 1, loads 16 bytes where the CPU loads a vector, and the lanes
 * fold by shuffles. A warp therefore reads whole sectors, and each element only once. Nearly all
 * leaves have 64 elements; a separate loop computes their sums of squares. That loop loads a leaf
 * while it adds the previous one; with four 16-byte loads per lane and three blocks per SM, 48 KiB
 * are in flight.
 *
 * The accumulator (csrc/ops/exact_sum.h) consists of integers, so the order in which blocks and
 * atomics run does not affect it. One atomic per leaf would be too slow, but nearby leaves have
 * similar magnitudes. Each thread therefore keeps a window of four digits in registers and adds its
 * leaves to it. It flushes the window when a leaf falls outside it, and once at the end. A block
 * collects its threads' windows in shared memory, propagates all carries once, in parallel, and
 * adds the digits to the result. Each block's contribution counts as at most two normalised sums
 * toward the accumulator's limit on additions.
 *
 * Squares and integer powers give the same bits as on the CPU. Other powers use CUDA's pow, whose
 * error is at most 2 ulp, compared to 1 ulp for the C library's.
 */
#include "dtype.cuh"
#include "reduce.cuh"

enum { PARTIALS = 16, WINDOW = 4, DIGITS = FSDPC_EXACT_SUM_DIGITS, WORDS = DIGITS + 2 };
enum { LEAF = 64, STEPS = LEAF / PARTIALS };

/* How leaves are read: by element or vector (any leaf), or prefetched (leaves of LEAF elements). */
enum leaf_form { BY_ELEMENTS, BY_VECTORS, BY_LEAVES };

/* The number of concurrent blocks per SM; each thread then has 80 registers, so the loop does not
 * spill. The grid has no more blocks than run concurrently, because each block ends with
 * atomics. */
enum { SM_BLOCKS = 3 };

/* atomicAdd has no signed 64-bit form, which two's complement makes unnecessary. */
__device__ __forceinline__ void add_word(int64_t *word, int64_t value)
{
    if (value)
        atomicAdd((unsigned long long *)word, (unsigned long long)value);
}

struct digit_window {
    int first; /* digits first .. first + WINDOW - 1 */
    int64_t words[WINDOW];

    __device__ __forceinline__ void flush(int64_t *sum)
    {
#pragma unroll
        for (int w = 0; w < WINDOW; w++) {
            if (words[w])
                add_word(sum + first + w, words[w]);
            words[w] = 0;
        }
    }

    /* value >= 0, or NaN or infinity */
    __device__ __forceinline__ void add(double value, int64_t *sum)
    {
        if (value == 0) /* would move the window to digit 0; common in unused embedding rows */
            return;
        uint64_t bits = (uint64_t)__double_as_longlong(value);
        uint64_t exponent = bits >> 52 & 0x7ff, mantissa = bits & 0xfffffffffffffu;
        if (exponent == 0x7ff) {
            add_word(sum + (mantissa ? DIGITS : DIGITS + 1), 1);
            return;
        }
        mantissa |= (uint64_t)(exponent != 0) << 52;
        unsigned place = (unsigned)(exponent - (exponent != 0)), shift = place % 32;
        int digit = (int)(place / 32);
        uint64_t low = mantissa << shift, high = shift ? mantissa >> (64 - shift) : 0;
        if (digit < first || digit > first + 1) {
            flush(sum);
            first = digit < DIGITS - WINDOW ? digit : DIGITS - WINDOW;
        }
        int64_t parts[3] = {(int64_t)(low & 0xffffffffu), (int64_t)(low >> 32), (int64_t)high};
#pragma unroll
        for (int k = 0; k < 3; k++) /* words are indexed by constants, to stay in registers */
#pragma unroll
            for (int w = 0; w < WINDOW; w++)
                words[w] += digit + k == first + w ? parts[k] : 0;
    }

    /* Must be called by all lanes of a warp; uses one atomic per word for all windows that begin at
     * the same digit. */
    __device__ __forceinline__ void flush_warp(int64_t *sum) const
    {
        for (unsigned left = 0xffffffffu; left;) {
            int shared = __shfl_sync(0xffffffffu, first, __ffs((int)left) - 1);
#pragma unroll
            for (int w = 0; w < WINDOW; w++) {
                long long word = warp_sum((long long)(first == shared ? words[w] : 0));
                if (threadIdx.x % WARP == 0)
                    add_word(sum + shared + w, word);
            }
            left &= ~__ballot_sync(0xffffffffu, first == shared);
        }
    }
};

/* add<T>: returns partial plus the term of value, a T. Squares of numbers with at most 24
 * significant bits are exact in fp64, so a fused multiply-add gives the same bits. Squares of fp64
 * numbers are rounded before they are added. */
struct square_term {
    enum { AHEAD = 1 }; /* computation only waits for memory */

    template <typename T> __device__ __forceinline__ double add(double partial, double value) const
    {
        return sizeof(T) < sizeof(double) ? fma(value, value, partial) : partial + value * value;
    }
};

enum { WHOLE_POWER_MAX = 64 };

struct power_term {
    enum { AHEAD = 0 };
    double p;
    unsigned whole; /* p, if it is an integer of at most WHOLE_POWER_MAX; otherwise 0 */

    template <typename T> __device__ __forceinline__ double add(double partial, double value) const
    {
        value = fabs(value);
        if (whole == 0)
            return partial + pow(value, p);
        double power = value, result = 1;
        for (unsigned rest = whole; rest; rest >>= 1, power *= power)
            result = rest & 1 ? result * power : result;
        return partial + result;
    }
};

template <typename T, int V, typename Term>
__device__ __forceinline__ void add_terms(double (&partial)[V], const vec<T, V> &values,
                                          const Term &term)
{
#pragma unroll
    for (int c = 0; c < V; c++)
        partial[c] = term.template add<T>(partial[c], widen<double>(values.at[c]));
}

/* Computes lane q's part of the sum of a leaf's numel elements at x. */
template <typename T, int V, bool VECTORS, typename Term>
__device__ __forceinline__ void leaf_partials(double (&partial)[V], const T *x, size_t numel, int q,
                                              const Term &term)
{
    size_t i = 0;
    if (VECTORS) {
#pragma unroll 4
        for (; i + PARTIALS <= numel; i += PARTIALS)
            add_terms<T, V>(partial, load<V>(x + i + q * V), term);
    }
    for (; i < numel; i += PARTIALS) {
#pragma unroll
        for (int c = 0; c < V; c++) {
            size_t at = i + q * V + c;
            partial[c] = term.template add<T>(partial[c], at < numel ? widen<double>(x[at]) : 0.0);
        }
    }
}

/* Returns the sum of the sixteen partial sums to every lane of the leaf. */
template <int V> __device__ __forceinline__ double fold_partials(double (&partial)[V])
{
#pragma unroll
    for (int half = PARTIALS / 2; half; half /= 2) {
        if (half >= V) {
#pragma unroll
            for (int c = 0; c < V; c++)
                partial[c] += __shfl_xor_sync(0xffffffffu, partial[c], half / V);
        } else {
#pragma unroll
            for (int c = 0; c < half; c++)
                partial[c] += partial[c + half];
        }
    }
    return partial[0];
}

struct leaf_plan {
    size_t numel, leaf, leaves, rounds; /* BY_LEAVES: counts whole leaves only */
};

/* Returns digit d of a block's words plus the carry from digit d - 1; the result is less than 2^32
 * + 2^31. */
__device__ __forceinline__ int64_t carried(const int64_t *words, int d)
{
    if (d >= DIGITS) /* counts */
        return words[d];
    int64_t own = d + 1 < DIGITS ? words[d] & 0xffffffff : words[d];
    return own + (d > 0 ? words[d - 1] >> 32 : 0);
}

/* Each team of LANES lanes handles LANES leaves at a time, so that each lane adds the sum of one
 * leaf. */
template <typename T> struct leaf_team {
    enum { V = 16 / sizeof(T), LANES = PARTIALS / V };
    int q;              /* the lane's index in the team */
    size_t first, step; /* index of its first leaves; leaves per round of the grid */

    __device__ leaf_team()
        : q(threadIdx.x % LANES), first(grid_thread() / LANES * LANES), step(grid_threads())
    {
    }
};

template <typename T, leaf_form FORM, typename Term>
__device__ __forceinline__ void add_leaves(digit_window &window, const T *x, const Term &term,
                                           const leaf_plan &p, int64_t *words)
{
    const int V = leaf_team<T>::V, LANES = leaf_team<T>::LANES;
    leaf_team<T> team;
    size_t first = team.first;
    for (size_t round = 0; round < p.rounds; round++) { /* all lanes take part in the shuffles */
        double mine = 0;
#pragma unroll
        for (int k = 0; k < LANES; k++) {
            size_t begin = (first + k) * p.leaf;
            double partial[V] = {};
            if (first + k < p.leaves)
                leaf_partials<T, V, FORM == BY_VECTORS>(
                    partial, x + begin, p.leaf < p.numel - begin ? p.leaf : p.numel - begin, team.q,
                    term);
            double total = fold_partials<V>(partial);
            mine = k == team.q ? total : mine;
        }
        window.add(mine, words);
        first += team.step;
    }
}

/* A lane handles STEPS vectors of a leaf of LEAF elements. As soon as a vector has been added, the
 * same vector of the lane's next leaf is loaded into its registers. */
template <typename T, typename Term>
__device__ __forceinline__ void add_leaves_ahead(digit_window &window, const T *x, const Term &term,
                                                 const leaf_plan &p, int64_t *words)
{
    const int V = leaf_team<T>::V, LANES = leaf_team<T>::LANES;
    leaf_team<T> team;
    vec<T, V> part[STEPS] = {};
    const T *next = x + team.first * LEAF + team.q * V;
#pragma unroll
    for (int j = 0; j < STEPS; j++)
        if (team.first < p.leaves)
            part[j] = load<V>(next + j * PARTIALS);
    size_t first = team.first;
    for (size_t round = 0; round < p.rounds; round++) {
        double mine = 0;
#pragma unroll
        for (int k = 0; k < LANES; k++) {
            size_t ahead = k + 1 < LANES ? 1 : team.step - (LANES - 1);
            next += ahead * LEAF;
            bool more = first + k + ahead < p.leaves;
            double partial[V] = {};
#pragma unroll
            for (int j = 0; j < STEPS; j++) {
                vec<T, V> values = part[j];
                part[j] = more ? load<V>(next + j * PARTIALS) : vec<T, V>{};
                add_terms<T, V>(partial, values, term);
            }
            double total = fold_partials<V>(partial);
            mine = k == team.q ? total : mine;
        }
        window.add(mine, words);
        first += team.step;
    }
    if (blockIdx.x == 0 && p.numel % LEAF) { /* the short leaf at the end, for the first team */
        double partial[V] = {};
        if (threadIdx.x < LANES)
            leaf_partials<T, V, false>(partial, x + p.leaves * LEAF, p.numel % LEAF, team.q, term);
        double total = fold_partials<V>(partial);
        window.add(team.q == 0 ? total : 0, words);
    }
}

template <typename T, leaf_form FORM, typename Term>
static __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS)
    sum_terms_kernel(const T *x, Term term, leaf_plan p, int64_t *sum)
{
    __shared__ int64_t words[WORDS];
    for (int w = threadIdx.x; w < WORDS; w += blockDim.x)
        words[w] = 0;
    __syncthreads();
    digit_window window = {0, {0, 0, 0, 0}};
    if constexpr (FORM == BY_LEAVES)
        add_leaves_ahead(window, x, term, p, words);
    else
        add_leaves<T, FORM>(window, x, term, p, words);
    window.flush_warp(words);
    __syncthreads();
    for (int w = threadIdx.x; w < WORDS; w += blockDim.x)
        add_word(sum + w, carried(words, w));
}

template <typename Term>
static fsdpc_status sum_terms(const char *what, const void *x, fsdpc_dtype dtype, leaf_plan plan,
                              Term term, fsdpc_exact_sum *sum_io, const fsdpc_stream *stream)
{
    if (plan.numel == 0)
        return FSDPC_OK;
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    bool ahead = Term::AHEAD && plan.leaf == LEAF && (uintptr_t)x % 16 == 0;
    plan.leaf = fsdpc_min_size(plan.leaf, plan.numel);
    plan.leaves = ahead ? plan.numel / LEAF : fsdpc_ceil_div(plan.numel, plan.leaf);
    size_t bytes = fsdpc_dtype_bytes(dtype);
    bool vectors = (uintptr_t)x % 16 == 0 && (plan.leaf * bytes % 16 == 0 || plan.leaves == 1);
    int64_t *sum = sum_io->digits; /* nans and infinities follow, as words DIGITS and DIGITS + 1 */
    size_t blocks = fsdpc_max_size(fsdpc_ceil_div(plan.leaves, BLOCK_THREADS), 1);
    size_t grid = fsdpc_min_size(blocks, (size_t)queue->multiprocessors * SM_BLOCKS);
    plan.rounds = fsdpc_ceil_div(plan.leaves, grid * BLOCK_THREADS);
    FSDPC_FOR_FLOAT(dtype, T, {
        if (ahead)
            FSDPC_LAUNCH((sum_terms_kernel < T, Term::AHEAD ? BY_LEAVES : BY_VECTORS, Term >), grid,
                         BLOCK_THREADS, 0, queue, (const T *)x, term, plan, sum);
        else if (vectors)
            FSDPC_LAUNCH((sum_terms_kernel<T, BY_VECTORS, Term>), grid, BLOCK_THREADS, 0, queue,
                         (const T *)x, term, plan, sum);
        else
            FSDPC_LAUNCH((sum_terms_kernel<T, BY_ELEMENTS, Term>), grid, BLOCK_THREADS, 0, queue,
                         (const T *)x, term, plan, sum);
    })
    return launched(what);
}

extern "C" fsdpc_status fsdpc_cuda_sumsq(const void *x, fsdpc_dtype dtype, size_t numel,
                                         size_t leaf, fsdpc_exact_sum *sum_io, fsdpc_stream *stream)
{
    leaf_plan plan = {numel, leaf, 0, 0};
    return sum_terms("sumsq", x, dtype, plan, square_term{}, sum_io, stream);
}

extern "C" fsdpc_status fsdpc_cuda_sumpow(const void *x, fsdpc_dtype dtype, size_t numel,
                                          size_t leaf, double p, fsdpc_exact_sum *sum_io,
                                          fsdpc_stream *stream)
{
    if (p == 2)
        return fsdpc_cuda_sumsq(x, dtype, numel, leaf, sum_io, stream);
    leaf_plan plan = {numel, leaf, 0, 0};
    power_term term = {p, p <= WHOLE_POWER_MAX && p == rint(p) ? (unsigned)p : 0};
    return sum_terms("sumpow", x, dtype, plan, term, sum_io, stream);
}
