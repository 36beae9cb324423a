/* Safetensors headers: what is laid out is read back, and each rule of the reader has a header that
 * breaks it alone.
 */
#include "ckpt/safetensors.h"

#include "check.h"

/* A file of this header and so many bytes of data, through the parser. */
static fsdpc_status parse(const char *json, size_t json_bytes, uint64_t data_bytes,
                          fsdpc_st_header *out)
{
    size_t bytes = 8 + json_bytes;
    unsigned char *file = malloc(bytes); /* exactly as large: sanitizers see a read too far */
    for (int i = 0; i < 8; i++)
        file[i] = (unsigned char)((uint64_t)json_bytes >> 8 * i);
    memcpy(file + 8, json, json_bytes);
    fsdpc_status status = fsdpc_st_parse(file, bytes, bytes + data_bytes, "x.st", out);
    free(file);
    return status;
}

#define REFUSED(json, data_bytes, code, text)                                                      \
    do {                                                                                           \
        fsdpc_st_header refused_ = {0};                                                            \
        CHECK_FAILS(parse(json, sizeof(json) - 1, data_bytes, &refused_), code, text);             \
    } while (0)

#define ONE(dtype, shape, offsets)                                                                 \
    "{\"a\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"
#define VALUE FSDPC_ERR_VALUE

static void test_accepted(void)
{
    fsdpc_st_header h;
    static const char plain[] = ONE("F32", "[2, 3]", "[0, 24]") "   ";
    CHECK_OK(parse(plain, sizeof plain - 1, 24, &h));
    CHECK(h.n_tensors == 1 && h.tensors[0].ndim == 2 && h.tensors[0].shape[1] == 3);
    CHECK(strcmp(h.tensors[0].dtype->name, "F32") == 0 && h.data_begin == 8 + sizeof plain - 1);
    fsdpc_st_header_fini(&h);

    static const char empty[] = "{}";
    CHECK_OK(parse(empty, 2, 0, &h));
    CHECK(h.n_tensors == 0);
    fsdpc_st_header_fini(&h);

    static const char scalars[] =
        "{\"z\":{\"data_offsets\":[0,0],\"shape\":[0,18446744073709551615],\"dtype\":\"I8\"},"
        "\"__metadata__\":{\"b\":\"2\",\"a\":\"\\u00e9\\ud83d\\ude00\\n\"},"
        "\"s\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]}}";
    CHECK_OK(parse(scalars, sizeof scalars - 1, 8, &h));
    CHECK(h.n_tensors == 2 && strcmp(h.tensors[0].name, "z") == 0 && h.n_metadata == 2);
    CHECK(strcmp(h.metadata[0].key, "a") == 0);
    CHECK(strcmp(h.metadata[0].value, "\xc3\xa9\xf0\x9f\x98\x80\n") == 0);
    fsdpc_st_header_fini(&h);
}

static void test_numbers(void)
{
    REFUSED(ONE("F32", "[-1]", "[0,4]"), 4, VALUE, "not negative");
    REFUSED(ONE("F32", "[1.0]", "[0,4]"), 4, VALUE, "whole number");
    REFUSED(ONE("F32", "[1e0]", "[0,4]"), 4, VALUE, "whole number");
    REFUSED(ONE("F32", "[NaN]", "[0,4]"), 4, VALUE, "whole number");
    REFUSED(ONE("F32", "[01]", "[0,4]"), 4, VALUE, "whole number");
    REFUSED(ONE("F32", "[18446744073709551616]", "[0,4]"), 4, VALUE, "2^64");
    REFUSED(ONE("F32", "[\"1\"]", "[0,4]"), 4, VALUE, "whole number");
    REFUSED(ONE("F32", "[4294967296,4294967296]", "[0,4]"), 4, VALUE, "beyond 2^64");
    REFUSED(ONE("F32", "[4611686018427387905]", "[0,4]"), 4, VALUE, "beyond 2^64");
}

