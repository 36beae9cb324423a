/* A binary heap of nodes, highest number first. */
#include "nn/frame.h"

#include <stdlib.h>
#include <string.h>

fsdpc_status fsdpc_frame_grow(void *array_io, size_t n, size_t *capacity_io, size_t element)
{
    if (n < *capacity_io)
        return FSDPC_OK;
    size_t capacity = *capacity_io ? 2 * *capacity_io : 32;
    void *array; /* copied: reading it through a void ** would break strict aliasing */
    memcpy(&array, array_io, sizeof array);
    array = realloc(array, capacity * element);
    if (!array)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for backward's list of %zu nodes", capacity);
    memcpy(array_io, &array, sizeof array);
    *capacity_io = capacity;
    return FSDPC_OK;
}

fsdpc_status fsdpc_frame_push(fsdpc_frame *frame, fsdpc_node *node)
{
    FSDPC_TRY(fsdpc_frame_grow(&frame->heap, frame->n, &frame->capacity, sizeof *frame->heap));
    size_t i = frame->n++;
    while (i > 0 && frame->heap[(i - 1) / 2]->number < node->number) {
        frame->heap[i] = frame->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    frame->heap[i] = fsdpc_node_acquire(node);
    return FSDPC_OK;
}

fsdpc_node *fsdpc_frame_pop(fsdpc_frame *frame)
{
    fsdpc_node *top = frame->heap[0], *last = frame->heap[--frame->n];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < frame->n; i = child) {
        if (child + 1 < frame->n && frame->heap[child + 1]->number > frame->heap[child]->number)
            child++;
        if (frame->heap[child]->number < last->number)
            break;
        frame->heap[i] = frame->heap[child];
    }
    if (frame->n)
        frame->heap[i] = last;
    return top;
}
