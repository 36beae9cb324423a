/* Keeps a list of storages over foreign memory and removes each before its memory is returned to
 * its owner.
 *
 * The wait uses an event instead of a sync, so errors in submitted work are left for the next sync
 * to report. If the device has a watch, the wait polls as a sync would, because work on the stream
 * may be waiting for a peer. That work may also need the GIL to make progress.
 */
#include "bind/state.h" /* Python.h first */

#include "bind/import.h"

#include <stdlib.h>

#include "base/log.h"

typedef struct fsdpc_py_import {
    fsdpc_py_state *state;
    struct fsdpc_py_import *next, **at; /* at: the pointer to it */
    fsdpc_storage *storage;
    fsdpc_py_lender lender;
} import;

void fsdpc_py_imports_init(fsdpc_py_imports *imports)
{
    pthread_mutex_init(&imports->lock, NULL);
}

/* ---- Back to its library ---- */

/* Waits until the main stream has finished using the memory. */
static fsdpc_status wait_for_use(fsdpc_device *device)
{
    fsdpc_stream *main = fsdpc_device_main(device);
    fsdpc_event *used;
    FSDPC_TRY(fsdpc_event_create(device, &used));
    fsdpc_status status = fsdpc_event_record(used, main);
    if (status == FSDPC_OK)
        status = fsdpc_event_await(used);
    fsdpc_event_destroy(used);
    return status;
}

/* May be called with or without the GIL. */
static bool may_go_back(const fsdpc_storage *storage, int log_level)
{
    if (!storage->device->remote)
        return true;
    PyThreadState *thread = PyGILState_Check() ? PyEval_SaveThread() : NULL;
    fsdpc_status status = wait_for_use(storage->device);
    if (status != FSDPC_OK) {
        const fsdpc_log log = {.level = (fsdpc_log_level)log_level, .rank = -1};
        FSDPC_WARN(&log, "%zu bytes of another library stay taken: the GPU may still use them (%s)",
                   storage->bytes, fsdpc_last_error());
    }
    if (thread)
        PyEval_RestoreThread(thread);
    if (status == FSDPC_ERR_INTERRUPT)
        PyErr_SetInterrupt(); /* raised later, in the program's main flow */
    return status == FSDPC_OK;
}

static void release(fsdpc_storage *storage)
{
    import *it = storage->owner;
    pthread_mutex_lock(&it->state->imports.lock);
    *it->at = it->next;
    if (it->next)
        it->next->at = it->at;
    pthread_mutex_unlock(&it->state->imports.lock);
    if (may_go_back(storage, it->state->runtime.env.log)) {
        PyObject *type, *value, *trace; /* the error being handled when the tensor was dropped */
        PyGILState_STATE gil = PyGILState_Ensure();
        PyErr_Fetch(&type, &value, &trace);
        it->lender.give_back(it->lender.owner);
        PyErr_Restore(type, value, trace);
        PyGILState_Release(gil);
    }
    free(it);
}

/* ---- In ---- */

fsdpc_status fsdpc_py_import(fsdpc_py_state *state, fsdpc_dtype dtype, int ndim,
                             const size_t *shape, void *data, fsdpc_py_lender lender,
                             fsdpc_tensor **out)
{
    fsdpc_py_imports *imports = &state->imports;
    import *it = malloc(sizeof *it);
    if (!it)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to note what a library lends");
    fsdpc_tensor *t;
    fsdpc_status status =
        fsdpc_tensor_wrap(state->runtime.device, dtype, ndim, shape, data, release, it, &t);
    if (status != FSDPC_OK) {
        free(it);
        return status;
    }
    pthread_mutex_lock(&imports->lock);
    *it = (import){.state = state,
                   .next = imports->first,
                   .at = &imports->first,
                   .storage = t->storage,
                   .lender = lender};
    if (it->next)
        it->next->at = &it->next;
    imports->first = it;
    pthread_mutex_unlock(&imports->lock);
    *out = t;
    return FSDPC_OK;
}

/* ---- Holds ---- */

fsdpc_status fsdpc_py_imports_keep(fsdpc_py_imports *imports, fsdpc_py_kept *out)
{
    size_t count = 0;
    pthread_mutex_lock(&imports->lock);
    for (const import *it = imports->first; it; it = it->next)
        count++;
    fsdpc_py_kept held = {.storages = malloc((count + 1) * sizeof *held.storages)};
    for (const import *it = imports->first; it && held.storages; it = it->next)
        if (fsdpc_storage_try_acquire(it->storage)) /* otherwise it is being freed */
            held.storages[held.count++] = it->storage;
    pthread_mutex_unlock(&imports->lock);
    if (!held.storages)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to note what a graph uses");
    *out = held;
    return FSDPC_OK;
}

void fsdpc_py_held_release(fsdpc_py_kept *held)
{
    for (size_t i = 0; i < held->count; i++)
        fsdpc_storage_release(held->storages[i]);
    free(held->storages);
    *held = (fsdpc_py_kept){0};
}
