/* Lays out the files and writes the texts that describe where tensors are stored.
 *
 * Each file holds as many consecutive tensors from the list as fit. The index and the manifest are
 * byte-identical to those of earlier versions, which wrote them with Python's json module.
 */
#include "ckpt/layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"

/* Adds a file for the tensors [begin, end); the file takes ownership of the header. */
static fsdpc_status add_file(fsdpc_ckpt_layout *layout, const char *folder, const char *name,
                             char *header, size_t header_bytes, size_t begin, size_t end)
{
    fsdpc_ckpt_file *file = &layout->files[layout->n_files++];
    size_t room = strlen(folder) + strlen(name) + 2;
    *file = (fsdpc_ckpt_file){.path = malloc(room),
                              .bytes = header_bytes,
                              .header = header,
                              .header_bytes = header_bytes,
                              .tensor = begin,
                              .n_tensors = end - begin};
    if (!file->path || !header)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a file of a checkpoint");
    snprintf(file->path, room, "%s/%s", folder, name);
    file->name = file->path + strlen(folder) + 1;
    for (size_t i = begin; i < end; i++) {
        fsdpc_st_tensor *t = &layout->tensors[i];
        t->begin += header_bytes;
        t->end += header_bytes;
        if (t->end > file->bytes)
            file->bytes = t->end;
    }
    return FSDPC_OK;
}

/* Returns the end of the range of tensors that fit into a file starting with tensor `begin`. */
static size_t file_end(const fsdpc_ckpt_layout *layout, size_t begin, size_t end)
{
    double filled = 0;
    size_t i = begin;
    for (; i < end; i++) {
        const fsdpc_st_tensor *t = &layout->tensors[i];
        double bytes = (double)t->dtype->bytes;
        for (int d = 0; d < t->ndim; d++)
            bytes *= (double)t->shape[d];
        filled += bytes;
        if (i > begin && filled > layout->max_file_bytes)
            break;
    }
    return i;
}

/* Adds the safetensors files with the tensors [begin, end). */
static fsdpc_status add_tensors(fsdpc_ckpt_layout *layout, const char *folder, const char *kind,
                                size_t begin, size_t end)
{
    size_t n = 0, k = 0;
    for (size_t i = begin; i < end; i = file_end(layout, i, end))
        n++;
    for (size_t i = begin, next; i < end; i = next) {
        char name[64], *header;
        size_t header_bytes;
        next = file_end(layout, i, end);
        if (n == 1 && end == layout->n_model) /* the model's only file */
            snprintf(name, sizeof name, "%s.safetensors", kind);
        else
            snprintf(name, sizeof name, "%s-%05zu-of-%05zu.safetensors", kind, ++k, n);
        FSDPC_TRY(fsdpc_st_layout(&layout->tensors[i], next - i, &header, &header_bytes));
        FSDPC_TRY(add_file(layout, folder, name, header, header_bytes, i, next));
    }
    return FSDPC_OK;
}

/* Returns the index of the file that holds a tensor; files with tensors come first, in order. */
static int file_of(const fsdpc_ckpt_layout *layout, size_t tensor)
{
    int f = 0;
    while (tensor >= layout->files[f].tensor + layout->files[f].n_tensors)
        f++;
    return f;
}

static int by_key(const void *a, const void *b)
{
    return strcmp(((const fsdpc_st_pair *)a)->key, ((const fsdpc_st_pair *)b)->key);
}

/* Adds the index of the model's files, in transformers' format. */
static fsdpc_status add_index(fsdpc_ckpt_layout *layout, const char *folder)
{
    fsdpc_json_text text = {0};
    fsdpc_st_pair *weights = calloc(layout->n_model + 1, sizeof *weights);
    unsigned long long total = 0;
    if (!weights)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for an index of %zu tensors",
                          layout->n_model);
    for (size_t i = 0; i < layout->n_model; i++) {
        const fsdpc_st_tensor *t = &layout->tensors[i];
        weights[i] = (fsdpc_st_pair){t->name, layout->files[file_of(layout, i)].name};
        total += t->end - t->begin;
    }
    qsort(weights, layout->n_model, sizeof *weights, by_key);
    fsdpc_json_put(&text, "{\n  \"metadata\": {\n    \"total_size\": %llu\n  },\n", total);
    fsdpc_json_put(&text, "  \"weight_map\": {");
    for (size_t i = 0; i < layout->n_model; i++) {
        fsdpc_json_put(&text, "%s\n    ", i ? "," : "");
        fsdpc_json_quote(&text, weights[i].key, true);
        fsdpc_json_put(&text, ": \"%s\"", weights[i].value);
    }
    fsdpc_json_put(&text, "\n  }\n}\n");
    free(weights);
    FSDPC_TRY(
        add_file(layout, folder, "model.safetensors.index.json", text.data, text.bytes, 0, 0));
    return fsdpc_json_text_end(&text, "an index");
}