static void test_entries(void)
{
    REFUSED(ONE("F12", "[1]", "[0,4]"), 4, FSDPC_ERR_DTYPE, "unknown dtype 'F12'");
    REFUSED(ONE("F32", "[1]", "[0,5]"), 5, VALUE, "takes 4 bytes");
    REFUSED(ONE("F32", "[1]", "[4,0]"), 4, VALUE, "takes 4 bytes");
    REFUSED(ONE("F32", "[1]", "[0]"), 4, VALUE, "expected ','");
    REFUSED(ONE("F32", "[1]", "[0,4,4]"), 4, VALUE, "expected ']'");
    REFUSED(ONE("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, FSDPC_ERR_UNSUPPORTED, "8 dimensions");
    REFUSED(ONE("F32", "[[1]]", "[0,4]"), 4, VALUE, "got '['");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 0, VALUE, "lacks its data_offsets");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
            VALUE, "twice the key 'dtype'");
    REFUSED("{\"a\":{\"dtype\":\"F32\",\"x\":1,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, VALUE,
            "unknown key 'x'");
    REFUSED("{\"a\":{}}", 0, VALUE, "expected '\"'");
    REFUSED("{\"a\":null}", 0, VALUE, "expected '{'");
}

#define TWO(first, second)                                                                         \
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" first                               \
    "},\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" second "}}"

static void test_places(void)
{
    REFUSED(TWO("[0,4]", "[2,6]"), 6, VALUE, "'b' begins at 2, inside");
    REFUSED(TWO("[0,4]", "[0,4]"), 4, VALUE, "inside the one that ends");
    REFUSED(TWO("[0,4]", "[5,9]"), 9, VALUE, "'b' begins at 5, behind a hole");
    REFUSED(TWO("[1,5]", "[5,9]"), 9, VALUE, "'a' begins at 1, behind a hole");
    REFUSED(TWO("[0,4]", "[4,8]"), 7, VALUE, "cut short");
    REFUSED(TWO("[0,4]", "[4,8]"), 9, VALUE, "added to");
    REFUSED("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
            "\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}",
            8, VALUE, "'a' stands twice");
    REFUSED("{\"\\u0061\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
            "\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}",
            8, VALUE, "'a' stands twice");
}

