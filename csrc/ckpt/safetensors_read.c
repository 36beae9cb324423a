/* The reader of safetensors headers.
 *
 * A single pass over the text fills arrays that grow as entries are read. The header's length
 * bounds the size of the arrays, because each entry takes at least 40 bytes of it. Strings are
 * stored in a single buffer as long as the header. Sorting by name then finds duplicates, and
 * sorting by offset finds overlaps and gaps, so even a header with a million tensors needs only two
 * sorts.
 */
#include "ckpt/safetensors.h"

#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "ckpt/json.h"

static const fsdpc_st_dtype dtypes[] = {
#define X(name, bytes, dtype) {#name, bytes, dtype},
    FSDPC_ST_DTYPE_TABLE(X)
#undef X
};

const fsdpc_st_dtype *fsdpc_st_dtype_find(const char *name)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (strcmp(dtypes[i].name, name) == 0)
            return &dtypes[i];
    return NULL;
}

static fsdpc_status grow(void **array_io, size_t n, size_t element_bytes)
{
    if (n & (n - 1) || n == 1)
        return FSDPC_OK; /* capacity is a power of two, at least 2 */
    void *larger = realloc(*array_io, (n ? 2 * n : 2) * element_bytes);
    if (!larger)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a header of %zu tensors", n);
    *array_io = larger;
    return FSDPC_OK;
}

/* ---- one entry ---- */

static fsdpc_status read_shape(fsdpc_json *json, fsdpc_st_tensor *t)
{
    FSDPC_TRY(fsdpc_json_expect(json, '['));
    if (fsdpc_json_take(json, ']'))
        return FSDPC_OK;
    do {
        if (t->ndim == FSDPC_ST_MAX_DIMS)
            return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "%s: tensor '%s' has more than %d dimensions",
                              json->what, t->name, (int)FSDPC_ST_MAX_DIMS);
        FSDPC_TRY(fsdpc_json_uint(json, &t->shape[t->ndim++]));
    } while (fsdpc_json_take(json, ','));
    return fsdpc_json_expect(json, ']');
}

static fsdpc_status read_offsets(fsdpc_json *json, fsdpc_st_tensor *t)
{
    FSDPC_TRY(fsdpc_json_expect(json, '['));
    FSDPC_TRY(fsdpc_json_uint(json, &t->begin));
    FSDPC_TRY(fsdpc_json_expect(json, ','));
    FSDPC_TRY(fsdpc_json_uint(json, &t->end));
    return fsdpc_json_expect(json, ']');
}

static fsdpc_status check_bytes(const fsdpc_json *json, const fsdpc_st_tensor *t)
{
    uint64_t bytes = t->dtype->bytes;
    for (int d = 0; d < t->ndim; d++)
        if (__builtin_mul_overflow(bytes, t->shape[d], &bytes))
            return fsdpc_fail(FSDPC_ERR_VALUE, "%s: the shape of tensor '%s' is beyond 2^64 bytes",
                              json->what, t->name);
    if (t->end < t->begin || t->end - t->begin != bytes)
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "%s: tensor '%s' takes %llu bytes by shape and dtype, its offsets are "
                          "[%llu, %llu]",
                          json->what, t->name, (unsigned long long)bytes,
                          (unsigned long long)t->begin, (unsigned long long)t->end);
    return FSDPC_OK;
}

static fsdpc_status read_tensor(fsdpc_json *json, char **cursor_io, fsdpc_st_tensor *t)
{
    enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4 };
    unsigned seen = 0;
    FSDPC_TRY(fsdpc_json_expect(json, '{'));
    do {
        char *mark = *cursor_io;
        const char *key, *dtype;
        FSDPC_TRY(fsdpc_json_string(json, cursor_io, &key));
        unsigned which = strcmp(key, "dtype") == 0          ? DTYPE
                         : strcmp(key, "shape") == 0        ? SHAPE
                         : strcmp(key, "data_offsets") == 0 ? OFFSETS
                                                            : 0;
        if (which == 0 || seen & which)
            return fsdpc_fail(FSDPC_ERR_VALUE, "%s: tensor '%s' has %s '%.100s'", json->what,
                              t->name, which ? "twice the key" : "the unknown key", key);
        seen |= which;
        *cursor_io = mark;
        FSDPC_TRY(fsdpc_json_expect(json, ':'));
        if (which == SHAPE) {
            FSDPC_TRY(read_shape(json, t));
        } else if (which == OFFSETS) {
            FSDPC_TRY(read_offsets(json, t));
        } else {
            FSDPC_TRY(fsdpc_json_string(json, cursor_io, &dtype));
            t->dtype = fsdpc_st_dtype_find(dtype);
            if (!t->dtype)
                return fsdpc_fail(FSDPC_ERR_DTYPE, "%s: tensor '%s' has the unknown dtype '%.100s'",
                                  json->what, t->name, dtype);
            *cursor_io = mark;
        }
    } while (fsdpc_json_take(json, ','));
    FSDPC_TRY(fsdpc_json_expect(json, '}'));
    if (seen != (DTYPE | SHAPE | OFFSETS))
        return fsdpc_fail(FSDPC_ERR_VALUE, "%s: tensor '%s' lacks its %s", json->what, t->name,
                          !(seen & DTYPE)   ? "dtype"
                          : !(seen & SHAPE) ? "shape"
                                            : "data_offsets");
    return check_bytes(json, t);
}

