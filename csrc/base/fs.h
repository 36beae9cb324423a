/* File-system calls, each preceded by one hook.
 *
 * Saves, loads and offloading access the file system only through these functions, each of which
 * calls the hook first. A test can therefore observe every call, make it fail, or end the process
 * before it. In production no hook is set, which adds no overhead. Errors name the call, the path
 * and errno's text.
 *
 * The functions keep no state, so any thread may call them.
 */
#ifndef FSDPC_BASE_FS_H
#define FSDPC_BASE_FS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

/* Called before each file-system call; if it returns anything but FSDPC_OK, the call fails with
 * that status. */
typedef fsdpc_status (*fsdpc_fs_hook_fn)(void *arg, const char *call, const char *path);

typedef struct fsdpc_fs {
    fsdpc_fs_hook_fn hook; /* may be NULL */
    void *arg;
} fsdpc_fs;

fsdpc_status fsdpc_fs_mkdir(const fsdpc_fs *fs, const char *path);
/* Fails if anything with this name exists. */
fsdpc_status fsdpc_fs_refuse_existing(const fsdpc_fs *fs, const char *path);
/* Creates a file of this size for writing, with its blocks reserved. */
fsdpc_status fsdpc_fs_create(const fsdpc_fs *fs, const char *path, uint64_t bytes, int *fd_out);
/* Creates an unnamed file, open for reading and writing. The file bypasses the page cache if the
 * file system supports that; *direct_out reports whether it does. */
fsdpc_status fsdpc_fs_temporary(const fsdpc_fs *fs, const char *folder, int *fd_out,
                                bool *direct_out);
/* Reserves blocks for a range of a file, extending the file if necessary. */
fsdpc_status fsdpc_fs_reserve(const fsdpc_fs *fs, int fd, const char *path, uint64_t offset,
                              uint64_t bytes);
/* Releases a range's blocks if the file system supports that; never fails. */
void fsdpc_fs_punch(int fd, uint64_t offset, uint64_t bytes);
fsdpc_status fsdpc_fs_open(const fsdpc_fs *fs, const char *path, bool write, int *fd_out);
fsdpc_status fsdpc_fs_size(const fsdpc_fs *fs, int fd, const char *path, uint64_t *bytes_out);
/* Writes all of the bytes, or returns an error. */
fsdpc_status fsdpc_fs_pwrite(const fsdpc_fs *fs, int fd, const char *path, const void *data,
                             size_t bytes, uint64_t offset);
fsdpc_status fsdpc_fs_pread(const fsdpc_fs *fs, int fd, const char *path, void *data, size_t bytes,
                            uint64_t offset);
/* Asks the kernel to begin writing a range to the disk; never fails. */
void fsdpc_fs_begin_writing(int fd, uint64_t offset, uint64_t bytes);
fsdpc_status fsdpc_fs_sync(const fsdpc_fs *fs, int fd, const char *path);
fsdpc_status fsdpc_fs_sync_folder(const fsdpc_fs *fs, const char *path);
/* Closes the file, or returns FSDPC_OK if `fd` is negative. */
fsdpc_status fsdpc_fs_close(const fsdpc_fs *fs, int fd, const char *path);
/* Renames without replacing: returns FSDPC_ERR_OS if `to` exists. */
fsdpc_status fsdpc_fs_rename_new(const fsdpc_fs *fs, const char *from, const char *to);
/* Atomically exchanges two folders, or does nothing if `to` does not exist; *exchanged_out reports
 * which. Fails if the file system does not support such an exchange. */
fsdpc_status fsdpc_fs_exchange(const fsdpc_fs *fs, const char *from, const char *to,
                               bool *exchanged_out);
/* Removes a folder with all its files and subfolders; returns FSDPC_OK if it does not exist. Links
 * are never followed, and a `path` that is a link is an error. */
fsdpc_status fsdpc_fs_remove_tree(const fsdpc_fs *fs, const char *path);

#endif
