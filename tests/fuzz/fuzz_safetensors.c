/* libFuzzer target: any bytes as a safetensors file.
 *
 * What the reader accepts must be sound (tensors inside the file, end to end, no name twice) and
 * must come back the same from a file laid out anew.
 */
#include <stdlib.h>
#include <string.h>

#include "ckpt/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void must(int condition)
{
    if (!condition)
        __builtin_trap();
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const fsdpc_st_tensor *)a)->name, ((const fsdpc_st_tensor *)b)->name);
}

static void check_again(fsdpc_st_header *first, uint64_t data_bytes)
{
    char *text;
    size_t text_bytes;
    fsdpc_st_tensor *copy = calloc(first->n_tensors + 1, sizeof *copy);
    if (first->n_tensors)
        memcpy(copy, first->tensors, first->n_tensors * sizeof *copy);
    if (fsdpc_st_layout(copy, first->n_tensors, &text, &text_bytes) == FSDPC_OK) {
        fsdpc_st_header second;
        must(fsdpc_st_parse(text, text_bytes, text_bytes + data_bytes, "again", &second) ==
             FSDPC_OK);
        must(second.n_tensors == first->n_tensors && second.n_metadata == 1);
        if (first->n_tensors) {
            qsort(first->tensors, first->n_tensors, sizeof *first->tensors, by_name);
            qsort(second.tensors, second.n_tensors, sizeof *second.tensors, by_name);
        }
        for (size_t i = 0; i < first->n_tensors; i++) {
            const fsdpc_st_tensor *a = &first->tensors[i], *b = &second.tensors[i];
            must(strcmp(a->name, b->name) == 0 && a->dtype == b->dtype && a->ndim == b->ndim);
            must(a->end - a->begin == b->end - b->begin);
        }
        fsdpc_st_header_fini(&second);
        free(text);
    }
    free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    fsdpc_st_header header;
    uint64_t length;
    if (fsdpc_st_header_bytes(data, bytes, "fuzz", &length) != FSDPC_OK)
        return 0;
    size_t head = 8 + (size_t)length;
    unsigned char *exact = malloc(head); /* sanitizers see a read behind the header */
    memcpy(exact, data, head);
    if (fsdpc_st_parse(exact, head, bytes, "fuzz", &header) == FSDPC_OK) {
        uint64_t at = 0;
        for (size_t i = 0; i < header.n_tensors; i++) {
            must(header.tensors[i].begin == at && header.tensors[i].end >= at);
            at = header.tensors[i].end;
        }
        must(header.data_begin + at == bytes);
        check_again(&header, at);
        fsdpc_st_header_fini(&header);
    }
    free(exact);
    return 0;
}
