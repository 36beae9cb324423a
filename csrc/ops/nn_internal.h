/* Shared by the CPU's nn kernels: work splitting, iteration over strided boxes, and the kernels
 * compiled only once because training does not use them (F64, integers, mixed casts).
 *
 * A kernel is a range function: it only computes elements (or rows, or columns) [first, last) of
 * its output, so the split cannot change a result. The *_body.h files hold the vector forms; each
 * is compiled three times, by nn_cpu.c, nn_cpu_avx2.c and nn_cpu_avx512.c.
 */
#ifndef FSDPC_OPS_NN_INTERNAL_H
#define FSDPC_OPS_NN_INTERNAL_H

#include "base/size.h"
#include "ops/nn_ops.h"

typedef void (*nn_range_fn)(const void *arg, size_t first, size_t last);

/* The number of elements above which waking a thread is worthwhile. */
enum { NN_GRAIN = 1 << 14 };

typedef struct nn_cut {
    nn_range_fn fn;
    const void *arg;
    size_t count, chunk;
} nn_cut;

static inline void nn_cut_part(void *arg, size_t part)
{
    const nn_cut *cut = arg;
    size_t first = part * cut->chunk;
    cut->fn(cut->arg, first, fsdpc_min_size(first + cut->chunk, cut->count));
}

/* Runs fn over [0, count) in pieces of at least `grain`, divided among the threads of the stream's
 * team. */
static inline void nn_for(fsdpc_stream *stream, size_t count, size_t grain, nn_range_fn fn,
                          const void *arg)
{
    fsdpc_team *team = stream->device->team;
    size_t threads = (size_t)fsdpc_team_threads(team);
    size_t pieces = fsdpc_min_size(4 * threads, count / fsdpc_max_size(grain, 1));
    if (threads == 1 || pieces <= 1) {
        if (count)
            fn(arg, 0, count);
        return;
    }
    size_t chunk = fsdpc_ceil_div(count, pieces);
    if (grain >= 64)
        chunk = fsdpc_round_up(chunk, 64); /* whole cache lines per thread */
    nn_cut cut = {fn, arg, count, chunk};
    fsdpc_team_run(team, fsdpc_ceil_div(count, chunk), nn_cut_part, &cut);
}

/* Returns the grain in rows of `cols` elements. */
static inline size_t nn_row_grain(size_t cols)
{
    return fsdpc_max_size(NN_GRAIN / fsdpc_max_size(cols, 1), 1);
}

static inline fsdpc_status nn_check_float(fsdpc_dtype dtype, const char *what)
{
    if (dtype > FSDPC_F64)
        return fsdpc_fail(FSDPC_ERR_DTYPE, "%s takes a float dtype, not %s: cast first", what,
                          fsdpc_dtype_name(dtype));
    return FSDPC_OK;
}

/* Defines name_kernels from an inlined `name(args, first, last, dtype)` and its F64 form. The
 * arguments are copied first: a kernel's stores cannot alias the copy, so it stays in registers. */
#define NN_FLOAT_KERNELS(name, args_type, f64)                                                     \
    NN_FLOAT_KERNEL(name, args_type, f32, FSDPC_F32)                                               \
    NN_FLOAT_KERNEL(name, args_type, bf16, FSDPC_BF16)                                             \
    NN_FLOAT_KERNEL(name, args_type, f16, FSDPC_F16)                                               \
    static const nn_range_fn name##_kernels[] = {[FSDPC_F32] = name##_f32,                         \
                                                 [FSDPC_BF16] = name##_bf16,                       \
                                                 [FSDPC_F16] = name##_f16,                         \
                                                 [FSDPC_F64] = (f64)};

#define NN_FLOAT_KERNEL(name, args_type, suffix, dtype)                                            \
    static void name##_##suffix(const void *args, size_t first, size_t last)                       \
    {                                                                                              \
        const args_type own = *(const args_type *)args;                                            \
        name(&own, first, last, dtype);                                                            \
    }

/* -- strided boxes ----------------------------------------------------------------------------- */

enum { NN_OPERANDS = 2 };

typedef struct nn_box {
    int ndim; /* at least 1 after nn_box_collapse */
    size_t shape[FSDPC_MAX_DIMS];
    size_t stride[NN_OPERANDS][FSDPC_MAX_DIMS];
    size_t base[NN_OPERANDS]; /* of the first element */
} nn_box;

