/* The per-thread error text.
 *
 * One thread-local buffer holds the message of the last failure; it is one of the library's three
 * documented mutable globals (docs/design.md). It is never allocated or freed, so reporting "out
 * of memory" cannot itself run out of memory. A message that does not fit is cut and ends in
 * "...".
 */
#include "base/status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { MESSAGE_BYTES = 4096 };

static _Thread_local char message[MESSAGE_BYTES];

static void write_message(const char *format, va_list args)
{
    int n = vsnprintf(message, sizeof message, format, args);
    if (n >= (int)sizeof message)
        memcpy(message + sizeof message - 4, "...", 4);
}

fsdpc_status fsdpc_fail(fsdpc_status code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    write_message(format, args);
    va_end(args);
    return code;
}

fsdpc_status fsdpc_fail_errno(const char *format, ...)
{
    int error = errno;
    va_list args;
    va_start(args, format);
    write_message(format, args);
    va_end(args);
    size_t used = strlen(message);
    snprintf(message + used, sizeof message - used, ": %s", strerror(error));
    return error == ENOMEM ? FSDPC_ERR_NOMEM : FSDPC_ERR_OS;
}

const char *fsdpc_last_error(void)
{
    return message;
}

const char *fsdpc_status_text(fsdpc_status status)
{
    switch (status) {
    case FSDPC_OK:
        return "OK";
    case FSDPC_IN_PROGRESS:
        return "IN_PROGRESS";
#define X(name, code, exception, text)                                                             \
    case FSDPC_ERR_##name:                                                                         \
        return #name ": " text;
        FSDPC_STATUS_TABLE(X)
#undef X
    }
    return "unknown status";
}
