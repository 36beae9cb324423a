/* The environment: defaults, values, ranges, unknown names. */
#include "base/env.h"
#include "check.h"

static void clear(void)
{
#define X(field, type, variable, fallback, lowest, highest, text) unsetenv(variable);
    FSDPC_ENV_TABLE(X)
#undef X
}

static void test_defaults(void)
{
    fsdpc_env env;
    clear();
    CHECK_OK(fsdpc_env_read(&env));
    CHECK(env.timeout_s == 300 && env.notice_s == 10 && !env.no_alias && env.threads == 0);
    CHECK(strcmp(env.isa, "auto") == 0 && env.log == 1 && env.trace == 4096);
    setenv("FSDPC_TRACE", "", 1); /* set but empty is not set */
    setenv("FSDPC_NO_ALIAS", "", 1);
    CHECK_OK(fsdpc_env_read(&env));
    CHECK(env.trace == 4096 && !env.no_alias);
}

static void test_values(void)
{
    fsdpc_env env;
    clear();
    setenv("FSDPC_TIMEOUT_S", "0.5", 1);
    setenv("FSDPC_NO_ALIAS", "1", 1);
    setenv("FSDPC_THREADS", "4096", 1);
    setenv("FSDPC_ISA", "avx2", 1);
    setenv("FSDPC_RUN_ID", "abc", 1); /* the launcher's */
    setenv("FSDPC_TEST_GPU", "1", 1); /* of tests that start ranks */
    setenv("FSDPC_TEST_SEED", "1", 1);
    setenv("FSDPC_COMMIT", "abc", 1);
    CHECK_OK(fsdpc_env_read(&env));
    CHECK(env.timeout_s == 0.5 && env.no_alias && env.threads == 4096);
    CHECK(strcmp(env.isa, "avx2") == 0);
    unsetenv("FSDPC_RUN_ID");
    unsetenv("FSDPC_TEST_GPU");
    unsetenv("FSDPC_TEST_SEED");
    unsetenv("FSDPC_COMMIT");
}

static void refuse(const char *variable, const char *value, const char *accepted)
{
    fsdpc_env env = {.trace = -7};
    clear();
    setenv(variable, value, 1);
    CHECK_FAILS(fsdpc_env_read(&env), FSDPC_ERR_VALUE, accepted);
    CHECK(strstr(fsdpc_last_error(), variable) != NULL);
    CHECK_NOTE(strstr(fsdpc_last_error(), value) != NULL, "%s", fsdpc_last_error());
    CHECK(env.trace == -7); /* written on success only */
}

static void test_refusals(void)
{
    refuse("FSDPC_TIMEOUT_S", "0", "from 0.01 to 1e+09");
    refuse("FSDPC_TIMEOUT_S", "nan", "from 0.01 to 1e+09");
    refuse("FSDPC_TIMEOUT_S", "5s", "from 0.01 to 1e+09");
    refuse("FSDPC_THREADS", "-1", "from 0 to 4096");
    refuse("FSDPC_THREADS", "2.5", "from 0 to 4096");
    refuse("FSDPC_THREADS", "99999999999999999999", "from 0 to 4096");
    refuse("FSDPC_NO_ALIAS", "yes", "0 or 1");
    refuse("FSDPC_LOG", "4", "from 0 to 3");
    clear();
}

static void test_unknown(void)
{
    fsdpc_env env;
    setenv("FSDPC_TIMEOUT", "5", 1);
    CHECK_FAILS(fsdpc_env_read(&env), FSDPC_ERR_VALUE, "did you mean FSDPC_TIMEOUT_S");
    unsetenv("FSDPC_TIMEOUT");
    setenv("FSDPC_SOMETHING_ELSE", "5", 1);
    CHECK_FAILS(fsdpc_env_read(&env), FSDPC_ERR_VALUE, "FSDPC_SOMETHING_ELSE is not known");
    CHECK(strstr(fsdpc_last_error(), "did you mean") == NULL);
    unsetenv("FSDPC_SOMETHING_ELSE");
    CHECK_OK(fsdpc_env_read(&env));
}

int main(void)
{
    test_defaults();
    test_values();
    test_refusals();
    test_unknown();
    return check_report("env");
}
