/* Environment variables for NCCL. */
#ifndef FSDPC_CUDA_NCCL_ENV_H
#define FSDPC_CUDA_NCCL_ENV_H

#include <stdbool.h>

#include "base/log.h"
#include "base/status.h"

/* Sets NCCL's environment variables when the library is opened, and warns in `log` if that may be
 * too late. `was_here`: the process had NCCL before. */
fsdpc_status fsdpc_nccl_environment(int version, bool was_here, bool several_hosts,
                                    const fsdpc_log *log);
/* Allows ranks to share a GPU, which NCCL supports from 2.30 on. Must be called before the first
 * channel is created. */
fsdpc_status fsdpc_nccl_allow_sharing(void);

#endif
