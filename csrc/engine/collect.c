/* The simple way, as it is rare (checkpoints of other tools, tests, printing).  Every rank sends
 * its piece padded to the largest one.  Pieces are runs of whole rows in rank order, so each rank
 * puts them end to end.
 */
#include "engine/collect.h"

#include <stdio.h>

#include "base/size.h"
#include "engine/grad_file.h"
#include "engine/grads.h"
#include "engine/unit_internal.h"

static size_t largest_piece(const fsdpc_layout *layout, int param)
{
    size_t largest = 0;
    for (int rank = 0; rank < layout->ranks; rank++)
        largest = fsdpc_max_size(largest, fsdpc_layout_piece(layout, param, rank).numel);
    return largest;
}

/* Programs written for one process like to call these on rank 0 alone. */
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

fsdpc_status fsdpc_unit_collect_rows(const fsdpc_unit *unit, int param, fsdpc_dtype dtype,
                                     const void *mine, void *out)
{
    const fsdpc_layout *layout = unit->layout;
    fsdpc_comm *comm = unit->mesh.shard;
    size_t element = fsdpc_dtype_bytes(dtype), largest = largest_piece(layout, param);
    size_t ranks = (size_t)comm->size, own = fsdpc_layout_piece(layout, param, comm->rank).numel;
    char *staging = NULL;
    FSDPC_TRY(fsdpc_device_alloc(unit->device, FSDPC_MEM_OTHER, (ranks + 1) * largest * element,
                                 (void **)&staging));
    char *send = staging + ranks * largest * element;
    fsdpc_coll op = {.kind = FSDPC_COLL_ALL_GATHER,
                     .unit = unit->id,
                     .what = layout->params[param].name,
                     .dtype = dtype,
                     .send = send,
                     .recv = staging,
                     .numel = largest};
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    fsdpc_status status = fsdpc_device_fill(unit->device, send, 0, largest * element, main);
    if (status == FSDPC_OK)
        status = fsdpc_device_copy(unit->device, send, mine, own * element, main);
    if (status == FSDPC_OK)
        status = say_collective(fsdpc_comm_run(comm, &op));
    for (int rank = 0; status == FSDPC_OK && rank < comm->size; rank++) {
        fsdpc_piece piece = fsdpc_layout_piece(layout, param, rank);
        status = fsdpc_device_copy(unit->device, (char *)out + piece.first * element,
                                   staging + (size_t)rank * largest * element,
                                   piece.numel * element, main);
    }
    fsdpc_device_free(unit->device, staging);
    return status;
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
    fsdpc_piece mine;
    fsdpc_dtype dtype = grads ? unit->groups[place->group].grad_dtype : place->dtype;
    const void *from =
        grads ? fsdpc_unit_grad_rows(unit, param, &mine) : fsdpc_unit_master(unit, param, &mine);
    return fsdpc_unit_collect_rows(unit, param, dtype, from, out);
}
