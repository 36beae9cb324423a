/* Formats a line on the stack and writes it with one call.
 *
 * It allocates no memory and takes no lock. A write of at most PIPE_BUF (4096) bytes to a pipe is
 * atomic, so ranks that share a launcher's pipe never interleave within a line. Bytes that stderr
 * does not accept are dropped, because a logging failure must not stop the program.
 */
#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { LINE_BYTES = 4096 };

static const char *const names[] = {
#define X(name, level, text) [FSDPC_LOG_##name] = text,
    FSDPC_LOG_TABLE(X)
#undef X
};

const char *fsdpc_log_level_name(fsdpc_log_level level)
{
    return (unsigned)level < sizeof names / sizeof *names ? names[level] : "unknown level";
}

void fsdpc_log_write(const fsdpc_log *log, fsdpc_log_level level, const char *format, ...)
{
    if (!log || level > log->level || level == FSDPC_LOG_SILENT)
        return;
    int error = errno; /* logging between a failure and its report must not change errno */
    char line[LINE_BYTES];
    size_t used = 0, limit = sizeof line - 1; /* leaves a byte for the line end */
    if (!log->fn) {
        int head = log->rank >= 0
                       ? snprintf(line, limit, "fsdpc rank %d: %s: ", log->rank,
                                  fsdpc_log_level_name(level))
                       : snprintf(line, limit, "fsdpc: %s: ", fsdpc_log_level_name(level));
        used = (size_t)head;
    }
    va_list args;
    va_start(args, format);
    int length = vsnprintf(line + used, limit - used, format, args);
    va_end(args);
    if (length < 0)
        length = 0;
    if ((size_t)length >= limit - used) {
        used = limit - 1;
        memcpy(line + used - 3, "...", 3);
    } else {
        used += (size_t)length;
    }
    if (log->fn) {
        line[used] = '\0';
        log->fn(log->arg, level, line);
    } else {
        line[used++] = '\n';
        while (write(STDERR_FILENO, line, used) < 0 && errno == EINTR) {
        }
    }
    errno = error;
}
