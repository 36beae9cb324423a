/* Loading plugins: what is refused and why; and, given the path of libfsdpc_cuda.so as argument,
 * that it loads on any machine and says what it found.
 */
#include "check.h"
#include "plugin/plugin.h"

static void test_refusals(void)
{
    const fsdpc_plugin *plugin = NULL;
    CHECK_FAILS(fsdpc_plugin_load("/nowhere/libfsdpc_none.so", &plugin), FSDPC_ERR_OS,
                "cannot load plugin");
    CHECK_FAILS(fsdpc_plugin_load("libm.so.6", &plugin), FSDPC_ERR_VALUE, "is no plugin");
    CHECK(plugin == NULL);
}

static void test_cuda(const char *path)
{
    const fsdpc_plugin *plugin = NULL, *again = NULL;
    CHECK_OK(fsdpc_plugin_load(path, &plugin));
    CHECK_OK(fsdpc_plugin_load(path, &again));
    CHECK(plugin && plugin == again && strcmp(plugin->name, "cuda") == 0);
    if (!plugin)
        return;
    char text[512];
    plugin->describe(text, sizeof text);
    printf("%s\n", text);
    int count = 0;
    fsdpc_status status = plugin->device_count(&count);
    if (status == FSDPC_OK) {
        CHECK(count >= 1);
    } else { /* the plugin's words in the core's text */
        CHECK(status == FSDPC_ERR_UNSUPPORTED && strlen(fsdpc_last_error()) > 20);
        CHECK(strstr(text, "no GPU: ") && strstr(text, fsdpc_last_error()));
    }
    const char *const nowhere = "/nowhere/libnccl.so.2";
    CHECK(plugin->comm_library(nowhere, text, sizeof text) == FSDPC_ERR_UNSUPPORTED);
    CHECK_NOTE(strstr(fsdpc_last_error(), nowhere), "%s", fsdpc_last_error());
    fsdpc_comm *comm = NULL;
    fsdpc_comm_config config = {.size = 1};
    const fsdpc_plugin_option none[] = {{NULL, NULL}};
    CHECK_FAILS(plugin->comm_create(&config, NULL, none, &comm), FSDPC_ERR_VALUE, "to begin over");
    fsdpc_mem *mem;
    fsdpc_device *device = NULL;
    CHECK_OK(fsdpc_mem_create(&mem));
    CHECK(plugin->device_create(mem, 10000, none, &device) != FSDPC_OK && device == NULL);
    fsdpc_mem_destroy(mem);
}

int main(int argc, char **argv)
{
    test_refusals();
    if (argc > 1)
        test_cuda(argv[1]);
    return check_report("test_plugin");
}
