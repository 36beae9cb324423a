/* The layout of a safetensors file.
 *
 * Order and bytes depend only on names, dtypes and shapes, so every rank creates the same header
 * and knows every offset without communication. Keys and separators match those of the reference
 * library. If the tensor order also matches, as it does with only one dtype per element size, the
 * files are byte-identical.
 */
#include "ckpt/safetensors.h"

#include <stdlib.h>
#include <string.h>

#include "ckpt/json.h"

static int by_alignment_then_name(const void *a, const void *b)
{
    const fsdpc_st_tensor *s = *(fsdpc_st_tensor *const *)a, *t = *(fsdpc_st_tensor *const *)b;
    if (s->dtype->bytes != t->dtype->bytes)
        return s->dtype->bytes > t->dtype->bytes ? -1 : 1;
    return strcmp(s->name, t->name);
}

static int by_name(const void *a, const void *b)
{
    const fsdpc_st_tensor *s = *(fsdpc_st_tensor *const *)a, *t = *(fsdpc_st_tensor *const *)b;
    return strcmp(s->name, t->name);
}

static fsdpc_status check_names(fsdpc_st_tensor **order, size_t n)
{
    qsort(order, n, sizeof *order, by_name);
    for (size_t i = 1; i < n; i++)
        if (strcmp(order[i - 1]->name, order[i]->name) == 0)
            return fsdpc_fail(FSDPC_ERR_VALUE, "two tensors are named '%s'", order[i]->name);
    return FSDPC_OK;
}

static fsdpc_status place(fsdpc_st_tensor **order, size_t n)
{
    uint64_t at = 0;
    for (size_t i = 0; i < n; i++) {
        fsdpc_st_tensor *t = order[i];
        uint64_t bytes = t->dtype->bytes;
        if (strcmp(t->name, "__metadata__") == 0)
            return fsdpc_fail(FSDPC_ERR_VALUE, "a tensor cannot be named '__metadata__'");
        for (int d = 0; d < t->ndim; d++)
            if (__builtin_mul_overflow(bytes, t->shape[d], &bytes))
                return fsdpc_fail(FSDPC_ERR_VALUE, "tensor '%s' is beyond 2^64 bytes", t->name);
        t->begin = at;
        if (__builtin_add_overflow(at, bytes, &at))
            return fsdpc_fail(FSDPC_ERR_VALUE, "the file would be beyond 2^64 bytes");
        t->end = at;
    }
    return FSDPC_OK;
}

void fsdpc_st_put_entry(const fsdpc_st_tensor *t, bool ascii, fsdpc_json_text *out)
{
    fsdpc_json_quote(out, t->name, ascii);
    fsdpc_json_put(out, ":{\"dtype\":\"%s\",\"shape\":[", t->dtype->name);
    for (int d = 0; d < t->ndim; d++)
        fsdpc_json_put(out, d ? ",%llu" : "%llu", (unsigned long long)t->shape[d]);
    fsdpc_json_put(out, "],");
}

fsdpc_status fsdpc_st_layout(fsdpc_st_tensor *tensors, size_t n_tensors, char **header_out,
                             size_t *header_bytes_out)
{
    fsdpc_json_text text = {0};
    fsdpc_st_tensor **order = calloc(n_tensors + 1, sizeof *order);
    if (!order)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to lay out %zu tensors", n_tensors);
    for (size_t i = 0; i < n_tensors; i++)
        order[i] = &tensors[i];
    fsdpc_status status;
    FSDPC_TRY_GOTO(status, check_names(order, n_tensors), free_order);
    qsort(order, n_tensors, sizeof *order, by_alignment_then_name);
    FSDPC_TRY_GOTO(status, place(order, n_tensors), free_order);
    /* The length comes last. */
    fsdpc_json_put(&text, "%8s{\"__metadata__\":{\"format\":\"pt\"}", "");
    for (size_t i = 0; i < n_tensors; i++) {
        fsdpc_json_put(&text, ",");
        fsdpc_st_put_entry(order[i], false, &text);
        fsdpc_json_put(&text, "\"data_offsets\":[%llu,%llu]}", (unsigned long long)order[i]->begin,
                       (unsigned long long)order[i]->end);
    }
    fsdpc_json_put(&text, "}");
    fsdpc_json_put(&text, "%*s", (int)(-text.bytes % 8), ""); /* to a multiple of 8 */
    FSDPC_TRY_GOTO(status, fsdpc_json_text_end(&text, "the header of a file"), free_order);
    size_t json_bytes = text.bytes - 8;
    if (json_bytes > FSDPC_ST_MAX_HEADER) {
        status = fsdpc_fail(FSDPC_ERR_VALUE,
                            "a header of %zu bytes for %zu tensors; the format "
                            "allows %u: use smaller shards",
                            json_bytes, n_tensors, FSDPC_ST_MAX_HEADER);
        goto free_order;
    }
    for (int i = 0; i < 8; i++)
        text.data[i] = (char)((uint64_t)json_bytes >> 8 * i);
    *header_out = text.data;
    *header_bytes_out = text.bytes;

free_order:
    if (status != FSDPC_OK)
        free(text.data);
    free(order);
    return status;
}
