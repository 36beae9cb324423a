/* Philox 4x32-10 against Random123's published vectors; uniforms stay in [0, 1). */
#include "base/random.h"
#include "check.h"

static int equals(fsdpc_philox got, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    return got.x[0] == a && got.x[1] == b && got.x[2] == c && got.x[3] == d;
}

static void test_vectors(void)
{
    /* Random123 1.14.0, tests/kat_vectors: counter words 0-1 are the block, 2-3 the stream */
    CHECK(equals(fsdpc_philox_block(0, 0, 0), 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
    CHECK(equals(fsdpc_philox_block(UINT64_MAX, UINT64_MAX, UINT64_MAX), 0x408f276d, 0x41c83b0e,
                 0xa20bc7c6, 0x6d5451fd));
    CHECK(equals(fsdpc_philox_block(0x299f31d0a4093822u, 0x0370734413198a2eu, 0x85a308d3243f6a88u),
                 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1));
}

static void test_uniform(void)
{
    CHECK(fsdpc_uniform_from_bits(0) == 0.0f);
    CHECK(fsdpc_uniform_from_bits(UINT32_MAX) < 1.0f);
    CHECK(fsdpc_uniform_from_bits(1u << 31) == 0.5f);
    double sum = 0, squares = 0;
    enum { BLOCKS = 25000 };
    for (uint64_t block = 0; block < BLOCKS; block++) {
        fsdpc_philox words = fsdpc_philox_block(42, 7, block);
        for (int i = 0; i < 4; i++) {
            double u = (double)fsdpc_uniform_from_bits(words.x[i]);
            sum += u;
            squares += u * u;
        }
    }
    double mean = sum / (4.0 * BLOCKS), second = squares / (4.0 * BLOCKS);
    /* standard errors at 100,000 draws: 0.0009 and 0.0009; 5 of them */
    CHECK_NOTE(mean > 0.4955 && mean < 0.5045, "mean %g", mean);
    CHECK_NOTE(second > 0.3286 && second < 0.3381, "second moment %g", second);
}

int main(void)
{
    test_vectors();
    test_uniform();
    return check_report("random");
}
