/* Opens the fake of a library of NVIDIA's that lies beside the program, before the plugin looks. */
#ifndef FSDPC_TESTS_GPU_OPEN_BESIDE_H
#define FSDPC_TESTS_GPU_OPEN_BESIDE_H

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

/* Its handle; `path`, of `bytes`, becomes where it is. */
static inline void *open_beside(const char *library_name, char *path, size_t bytes)
{
    ssize_t n = readlink("/proc/self/exe", path, bytes - 1);
    path[n > 0 ? n : 0] = 0;
    char *name = strrchr(path, '/') + 1;
    snprintf(name, bytes - (size_t)(name - path), "%s", library_name);
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK_NOTE(handle, "%s", dlerror());
    return handle;
}

#endif
