/* Memory that the fake NCCL is told of: windows of all ranks, and buffers of one.
 *
 * What NCCL would refuse or get wrong is a complaint: memory that no handle of the driver's backs
 * from its first mapping on, other sizes on other ranks, memory that went before it was
 * deregistered, a communicator destroyed with windows left, a gather that writes a slot by another
 * address than its first. A window's call says that it succeeded and goes on in the background
 * until all ranks have come.
 */
#include <stdint.h>
#include <stdlib.h>

#include "emu_driver.h"
#include "fake_inside.h"
#include "fake_launch.h"

enum { PAGE = 4096 };

struct fake_known {
    fake_known *next;
    const void *memory;
    size_t bytes;
    bool window;
};

static _Atomic int windows, buffers, in_place, elsewhere;
static _Atomic bool no_patches;

#define X(result, name, parameters) EXPORT result name parameters;
FSDPC_NCCL_OPTIONAL(X)
#undef X
EXPORT void fake_nccl_registered(fake_nccl_memory *out);
EXPORT void fake_nccl_hide_windows(int yes);

void fake_nccl_registered(fake_nccl_memory *out)
{
    *out = (fake_nccl_memory){atomic_load(&windows), atomic_load(&buffers), atomic_load(&in_place),
                              atomic_load(&elsewhere)};
}

void fake_nccl_hide_windows(int yes)
{
    atomic_store(&no_patches, yes);
}

static bool is_home(const void *memory, size_t bytes)
{
    FAKE_RUNTIME(emu_driver_is_home_fn, "emu_driver_is_home", call)
    return call(memory, bytes);
}

static const void *home_of(const void *memory)
{
    FAKE_RUNTIME(emu_home_fn, "emu_home", call)
    return call(memory);
}

/* ---- Registering ---- */

static fake_known *know(fsdpc_nccl_comm comm, const void *memory, size_t bytes, bool window)
{
    fake_known *made = malloc(sizeof *made);
    *made = (fake_known){comm->known, memory, bytes, window};
    comm->known = made;
    atomic_fetch_add(window ? &windows : &buffers, 1);
    return made;
}

fsdpc_nccl_result ncclCommWindowRegister(fsdpc_nccl_comm comm, void *memory, size_t bytes,
                                         fsdpc_nccl_window *out, int flags)
{
    *out = NULL;
    if (fake_is_in_progress(comm))
        return fake_complain("a window is registered while another call is in progress");
    if (flags != FSDPC_NCCL_WIN_COLL_SYMMETRIC || (uintptr_t)memory % PAGE != 0 ||
        !is_home(memory, bytes))
        return fake_complain("a window of memory that is not a slot's own");
    if (atomic_load(&no_patches))
        return FSDPC_NCCL_SUCCESS;
    size_t none = 0;
    _Atomic size_t *agreed = &comm->all->window_bytes[comm->windows++ % WINDOWS_MAX];
    if (!atomic_compare_exchange_strong(agreed, &none, bytes) && none != bytes)
        return fake_complain("ranks register windows of different sizes");
    comm->fails = fake_is_broken(FAKE_NCCL_NO_WINDOW, comm->rank);
    if (!comm->fails)
        atomic_fetch_add(&comm->all->windows, 1);
    *out = (fsdpc_nccl_window)know(comm, memory, bytes, true);
    return FSDPC_NCCL_SUCCESS;
}

fsdpc_nccl_result fake_registering(const struct ncclComm *comm)
{
    if (comm->fails)
        return FSDPC_NCCL_SYSTEM_ERROR;
    return atomic_load(&comm->all->windows) < (long)comm->windows * comm->size
               ? FSDPC_NCCL_IN_PROGRESS
               : FSDPC_NCCL_SUCCESS;
}

fsdpc_nccl_result ncclCommRegister(fsdpc_nccl_comm comm, void *memory, size_t bytes,
                                   void **handle_out)
{
    *handle_out = know(comm, memory, bytes, false);
    return FSDPC_NCCL_SUCCESS;
}

static fsdpc_nccl_result forget(fsdpc_nccl_comm comm, const void *handle, bool window)
{
    fake_known **at = &comm->known;
    while (*at && *at != handle)
        at = &(*at)->next;
    fake_known *known = *at;
    if (!known || known->window != window || fake_is_in_progress(comm))
        return fake_complain("what was not registered is deregistered, or amid another call");
    if (!is_home(known->memory, known->bytes))
        return fake_complain("memory went before it was deregistered");
    *at = known->next;
    free(known);
    atomic_fetch_sub(window ? &windows : &buffers, 1);
    return FSDPC_NCCL_SUCCESS;
}

fsdpc_nccl_result ncclCommWindowDeregister(fsdpc_nccl_comm comm, fsdpc_nccl_window window)
{
    return forget(comm, window, true);
}

fsdpc_nccl_result ncclCommDeregister(fsdpc_nccl_comm comm, void *handle)
{
    return forget(comm, handle, false);
}

void fake_forget_all(fsdpc_nccl_comm comm, bool complains)
{
    if (comm->known && complains)
        fake_complain("a communicator is destroyed that knows memory");
    while (comm->known) {
        fake_known *known = comm->known;
        comm->known = known->next;
        atomic_fetch_sub(known->window ? &windows : &buffers, 1);
        free(known);
    }
}

/* ---- Gathers ---- */

void fake_look_at_gather(const struct ncclComm *comm, const fake_op *op)
{
    const unsigned char *recv = op->recv;
    size_t bytes = op->numel * fake_type_bytes(op->type);
    if (home_of(recv) != recv)
        fake_complain("a gather writes a slot by another address than its own");
    const fake_known *known = comm->known;
    while (known && (recv < (const unsigned char *)known->memory ||
                     recv >= (const unsigned char *)known->memory + known->bytes))
        known = known->next;
    if (!known)
        atomic_fetch_add(&elsewhere, 1);
    else if (op->send != recv + (size_t)comm->rank * bytes)
        fake_complain("a gather into memory that is known is not in place");
    else
        atomic_fetch_add(&in_place, 1);
}
