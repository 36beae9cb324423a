/* A reader of JSON that takes what the format of a header allows and nothing else.
 *
 * A cursor over a text: the caller knows what must come next and asks for it.  Nothing recurses, so
 * nesting deeper than the caller's own shape is an error at its first bracket, never a stack that
 * grows.  Numbers are whole and not negative; strings are valid UTF-8, escapes resolved, without
 * NUL, control characters or halves of surrogate pairs.  Every error names the text, the byte and
 * the expectation.
 */
#ifndef FSDPC_CKPT_JSON_H
#define FSDPC_CKPT_JSON_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef struct fsdpc_json {
    const unsigned char *begin, *at, *end;
    const char *what; /* borrowed: the file, for messages */
} fsdpc_json;

/* Skips blanks and takes `symbol` if it comes next. */
bool fsdpc_json_take(fsdpc_json *json, char symbol);
/* The same, and an error if it does not. */
fsdpc_status fsdpc_json_expect(fsdpc_json *json, char symbol);

/* A string, NUL-terminated, written at *cursor_io, which moves behind it.  The result is never
 * longer than its source, so a buffer as long as the text holds all strings of it. */
fsdpc_status fsdpc_json_string(fsdpc_json *json, char **cursor_io, const char **out);
fsdpc_status fsdpc_json_uint(fsdpc_json *json, uint64_t *out);

/* Only blanks are left. */
fsdpc_status fsdpc_json_end(fsdpc_json *json);

/* An error at the cursor: "file: byte 17 of the header: expected ..., got '-'". */
fsdpc_status fsdpc_json_fail(const fsdpc_json *json, const char *expected);

/* Writes a string with its quotes, escaped as JSON asks and no further; returns the bytes it takes,
 * and only counts where `out` is NULL. */
size_t fsdpc_json_quote(const char *text, char *out);

#endif
