/* Selects the NCCL library; nccl_load.h explains the search order.
 *
 * Every call opens the library again; the loader counts references and returns the same one, so no
 * state is kept here.
 */
#include "cuda/nccl_load.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>

#include "cuda/nccl_env.h"

enum { OLDEST = 22600 };

static const char soname[] = "libnccl.so.2";

static fsdpc_status open_library(const char *path, void **out, bool *was_here_out)
{
    void *library = dlopen(soname, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    *was_here_out = library != NULL;
    if (!library && path) {
        library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!library) /* if the user names a library, no other is tried */
            return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                              "cannot load NCCL: %s (FSDPC_NCCL_LIB names it); name another, or "
                              "unset it",
                              dlerror());
    }
    if (!library)
        library = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "no NCCL: %s (looked for in this process, FSDPC_NCCL_LIB, pip's "
                          "nvidia-nccl-cu13 and the system); ranks on GPUs need 2.26 or newer, "
                          "and 2.30 where they share one: pip install nvidia-nccl-cu13, or name "
                          "one in FSDPC_NCCL_LIB (a single rank needs none)",
                          dlerror());
    *out = library;
    return FSDPC_OK;
}

fsdpc_status fsdpc_nccl_open(const char *path, bool several_hosts, const fsdpc_log *log,
                             fsdpc_nccl *out)
{
    void *library = NULL;
    fsdpc_nccl nccl = {0};
    FSDPC_TRY(open_library(path, &library, &nccl.was_here));
#define X(result, name, parameters)                                                                \
    *(void **)&nccl.name = dlsym(library, #name);                                                  \
    if (!nccl.name)                                                                                \
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,                                                   \
                          "this NCCL has no " #name ": install 2.26 or newer");
    FSDPC_NCCL_SYMBOLS(X)
#undef X
#define X(result, name, parameters) *(void **)&nccl.name = dlsym(library, #name);
    FSDPC_NCCL_OPTIONAL(X)
#undef X
    FSDPC_TRY(fsdpc_nccl_check(&nccl, nccl.ncclGetVersion(&nccl.version), "tell its version"));
    if (nccl.version < OLDEST)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "NCCL %d.%d.%d keeps no order between operations of several "
                          "communicators, which wait for each other then: install 2.26 or newer "
                          "(pip's nvidia-nccl-cu13)",
                          nccl.version / 10000, nccl.version / 100 % 100, nccl.version % 100);
    FSDPC_TRY(fsdpc_nccl_environment(nccl.version, nccl.was_here, several_hosts, log));
    *out = nccl;
    return FSDPC_OK;
}

fsdpc_status fsdpc_nccl_check(const fsdpc_nccl *nccl, fsdpc_nccl_result result, const char *what)
{
    if (__builtin_expect(result == FSDPC_NCCL_SUCCESS, 1))
        return FSDPC_OK;
    bool elsewhere = result == FSDPC_NCCL_REMOTE_ERROR || result == FSDPC_NCCL_SYSTEM_ERROR;
    return fsdpc_fail(elsewhere ? FSDPC_ERR_PEER : FSDPC_ERR_INTERNAL, "NCCL failed to %s: %s",
                      what, nccl->ncclGetErrorString(result));
}

fsdpc_status fsdpc_nccl_describe(const char *path, char *text, size_t bytes)
{
    fsdpc_nccl nccl;
    FSDPC_TRY(fsdpc_nccl_open(path, false, NULL, &nccl));
    Dl_info info;
    bool placed = dladdr(*(void **)&nccl.ncclGetVersion, &info) != 0;
    snprintf(text, bytes, "NCCL %d.%d.%d at %s", nccl.version / 10000, nccl.version / 100 % 100,
             nccl.version % 100, placed ? info.dli_fname : "an unknown place");
    return FSDPC_OK;
}
