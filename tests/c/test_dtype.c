/* Names and sizes; conversions of single elements, exhaustively where 16 bits allow it. */
#include <math.h>

#include "base/dtype.h"
#include "check.h"

static void test_names(void)
{
    fsdpc_dtype dtype;
    for (int i = 0; i < FSDPC_DTYPE_COUNT; i++) {
        CHECK_OK(fsdpc_dtype_parse(fsdpc_dtype_name((fsdpc_dtype)i), &dtype));
        CHECK((int)dtype == i);
    }
    CHECK_FAILS(fsdpc_dtype_parse("complex64", &dtype), FSDPC_ERR_DTYPE, "complex64");
    CHECK(strcmp(fsdpc_dtype_name(FSDPC_DTYPE_COUNT), "unknown dtype") == 0);
    CHECK(fsdpc_dtype_bytes(FSDPC_BF16) == 2 && fsdpc_dtype_bytes(FSDPC_F64) == 8);
    CHECK(fsdpc_dtype_bytes(FSDPC_BOOL) == 1 && fsdpc_dtype_bytes(FSDPC_I64) == 8);
    CHECK(fsdpc_dtype_is_float(FSDPC_F16) && !fsdpc_dtype_is_float(FSDPC_I32));
}

/* Every 16-bit value survives the way to fp32 and back; NaNs stay NaNs of the same sign. */
static void test_round_trips(void)
{
    int wrong_bf16 = 0, wrong_f16 = 0;
    for (uint32_t x = 0; x < 65536; x++) {
        uint16_t bits = (uint16_t)x;
        float a = fsdpc_bf16_to_f32(bits), b = fsdpc_f16_to_f32(bits);
        uint16_t back_a = fsdpc_f32_to_bf16(a), back_b = fsdpc_f32_to_f16(b);
        if (isnan(a))
            wrong_bf16 += back_a != (bits | 0x40);
        else
            wrong_bf16 += back_a != bits;
        if (isnan(b))
            wrong_f16 += back_b != (bits | 0x200);
        else
            wrong_f16 += back_b != bits;
    }
    CHECK_NOTE(wrong_bf16 == 0, "%d values", wrong_bf16);
    CHECK_NOTE(wrong_f16 == 0, "%d values", wrong_f16);
}

/* Between every two neighbours of one sign: the middle goes to the even one, a step beside it to
 * the nearer. The magnitude grows with the bits, so neighbours are bits and bits + 1. */
static int wrong_middles(uint32_t infinity, float (*widen)(uint16_t), uint16_t (*narrow)(float))
{
    int wrong = 0;
    for (uint32_t low = 0; low + 1 < infinity; low++) {
        float a = widen((uint16_t)low), b = widen((uint16_t)(low + 1));
        float middle = (float)(((double)a + (double)b) / 2); /* exact */
        uint16_t even = (uint16_t)(low + (low & 1));
        wrong += narrow(middle) != even;
        wrong += narrow(-middle) != (even | 0x8000);
        wrong += narrow(nextafterf(middle, 0.0f)) != low;
        wrong += narrow(nextafterf(middle, INFINITY)) != low + 1;
    }
    return wrong;
}

static float widen_bf16(uint16_t x)
{
    return fsdpc_bf16_to_f32(x);
}

static float widen_f16(uint16_t x)
{
    return fsdpc_f16_to_f32(x);
}

static uint16_t narrow_bf16(float x)
{
    return fsdpc_f32_to_bf16(x);
}

static uint16_t narrow_f16(float x)
{
    return fsdpc_f32_to_f16(x);
}

static void test_rounding(void)
{
    int wrong = wrong_middles(0x7f80, widen_bf16, narrow_bf16);
    CHECK_NOTE(wrong == 0, "bf16: %d", wrong);
    wrong = wrong_middles(0x7c00, widen_f16, narrow_f16);
    CHECK_NOTE(wrong == 0, "fp16: %d", wrong);
    CHECK(fsdpc_f32_to_bf16(INFINITY) == 0x7f80 && fsdpc_f32_to_bf16(-INFINITY) == 0xff80);
    CHECK(fsdpc_f32_to_bf16(3.4028235e38f) == 0x7f80); /* the largest fp32 rounds up */
    CHECK(fsdpc_f32_to_f16(INFINITY) == 0x7c00 && fsdpc_f32_to_f16(1e30f) == 0x7c00);
    CHECK(fsdpc_f32_to_f16(65519.996f) == 0x7bff && fsdpc_f32_to_f16(65520.0f) == 0x7c00);
    CHECK(fsdpc_f32_to_bf16(1e-39f) == 0x000b); /* subnormals are kept */
    CHECK(fsdpc_f32_to_f16(1e-30f) == 0 && fsdpc_f32_to_f16(-0.0f) == 0x8000);
    float quiet = fsdpc_f32_from_bits(0xff800001u); /* a NaN whose payload would round away */
    CHECK(fsdpc_f32_to_bf16(quiet) == 0xffc0 && (fsdpc_f32_to_f16(quiet) & 0xfe00) == 0xfe00);
}

int main(void)
{
    test_names();
    test_round_trips();
    test_rounding();
    return check_report("dtype");
}
