/* File-system calls, each preceded by a hook.
 *
 * Creating a file reserves its blocks, so that a full disk is detected before any data is written.
 * If the file system cannot reserve blocks, as with some network file systems, only the size is set
 * and a full disk is detected on write. If renameat2 does not support RENAME_NOREPLACE, the code
 * checks that the target does not exist and then calls rename.
 */
#include "base/fs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static fsdpc_status ask(const fsdpc_fs *fs, const char *call, const char *path)
{
    return fs && fs->hook ? fs->hook(fs->arg, call, path) : FSDPC_OK;
}

fsdpc_status fsdpc_fs_mkdir(const fsdpc_fs *fs, const char *path)
{
    FSDPC_TRY(ask(fs, "mkdir", path));
    if (mkdir(path, 0777) != 0)
        return fsdpc_fail_errno("cannot make the folder '%s'", path);
    return FSDPC_OK;
}

fsdpc_status fsdpc_fs_refuse_existing(const fsdpc_fs *fs, const char *path)
{
    struct statx info;
    FSDPC_TRY(ask(fs, "lstat", path));
    if (statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_TYPE, &info) == 0)
        return fsdpc_fail(FSDPC_ERR_OS,
                          "'%s' is there already and is not written over: choose another name, or "
                          "remove it first",
                          path);
    return errno == ENOENT ? FSDPC_OK : fsdpc_fail_errno("cannot look at '%s'", path);
}

fsdpc_status fsdpc_fs_reserve(const fsdpc_fs *fs, int fd, const char *path, uint64_t offset,
                              uint64_t bytes)
{
    FSDPC_TRY(ask(fs, "fallocate", path));
    if (bytes == 0)
        return FSDPC_OK;
    int result;
    do /* blocks already reserved stay reserved after a signal */
        result = fallocate(fd, 0, (off_t)offset, (off_t)bytes);
    while (result != 0 && errno == EINTR);
    if (result == 0)
        return FSDPC_OK;
    if ((errno == EOPNOTSUPP || errno == ENOSYS) && ftruncate(fd, (off_t)(offset + bytes)) == 0)
        return FSDPC_OK;
    return fsdpc_fail_errno("cannot reserve %llu bytes for '%s'", (unsigned long long)bytes, path);
}

void fsdpc_fs_punch(int fd, uint64_t offset, uint64_t bytes)
{
    if (bytes > 0)
        (void)fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset,
                        (off_t)bytes);
}

/* If the file system does not support unnamed files, creates a named one and unlinks it. */
static int open_temporary(const char *folder, int flags)
{
    int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT))
        return fd;
    char path[4096];
    int n = snprintf(path, sizeof path, "%s/.fsdpc-XXXXXX", folder);
    if (n < 0 || (size_t)n >= sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    fd = mkostemp(path, O_CLOEXEC | flags);
    if (fd >= 0)
        unlink(path);
    return fd;
}

fsdpc_status fsdpc_fs_temporary(const fsdpc_fs *fs, const char *folder, int *fd_out,
                                bool *direct_out)
{
    FSDPC_TRY(ask(fs, "create", folder));
    int fd = open_temporary(folder, O_DIRECT);
    *direct_out = fd >= 0;
    if (fd < 0 && errno == EINVAL)
        fd = open_temporary(folder, 0);
    if (fd < 0)
        return fsdpc_fail_errno("cannot make a file in the folder '%s'", folder);
    *fd_out = fd;
    return FSDPC_OK;
}

fsdpc_status fsdpc_fs_create(const fsdpc_fs *fs, const char *path, uint64_t bytes, int *fd_out)
{
    FSDPC_TRY(ask(fs, "create", path));
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return fsdpc_fail_errno("cannot create '%s'", path);
    fsdpc_status status = fsdpc_fs_reserve(fs, fd, path, 0, bytes);
    if (status != FSDPC_OK) {
        close(fd);
        return status;
    }
    *fd_out = fd;
    return FSDPC_OK;
}

fsdpc_status fsdpc_fs_open(const fsdpc_fs *fs, const char *path, bool write, int *fd_out)
{
    FSDPC_TRY(ask(fs, "open", path));
    int fd = open(path, (write ? O_WRONLY : O_RDONLY) | O_CLOEXEC);
    if (fd < 0)
        return fsdpc_fail_errno("cannot open '%s'", path);
    *fd_out = fd;
    return FSDPC_OK;
}

fsdpc_status fsdpc_fs_size(const fsdpc_fs *fs, int fd, const char *path, uint64_t *bytes_out)
{
    struct statx info;
    FSDPC_TRY(ask(fs, "fstat", path));
    if (statx(fd, "", AT_EMPTY_PATH, STATX_TYPE | STATX_SIZE, &info) != 0)
        return fsdpc_fail_errno("cannot look at '%s'", path);
    if (!S_ISREG(info.stx_mode))
        return fsdpc_fail(FSDPC_ERR_VALUE, "'%s' is not a plain file", path);
    *bytes_out = info.stx_size;
    return FSDPC_OK;
}

