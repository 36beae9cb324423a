/* CRC-32C against published values, a bitwise definition, and itself in pieces. */
#include "base/crc32c.h"
#include "base/random.h"
#include "check.h"

enum { BYTES = 40000 };

static uint32_t by_definition(const unsigned char *data, size_t bytes)
{
    uint32_t state = 0xffffffffu;
    for (size_t i = 0; i < bytes; i++) {
        state ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            state = state >> 1 ^ (state & 1 ? 0x82F63B78u : 0);
    }
    return ~state;
}

static void test_copied_in(void)
{
    unsigned char bytes[32]; /* RFC 3720, B.4 */
    CHECK(fsdpc_crc32c(0, "123456789", 9) == 0xe3069283u);
    memset(bytes, 0, sizeof bytes);
    CHECK(fsdpc_crc32c(0, bytes, 32) == 0x8a9136aau);
    memset(bytes, 0xff, sizeof bytes);
    CHECK(fsdpc_crc32c(0, bytes, 32) == 0x62a8ab43u);
    for (int i = 0; i < 32; i++)
        bytes[i] = (unsigned char)i;
    CHECK(fsdpc_crc32c(0, bytes, 32) == 0x46dd794eu);
    CHECK(fsdpc_crc32c(0, NULL, 0) == 0 && fsdpc_crc32c_portable(0, NULL, 0) == 0);
    CHECK(fsdpc_crc32c(0x1234u, NULL, 0) == 0x1234u);
}

static void test_lengths(const unsigned char *data)
{
    /* around every switch of path: words, 3 x 256, folding's 1024 and its steps of 256, slicing's
     * 4096, 3 x 4096 and above */
    const size_t around[] = {0,    8,    16,   768,   1008,  1024,  1270,
                             1530, 1536, 4096, 12288, 13056, 24576, 36864};
    for (size_t a = 0; a < sizeof around / sizeof *around; a++) {
        for (size_t off = 0; off < 20; off++) {
            size_t bytes = around[a] + off, start = off * 7 % 9;
            uint32_t want = by_definition(data + start, bytes);
            CHECK_NOTE(fsdpc_crc32c(0, data + start, bytes) == want, "%zu bytes", bytes);
            CHECK_NOTE(fsdpc_crc32c_portable(0, data + start, bytes) == want, "%zu bytes", bytes);
        }
    }
}

static void test_pieces(const unsigned char *data)
{
    uint32_t whole = fsdpc_crc32c(0, data, BYTES);
    const size_t cuts[] = {0, 1, 63, 4097, 12288, 39999, BYTES};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        size_t cut = cuts[i];
        uint32_t a = fsdpc_crc32c(0, data, cut), b = fsdpc_crc32c(0, data + cut, BYTES - cut);
        CHECK_NOTE(fsdpc_crc32c(a, data + cut, BYTES - cut) == whole, "continued at %zu", cut);
        CHECK_NOTE(fsdpc_crc32c_portable(a, data + cut, BYTES - cut) == whole, "at %zu", cut);
        CHECK_NOTE(fsdpc_crc32c_combine(a, b, BYTES - cut) == whole, "combined at %zu", cut);
    }
    /* associativity at lengths no buffer has */
    uint64_t far = (uint64_t)5 << 40;
    uint32_t left = fsdpc_crc32c_combine(fsdpc_crc32c_combine(1, 2, far), 3, far + 7);
    uint32_t right = fsdpc_crc32c_combine(1, fsdpc_crc32c_combine(2, 3, far + 7), far + far + 7);
    CHECK(left == right);
}

int main(void)
{
    unsigned char *data = malloc(BYTES + 16);
    for (size_t i = 0; i < BYTES + 16; i++)
        data[i] = (unsigned char)fsdpc_philox_block(1, 2, i).x[0];
    test_copied_in();
    test_lengths(data);
    test_pieces(data);
    free(data);
    return check_report("crc32c");
}
