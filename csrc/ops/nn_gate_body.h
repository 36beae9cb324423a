/* SwiGLU, forward and backward, and dropout (see nn_internal.h for how bodies are compiled).
 *
 * Dropout draws word first + i of a Philox stream for element i.  Sixteen blocks of four words are
 * computed side by side so that the rounds become vector code; the words are the scalar ones.
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
    for (; i + FSDPC_LANES <= last; i += FSDPC_LANES)
        swiglu_step(args, i, FSDPC_LANES, dtype);
    if (i < last)
        swiglu_step(args, i, last - i, dtype);
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
    for (; i + FSDPC_LANES <= last; i += FSDPC_LANES)
        swiglu_backward_step(args, i, FSDPC_LANES, dtype);
    if (i < last)
        swiglu_backward_step(args, i, last - i, dtype);
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

enum { DROPOUT_BLOCKS = 16, DROPOUT_WORDS = 4 * DROPOUT_BLOCKS };

/* Words 4 * block .. of the stream: fsdpc_philox_block for sixteen blocks at once. */
static void dropout_words(uint64_t seed, uint64_t stream, uint64_t block,
                          uint32_t words[DROPOUT_WORDS])
{
    uint32_t c0[DROPOUT_BLOCKS], c1[DROPOUT_BLOCKS], c2[DROPOUT_BLOCKS], c3[DROPOUT_BLOCKS];
    for (uint32_t l = 0; l < DROPOUT_BLOCKS; l++) {
        c0[l] = (uint32_t)(block + l);
        c1[l] = (uint32_t)((block + l) >> 32);
        c2[l] = (uint32_t)stream;
        c3[l] = (uint32_t)(stream >> 32);
    }
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        for (int l = 0; l < DROPOUT_BLOCKS; l++) {
            uint64_t p0 = (uint64_t)0xD2511F53u * c0[l], p1 = (uint64_t)0xCD9E8D57u * c2[l];
            c0[l] = (uint32_t)(p1 >> 32) ^ c1[l] ^ k0;
            c1[l] = (uint32_t)p1;
            c2[l] = (uint32_t)(p0 >> 32) ^ c3[l] ^ k1;
            c3[l] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int l = 0; l < DROPOUT_BLOCKS; l++) {
        words[4 * l] = c0[l];
        words[4 * l + 1] = c1[l];
        words[4 * l + 2] = c2[l];
        words[4 * l + 3] = c3[l];
    }
}

FSDPC_INLINE void dropout_range(const fsdpc_dropout_args *args, size_t first, size_t last,
                                fsdpc_dtype dtype)
{
    /* keep where uniform >= p, in integers: 24 bits against p * 2^24 rounded up */
    uint32_t threshold = (uint32_t)ceil(args->p * 0x1p24);
    float scale = args->p < 1 ? (float)(1 / (1 - args->p)) : 0.0f;
    for (size_t i = first, numel; i < last; i += numel) {
        uint32_t words[DROPOUT_WORDS];
        uint64_t word = args->first + i;
        size_t skip = word % 4;
        dropout_words(args->seed, args->stream, word / 4, words);
        numel = fsdpc_min_size(DROPOUT_WORDS - skip, last - i);
        for (size_t j = 0; j < numel; j++) {
            bool keep = words[skip + j] >> 8 >= threshold;
            if (dtype == FSDPC_F64) {
                double x = ((const double *)args->x)[i + j];
                ((double *)args->out)[i + j] = keep ? x / (1 - args->p) : 0;
            } else {
                float x = fsdpc_f32_load_as(args->x, i + j, dtype);
                fsdpc_f32_store_as(args->out, i + j, dtype, keep ? x * scale : 0.0f);
            }
        }
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