static fsdpc_status read_metadata(fsdpc_json *json, char **cursor_io, fsdpc_st_header *header)
{
    FSDPC_TRY(fsdpc_json_expect(json, '{'));
    if (fsdpc_json_take(json, '}'))
        return FSDPC_OK;
    do {
        FSDPC_TRY(grow((void **)&header->metadata, header->n_metadata, sizeof *header->metadata));
        fsdpc_st_pair *pair = &header->metadata[header->n_metadata];
        FSDPC_TRY(fsdpc_json_string(json, cursor_io, &pair->key));
        FSDPC_TRY(fsdpc_json_expect(json, ':'));
        FSDPC_TRY(fsdpc_json_string(json, cursor_io, &pair->value));
        header->n_metadata++;
    } while (fsdpc_json_take(json, ','));
    return fsdpc_json_expect(json, '}');
}

/* ---- all of them ---- */

static fsdpc_status read_entries(fsdpc_json *json, char *cursor, fsdpc_st_header *header)
{
    bool metadata_seen = false;
    FSDPC_TRY(fsdpc_json_expect(json, '{'));
    if (fsdpc_json_take(json, '}'))
        return fsdpc_json_end(json);
    do {
        const char *name;
        FSDPC_TRY(fsdpc_json_string(json, &cursor, &name));
        FSDPC_TRY(fsdpc_json_expect(json, ':'));
        if (strcmp(name, "__metadata__") == 0) {
            if (metadata_seen)
                return fsdpc_fail(FSDPC_ERR_VALUE, "%s: __metadata__ stands twice", json->what);
            metadata_seen = true;
            FSDPC_TRY(read_metadata(json, &cursor, header));
            continue;
        }
        FSDPC_TRY(grow((void **)&header->tensors, header->n_tensors, sizeof *header->tensors));
        fsdpc_st_tensor *t = &header->tensors[header->n_tensors];
        *t = (fsdpc_st_tensor){.name = name};
        FSDPC_TRY(read_tensor(json, &cursor, t));
        header->n_tensors++;
    } while (fsdpc_json_take(json, ','));
    FSDPC_TRY(fsdpc_json_expect(json, '}'));
    return fsdpc_json_end(json);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const fsdpc_st_tensor *)a)->name, ((const fsdpc_st_tensor *)b)->name);
}

static int by_key(const void *a, const void *b)
{
    return strcmp(((const fsdpc_st_pair *)a)->key, ((const fsdpc_st_pair *)b)->key);
}

static int by_offset(const void *a, const void *b)
{
    const fsdpc_st_tensor *s = a, *t = b;
    if (s->begin != t->begin)
        return s->begin < t->begin ? -1 : 1;
    if (s->end != t->end)
        return s->end < t->end ? -1 : 1;
    return strcmp(s->name, t->name);
}

static void sort(void *array, size_t n, size_t bytes, int (*compare)(const void *, const void *))
{
    if (n > 1)
        qsort(array, n, bytes, compare);
}

static fsdpc_status check_names(fsdpc_st_header *header, const char *what)
{
    sort(header->tensors, header->n_tensors, sizeof *header->tensors, by_name);
    for (size_t i = 1; i < header->n_tensors; i++)
        if (strcmp(header->tensors[i - 1].name, header->tensors[i].name) == 0)
            return fsdpc_fail(FSDPC_ERR_VALUE, "%s: tensor '%s' stands twice", what,
                              header->tensors[i].name);
    sort(header->metadata, header->n_metadata, sizeof *header->metadata, by_key);
    for (size_t i = 1; i < header->n_metadata; i++)
        if (strcmp(header->metadata[i - 1].key, header->metadata[i].key) == 0)
            return fsdpc_fail(FSDPC_ERR_VALUE, "%s: the metadata's key '%s' stands twice", what,
                              header->metadata[i].key);
    return FSDPC_OK;
}

