/* NCCL through the loader: its version and an identity for a new group, neither of which needs a
 * GPU.
 *
 * Arguments: the path of a libnccl.so.2, and, to show that a copy which the process has is taken
 * before it, the path of another that is loaded first. Without a path nothing but the refusals is
 * tested.
 */
#include <dlfcn.h>

#include "check.h"
#include "cuda/nccl_load.h"

static void test_refusals(void)
{
    fsdpc_nccl nccl;
    CHECK_FAILS(fsdpc_nccl_open("/nowhere/libnccl.so.2", false, NULL, &nccl), FSDPC_ERR_UNSUPPORTED,
                "/nowhere/libnccl.so.2");
    CHECK_FAILS(fsdpc_nccl_open("/nowhere/libnccl.so.2", false, NULL, &nccl), FSDPC_ERR_UNSUPPORTED,
                "(FSDPC_NCCL_LIB names it); name another, or unset it");
    CHECK_FAILS(fsdpc_nccl_open("libm.so.6", false, NULL, &nccl), FSDPC_ERR_UNSUPPORTED,
                "this NCCL has no ncclGetVersion");
}

static void test_identities(const char *path)
{
    fsdpc_nccl nccl, again;
    CHECK_OK(fsdpc_nccl_open(path, false, NULL, &nccl));
    CHECK_OK(fsdpc_nccl_open(NULL, false, NULL, &again)); /* finds the one that is open */
    CHECK(nccl.ncclGetUniqueId == again.ncclGetUniqueId);
    CHECK_NOTE(nccl.version >= 22800 && nccl.version == again.version, "%d", nccl.version);
    CHECK(nccl.ncclCommRegister && nccl.ncclCommDeregister);
    CHECK(nccl.ncclCommWindowRegister && nccl.ncclCommWindowDeregister);
    fsdpc_nccl_id one = {{0}}, other = {{0}};
    CHECK_OK(fsdpc_nccl_check(&nccl, nccl.ncclGetUniqueId(&one), "make an identity"));
    CHECK_OK(fsdpc_nccl_check(&nccl, nccl.ncclGetUniqueId(&other), "make an identity"));
    CHECK(memcmp(&one, &other, sizeof one) != 0);
    CHECK_FAILS(fsdpc_nccl_check(&nccl, nccl.ncclGetUniqueId(NULL), "make an identity"),
                FSDPC_ERR_INTERNAL, "NCCL failed to make an identity: ");
}

/* Says where the library is, for whoever knows where it ought to be. */
static void test_description(const char *path)
{
    char text[512] = "";
    CHECK_OK(fsdpc_nccl_describe(path, text, sizeof text));
    CHECK_NOTE(strncmp(text, "NCCL 2.", 7) == 0 && strstr(text, " at /"), "%s", text);
    printf("%s\n", text);
}

int main(int argc, char **argv)
{
    if (argc == 1)
        test_refusals();
    if (argc > 2)
        CHECK(dlopen(argv[2], RTLD_NOW | RTLD_LOCAL));
    if (argc > 1) {
        test_identities(argv[1]);
        test_description(argv[1]);
    }
    return check_report("test_nccl_load");
}
