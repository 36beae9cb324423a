/* A JSON reader that accepts only the JSON that a header's format allows, and a writer.
 *
 * It is a cursor over a text: the caller knows what must come next and asks for it.  It does not
 * recurse: nesting deeper than the caller expects is an error at its first bracket and never grows
 * the stack.  Numbers are non-negative integers.  Strings are valid UTF-8 without NUL, control
 * characters or halves of surrogate pairs; the reader resolves escapes.  Every error names the
 * text, the byte and the expected token.
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

/* Skips blanks and consumes `symbol` if it comes next. */
bool fsdpc_json_take(fsdpc_json *json, char symbol);
/* Does the same, but fails if it does not. */
fsdpc_status fsdpc_json_expect(fsdpc_json *json, char symbol);

/* Reads a string and writes it, NUL-terminated, at *cursor_io, which moves past it.  The result is
 * never longer than its source, so a buffer as long as the text is enough for all its strings. */
fsdpc_status fsdpc_json_string(fsdpc_json *json, char **cursor_io, const char **out);
fsdpc_status fsdpc_json_uint(fsdpc_json *json, uint64_t *out);

/* Checks that only whitespace remains. */
fsdpc_status fsdpc_json_end(fsdpc_json *json);

/* Reports an error at the cursor: "file: byte 17 of the header: expected ..., got '-'". */
fsdpc_status fsdpc_json_fail(const fsdpc_json *json, const char *expected);

/* Text that grows while JSON is written into it; all zeros is empty.  Without memory it drops what
 * is put, and fsdpc_json_text_end reports that. */
typedef struct fsdpc_json_text {
    char *data; /* NUL-terminated after the first put; the owner frees it */
    size_t bytes, capacity;
    bool failed;
} fsdpc_json_text;

void fsdpc_json_put(fsdpc_json_text *text, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Puts a string of valid UTF-8 in quotes, escaped only as far as JSON requires.  With `ascii` it
 * also escapes everything but printable ASCII, as Python's json module does by default. */
void fsdpc_json_quote(fsdpc_json_text *text, const char *string, bool ascii);

/* Returns FSDPC_ERR_NOMEM, naming `what`, if anything was dropped. */
fsdpc_status fsdpc_json_text_end(const fsdpc_json_text *text, const char *what);

#endif
