/* The layout of a safetensors file.
 *
 * Order and bytes depend only on names, dtypes and shapes, so every rank creates the same header
 * and knows every offset without communication.  Keys and separators are those of the reference
 * library.  If its order is the same (only one dtype per size), the files are identical byte for
 * byte.
 */
#include "ckpt/safetensors.h"

#include <stdio.h>
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

/* Writes the entry; a NULL `out` only counts its bytes. */
static size_t entry(const fsdpc_st_tensor *t, char *out)
{
    char numbers[64 + 21 * FSDPC_ST_MAX_DIMS], *put = numbers, *end = numbers + sizeof numbers;
    put += snprintf(put, (size_t)(end - put), ":{\"dtype\":\"%s\",\"shape\":[", t->dtype->name);
    for (int d = 0; d < t->ndim; d++)
        put += snprintf(put, (size_t)(end - put), d ? ",%llu" : "%llu",
                        (unsigned long long)t->shape[d]);
    char offsets[80];
    size_t name_bytes = fsdpc_json_quote(t->name, out), shape_bytes = (size_t)(put - numbers);
    size_t offset_bytes =
        (size_t)snprintf(offsets, sizeof offsets, "],\"data_offsets\":[%llu,%llu]}",
                         (unsigned long long)t->begin, (unsigned long long)t->end);
    if (out) {
        memcpy(out + name_bytes, numbers, shape_bytes);
        memcpy(out + name_bytes + shape_bytes, offsets, offset_bytes);
    }
    return name_bytes + shape_bytes + offset_bytes;
}

/* Writes the JSON text, or only counts its bytes. */
static size_t render(fsdpc_st_tensor *const *order, size_t n, const fsdpc_st_pair *metadata,
                     size_t n_metadata, char *out)
{
    static const char opening[] = "\"__metadata__\":{";
    size_t bytes = 0;
#define PUT(symbol)                                                                                \
    do {                                                                                           \
        if (out)                                                                                   \
            out[bytes] = (symbol);                                                                 \
        bytes++;                                                                                   \
    } while (0)
    PUT('{');
    if (n_metadata) {
        if (out)
            memcpy(out + bytes, opening, sizeof opening - 1);
        bytes += sizeof opening - 1;
        for (size_t i = 0; i < n_metadata; i++) {
            if (i)
                PUT(',');
            bytes += fsdpc_json_quote(metadata[i].key, out ? out + bytes : NULL);
            PUT(':');
            bytes += fsdpc_json_quote(metadata[i].value, out ? out + bytes : NULL);
        }
        PUT('}');
    }
    for (size_t i = 0; i < n; i++) {
        if (i || n_metadata)
            PUT(',');
        bytes += entry(order[i], out ? out + bytes : NULL);
    }
    PUT('}');
#undef PUT
    return bytes;
}

fsdpc_status fsdpc_st_layout(fsdpc_st_tensor *tensors, size_t n_tensors,
                             const fsdpc_st_pair *metadata, size_t n_metadata, char **header_out,
                             size_t *header_bytes_out)
{
    fsdpc_st_tensor **order = calloc(n_tensors + 1, sizeof *order);
    if (!order)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to lay out %zu tensors", n_tensors);
    for (size_t i = 0; i < n_tensors; i++)
        order[i] = &tensors[i];
    fsdpc_status status;
    FSDPC_TRY_GOTO(status, check_names(order, n_tensors), free_order);
    qsort(order, n_tensors, sizeof *order, by_alignment_then_name);
    FSDPC_TRY_GOTO(status, place(order, n_tensors), free_order);
    size_t json_bytes = render(order, n_tensors, metadata, n_metadata, NULL);
    size_t padded = (json_bytes + 7) / 8 * 8;
    if (padded > FSDPC_ST_MAX_HEADER) {
        status = fsdpc_fail(FSDPC_ERR_VALUE,
                            "a header of %zu bytes for %zu tensors; the format "
                            "allows %u: use smaller shards",
                            padded, n_tensors, FSDPC_ST_MAX_HEADER);
        goto free_order;
    }
    unsigned char *header = malloc(8 + padded);
    if (!header) {
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a header of %zu bytes", padded);
        goto free_order;
    }
    for (int i = 0; i < 8; i++)
        header[i] = (unsigned char)((uint64_t)padded >> 8 * i);
    render(order, n_tensors, metadata, n_metadata, (char *)header + 8);
    memset(header + 8 + json_bytes, ' ', padded - json_bytes);
    *header_out = (char *)header;
    *header_bytes_out = 8 + padded;

free_order:
    free(order);
    return status;
}