static void test_text(void)
{
    REFUSED("", 0, VALUE, "expected '{'");
    REFUSED(" {}", 0, VALUE, "expected '{'");
    REFUSED("{}x", 0, VALUE, "nothing but blanks");
    REFUSED("{", 0, VALUE, "the end");
    REFUSED("[{}]", 0, VALUE, "expected '{'");
    REFUSED("{\"a", 0, VALUE, "end of a string");
    REFUSED("{\"\x80\":1}", 0, VALUE, "valid UTF-8");
    REFUSED("{\"\xc0\xaf\":1}", 0, VALUE, "valid UTF-8");
    REFUSED("{\"\xe0\x80\xaf\":1}", 0, VALUE, "valid UTF-8");
    REFUSED("{\"\xed\xa0\x80\":1}", 0, VALUE, "valid UTF-8");
    REFUSED("{\"\xf4\x90\x80\x80\":1}", 0, VALUE, "valid UTF-8");
    REFUSED("{\"\xf0\x9f\x98", 0, VALUE, "valid UTF-8");
    REFUSED("{\"\n\":1}", 0, VALUE, "control character");
    REFUSED("{\"\\x\":1}", 0, VALUE, "escape");
    REFUSED("{\"\\ud800\":1}", 0, VALUE, "surrogate pair");
    REFUSED("{\"\\udc00\":1}", 0, VALUE, "surrogate pair");
    REFUSED("{\"\\u00\":1}", 0, VALUE, "hexadecimal");
    REFUSED("{\"\\u0000\":1}", 0, VALUE, "no NUL");
    REFUSED("{\"__metadata__\":{\"a\":1}}", 0, VALUE, "expected '\"'");
    REFUSED("{\"__metadata__\":{\"a\":{}}}", 0, VALUE, "expected '\"'");
    REFUSED("{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, VALUE, "key 'a' stands twice");
    REFUSED("{\"__metadata__\":{},\"__metadata__\":{}}", 0, VALUE, "__metadata__ stands twice");
    REFUSED("{\"a\":{},}", 0, VALUE, "expected '\"'");

    enum { DEEP = 1 << 20 };
    char *deep = malloc(DEEP); /* a recursive reader would need as many stack frames */
    memset(deep, '[', DEEP);
    memcpy(deep, "{\"a\":", 5);
    fsdpc_st_header h;
    CHECK_FAILS(parse(deep, DEEP, 0, &h), VALUE, "expected '{', got '['");
    free(deep);
}

static void test_lengths(void)
{
    unsigned char file[16] = {0x01, 0xe1, 0xf5, 0x05}; /* 100,000,001 */
    uint64_t length;
    fsdpc_st_header h;
    CHECK_FAILS(fsdpc_st_header_bytes(file, UINT64_MAX, "x.st", &length), VALUE, "100000001 bytes");
    file[0] = 0x00;
    CHECK_OK(fsdpc_st_header_bytes(file, UINT64_MAX, "x.st", &length));
    CHECK(length == 100000000);
    CHECK_FAILS(fsdpc_st_header_bytes(file, 100000007, "x.st", &length), VALUE, "cut short");
    memset(file, 0xff, 8);
    CHECK_FAILS(fsdpc_st_parse(file, 16, 16, "x.st", &h), VALUE, "allows");
    CHECK_FAILS(fsdpc_st_parse(file, 7, 7, "x.st", &h), VALUE, "too few");
}

static void test_layout(void)
{
    const fsdpc_st_dtype *f32 = fsdpc_st_dtype_find("F32"), *bf16 = fsdpc_st_dtype_find("BF16");
    fsdpc_st_tensor tensors[] = {
        {.name = "b", .dtype = bf16, .ndim = 1, .shape = {3}},
        {.name = "z\"\\\x01\xc3\xa9", .dtype = f32, .ndim = 2, .shape = {2, 2}},
        {.name = "a", .dtype = f32, .ndim = 0},
        {.name = "", .dtype = fsdpc_st_dtype_find("I64"), .ndim = 1, .shape = {0}},
    };
    char *header;
    size_t bytes;
    CHECK_OK(fsdpc_st_layout(tensors, 4, &header, &bytes));
    CHECK(bytes % 8 == 0);
    CHECK(tensors[3].begin == 0 && tensors[3].end == 0);
    CHECK(tensors[2].begin == 0 && tensors[2].end == 4);
    CHECK(tensors[1].begin == 4 && tensors[1].end == 20);
    CHECK(tensors[0].begin == 20 && tensors[0].end == 26);
    fsdpc_st_header h;
    CHECK_OK(fsdpc_st_parse(header, bytes, bytes + 26, "x.st", &h));
    CHECK(h.n_tensors == 4 && h.data_begin == bytes && h.n_metadata == 1);
    CHECK(strcmp(h.tensors[2].name, tensors[1].name) == 0);
    CHECK(h.tensors[2].ndim == 2 && h.tensors[2].end == 20);
    fsdpc_st_header_fini(&h);
    free(header);

    tensors[0].name = "a";
    CHECK_FAILS(fsdpc_st_layout(tensors, 4, &header, &bytes), VALUE, "are named 'a'");
    tensors[0].name = "__metadata__";
    CHECK_FAILS(fsdpc_st_layout(tensors, 4, &header, &bytes), VALUE, "cannot be named");
    tensors[0] = (fsdpc_st_tensor){.name = "n", .dtype = f32, .ndim = 1, .shape = {1ull << 62}};
    CHECK_FAILS(fsdpc_st_layout(tensors, 4, &header, &bytes), VALUE, "beyond 2^64");
}

/* A valid header with any one bit changed is refused, or it is another valid header of the same
 * bytes: never a crash, never a tensor outside of the file. */
static void test_flips(void)
{
    static const char json[] = TWO("[0,4]", "[4,8]");
    char changed[sizeof json];
    for (size_t bit = 0; bit < 8 * (sizeof json - 1); bit++) {
        memcpy(changed, json, sizeof json);
        changed[bit / 8] = (char)(changed[bit / 8] ^ 1 << bit % 8);
        fsdpc_st_header h;
        if (parse(changed, sizeof json - 1, 8, &h) != FSDPC_OK)
            continue;
        for (size_t i = 0; i < h.n_tensors; i++)
            CHECK(h.tensors[i].begin <= h.tensors[i].end && h.tensors[i].end <= 8);
        fsdpc_st_header_fini(&h);
    }
}

int main(void)
{
    test_accepted();
    test_numbers();
    test_entries();
    test_places();
    test_text();
    test_lengths();
    test_layout();
    test_flips();
    return check_report("safetensors");
}
