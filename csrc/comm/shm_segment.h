/* A piece of shared memory: a sealed memfd, a file without a name, or plain memory that the threads
 * of a process share.
 *
 * create -> (pass the descriptor to peers, who adopt it) -> map -> close_fd -> release.  Memory is
 * reserved before it is mapped, so that too little of it is an error here, not a SIGBUS later.
 * Size and seals of an adopted descriptor are checked for the same reason.  Mappings are populated
 * at once, but for those of files, and left out of core dumps.
 *
 * Counted references; retain and release from any thread, the rest from one at a time.
 */
#ifndef FSDPC_COMM_SHM_SEGMENT_H
#define FSDPC_COMM_SHM_SEGMENT_H

#include <stdbool.h>

#include "base/status.h"

typedef struct fsdpc_shm_segment {
    _Atomic int refs;
    int fd;                        /* -1: none, or closed */
    bool file;                     /* on a disk */
    size_t bytes;                  /* whole pages */
    unsigned char *writable;       /* NULL until mapped so */
    const unsigned char *readable; /* plain memory: the same as writable */
} fsdpc_shm_segment;

/* `shared`: a memfd named `name`, not yet mapped; else plain memory, mapped. Zeroed. */
fsdpc_status fsdpc_shm_segment_create(const char *name, size_t bytes, bool shared,
                                      fsdpc_shm_segment **out);
/* Takes `fd`, of a peer or a file made here, over, also when it fails. `bytes` as given to create. */
fsdpc_status fsdpc_shm_segment_adopt(int fd, size_t bytes, fsdpc_shm_segment **out);
fsdpc_status fsdpc_shm_segment_map(fsdpc_shm_segment *segment, bool writable);
void fsdpc_shm_segment_close_fd(fsdpc_shm_segment *segment); /* mappings stay */

fsdpc_shm_segment *fsdpc_shm_segment_retain(fsdpc_shm_segment *segment);
void fsdpc_shm_segment_release(fsdpc_shm_segment *segment); /* NULL is fine */

size_t fsdpc_shm_page_round(size_t bytes); /* up to whole pages, at least one */

#endif
