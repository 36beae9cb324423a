/* The log contains a few lines for users and never replaces an error.
 *
 * A log belongs to a context and is plain data: a level (from FSDPC_LOG), the rank it logs for and
 * a sink. Without a sink, each line goes to stderr in one write, so lines from different ranks
 * never mix. Python installs a sink that passes lines to its logging module.
 *
 * Any thread may write to a log, but its fields may change only while no thread is writing. A NULL
 * log is silent. Code that fails calls fsdpc_fail() and logs nothing: the code that handles the
 * error decides whether to log it.
 */
#ifndef FSDPC_BASE_LOG_H
#define FSDPC_BASE_LOG_H

/* X(name, level, text); the levels of FSDPC_LOG */
#define FSDPC_LOG_TABLE(X)                                                                         \
    X(SILENT, 0, "silent")                                                                         \
    X(WARNING, 1, "warning") /* something the user should change */                                \
    X(NOTE, 2, "note")       /* decisions: paths chosen, fallbacks taken */                        \
    X(DEBUG, 3, "debug")     /* everything */

typedef enum fsdpc_log_level {
#define X(name, level, text) FSDPC_LOG_##name = level,
    FSDPC_LOG_TABLE(X)
#undef X
} fsdpc_log_level;

/* `line` has no line end and is valid only during the call. */
typedef void (*fsdpc_log_fn)(void *arg, fsdpc_log_level level, const char *line);

typedef struct fsdpc_log {
    fsdpc_log_level level; /* lines above it are dropped */
    int rank;              /* -1: not known yet */
    fsdpc_log_fn fn;       /* NULL: stderr */
    void *arg;
} fsdpc_log;

/* Formats a line and passes it to the sink; a line that is too long is cut and ends in "...". */
void fsdpc_log_write(const fsdpc_log *log, fsdpc_log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4), cold));

const char *fsdpc_log_level_name(fsdpc_log_level level);

/* These macros evaluate their arguments only if the level is enabled. */
#define FSDPC_LOG_AT(log, level_, ...)                                                             \
    do {                                                                                           \
        const fsdpc_log *log_at_ = (log);                                                          \
        if (log_at_ && log_at_->level >= (level_))                                                 \
            fsdpc_log_write(log_at_, (level_), __VA_ARGS__);                                       \
    } while (0)
#define FSDPC_WARN(log, ...) FSDPC_LOG_AT(log, FSDPC_LOG_WARNING, __VA_ARGS__)
#define FSDPC_NOTE(log, ...) FSDPC_LOG_AT(log, FSDPC_LOG_NOTE, __VA_ARGS__)
#define FSDPC_DEBUG(log, ...) FSDPC_LOG_AT(log, FSDPC_LOG_DEBUG, __VA_ARGS__)

#endif
