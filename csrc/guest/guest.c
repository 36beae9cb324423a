/* Forwarders to the host table, under the names that the headers declare.
 *
 * The table's address is a plugin's only mutable global. The loading thread writes it once, before
 * any other thread can know about the plugin. Callers cannot pass the address: sources that core
 * and plugins share call these functions by name, some before any object exists. Linking to the
 * core's symbols would require exporting them, but Python loads the extension with its symbols
 * local.
 */
#include "guest/guest.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { LINE_BYTES = 1024 };

static const fsdpc_plugin_host *guest_host;

void fsdpc_guest_init(const fsdpc_plugin_host *host)
{
    guest_host = host;
}

fsdpc_status fsdpc_fail(fsdpc_status code, const char *format, ...)
{
    char message[LINE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    return guest_host->fail(code, message);
}

fsdpc_status fsdpc_fail_errno(const char *format, ...)
{
    int error = errno;
    char message[LINE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    return fsdpc_fail(error == ENOMEM ? FSDPC_ERR_NOMEM : FSDPC_ERR_OS, "%s: %s", message,
                      strerror(error));
}

const char *fsdpc_last_error(void)
{
    return guest_host->last_error();
}

void fsdpc_log_write(const fsdpc_log *log, fsdpc_log_level level, const char *format, ...)
{
    char line[LINE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    guest_host->log(log, level, line);
}

fsdpc_status fsdpc_mem_alloc(fsdpc_mem *mem, fsdpc_mem_kind kind, size_t bytes, void **out)
{
    return guest_host->mem_alloc(mem, kind, bytes, out);
}

void fsdpc_mem_free(fsdpc_mem *mem, void *pointer)
{
    guest_host->mem_free(mem, pointer);
}

void fsdpc_mem_count(fsdpc_mem *mem, fsdpc_mem_kind kind, int64_t bytes)
{
    guest_host->mem_count(mem, kind, bytes);
}

void fsdpc_mem_count_system_alloc(fsdpc_mem *mem)
{
    guest_host->mem_count_system_alloc(mem);
}
