/* The C tests' whole framework: CHECK counts and reports, check_report() ends main.
 *
 * A test is a main() that calls functions, each of which CHECKs; it prints what failed with file
 * and line and returns 1 if anything did. TEST_STREAM gives a CPU device and stream to run kernels
 * on.
 */
#ifndef FSDPC_TESTS_CHECK_H
#define FSDPC_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"

/* Built for a sanitizer: slower, and what it catches does not come to handlers of ours. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

static int check_failures, check_count;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        check_count++;                                                                             \
        if (!(condition)) {                                                                        \
            check_failures++;                                                                      \
            fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition);          \
        }                                                                                          \
    } while (0)

/* With a printf-style note on what was being tried. */
#define CHECK_NOTE(condition, ...)                                                                 \
    do {                                                                                           \
        check_count++;                                                                             \
        if (!(condition)) {                                                                        \
            check_failures++;                                                                      \
            fprintf(stderr, "%s:%d: CHECK(%s) failed: ", __FILE__, __LINE__, #condition);          \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fputc('\n', stderr);                                                                   \
        }                                                                                          \
    } while (0)

#define CHECK_OK(expr)                                                                             \
    do {                                                                                           \
        fsdpc_status check_status_ = (expr);                                                       \
        CHECK_NOTE(check_status_ == FSDPC_OK, "%s: %s", fsdpc_status_text(check_status_),          \
                   fsdpc_last_error());                                                            \
    } while (0)

/* The call must fail with this code and a message that contains the text. */
#define CHECK_FAILS(expr, code, text)                                                              \
    do {                                                                                           \
        fsdpc_status check_status_ = (expr);                                                       \
        CHECK_NOTE(check_status_ == (code), "got %s", fsdpc_status_text(check_status_));           \
        CHECK_NOTE(strstr(fsdpc_last_error(), (text)) != NULL, "message is: %s",                   \
                   fsdpc_last_error());                                                            \
    } while (0)

static inline int check_report(const char *name)
{
    printf("%s: %d checks, %d failed\n", name, check_count, check_failures);
    return check_failures != 0;
}

#endif
