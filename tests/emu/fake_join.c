/* Sums and extrema of the fake NCCL: of two numbers, rounded to their type.
 *
 * Ranks are joined one by one and rounded after each, unlike the tree of the CPU's reductions.
 */
#include <stdint.h>
#include <string.h>

#include "base/dtype.h"
#include "fake_inside.h"

size_t fake_type_bytes(fsdpc_nccl_type type)
{
    switch (type) {
    case FSDPC_NCCL_UINT8:
        return 1;
    case FSDPC_NCCL_FLOAT16:
    case FSDPC_NCCL_BFLOAT16:
        return 2;
    case FSDPC_NCCL_INT32:
    case FSDPC_NCCL_FLOAT32:
        return 4;
    default:
        return 8;
    }
}

#define JOIN(ctype)                                                                                \
    do {                                                                                           \
        ctype x, y;                                                                                \
        memcpy(&x, into, sizeof x);                                                                \
        memcpy(&y, from, sizeof y);                                                                \
        x = red == FSDPC_NCCL_SUM   ? (ctype)(x + y)                                               \
            : red == FSDPC_NCCL_MAX ? (x > y ? x : y)                                              \
                                    : (x < y ? x : y);                                             \
        memcpy(into, &x, sizeof x);                                                                \
    } while (0)

#define JOIN_HALF(widen, narrow)                                                                   \
    do {                                                                                           \
        uint16_t x, y;                                                                             \
        memcpy(&x, into, sizeof x);                                                                \
        memcpy(&y, from, sizeof y);                                                                \
        x = narrow(widen(x) + widen(y));                                                           \
        memcpy(into, &x, sizeof x);                                                                \
    } while (0)

void fake_join(fsdpc_nccl_type type, fsdpc_nccl_red red, unsigned char *into,
               const unsigned char *from)
{
    switch (type) {
    case FSDPC_NCCL_UINT8:
        JOIN(uint8_t);
        break;
    case FSDPC_NCCL_INT32:
        JOIN(int32_t);
        break;
    case FSDPC_NCCL_INT64:
        JOIN(int64_t);
        break;
    case FSDPC_NCCL_FLOAT32:
        JOIN(float);
        break;
    case FSDPC_NCCL_FLOAT64:
        JOIN(double);
        break;
    case FSDPC_NCCL_FLOAT16:
        JOIN_HALF(fsdpc_f16_to_f32, fsdpc_f32_to_f16);
        break;
    case FSDPC_NCCL_BFLOAT16:
        JOIN_HALF(fsdpc_bf16_to_f32, fsdpc_f32_to_bf16);
        break;
    }
}
