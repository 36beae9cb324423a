/* How the fakes of NVIDIA's libraries find the emulated runtime, and put work on its streams. */
#ifndef FSDPC_TESTS_EMU_FAKE_LAUNCH_H
#define FSDPC_TESTS_EMU_FAKE_LAUNCH_H

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

/* A function of the runtime's: of the program's, or of the plugin's, which keeps its symbols to
 * itself. */
static inline void *fake_runtime(const char *name)
{
    const char *plugin = getenv("FSDPC_CUDA_PLUGIN");
    void *handle = plugin ? dlopen(plugin, RTLD_NOW | RTLD_NOLOAD) : NULL;
    void *found = dlsym(handle ? handle : RTLD_DEFAULT, name);
    if (!found) {
        fprintf(stderr, "a fake library: no emulated runtime: %s\n", dlerror());
        abort();
    }
    return found;
}

/* Declares `call`, the runtime's function of this name, looked for once; in a function of its own.
 */
#define FAKE_RUNTIME(type, name, call)                                                             \
    static _Atomic(type) call##_found;                                                             \
    type call = atomic_load(&call##_found);                                                        \
    if (!call) {                                                                                   \
        *(void **)&call = fake_runtime(name);                                                      \
        atomic_store(&call##_found, call);                                                         \
    }

static inline void fake_launch(cudaStream_t stream, cudaHostFn_t function, void *arg,
                               bool touches_memory)
{
    FAKE_RUNTIME(emu_launch_host_fn, "emu_launch_host", call)
    call(stream, function, arg, touches_memory);
}

#endif
