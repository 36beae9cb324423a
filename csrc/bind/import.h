/* Memory of other libraries that tensors stand on (DLPack), and when they get it back.
 *
 * A library does with memory what it likes as soon as it has it again, so that waits until our main
 * stream has done with it.  Where that cannot be waited for (Ctrl-C, a peer that is gone), the
 * library never gets it back, and a line in the log says so: dropping a tensor raises no errors.
 *
 * A captured step goes on using memory that its tensors stood on, so a capture holds all that there
 * is.  None comes in meanwhile (from_dlpack refuses).
 *
 * Any thread may drop a tensor, with the GIL or without.
 */
#ifndef FSDPC_BIND_IMPORT_H
#define FSDPC_BIND_IMPORT_H

#include <pthread.h>

#include "nn/tensor.h"

/* A module's. */
typedef struct fsdpc_py_imports {
    pthread_mutex_t lock;
    struct fsdpc_py_import *first;
} fsdpc_py_imports;

struct fsdpc_py_state; /* bind/state.h, which embeds them */

void fsdpc_py_imports_init(fsdpc_py_imports *imports);

/* Memory to give back to a library, and how: called once, with the GIL. */
typedef struct fsdpc_py_lent {
    void *owner;
    void (*give_back)(void *owner);
} fsdpc_py_lent;

/* A tensor over `data`, which the runtime's device reaches; after an error nothing is given back.
 */
fsdpc_status fsdpc_py_import(struct fsdpc_py_state *state, fsdpc_dtype dtype, int ndim,
                             const size_t *shape, void *data, fsdpc_py_lent lent,
                             fsdpc_tensor **out);

/* All that tensors stand on now; zero: nothing is held. */
typedef struct fsdpc_py_held {
    fsdpc_storage **storages;
    size_t count;
} fsdpc_py_held;

fsdpc_status fsdpc_py_imports_hold(fsdpc_py_imports *imports, fsdpc_py_held *out);
void fsdpc_py_held_release(fsdpc_py_held *held);

#endif
