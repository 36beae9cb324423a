/* AdamW and Adam in one pass: decay, moments, update, and the cast to the wire.
 *
 * Included by flat_cpu_body.h.  The scalars are computed once in fp64 and rounded to fp32; the
 * arithmetic per element is fp32, operation by operation that of PyTorch's fused CPU kernel
 * (aten/src/ATen/native/cpu/FusedAdamKernel.cpp) as its compiler fused it: m moves towards g by a
 * fused multiply-add, v adds (1 - b2) g * g fused, Adam's decay joins the gradient fused,
 * everything else is rounded after each operation.  So an fp32 step has the same bits as torch's on
 * machines with FMA, and the same bits as every other path here, tails included.
 *
 * The published value is the cast of the stored (rounded) parameter, so that `equal` of wire and
 * master holds right after the step.
 */

typedef struct adamw_scalars {
    float grad_scale; /* negative to maximize */
    float keep;       /* 1 - lr * decay, 1 where decay is not decoupled */
    float decay;      /* joins the gradient; 0 where decoupled */
    float toward_grad, beta2, add_square, root_bias2, eps, minus_step;
} adamw_scalars;

typedef struct adamw_part_args {
    const fsdpc_adamw_args *a;
    adamw_scalars k;
    bool stream_wire;
} adamw_part_args;

static adamw_scalars adamw_prepare(const fsdpc_adamw_args *a)
{
    double bias1 = 1 - pow(a->beta1, (double)a->step), bias2 = 1 - pow(a->beta2, (double)a->step);
    return (adamw_scalars){
        .grad_scale = a->maximize ? -a->grad_scale : a->grad_scale,
        .keep = a->decoupled ? (float)(1 - a->lr * a->weight_decay) : 1.0f,
        .decay = a->decoupled ? 0.0f : (float)a->weight_decay,
        .toward_grad = (float)(1 - a->beta1),
        .beta2 = (float)a->beta2,
        .add_square = (float)(1 - a->beta2),
        .root_bias2 = (float)sqrt(bias2),
        .eps = (float)a->eps,
        .minus_step = (float)-(a->lr / bias1),
    };
}

/* Fused on every path: where the compiler's baseline has no such instruction, libm's is exact (and
 * a call, so it is kept out of line). */
#if defined(FSDPC_VEC_AVX512) || defined(FSDPC_VEC_AVX2)
FSDPC_INLINE fsdpc_vf fused(fsdpc_vf a, fsdpc_vf b, fsdpc_vf c)
{
    return fsdpc_vf_fma(a, b, c);
}
#else
static __attribute__((noinline)) fsdpc_vf fused(fsdpc_vf a, fsdpc_vf b, fsdpc_vf c)
{
    for (int i = 0; i < FSDPC_LANES; i++)
        c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}
#endif

FSDPC_INLINE fsdpc_vf adamw_step(const adamw_scalars *k, fsdpc_vf p, fsdpc_vf g, fsdpc_vf *m,
                                 fsdpc_vf *v)
{
    g = g * fsdpc_vf_splat(k->grad_scale);
    if (k->decay != 0)
        g = fused(p, fsdpc_vf_splat(k->decay), g);
    else
        p = p * fsdpc_vf_splat(k->keep);
    if (k->toward_grad < 0.5f)
        *m = fused(g - *m, fsdpc_vf_splat(k->toward_grad), *m);
    else
        *m = fused(g - *m, fsdpc_vf_splat(k->toward_grad - 1.0f), g);
    *v = fused(g * fsdpc_vf_splat(k->add_square), g, *v * fsdpc_vf_splat(k->beta2));
    fsdpc_vf root = fsdpc_vf_sqrt(*v) / fsdpc_vf_splat(k->root_bias2);
    return p + fsdpc_vf_splat(k->minus_step) * *m / (root + fsdpc_vf_splat(k->eps));
}

/* What a vector's step needs to know of memory.  All constants; WIRE_NONE is no wire. */
enum { WIRE_NONE = FSDPC_DTYPE_COUNT };

typedef struct adamw_kind {
    fsdpc_dtype param, grad;
    int wire;
    bool stream_wire; /* write the wire past the cache */
} adamw_kind;

/* Steps elements i .. and returns them as stored, which is what the wire gets. */
FSDPC_INLINE fsdpc_vf adamw_vector(const fsdpc_adamw_args *a, const adamw_scalars *k, size_t i,
                                   adamw_kind kind)
{
    fsdpc_vf m = fsdpc_vf_load(a->exp_avg + i), v = fsdpc_vf_load(a->exp_avg_sq + i);
    fsdpc_vf p = adamw_step(k, fsdpc_vf_load_as(a->param, i, kind.param),
                            fsdpc_vf_load_as(a->grad, i, kind.grad), &m, &v);
    fsdpc_vf_store(a->exp_avg + i, m);
    fsdpc_vf_store(a->exp_avg_sq + i, v);
    fsdpc_vf_store_as(a->param, i, kind.param, p);
    return kind.param == FSDPC_BF16 ? fsdpc_vf_from_bf16(fsdpc_vf_to_bf16(p)) : p;
}

