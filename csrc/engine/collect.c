/* Pieces are runs of whole rows in rank order. If all ranks have the same number of elements, an
 * all-gather places each piece at its final position. Otherwise each rank sends its shard, padded
 * to the size of the largest shard, in parts through a fixed-size staging buffer.
 */
#include "engine/collect.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/size.h"
#include "engine/grad_file.h"
#include "engine/grads.h"
#include "engine/unit_internal.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

enum { STAGING_BYTES = 4 << 20, POPULATED_FROM_BYTES = 1 << 20 };

/* Users often receive fresh memory. A single call maps all pages of the destination; otherwise each
 * rank in turn would incur page faults while its peers wait for a chunk. */
static void populate(const fsdpc_device *device, void *out, size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t begin = fsdpc_round_up((size_t)out, page), end = (size_t)out + bytes;
    if (!device->remote && bytes >= POPULATED_FROM_BYTES)
        madvise((void *)begin, (end - begin) / page * page, MADV_POPULATE_WRITE); /* or faults */
}

static size_t largest_shard(const fsdpc_layout *layout, int param)
{
    size_t largest = 0;
    for (int rank = 0; rank < layout->ranks; rank++)
        largest = fsdpc_max_size(largest, fsdpc_layout_local_shard(layout, param, rank).numel);
    return largest;
}

/* Programs written for one process often call these functions only on rank 0. */
static fsdpc_status say_collective(fsdpc_status status)
{
    if (status != FSDPC_ERR_PEER && status != FSDPC_ERR_MISMATCH && status != FSDPC_ERR_TIMEOUT)
        return status;
    char text[512];
    snprintf(text, sizeof text, "%s", fsdpc_last_error());
    return fsdpc_fail(status,
                      "%s; state_dict() and full_tensor() are collective: call them on every rank, "
                      "and use the result where you like",
                      text);
}

static bool is_even(const fsdpc_layout *layout, int param, size_t largest)
{
    return largest * (size_t)layout->ranks == layout->params[param].numel;
}

static fsdpc_status gather_padded(const fsdpc_unit *unit, int param, fsdpc_coll op, size_t largest,
                                  void *out)
{
    const fsdpc_layout *layout = unit->layout;
    const fsdpc_comm *comm = unit->mesh.shard;
    fsdpc_device *device = unit->device;
    fsdpc_stream *main = fsdpc_device_main(device);
    const char *mine = op.send;
    size_t element = fsdpc_dtype_bytes(op.dtype), ranks = (size_t)comm->size;
    size_t own = fsdpc_layout_local_shard(layout, param, comm->rank).numel;
    size_t part = fsdpc_max_size(STAGING_BYTES / ((ranks + 1) * element), 1);
    part = fsdpc_min_size(part, largest);
    char *staging = NULL;
    FSDPC_TRY(fsdpc_device_alloc(device, FSDPC_MEM_OTHER, (ranks + 1) * part * element,
                                 (void **)&staging));
    char *send = staging + ranks * part * element;
    op.send = send;
    op.recv = staging;
    fsdpc_status status = FSDPC_OK;
    for (size_t begin = 0; status == FSDPC_OK && begin < largest; begin += part) {
        op.numel = fsdpc_min_size(part, largest - begin);
        size_t here = begin < own ? fsdpc_min_size(op.numel, own - begin) : 0;
        if (here < op.numel)
            status = fsdpc_device_fill(device, send, 0, op.numel * element, main);
        if (status == FSDPC_OK)
            status = fsdpc_device_copy(device, send, mine + begin * element, here * element, main);
        if (status == FSDPC_OK)
            status = say_collective(fsdpc_comm_run(unit->mesh.shard, &op));
        for (int rank = 0; status == FSDPC_OK && rank < comm->size; rank++) {
            fsdpc_local_shard local = fsdpc_layout_local_shard(layout, param, rank);
            if (begin < local.numel)
                status = fsdpc_device_copy(device, (char *)out + (local.first + begin) * element,
                                           staging + (size_t)rank * op.numel * element,
                                           fsdpc_min_size(op.numel, local.numel - begin) * element,
                                           main);
        }
    }
    fsdpc_device_free(device, staging);
    return status;
}

fsdpc_status fsdpc_unit_collect_rows(const fsdpc_unit *unit, int param, fsdpc_dtype dtype,
                                     const void *mine, void *out)
{
    size_t largest = largest_shard(unit->layout, param);
    fsdpc_coll op = {.kind = FSDPC_COLL_ALL_GATHER,
                     .unit = unit->id,
                     .what = unit->layout->params[param].name,
                     .dtype = dtype,
                     .send = mine,
                     .recv = out,
                     .numel = largest};
    populate(unit->device, out, unit->layout->params[param].numel * fsdpc_dtype_bytes(dtype));
    /* On a remote device, the local shard may be in host memory; staging then copies it to the
     * device. */
    if (!unit->device->remote && is_even(unit->layout, param, largest))
        return say_collective(fsdpc_comm_run(unit->mesh.shard, &op));
    return gather_padded(unit, param, op, largest, out);
}

fsdpc_status fsdpc_unit_collect(fsdpc_unit *unit, int param, bool grads, void *out)
{
    const fsdpc_place *place = &unit->layout->params[param];
    if (grads && !fsdpc_grad_exists(unit, param))
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "parameter '%s' of unit '%s' has no gradient: run backward first",
                          place->name, unit->name);
    FSDPC_TRY(grads ? fsdpc_unit_apply_scale(unit) : fsdpc_unit_check_master(unit, param));
    if (grads)
        FSDPC_TRY(fsdpc_grad_file_check(unit, param, false));
    fsdpc_local_shard mine;
    fsdpc_dtype dtype = grads ? unit->groups[place->group].grad_dtype : place->dtype;
    const void *from =
        grads ? fsdpc_unit_grad_rows(unit, param, &mine) : fsdpc_unit_master(unit, param, &mine);
    return fsdpc_unit_collect_rows(unit, param, dtype, from, out);
}
