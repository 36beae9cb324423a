/* A segment of shared memory: a sealed memfd, an unnamed file, or plain memory that the threads of
 * a process share.
 *
 * create -> (pass the descriptor to peers, who adopt it) -> map -> close_fd -> release. Memory is
 * reserved before it is mapped, so that a shortage is an error here, not a SIGBUS later. The size
 * and seals of an adopted descriptor are checked for the same reason. Mappings are excluded from
 * core dumps and, except for those of files, are populated immediately.
 *
 * Segments have reference counts. Any thread may call retain and release; other calls must come
 * from one thread at a time.
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
    unsigned char *writable;       /* NULL until mapped writable */
    const unsigned char *readable; /* plain memory: equal to writable */
} fsdpc_shm_segment;

/* `shared`: creates an unmapped memfd named `name`; otherwise mapped plain memory. Zeroed. */
fsdpc_status fsdpc_shm_segment_create(const char *name, size_t bytes, bool shared,
                                      fsdpc_shm_segment **out);
/* Takes ownership of `fd`, even on failure. The descriptor comes from a peer or from a file created
 * here. `bytes` as passed to create. */
fsdpc_status fsdpc_shm_segment_adopt(int fd, size_t bytes, fsdpc_shm_segment **out);
fsdpc_status fsdpc_shm_segment_map(fsdpc_shm_segment *segment, bool writable);
void fsdpc_shm_segment_close_fd(fsdpc_shm_segment *segment); /* mappings stay */

fsdpc_shm_segment *fsdpc_shm_segment_retain(fsdpc_shm_segment *segment);
void fsdpc_shm_segment_release(fsdpc_shm_segment *segment); /* NULL is fine */

size_t fsdpc_shm_page_round(size_t bytes); /* up to whole pages, at least one */

#endif
