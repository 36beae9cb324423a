/* Memory of other libraries that tensors use through DLPack, and the rules for returning it.
 *
 * A library may reuse its memory as soon as we return it, so we first wait until our main stream
 * has finished with it. If that wait is impossible (after Ctrl-C or the loss of a peer), the memory
 * is never returned. The log reports this, because dropping a tensor must not raise an exception.
 *
 * A captured step continues to use the memory of its tensors, so a capture keeps all imported
 * memory. No memory can be imported during a capture (from_dlpack refuses).
 *
 * Any thread may drop a tensor, with or without the GIL.
 */
#ifndef FSDPC_BIND_IMPORT_H
#define FSDPC_BIND_IMPORT_H

#include <pthread.h>

#include "nn/tensor.h"

/* Belongs to a module. */
typedef struct fsdpc_py_imports {
    pthread_mutex_t lock;
    struct fsdpc_py_import *first;
} fsdpc_py_imports;

struct fsdpc_py_state; /* bind/state.h, which embeds them */

void fsdpc_py_imports_init(fsdpc_py_imports *imports);

/* Memory to return to a library, and the function that returns it, which is called once with the
 * GIL held. */
typedef struct fsdpc_py_lender {
    void *owner;
    void (*give_back)(void *owner);
} fsdpc_py_lender;

/* Creates a tensor over `data`, which the runtime's device can access. On error, nothing is
 * returned to the library.
 */
fsdpc_status fsdpc_py_import(struct fsdpc_py_state *state, fsdpc_dtype dtype, int ndim,
                             const size_t *shape, void *data, fsdpc_py_lender lender,
                             fsdpc_tensor **out);

/* All imported memory that tensors currently use; a zero-initialised list is empty. */
typedef struct fsdpc_py_kept {
    fsdpc_storage **storages;
    size_t count;
} fsdpc_py_kept;

fsdpc_status fsdpc_py_imports_keep(fsdpc_py_imports *imports, fsdpc_py_kept *out);
void fsdpc_py_held_release(fsdpc_py_kept *held);

#endif