static inline size_t nn_box_numel(const nn_box *box)
{
    size_t numel = 1;
    for (int d = 0; d < box->ndim; d++)
        numel *= box->shape[d];
    return numel;
}

/* Drops dimensions of size one, and merges neighbouring dimensions that both operands step through
 * evenly. */
static inline void nn_box_collapse(nn_box *box)
{
    int kept = 0;
    for (int d = 0; d < box->ndim; d++) {
        if (box->shape[d] == 1)
            continue;
        bool joins = kept > 0;
        for (int o = 0; o < NN_OPERANDS && joins; o++)
            joins = box->stride[o][kept - 1] == box->stride[o][d] * box->shape[d];
        int into = joins ? kept - 1 : kept++;
        box->shape[into] = joins ? box->shape[into] * box->shape[d] : box->shape[d];
        for (int o = 0; o < NN_OPERANDS; o++)
            box->stride[o][into] = box->stride[o][d];
    }
    if (kept == 0) {
        box->shape[0] = 1;
        for (int o = 0; o < NN_OPERANDS; o++)
            box->stride[o][0] = 1;
        kept = 1;
    }
    box->ndim = kept;
}

/* Computes the start of row `row` (an index over all but the last `inner` dimensions) in each
 * operand. */
static inline void nn_box_offsets(const nn_box *box, int inner, size_t row,
                                  size_t offset_out[NN_OPERANDS])
{
    for (int o = 0; o < NN_OPERANDS; o++)
        offset_out[o] = box->base[o];
    for (int d = box->ndim - 1 - inner; d >= 0; d--) {
        size_t index = row % box->shape[d];
        row /= box->shape[d];
        for (int o = 0; o < NN_OPERANDS; o++)
            offset_out[o] += index * box->stride[o][d];
    }
}

/* -- plans: arguments after collapsing, for range functions ------------------------------------ */

typedef struct nn_binary_plan {
    const fsdpc_binary_args *args;
    nn_box box; /* operands a, b */
} nn_binary_plan;

typedef struct nn_sum_plan {
    const fsdpc_sum_args *args;
    nn_box kept, reduced; /* operand 0 is x; without the innermost dimension */
    size_t outer;         /* numel of kept */
    size_t folds;         /* numel of reduced */
    size_t inner;         /* length of the innermost dimension, which is dense */
    bool inner_kept;      /* or reduced */
    double *partial;      /* a full sum's block sums; NULL: not a full sum */
} nn_sum_plan;

enum {
    NN_SUM_COLS = 512,    /* columns per item of a sum over rows */
    NN_SUM_BLOCK = 16384, /* elements per partial of a full sum */
};

typedef struct nn_copy_plan {
    const fsdpc_copy_args *args;
    nn_box box; /* operands dst, src; dst's strides descend */
} nn_copy_plan;

typedef struct nn_embedding_plan {
    const fsdpc_embedding_args *args;
    size_t *starts; /* (rows + 1): start of each table row's ids in `order` */
    size_t *order;  /* (count): positions of ids, sorted by id, equal ids in order */
} nn_embedding_plan;

/* -- pooling windows --------------------------------------------------------------------------- */

typedef struct nn_span {
    size_t first, end;
} nn_span;

static inline nn_span nn_span_meet(const nn_span *a, const nn_span *b)
{
    return (nn_span){fsdpc_max_size(a->first, b->first), fsdpc_min_size(a->end, b->end)};
}

/* Returns the range of image elements that window `place` covers along dimension d; it may be
 * empty. */
static inline nn_span nn_pool_span(const fsdpc_pool_args *args, int d, size_t place)
{
    size_t begin = place * args->stride[d], pad = args->padding[d];
    size_t first = fsdpc_min_size(begin > pad ? begin - pad : 0, args->image[d]);
    size_t end = begin + args->kernel[d] > pad ? begin + args->kernel[d] - pad : 0;
    return (nn_span){first, fsdpc_max_size(fsdpc_min_size(end, args->image[d]), first)};
}

/* Returns the range of windows along dimension d that may overlap any of the image's `elements`. */
static inline nn_span nn_pool_places(const fsdpc_pool_args *args, int d, const nn_span *elements)
{
    size_t kernel = args->kernel[d], first = elements->first + args->padding[d] + 1;
    size_t end = (elements->end - 1 + args->padding[d]) / args->stride[d] + 1;
    return (nn_span){first > kernel ? fsdpc_ceil_div(first - kernel, args->stride[d]) : 0,
                     fsdpc_min_size(end, args->places[d])};
}

