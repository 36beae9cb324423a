/* Codes, messages and the three macros; checked arithmetic on sizes. */
#include <errno.h>
#include <pthread.h>

#include "base/size.h"
#include "base/status.h"
#include "check.h"

static void test_messages(void)
{
    CHECK(strcmp(fsdpc_last_error(), "") == 0);
    CHECK(fsdpc_fail(FSDPC_ERR_SHAPE, "got %d, need %s", 3, "four") == FSDPC_ERR_SHAPE);
    CHECK(strcmp(fsdpc_last_error(), "got 3, need four") == 0);
    errno = ENOENT;
    CHECK(fsdpc_fail_errno("opening '%s'", "x") == FSDPC_ERR_OS);
    CHECK(strcmp(fsdpc_last_error(), "opening 'x': No such file or directory") == 0);
    errno = ENOMEM;
    CHECK(fsdpc_fail_errno("mapping") == FSDPC_ERR_NOMEM);
    char *text = malloc(9000);
    memset(text, 'm', 8999);
    text[8999] = '\0';
    fsdpc_fail(FSDPC_ERR_VALUE, "%s", text);
    size_t length = strlen(fsdpc_last_error());
    CHECK(length == 4095 && strcmp(fsdpc_last_error() + length - 4, "m...") == 0);
    errno = ENOENT;
    fsdpc_fail_errno("%s", text); /* a full buffer stays a string */
    CHECK(strlen(fsdpc_last_error()) == 4095);
    free(text);
}

static void *fail_elsewhere(void *arg)
{
    int *clean = arg;
    *clean = fsdpc_last_error()[0] == '\0';
    fsdpc_fail(FSDPC_ERR_VALUE, "the other thread's");
    return NULL;
}

static void test_threads(void)
{
    int clean = 0;
    pthread_t thread;
    fsdpc_fail(FSDPC_ERR_VALUE, "mine");
    CHECK(pthread_create(&thread, NULL, fail_elsewhere, &clean) == 0);
    pthread_join(thread, NULL);
    CHECK(clean && strcmp(fsdpc_last_error(), "mine") == 0);
}

static void test_texts(void)
{
    CHECK(strcmp(fsdpc_status_text(FSDPC_OK), "OK") == 0);
    CHECK(strcmp(fsdpc_status_text(FSDPC_IN_PROGRESS), "IN_PROGRESS") == 0);
    CHECK(strncmp(fsdpc_status_text(FSDPC_ERR_TIMEOUT), "TIMEOUT: ", 9) == 0);
    CHECK(strcmp(fsdpc_status_text((fsdpc_status)-999), "unknown status") == 0);
    int distinct = 1;
    const int codes[] = {
#define X(name, code, exception, text) code,
        FSDPC_STATUS_TABLE(X)
#undef X
    };
    const int count = (int)(sizeof codes / sizeof *codes);
    for (int i = 0; i < count; i++)
        for (int j = 0; j < i; j++)
            distinct &= codes[i] != codes[j] && codes[i] < 0;
    CHECK(distinct);
}

static fsdpc_status give(fsdpc_status status, int *calls)
{
    ++*calls;
    return status;
}

static fsdpc_status try_two(fsdpc_status first, int *calls)
{
    FSDPC_TRY(give(first, calls));
    FSDPC_TRY(give(FSDPC_OK, calls));
    return FSDPC_OK;
}

static fsdpc_status try_goto(fsdpc_status first, int *calls)
{
    fsdpc_status status;
    FSDPC_TRY_GOTO(status, give(first, calls), undo);
    return FSDPC_OK;
undo:
    *calls += 100;
    return status;
}

static void test_macros(void)
{
    int calls = 0;
    CHECK(try_two(FSDPC_OK, &calls) == FSDPC_OK && calls == 2);
    CHECK(try_two(FSDPC_ERR_KEY, &calls) == FSDPC_ERR_KEY && calls == 3);
    CHECK(try_two(FSDPC_IN_PROGRESS, &calls) == FSDPC_IN_PROGRESS && calls == 4);
    calls = 0;
    CHECK(try_goto(FSDPC_OK, &calls) == FSDPC_OK && calls == 1);
    CHECK(try_goto(FSDPC_ERR_KEY, &calls) == FSDPC_ERR_KEY && calls == 102);
    fsdpc_status status = FSDPC_OK;
    calls = 0;
    FSDPC_KEEP_FIRST(status, give(FSDPC_OK, &calls));
    FSDPC_KEEP_FIRST(status, give(FSDPC_ERR_KEY, &calls));
    FSDPC_KEEP_FIRST(status, give(FSDPC_ERR_VALUE, &calls));
    CHECK(status == FSDPC_ERR_KEY && calls == 3);
}

static void test_sizes(void)
{
    size_t out = 7;
    CHECK_OK(fsdpc_mul_size(6, 7, &out));
    CHECK(out == 42);
    CHECK_FAILS(fsdpc_mul_size(SIZE_MAX / 2, 3, &out), FSDPC_ERR_VALUE, "does not fit");
    CHECK_OK(fsdpc_add_size(SIZE_MAX - 1, 1, &out));
    CHECK(out == SIZE_MAX);
    CHECK_FAILS(fsdpc_add_size(SIZE_MAX, 1, &out), FSDPC_ERR_VALUE, "does not fit");
    CHECK(fsdpc_ceil_div(0, 8) == 0 && fsdpc_ceil_div(8, 8) == 1 && fsdpc_ceil_div(9, 8) == 2);
    CHECK(fsdpc_ceil_div(SIZE_MAX, 2) == SIZE_MAX / 2 + 1);
    CHECK(fsdpc_round_up(0, 64) == 0 && fsdpc_round_up(1, 64) == 64);
    CHECK(fsdpc_min_size(2, 3) == 2 && fsdpc_max_size(2, 3) == 3);
}

int main(void)
{
    test_messages();
    test_threads();
    test_texts();
    test_macros();
    test_sizes();
    return check_report("status");
}