fsdpc_status fsdpc_fs_pwrite(const fsdpc_fs *fs, int fd, const char *path, const void *data,
                             size_t bytes, uint64_t offset)
{
    FSDPC_TRY(ask(fs, "pwrite", path));
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pwrite(fd, (const char *)data + done, bytes - done, (off_t)(offset + done));
        if (n > 0)
            done += (size_t)n;
        else if (n == 0 || errno != EINTR)
            return fsdpc_fail_errno("cannot write %zu bytes at %llu of '%s'", bytes,
                                    (unsigned long long)offset, path);
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_fs_pread(const fsdpc_fs *fs, int fd, const char *path, void *data, size_t bytes,
                            uint64_t offset)
{
    FSDPC_TRY(ask(fs, "pread", path));
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pread(fd, (char *)data + done, bytes - done, (off_t)(offset + done));
        if (n > 0)
            done += (size_t)n;
        else if (n == 0)
            return fsdpc_fail(FSDPC_ERR_OS, "'%s' ends at byte %llu, %llu are wanted", path,
                              (unsigned long long)offset + done,
                              (unsigned long long)offset + bytes);
        else if (errno != EINTR)
            return fsdpc_fail_errno("cannot read %zu bytes at %llu of '%s'", bytes,
                                    (unsigned long long)offset, path);
    }
    return FSDPC_OK;
}

void fsdpc_fs_begin_writing(int fd, uint64_t offset, uint64_t bytes)
{
    (void)sync_file_range(fd, (off_t)offset, (off_t)bytes, SYNC_FILE_RANGE_WRITE);
}

fsdpc_status fsdpc_fs_sync(const fsdpc_fs *fs, int fd, const char *path)
{
    FSDPC_TRY(ask(fs, "fsync", path));
    while (fsync(fd) != 0)
        if (errno != EINTR)
            return fsdpc_fail_errno("cannot bring '%s' to the disk", path);
    return FSDPC_OK;
}

fsdpc_status fsdpc_fs_sync_folder(const fsdpc_fs *fs, const char *path)
{
    FSDPC_TRY(ask(fs, "open", path));
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return fsdpc_fail_errno("cannot open the folder '%s'", path);
    fsdpc_status status = ask(fs, "fsync", path);
    int result = 0;
    while (status == FSDPC_OK && (result = fsync(fd)) != 0 && errno == EINTR)
        continue;
    if (result != 0 && errno != EINVAL) /* the file system has nothing to sync for folders */
        status = fsdpc_fail_errno("cannot bring the folder '%s' to the disk", path);
    close(fd);
    return status;
}

fsdpc_status fsdpc_fs_close(const fsdpc_fs *fs, int fd, const char *path)
{
    if (fd < 0)
        return FSDPC_OK;
    fsdpc_status status = ask(fs, "close", path);
    if (close(fd) != 0 && errno != EINTR && status == FSDPC_OK)
        status = fsdpc_fail_errno("cannot close '%s'", path);
    return status;
}

fsdpc_status fsdpc_fs_rename_new(const fsdpc_fs *fs, const char *from, const char *to)
{
    FSDPC_TRY(ask(fs, "rename", to));
    if (renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) == 0)
        return FSDPC_OK;
    if (errno == EINVAL || errno == ENOSYS) { /* the file system does not support the flag */
        struct statx info;
        if (statx(AT_FDCWD, to, AT_SYMLINK_NOFOLLOW, STATX_TYPE, &info) == 0)
            errno = EEXIST;
        else if (errno == ENOENT && rename(from, to) == 0)
            return FSDPC_OK;
    }
    return fsdpc_fail_errno("cannot rename '%s' to '%s'", from, to);
}

fsdpc_status fsdpc_fs_exchange(const fsdpc_fs *fs, const char *from, const char *to,
                               bool *exchanged_out)
{
    FSDPC_TRY(ask(fs, "exchange", to));
    *exchanged_out = renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_EXCHANGE) == 0;
    if (*exchanged_out || errno == ENOENT)
        return FSDPC_OK;
    if (errno == EINVAL || errno == ENOSYS)
        return fsdpc_fail(FSDPC_ERR_OS,
                          "the file system of '%s' cannot replace a folder at once: save under "
                          "another name, then remove this one",
                          to);
    return fsdpc_fail_errno("cannot exchange '%s' and '%s'", from, to);
}

static fsdpc_status remove_entry(const fsdpc_fs *fs, int folder, const char *path)
{
    const char *name = strrchr(path, '/') + 1;
    struct statx info;
    if (statx(folder, name, AT_SYMLINK_NOFOLLOW, STATX_TYPE, &info) == 0 && S_ISDIR(info.stx_mode))
        return fsdpc_fs_remove_tree(fs, path);
    FSDPC_TRY(ask(fs, "unlink", path));
    if (unlinkat(folder, name, 0) != 0 && errno != ENOENT)
        return fsdpc_fail_errno("cannot remove '%s'", path);
    return FSDPC_OK;
}

fsdpc_status fsdpc_fs_remove_tree(const fsdpc_fs *fs, const char *path)
{
    FSDPC_TRY(ask(fs, "opendir", path));
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *folder = fd < 0 ? NULL : fdopendir(fd);
    if (!folder) {
        if (errno == ENOENT)
            return FSDPC_OK;
        fsdpc_status failed = fsdpc_fail_errno("cannot open the folder '%s' to remove it", path);
        if (fd >= 0)
            close(fd);
        return failed;
    }
    fsdpc_status status = FSDPC_OK;
    for (struct dirent *entry; status == FSDPC_OK && (entry = readdir(folder));) {
        char inner[4096];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        int n = snprintf(inner, sizeof inner, "%s/%s", path, entry->d_name);
        if (n < 0 || (size_t)n >= sizeof inner)
            status =
                fsdpc_fail(FSDPC_ERR_VALUE, "the path '%s/%s' is too long", path, entry->d_name);
        else
            status = remove_entry(fs, dirfd(folder), inner);
    }
    closedir(folder);
    FSDPC_TRY(status);
    FSDPC_TRY(ask(fs, "rmdir", path));
    if (rmdir(path) != 0 && errno != ENOENT)
        return fsdpc_fail_errno("cannot remove the folder '%s'", path);
    return FSDPC_OK;
}