static fsdpc_status check_offsets(fsdpc_st_header *header, uint64_t file_bytes, const char *what)
{
    uint64_t at = 0;
    sort(header->tensors, header->n_tensors, sizeof *header->tensors, by_offset);
    for (size_t i = 0; i < header->n_tensors; i++) {
        const fsdpc_st_tensor *t = &header->tensors[i];
        if (t->begin != at)
            return fsdpc_fail(FSDPC_ERR_VALUE, "%s: tensor '%s' begins at %llu, %s at %llu", what,
                              t->name, (unsigned long long)t->begin,
                              t->begin < at ? "inside the one that ends" : "behind a hole",
                              (unsigned long long)at);
        at = t->end;
    }
    uint64_t have = file_bytes - header->data_begin;
    if (at != have)
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "%s: the tensors take %llu bytes, the file has %llu for them: it was %s",
                          what, (unsigned long long)at, (unsigned long long)have,
                          have < at ? "cut short" : "added to");
    return FSDPC_OK;
}

fsdpc_status fsdpc_st_header_bytes(const void *data, uint64_t file_bytes, const char *what,
                                   uint64_t *out)
{
    const unsigned char *bytes = data;
    uint64_t length = 0;
    if (file_bytes < 8)
        return fsdpc_fail(FSDPC_ERR_VALUE, "%s: %llu bytes are too few for a safetensors file",
                          what, (unsigned long long)file_bytes);
    for (int i = 7; i >= 0; i--)
        length = length << 8 | bytes[i];
    if (length > FSDPC_ST_MAX_HEADER)
        return fsdpc_fail(FSDPC_ERR_VALUE, "%s: a header of %llu bytes; the format allows %u", what,
                          (unsigned long long)length, FSDPC_ST_MAX_HEADER);
    if (length > file_bytes - 8)
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "%s: a header of %llu bytes in a file of %llu: it was cut short, or is "
                          "no safetensors file",
                          what, (unsigned long long)length, (unsigned long long)file_bytes);
    *out = length;
    return FSDPC_OK;
}

fsdpc_status fsdpc_st_parse(const void *data, size_t bytes, uint64_t file_bytes, const char *what,
                            fsdpc_st_header *out)
{
    uint64_t length = 0;
    FSDPC_TRY(fsdpc_st_header_bytes(data, file_bytes, what, &length));
    if (bytes < 8 + length)
        return fsdpc_fail(FSDPC_ERR_INTERNAL, "%s: %zu bytes of the header given", what, bytes);
    const unsigned char *text = (const unsigned char *)data + 8;
    fsdpc_json json = {.begin = text, .at = text, .end = text + length, .what = what};
    fsdpc_st_header header = {.data_begin = 8 + length};
    if (length == 0 || *text != '{')
        return fsdpc_json_fail(&json, "'{'");
    header.text = malloc((size_t)length);
    if (!header.text)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "%s: no memory for a header of %llu bytes", what,
                          (unsigned long long)length);
    fsdpc_status status = read_entries(&json, header.text, &header);
    if (status == FSDPC_OK)
        status = check_names(&header, what);
    if (status == FSDPC_OK)
        status = check_offsets(&header, file_bytes, what);
    if (status != FSDPC_OK) {
        fsdpc_st_header_fini(&header);
        return status;
    }
    *out = header;
    return FSDPC_OK;
}

void fsdpc_st_header_fini(fsdpc_st_header *header)
{
    free(header->tensors);
    free(header->metadata);
    free(header->text);
    *header = (fsdpc_st_header){0};
}

fsdpc_status fsdpc_st_load(const char *path, fsdpc_st_header *out)
{
    int fd;
    uint64_t file_bytes = 0, length = 0;
    unsigned char first[8] = {0}, *text = NULL;
    FSDPC_TRY(fsdpc_fs_open(NULL, path, false, &fd));
    fsdpc_status status;
    FSDPC_TRY_GOTO(status, fsdpc_fs_size(NULL, fd, path, &file_bytes), close_file);
    if (file_bytes >= sizeof first)
        FSDPC_TRY_GOTO(status, fsdpc_fs_pread(NULL, fd, path, first, sizeof first, 0), close_file);
    FSDPC_TRY_GOTO(status, fsdpc_st_header_bytes(first, file_bytes, path, &length), close_file);
    text = malloc(8 + length);
    if (!text) {
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "%s: no memory for a header of %llu bytes", path,
                            (unsigned long long)length);
        goto close_file;
    }
    FSDPC_TRY_GOTO(status, fsdpc_fs_pread(NULL, fd, path, text, 8 + length, 0), close_file);
    status = fsdpc_st_parse(text, 8 + length, file_bytes, path, out);

close_file:
    free(text);
    FSDPC_KEEP_FIRST(status, fsdpc_fs_close(NULL, fd, path));
    return status;
}
