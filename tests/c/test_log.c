/* The log: levels, sinks, cut lines, one write to stderr. */
#include <unistd.h>

#include "base/log.h"
#include "check.h"

typedef struct sink {
    int lines;
    fsdpc_log_level level;
    char last[8192];
} sink;

static void keep_line(void *arg, fsdpc_log_level level, const char *line)
{
    sink *kept = arg;
    kept->lines++;
    kept->level = level;
    snprintf(kept->last, sizeof kept->last, "%s", line);
}

static int evaluated(int *count)
{
    return ++*count;
}

static void test_log(void)
{
    static sink kept;
    fsdpc_log log = {.level = FSDPC_LOG_NOTE, .rank = 3, .fn = keep_line, .arg = &kept};
    int count = 0;
    FSDPC_WARN(&log, "unit %d is %s", evaluated(&count), "slow");
    CHECK(kept.lines == 1 && kept.level == FSDPC_LOG_WARNING && count == 1);
    CHECK(strcmp(kept.last, "unit 1 is slow") == 0);
    FSDPC_NOTE(&log, "n");
    FSDPC_DEBUG(&log, "%d", evaluated(&count));
    CHECK(kept.lines == 2 && kept.level == FSDPC_LOG_NOTE && count == 1);
    FSDPC_WARN((fsdpc_log *)NULL, "nobody hears this");
    log.level = FSDPC_LOG_SILENT;
    FSDPC_WARN(&log, "nor this");
    fsdpc_log_write(&log, FSDPC_LOG_WARNING, "nor this");
    CHECK(kept.lines == 2);
    log.level = FSDPC_LOG_DEBUG;
    char *text = malloc(10001);
    memset(text, 'x', 10000);
    text[10000] = '\0';
    FSDPC_DEBUG(&log, "%s", text);
    size_t length = strlen(kept.last);
    CHECK(length > 4000 && length < 4096 && strcmp(kept.last + length - 4, "x...") == 0);
    free(text);
    CHECK(strcmp(fsdpc_log_level_name(FSDPC_LOG_NOTE), "note") == 0);
}

static void test_log_to_stderr(void)
{
    int back = dup(2), ends[2];
    CHECK(back >= 0 && pipe(ends) == 0);
    dup2(ends[1], 2);
    fsdpc_log log = {.level = FSDPC_LOG_WARNING, .rank = 3};
    FSDPC_WARN(&log, "five is %d", 5);
    log.rank = -1;
    FSDPC_WARN(&log, "early");
    dup2(back, 2);
    char text[256] = "";
    ssize_t bytes = read(ends[0], text, sizeof text - 1);
    CHECK(bytes > 0);
    CHECK_NOTE(strcmp(text, "fsdpc rank 3: warning: five is 5\nfsdpc: warning: early\n") == 0, "%s",
               text);
    close(back);
    close(ends[0]);
    close(ends[1]);
}

int main(void)
{
    test_log();
    test_log_to_stderr();
    return check_report("log");
}