fsdpc_status fsdpc_ckpt_lay_out(fsdpc_ckpt_layout *layout, const char *folder,
                                fsdpc_ckpt_shard *shards, size_t n_shards)
{
    layout->files = calloc(layout->n_tensors + layout->n_others + 2, sizeof *layout->files);
    if (!layout->files)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the files of a checkpoint");
    FSDPC_TRY(add_tensors(layout, folder, "model", 0, layout->n_model));
    size_t n_model_files = layout->n_files;
    FSDPC_TRY(add_tensors(layout, folder, "optimizer", layout->n_model, layout->n_tensors));
    for (size_t i = 0; i < n_shards; i++) {
        size_t own = (size_t)shards[i].tensor;
        const fsdpc_st_tensor *t = &layout->tensors[own];
        FSDPC_TRY(fsdpc_ckpt_place(&shards[i], file_of(layout, own), t->dtype, t->begin, t->end));
    }
    if (n_model_files > 1)
        FSDPC_TRY(add_index(layout, folder));
    for (size_t i = 0; i < layout->n_others; i++) {
        const fsdpc_st_pair *other = &layout->others[i];
        FSDPC_TRY(
            add_file(layout, folder, other->key, strdup(other->value), strlen(other->value), 0, 0));
    }
    return FSDPC_OK;
}

void fsdpc_ckpt_layout_fini(fsdpc_ckpt_layout *layout)
{
    for (size_t f = 0; f < layout->n_files; f++) {
        free(layout->files[f].path);
        free(layout->files[f].header);
    }
    free(layout->files);
    layout->files = NULL;
    layout->n_files = 0;
}

/* ---- the manifest ---- */

static int by_file_name(const void *a, const void *b)
{
    return strcmp((*(fsdpc_ckpt_file *const *)a)->name, (*(fsdpc_ckpt_file *const *)b)->name);
}

static fsdpc_status put_files(const fsdpc_ckpt_layout *layout, fsdpc_json_text *out)
{
    size_t n = layout->n_files;
    const fsdpc_ckpt_file **order = calloc(n + 1, sizeof *order);
    if (!order)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a manifest of %zu files", n);
    for (size_t f = 0; f < n; f++)
        order[f] = &layout->files[f];
    qsort(order, n, sizeof *order, by_file_name);
    fsdpc_json_put(out, " \"files\": {");
    for (size_t f = 0; f < n; f++)
        fsdpc_json_put(out,
                       "%s\n  \"%s\": {\n   \"bytes\": %llu,\n   \"header_bytes\": %zu,\n"
                       "   \"header_crc32c\": \"%08x\"\n  }",
                       f ? "," : "", order[f]->name, (unsigned long long)order[f]->bytes,
                       order[f]->header_bytes,
                       fsdpc_crc32c(0, order[f]->header, order[f]->header_bytes));
    fsdpc_json_put(out, "%s},\n", n ? "\n " : "");
    free(order);
    return FSDPC_OK;
}

/* Writes the entries of the tensors [begin, end). */
static void put_tensors(const fsdpc_ckpt_layout *layout, const uint32_t *crcs, size_t begin,
                        size_t end, fsdpc_json_text *out)
{
    for (size_t i = begin; i < end; i++) {
        const fsdpc_st_tensor *t = &layout->tensors[i];
        fsdpc_json_put(out, "%s", i > begin ? "," : "");
        fsdpc_st_put_entry(t, true, out);
        fsdpc_json_put(out, "\"file\":\"%s\",\"offsets\":[%llu,%llu],\"crc32c\":\"%08x\"}",
                       layout->files[file_of(layout, i)].name, (unsigned long long)t->begin,
                       (unsigned long long)t->end, crcs[i]);
    }
}

static void put_member(const fsdpc_st_pair *member, fsdpc_json_text *out)
{
    fsdpc_json_put(out, " \"%s\": %s,\n", member->key, member->value);
}

fsdpc_status fsdpc_ckpt_manifest(const fsdpc_ckpt_layout *layout, const uint32_t *crcs,
                                 fsdpc_json_text *out)
{
    size_t i = 0;
    fsdpc_json_put(out, "{\n");
    for (; i < layout->n_members && strcmp(layout->members[i].key, "files") < 0; i++)
        put_member(&layout->members[i], out);
    FSDPC_TRY(put_files(layout, out));
    for (; i < layout->n_members; i++)
        put_member(&layout->members[i], out);
    fsdpc_json_put(out, " \"tensors\":{\"model\":{");
    put_tensors(layout, crcs, 0, layout->n_model, out);
    fsdpc_json_put(out, "},\"optimizer\":{");
    put_tensors(layout, crcs, layout->n_model, layout->n_tensors, out);
    fsdpc_json_put(out, "}},\n \"checksum\":\"");
    FSDPC_TRY(fsdpc_json_text_end(out, "a manifest"));
    fsdpc_json_put(out, "%08x\"\n}\n", fsdpc_crc32c(0, out->data, out->bytes));
    return fsdpc_json_text_end(out, "a manifest");
}