/* The same for the last n elements. */
FSDPC_INLINE fsdpc_vf adamw_tail(const fsdpc_adamw_args *a, const adamw_scalars *k, size_t i,
                                 adamw_kind kind, size_t n)
{
    fsdpc_vf m = fsdpc_vf_load_n(a->exp_avg + i, n), v = fsdpc_vf_load_n(a->exp_avg_sq + i, n);
    fsdpc_vf p = adamw_step(k, fsdpc_vf_load_as_n(a->param, i, kind.param, n),
                            fsdpc_vf_load_as_n(a->grad, i, kind.grad, n), &m, &v);
    fsdpc_vf_store_n(a->exp_avg + i, m, n);
    fsdpc_vf_store_n(a->exp_avg_sq + i, v, n);
    fsdpc_vf_store_as_n(a->param, i, kind.param, p, n);
    return kind.param == FSDPC_BF16 ? fsdpc_vf_from_bf16(fsdpc_vf_to_bf16(p)) : p;
}

FSDPC_INLINE void adamw_run(const adamw_part_args *args, size_t begin, size_t end, adamw_kind kind)
{
    const fsdpc_adamw_args *a = args->a;
    const adamw_scalars k = args->k;
    const fsdpc_dtype wire = (fsdpc_dtype)(kind.wire == WIRE_NONE ? 0 : kind.wire);
    size_t i = begin;
    for (; i + 2 * FSDPC_LANES <= end; i += 2 * FSDPC_LANES) {
        prefetch_ahead(a->exp_avg, i, FSDPC_F32, 2 * FSDPC_LANES);
        prefetch_ahead(a->exp_avg_sq, i, FSDPC_F32, 2 * FSDPC_LANES);
        prefetch_ahead(a->param, i, kind.param, 2 * FSDPC_LANES);
        prefetch_ahead(a->grad, i, kind.grad, 2 * FSDPC_LANES);
        fsdpc_vf low = adamw_vector(a, &k, i, kind);
        fsdpc_vf high = adamw_vector(a, &k, i + FSDPC_LANES, kind);
        if (kind.wire != WIRE_NONE)
            store_pair(a->wire, i, wire, low, high, kind.stream_wire);
    }
    if (kind.stream_wire)
        stream_end();
    for (size_t left; i < end; i += left) {
        left = fsdpc_min_size(FSDPC_LANES, end - i);
        fsdpc_vf p = adamw_tail(a, &k, i, kind, left);
        if (kind.wire != WIRE_NONE)
            fsdpc_vf_store_as_n(a->wire, i, wire, p, left);
    }
}

/* Wires of F16 and F64 are written block by block behind the step, from L1. */
enum { ADAMW_BLOCK = 1024 };

FSDPC_INLINE void adamw_publish(const adamw_part_args *args, size_t begin, size_t end,
                                fsdpc_dtype param, fsdpc_dtype grad)
{
    const fsdpc_adamw_args *a = args->a;
    if (!a->wire) {
        adamw_run(args, begin, end, (adamw_kind){param, grad, WIRE_NONE, false});
    } else if (a->wire_dtype == FSDPC_F32 && args->stream_wire) {
        adamw_run(args, begin, end, (adamw_kind){param, grad, FSDPC_F32, true});
    } else if (a->wire_dtype == FSDPC_F32) {
        adamw_run(args, begin, end, (adamw_kind){param, grad, FSDPC_F32, false});
    } else if (a->wire_dtype == FSDPC_BF16 && args->stream_wire) {
        adamw_run(args, begin, end, (adamw_kind){param, grad, FSDPC_BF16, true});
    } else if (a->wire_dtype == FSDPC_BF16) {
        adamw_run(args, begin, end, (adamw_kind){param, grad, FSDPC_BF16, false});
    } else {
        for (size_t at = begin; at < end; at += ADAMW_BLOCK) {
            size_t stop = fsdpc_min_size(at + ADAMW_BLOCK, end);
            adamw_run(args, at, stop, (adamw_kind){param, grad, WIRE_NONE, false});
            cast_range(fsdpc_flat_at(a->wire, at, a->wire_dtype), a->wire_dtype,
                       fsdpc_flat_at(a->param, at, param), param, stop - at, false);
        }
    }
}

static void adamw_part(void *arg, size_t begin, size_t end)
{
    const adamw_part_args *args = arg;
    switch (FLAT_PAIR(args->a->param_dtype, args->a->grad_dtype)) {
#define X(P, G)                                                                                    \
    case FLAT_PAIR(FSDPC_##P, FSDPC_##G):                                                          \
        adamw_publish(args, begin, end, FSDPC_##P, FSDPC_##G);                                     \
        break;
        X(F32, F32)
        X(F32, BF16)
        X(BF16, F32)
        X(BF16, BF16)
#undef X
    }
}

static fsdpc_status flat_adamw(const fsdpc_adamw_args *a, fsdpc_stream *stream)
{
    bool param_ok = a->param_dtype == FSDPC_F32 || a->param_dtype == FSDPC_BF16;
    bool grad_ok = a->grad_dtype == FSDPC_F32 || a->grad_dtype == FSDPC_BF16;
    if (!param_ok || !grad_ok)
        return fsdpc_fail(FSDPC_ERR_DTYPE,
                          "AdamW takes float32 or bfloat16, not a %s parameter with a %s gradient; "
                          "keep masters in float32",
                          fsdpc_dtype_name(a->param_dtype), fsdpc_dtype_name(a->grad_dtype));
    if (a->wire)
        FSDPC_TRY(fsdpc_flat_check_dtype("AdamW's wire", a->wire_dtype));
    if (a->step < 1)
        return fsdpc_fail(FSDPC_ERR_VALUE, "AdamW's step is %lld; the first is 1",
                          (long long)a->step);
    adamw_part_args args = {a, adamw_prepare(a), a->wire && can_stream(a->wire, a->numel)};
    fsdpc_flat_split(stream, a->numel, 64, adamw_part, &args);
    return FSDPC_OK;
}
