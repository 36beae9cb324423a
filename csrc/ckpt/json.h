/* A JSON writer, and a reader that accepts only the JSON that a header's format allows.
 *
 * The reader is a cursor over a text: the caller knows what must come next and asks for it. It does
 * not recurse: nesting deeper than the caller expects is an error at its first bracket, so input
 * cannot grow the stack. Numbers are non-negative integers. Strings are valid UTF-8 without NUL,
 * control characters or unpaired surrogates; the reader resolves escapes. Every error message
 * includes the text's name, the byte offset and the expected token.
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
/* Skips blanks and consumes `symbol`, but fails if something else comes next. */
fsdpc_status fsdpc_json_expect(fsdpc_json *json, char symbol);

/* Reads a string, writes it NUL-terminated at *cursor_io, and advances *cursor_io past it. The
 * result is never longer than its source, so a buffer as long as the text can hold all its
 * strings. */
fsdpc_status fsdpc_json_string(fsdpc_json *json, char **cursor_io, const char **out);
fsdpc_status fsdpc_json_uint(fsdpc_json *json, uint64_t *out);

/* Checks that only whitespace remains. */
fsdpc_status fsdpc_json_end(fsdpc_json *json);

/* Reports an error at the cursor: "file: byte 17 of the header: expected ..., got '-'". */
fsdpc_status fsdpc_json_fail(const fsdpc_json *json, const char *expected);

/* Text that grows while JSON is written to it; a zero-initialised struct is empty. If memory runs
 * out, further output is dropped, and fsdpc_json_text_end reports it. */
typedef struct fsdpc_json_text {
    char *data; /* NUL-terminated after the first put; the owner frees it */
    size_t bytes, capacity;
    bool failed;
} fsdpc_json_text;

void fsdpc_json_put(fsdpc_json_text *text, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Writes a string of valid UTF-8 in quotes, escaping only what JSON requires. If `ascii` is true,
 * also escapes everything except printable ASCII, as Python's json module does by default. */
void fsdpc_json_quote(fsdpc_json_text *text, const char *string, bool ascii);

/* Returns FSDPC_ERR_NOMEM, naming `what`, if any output was dropped. */
fsdpc_status fsdpc_json_text_end(const fsdpc_json_text *text, const char *what);

#endif
