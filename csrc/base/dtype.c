/* Names and sizes of the element types, generated from one table. */
#include "base/dtype.h"

static const size_t bytes_of[] = {
#define X(name, bytes, text) [FSDPC_##name] = bytes,
    FSDPC_DTYPE_TABLE(X)
#undef X
};

static const char *const name_of[] = {
#define X(name, bytes, text) [FSDPC_##name] = text,
    FSDPC_DTYPE_TABLE(X)
#undef X
};

size_t fsdpc_dtype_bytes(fsdpc_dtype dtype)
{
    return bytes_of[dtype];
}

const char *fsdpc_dtype_name(fsdpc_dtype dtype)
{
    return (unsigned)dtype < FSDPC_DTYPE_COUNT ? name_of[dtype] : "unknown dtype";
}

bool fsdpc_dtype_is_float(fsdpc_dtype dtype)
{
    return dtype == FSDPC_F32 || dtype == FSDPC_BF16 || dtype == FSDPC_F16 || dtype == FSDPC_F64;
}

fsdpc_status fsdpc_dtype_parse(const char *name, fsdpc_dtype *out)
{
    for (int i = 0; i < FSDPC_DTYPE_COUNT; i++) {
        if (strcmp(name, name_of[i]) == 0) {
            *out = (fsdpc_dtype)i;
            return FSDPC_OK;
        }
    }
    return fsdpc_fail(FSDPC_ERR_DTYPE,
                      "unknown dtype '%s'; known are float32, bfloat16, float16, float64, int32, "
                      "int64, uint8 and bool",
                      name);
}
