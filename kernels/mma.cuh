/* Warp-level tensor core operations: loading 8 by 8 matrices, multiplying 16 by 8 by 16, and
 * copying asynchronously into shared memory.
 *
 * A fragment's layout, with g = lane / 4 and t = lane % 4 (PTX's names):
 *     A (16 x 16)  a[0]: row g, columns 2t, 2t + 1;  a[1]: row g + 8;  a[2], a[3]: columns + 8
 *     B (16 x 8)   b[0]: rows 2t, 2t + 1 of column g;  b[1]: rows + 8
 *     C (16 x 8)   c[0], c[1]: row g, columns 2t, 2t + 1;  c[2], c[3]: row g + 8
 * so two neighbouring C, rounded, are an A: products chain without leaving the registers.
 */
#ifndef FSDPC_KERNELS_MMA_CUH
#define FSDPC_KERNELS_MMA_CUH

#include "dtype.cuh"

#if defined(FSDPC_EMU)
#include "emu_mma.h"
#else

__device__ __forceinline__ uint32_t shared_address(const void *at)
{
    return (uint32_t)__cvta_generic_to_shared(at);
}

/* Loads four matrices; lanes 8i .. 8i + 7 pass the rows of matrix i, and out[i] receives this
 * lane's pair from it. */
__device__ __forceinline__ void load_matrices(uint32_t (&out)[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/* Does the same as load_matrices, but transposes each matrix. */
__device__ __forceinline__ void load_matrices_turned(uint32_t (&out)[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1, bf16)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1, f16)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Rounds two floats and packs them, with the first in the lower half. */
__device__ __forceinline__ uint32_t pack_pair(float low, float high, bf16)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high, f16)
{
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* Copies 16 bytes from global to shared memory, or writes zeros; the copy is complete when
 * copies_wait returns. */
__device__ __forceinline__ void copy_16(void *shared, const void *global, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copies_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most LEFT of this thread's most recent copy groups are in flight. */
template <int LEFT> __device__ __forceinline__ void copies_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ float exp_2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
#endif
