/* The loaded plugins: one of the few globals, guarded by a lock.
 *
 * A library is opened with local symbols, so that the symbols of two plugins (or of a plugin and
 * torch) never clash. It is never closed, because its code may be on any thread's stack and CUDA
 * does not survive unloading. A library that was opened but is incompatible also stays open,
 * unused.
 */
#include "plugin/plugin.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { PLUGINS_MAX = 8 };

static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char *path;
    const fsdpc_plugin *plugin;
} registry[PLUGINS_MAX];
static size_t registry_count;

static fsdpc_status host_fail(fsdpc_status code, const char *message)
{
    return fsdpc_fail(code, "%s", message);
}

static void host_log(const fsdpc_log *log, fsdpc_log_level level, const char *line)
{
    fsdpc_log_write(log, level, "%s", line);
}

static const fsdpc_plugin_host host = {
    .layout = FSDPC_PLUGIN_LAYOUT,
    .fail = host_fail,
    .last_error = fsdpc_last_error,
    .log = host_log,
    .mem_alloc = fsdpc_mem_alloc,
    .mem_free = fsdpc_mem_free,
    .mem_count = fsdpc_mem_count,
    .mem_count_system_alloc = fsdpc_mem_count_system_alloc,
};

static fsdpc_status open_plugin(const char *path, const fsdpc_plugin **out)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return fsdpc_fail(FSDPC_ERR_OS, "cannot load plugin: %s", dlerror());
    fsdpc_plugin_open_fn open;
    *(void **)&open = dlsym(library, "fsdpc_plugin_open");
    if (!open)
        return fsdpc_fail(FSDPC_ERR_VALUE, "%s is no plugin of fsdpc: it has no fsdpc_plugin_open",
                          path);
    const fsdpc_plugin *plugin = open(&host);
    if (!plugin)
        return FSDPC_ERR_STATE; /* fsdpc_plugin_open has set the error */
    if (memcmp(&plugin->layout, &host.layout, sizeof host.layout) != 0)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "plugin %s has ABI %u, this fsdpc %u, or structs of other sizes: build "
                          "both from one source",
                          path, plugin->layout.abi, host.layout.abi);
    *out = plugin;
    return FSDPC_OK;
}

static fsdpc_status find_or_open(const char *path, const fsdpc_plugin **out)
{
    for (size_t i = 0; i < registry_count; i++)
        if (strcmp(registry[i].path, path) == 0) {
            *out = registry[i].plugin;
            return FSDPC_OK;
        }
    if (registry_count == PLUGINS_MAX)
        return fsdpc_fail(FSDPC_ERR_STATE, "%d plugins are loaded; no more are taken",
                          (int)PLUGINS_MAX);
    char *kept = strdup(path);
    if (!kept)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to load plugin %s", path);
    const fsdpc_plugin *plugin = NULL;
    fsdpc_status status = open_plugin(path, &plugin);
    if (status != FSDPC_OK) {
        free(kept);
        return status;
    }
    registry[registry_count].path = kept;
    registry[registry_count++].plugin = plugin;
    *out = plugin;
    return FSDPC_OK;
}

fsdpc_status fsdpc_plugin_load(const char *path, const fsdpc_plugin **out)
{
    pthread_mutex_lock(&registry_lock);
    fsdpc_status status = find_or_open(path, out);
    pthread_mutex_unlock(&registry_lock);
    return status;
}
