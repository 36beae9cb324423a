/* Status codes, and the calling thread's error message.
 *
 * Every function that can fail returns fsdpc_status: 0 is success, negative values are errors, and
 * FSDPC_IN_PROGRESS is the one positive value ("not yet, ask again"). The function that detects an
 * error reports it once, with fsdpc_fail(); its callers propagate the code with FSDPC_TRY and add
 * nothing. Outputs are written only on success.
 *
 * The message belongs to the calling thread and is valid until its next fsdpc_fail(). A message
 * contains the invalid values and ends with a remedy.
 */
#ifndef FSDPC_BASE_STATUS_H
#define FSDPC_BASE_STATUS_H

#include <stddef.h>

/* X(name, code, Python exception, meaning) */
#define FSDPC_STATUS_TABLE(X)                                                                      \
    X(VALUE, -1, ValueError, "a value is out of range or makes no sense")                          \
    X(TYPE, -2, TypeError, "a value has the wrong type")                                           \
    X(SHAPE, -3, ValueError, "shapes do not fit together")                                         \
    X(DTYPE, -4, TypeError, "a dtype is not accepted here")                                        \
    X(STATE, -5, RuntimeError, "not allowed in the present state")                                 \
    X(INDEX, -6, IndexError, "an index is out of bounds")                                          \
    X(KEY, -7, KeyError, "no such name")                                                           \
    X(NOMEM, -8, MemoryError, "memory could not be had")                                           \
    X(OS, -9, OSError, "the operating system refused")                                             \
    X(TIMEOUT, -10, TimeoutError, "a deadline passed")                                             \
    X(PEER, -11, PeerError, "another rank died or left")                                           \
    X(MISMATCH, -12, MismatchError, "ranks disagree")                                              \
    X(POISONED, -13, PeerError, "the communicator failed earlier")                                 \
    X(INTERRUPT, -14, KeyboardInterrupt, "interrupted by the user")                                \
    X(UNSUPPORTED, -15, NotImplementedError, "not supported here")                                 \
    X(CALLBACK, -16, RuntimeError, "a callback failed; it keeps its own error")                    \
    X(INTERNAL, -17, SystemError, "a bug in fsdpc")

typedef enum fsdpc_status {
    FSDPC_OK = 0,
    FSDPC_IN_PROGRESS = 1,
#define X(name, code, exception, text) FSDPC_ERR_##name = code,
    FSDPC_STATUS_TABLE(X)
#undef X
} fsdpc_status;

/* Records the formatted message for this thread and returns `code`. */
fsdpc_status fsdpc_fail(fsdpc_status code, const char *format, ...)
    __attribute__((format(printf, 2, 3), cold));

/* Fails with FSDPC_ERR_OS (or NOMEM for ENOMEM), with errno's text appended. */
fsdpc_status fsdpc_fail_errno(const char *format, ...) __attribute__((format(printf, 1, 2), cold));

/* Returns the message of this thread's last failure, or "" if there was none. */
const char *fsdpc_last_error(void);

/* Returns a code's text: "VALUE: a value is out of range ...". */
const char *fsdpc_status_text(fsdpc_status status);

#define FSDPC_TRY(expr)                                                                            \
    do {                                                                                           \
        fsdpc_status try_status_ = (expr);                                                         \
        if (__builtin_expect(try_status_ != FSDPC_OK, 0))                                          \
            return try_status_;                                                                    \
    } while (0)

#define FSDPC_TRY_GOTO(status, expr, label)                                                        \
    do {                                                                                           \
        (status) = (expr);                                                                         \
        if (__builtin_expect((status) != FSDPC_OK, 0))                                             \
            goto label;                                                                            \
    } while (0)

/* For teardown: always runs `expr`, and keeps the first error. */
#define FSDPC_KEEP_FIRST(status, expr)                                                             \
    do {                                                                                           \
        fsdpc_status keep_status_ = (expr);                                                        \
        if ((status) == FSDPC_OK)                                                                  \
            (status) = keep_status_;                                                               \
    } while (0)

#endif