/* -- nn_plan.c: checks and plans, without vectors ---------------------------------------------- */

void fsdpc_nn_sum_plan_init(nn_sum_plan *plan, const fsdpc_sum_args *args);
size_t fsdpc_nn_copy_plan_init(nn_copy_plan *plan); /* args set; returns numel */
bool fsdpc_nn_copy_plan_turn(
    nn_copy_plan *plan); /* makes the source-dense dimension, if any, the second to last */
fsdpc_status fsdpc_nn_embedding_check(const fsdpc_embedding_args *args); /* ids in range? */
void fsdpc_nn_embedding_sort(nn_embedding_plan *plan); /* fills starts and order */
fsdpc_status fsdpc_nn_cross_entropy_check(const fsdpc_cross_entropy_args *args, size_t *count_out);
void fsdpc_nn_cross_entropy_mean(const fsdpc_cross_entropy_args *args, size_t count);
double fsdpc_nn_loss_scale(const fsdpc_loss_sum *sum, const float *dloss); /* dloss / count, or 0 */

/* -- nn_cast.c: any dtype, element by element -------------------------------------------------- */

/* dst[dst_at + i * dst_step] = cast(src[src_at + i * src_step]) [+ dst], in elements */
void fsdpc_nn_cast_row(void *dst, fsdpc_dtype dst_dtype, size_t dst_at, size_t dst_step,
                       const void *src, fsdpc_dtype src_dtype, size_t src_at, size_t src_step,
                       size_t numel, bool accumulate);
double fsdpc_nn_load_f64(const void *base, size_t i, fsdpc_dtype dtype); /* float dtypes */
void fsdpc_nn_store_f64(void *base, size_t i, fsdpc_dtype dtype, double x);

static inline int64_t fsdpc_nn_load_id(const void *ids, size_t i, fsdpc_dtype id_dtype)
{
    return id_dtype == FSDPC_I32 ? ((const int32_t *)ids)[i] : ((const int64_t *)ids)[i];
}

/* -- nn_cumsum.c ------------------------------------------------------------------------------- */

fsdpc_status fsdpc_nn_cumsum(const fsdpc_cumsum_args *args, fsdpc_stream *stream);

/* -- nn_f64.c, nn_f64_rows.c: kernels not used in training, compiled once ---------------------- */

void fsdpc_nn_unary_f64(const void *args, size_t first, size_t last);
void fsdpc_nn_unary_backward_f64(const void *args, size_t first, size_t last);
void fsdpc_nn_swiglu_f64(const void *args, size_t first, size_t last);
void fsdpc_nn_swiglu_backward_f64(const void *args, size_t first, size_t last);
void fsdpc_nn_power_wide(const void *plan, size_t first, size_t last); /* F64, I32, I64 */
void fsdpc_nn_sum_wide(const void *plan, size_t first,
                       size_t last); /* F64 in or out; items: outputs */
void fsdpc_nn_sum_i64(const void *plan, size_t first, size_t last); /* items: outputs */
void fsdpc_nn_embedding_backward_wide(const void *plan, size_t first, size_t last);
void fsdpc_nn_rotary_f64(const void *args, size_t first, size_t last);
void fsdpc_nn_softmax_f64(const void *args, size_t first, size_t last);
void fsdpc_nn_softmax_backward_f64(const void *args, size_t first, size_t last);
void fsdpc_nn_norm_f64(const void *args, size_t first, size_t last);
void fsdpc_nn_norm_backward_f64(const fsdpc_norm_args *args);
void fsdpc_nn_row_moments_f64(const void *args, size_t first, size_t last);
void fsdpc_nn_row_affine_f64(const void *args, size_t first, size_t last);
void fsdpc_nn_pool_f64(const void *args, size_t first, size_t last);          /* rows of windows */
void fsdpc_nn_pool_backward_f64(const void *args, size_t first, size_t last); /* planes */
void fsdpc_nn_cross_entropy_f64(const void *args, size_t first, size_t last);
void fsdpc_nn_cross_entropy_backward_f64(const void *args, size_t first, size_t last);

/* -- the tables, one per instruction set ------------------------------------------------------- */

extern const fsdpc_nn_ops fsdpc_nn_ops_portable;
#if defined(__x86_64__)
extern const fsdpc_nn_ops fsdpc_nn_ops_avx2;
extern const fsdpc_nn_ops fsdpc_nn_ops_avx512;
#endif

#endif
