/* Tensor cores and asynchronous copies on this processor; stands in for the body of
 * kernels/mma.cuh.
 *
 * A copy may be made at any time between its issue and the wait for it: in ascending order of
 * threads it is made at once, in descending order at the wait. Who ends without waiting has the
 * process end.
 */
#ifndef FSDPC_TESTS_EMU_EMU_MMA_H
#define FSDPC_TESTS_EMU_EMU_MMA_H

/* Lanes offer what their rows hold, so that all have been read once the exchange is over. */
inline void emu_load_matrices(uint32_t (&out)[4], const void *row, bool turned)
{
    unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const unsigned char *offers = emu_exchange(row, 16);
    for (unsigned i = 0; i < 4; i++) {
        uint16_t pair[2];
        for (unsigned e = 0; e < 2; e++) {
            unsigned r = turned ? 2 * t + e : g, c = turned ? g : 2 * t + e;
            memcpy(&pair[e], offers + (8 * i + r) * 64 + c * 2, sizeof pair[e]);
        }
        out[i] = pair[0] | (uint32_t)pair[1] << 16;
    }
}

inline void load_matrices(uint32_t (&out)[4], const void *row)
{
    emu_load_matrices(out, row, false);
}

inline void load_matrices_turned(uint32_t (&out)[4], const void *row)
{
    emu_load_matrices(out, row, true);
}

inline float emu_half(uint32_t pair, unsigned high, bf16)
{
    return bf16_to_f32((uint16_t)(high ? pair >> 16 : pair));
}

inline float emu_half(uint32_t pair, unsigned high, f16)
{
    return f16_to_f32((uint16_t)(high ? pair >> 16 : pair));
}

template <typename T>
inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T kind)
{
    struct offer {
        uint32_t a[4], b[2];
    } mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const unsigned char *offers = emu_exchange(&mine, sizeof mine);
    for (unsigned e = 0; e < 4; e++) {
        unsigned col = 2 * t + e % 2; /* row g, or g + 8 for e of 2 and 3 */
        for (unsigned k = 0; k < 16; k++) {
            offer left, right;
            memcpy(&left, offers + (g * 4 + k % 8 / 2) * 64, sizeof left);
            memcpy(&right, offers + (col * 4 + k % 8 / 2) * 64, sizeof right);
            c[e] += emu_half(left.a[e / 2 + (k / 8) * 2], k % 2, kind) *
                    emu_half(right.b[k / 8], k % 2, kind);
        }
    }
}

inline uint32_t pack_pair(float low, float high, bf16)
{
    return f32_to_bf16(low) | (uint32_t)f32_to_bf16(high) << 16;
}

inline uint32_t pack_pair(float low, float high, f16)
{
    return f32_to_f16(low) | (uint32_t)f32_to_f16(high) << 16;
}

inline void copy_16(void *shared, const void *global, bool valid)
{
    emu_copy_later(shared, global, valid);
}

inline void copies_commit()
{
    emu_copies_commit();
}

template <int LEFT> inline void copies_wait()
{
    emu_copies_wait(LEFT);
}

inline float exp_2(float x)
{
    return exp2f(x);
}

#endif
