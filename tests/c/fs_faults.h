/* A hook for file-system calls that lets one kind of call fail. */
#ifndef FSDPC_TESTS_FS_FAULTS_H
#define FSDPC_TESTS_FS_FAULTS_H

#include <string.h>

#include "base/fs.h"

typedef struct faults {
    const char *call; /* that fails */
    _Atomic int left; /* times it does not before */
} faults;

static fsdpc_status hook(void *arg, const char *call, const char *path)
{
    faults *f = arg;
    (void)path;
    if (!f->call || strcmp(call, f->call) != 0 || f->left-- > 0)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_OS, "the test lets %s fail", call);
}

#endif
