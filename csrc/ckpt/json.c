/* The JSON cursor and the growable text. Output is formatted into the remaining space and, if it
 * does not fit, again after the text has grown.
 *
 * UTF-8 is validated as in RFC 3629: overlong forms, surrogates and code points above U+10FFFF are
 * rejected. Strings are copied in runs; only backslashes and bytes above 127 are examined
 * individually.
 */
#include "ckpt/json.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void skip_blanks(fsdpc_json *json)
{
    while (json->at < json->end &&
           (*json->at == ' ' || *json->at == '\n' || *json->at == '\t' || *json->at == '\r'))
        json->at++;
}

fsdpc_status fsdpc_json_fail(const fsdpc_json *json, const char *expected)
{
    char got[24] = "the end";
    if (json->at < json->end) {
        unsigned char byte = *json->at;
        if (byte >= 0x20 && byte < 0x7f)
            snprintf(got, sizeof got, "'%c'", byte);
        else
            snprintf(got, sizeof got, "byte 0x%02x", byte);
    }
    return fsdpc_fail(FSDPC_ERR_VALUE, "%s: byte %zu of the header: expected %s, got %s",
                      json->what, (size_t)(json->at - json->begin), expected, got);
}

bool fsdpc_json_take(fsdpc_json *json, char symbol)
{
    skip_blanks(json);
    if (json->at == json->end || *json->at != (unsigned char)symbol)
        return false;
    json->at++;
    return true;
}

fsdpc_status fsdpc_json_expect(fsdpc_json *json, char symbol)
{
    const char text[] = {'\'', symbol, '\'', 0};
    return fsdpc_json_take(json, symbol) ? FSDPC_OK : fsdpc_json_fail(json, text);
}

fsdpc_status fsdpc_json_end(fsdpc_json *json)
{
    skip_blanks(json);
    return json->at == json->end ? FSDPC_OK : fsdpc_json_fail(json, "nothing but blanks");
}

fsdpc_status fsdpc_json_uint(fsdpc_json *json, uint64_t *out)
{
    skip_blanks(json);
    const unsigned char *begin = json->at;
    uint64_t value = 0;
    for (; json->at < json->end && *json->at >= '0' && *json->at <= '9'; json->at++) {
        if (__builtin_mul_overflow(value, UINT64_C(10), &value) ||
            __builtin_add_overflow(value, (uint64_t)(*json->at - '0'), &value))
            return fsdpc_json_fail(json, "a number below 2^64");
    }
    size_t digits = (size_t)(json->at - begin);
    if (digits == 0 || (digits > 1 && *begin == '0'))
        return fsdpc_json_fail(json, "a whole number that is not negative");
    if (json->at < json->end && strchr(".eE+-", *json->at) && *json->at)
        return fsdpc_json_fail(json, "a whole number that is not negative");
    *out = value;
    return FSDPC_OK;
}

/* ---- strings ---- */

/* Returns the length of the UTF-8 sequence at `at`, or 0 if it is invalid. */
static size_t sequence_bytes(const unsigned char *at, const unsigned char *end)
{
    unsigned char lead = at[0];
    size_t bytes = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (bytes == 0 || lead > 0xf4 || (size_t)(end - at) < bytes)
        return 0;
    for (size_t i = 1; i < bytes; i++)
        if ((at[i] & 0xc0) != 0x80)
            return 0;
    bool overlong = (lead == 0xe0 && at[1] < 0xa0) || (lead == 0xf0 && at[1] < 0x90);
    bool beyond = (lead == 0xed && at[1] > 0x9f) || (lead == 0xf4 && at[1] > 0x8f);
    return overlong || beyond ? 0 : bytes;
}

static char *put_utf8(char *out, uint32_t code)
{
    if (code < 0x80) {
        *out++ = (char)code;
    } else if (code < 0x800) {
        *out++ = (char)(0xc0 | code >> 6);
        *out++ = (char)(0x80 | (code & 63));
    } else if (code < 0x10000) {
        *out++ = (char)(0xe0 | code >> 12);
        *out++ = (char)(0x80 | (code >> 6 & 63));
        *out++ = (char)(0x80 | (code & 63));
    } else {
        *out++ = (char)(0xf0 | code >> 18);
        *out++ = (char)(0x80 | (code >> 12 & 63));
        *out++ = (char)(0x80 | (code >> 6 & 63));
        *out++ = (char)(0x80 | (code & 63));
    }
    return out;
}

static fsdpc_status four_digits(fsdpc_json *json, uint32_t *out)
{
    uint32_t value = 0;
    for (int i = 0; i < 4; i++, json->at++) {
        unsigned char c = json->at < json->end ? *json->at : 0;
        uint32_t digit = c >= '0' && c <= '9'   ? (uint32_t)(c - '0')
                         : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a' + 10)
                         : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A' + 10)
                                                : 16;
        if (digit == 16)
            return fsdpc_json_fail(json, "four hexadecimal digits");
        value = value << 4 | digit;
    }
    *out = value;
    return FSDPC_OK;
}

/* Reads one code point after "\u"; a surrogate pair takes two escapes. */
static fsdpc_status unicode_escape(fsdpc_json *json, uint32_t *out)
{
    uint32_t code = 0, low = 0;
    FSDPC_TRY(four_digits(json, &code));
    if (code >= 0xdc00 && code < 0xe000)
        return fsdpc_json_fail(json, "no lone half of a surrogate pair");
    if (code >= 0xd800 && code < 0xdc00) {
        if (json->end - json->at < 2 || json->at[0] != '\\' || json->at[1] != 'u')
            return fsdpc_json_fail(json, "the second half of a surrogate pair");
        json->at += 2;
        FSDPC_TRY(four_digits(json, &low));
        if (low < 0xdc00 || low >= 0xe000)
            return fsdpc_json_fail(json, "the second half of a surrogate pair");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    if (code == 0)
        return fsdpc_json_fail(json, "no NUL in a string");
    *out = code;
    return FSDPC_OK;
}

static fsdpc_status escape(fsdpc_json *json, char **out_io)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    json->at++; /* the backslash */
    unsigned char c = json->at < json->end ? *json->at : 0;
    if (c == 'u') {
        uint32_t code = 0;
        json->at++;
        FSDPC_TRY(unicode_escape(json, &code));
        *out_io = put_utf8(*out_io, code);
        return FSDPC_OK;
    }
    const char *known = c ? strchr(from, c) : NULL;
    if (!known)
        return fsdpc_json_fail(json, "an escape that JSON knows");
    *(*out_io)++ = to[known - from];
    json->at++;
    return FSDPC_OK;
}

fsdpc_status fsdpc_json_string(fsdpc_json *json, char **cursor_io, const char **out)
{
    FSDPC_TRY(fsdpc_json_expect(json, '"'));
    char *begin = *cursor_io, *put = begin;
    for (;;) {
        if (json->at == json->end)
            return fsdpc_json_fail(json, "the end of a string");
        unsigned char c = *json->at;
        if (c == '"')
            break;
        if (c == '\\') {
            FSDPC_TRY(escape(json, &put));
            continue;
        }
        if (c < 0x20)
            return fsdpc_json_fail(json, "no control character in a string");
        size_t bytes = sequence_bytes(json->at, json->end);
        if (bytes == 0)
            return fsdpc_json_fail(json, "valid UTF-8");
        memcpy(put, json->at, bytes);
        put += bytes;
        json->at += bytes;
    }
    json->at++;
    *put++ = 0;
    *cursor_io = put;
    *out = begin;
    return FSDPC_OK;
}

/* ---- writing ---- */

enum { LEAST_BYTES = 4096 };

static void grow_text(fsdpc_json_text *text, size_t bytes)
{
    size_t capacity = text->capacity ? 2 * text->capacity : LEAST_BYTES;
    while (capacity < bytes)
        capacity *= 2;
    char *larger = realloc(text->data, capacity);
    text->failed = !larger;
    if (larger) {
        text->data = larger;
        text->capacity = capacity;
    }
}

void fsdpc_json_put(fsdpc_json_text *text, const char *format, ...)
{
    for (int turn = 0; turn < 2 && !text->failed; turn++) {
        size_t left = text->capacity - text->bytes;
        va_list args;
        va_start(args, format);
        int n = vsnprintf(left ? text->data + text->bytes : NULL, left, format, args);
        va_end(args);
        if (n >= 0 && (size_t)n < left) {
            text->bytes += (size_t)n;
            return;
        }
        if (n < 0)
            text->failed = true;
        else
            grow_text(text, text->bytes + (size_t)n + 1);
    }
}

/* Reads one character of valid UTF-8 and moves past it. */
static uint32_t next_code(const unsigned char **at_io)
{
    const unsigned char *at = *at_io;
    int more = *at < 0x80 ? 0 : *at < 0xe0 ? 1 : *at < 0xf0 ? 2 : 3;
    uint32_t code = more == 0 ? *at : *at & (0x3fu >> more);
    for (at++; more > 0 && *at; at++, more--)
        code = code << 6 | (*at & 0x3f);
    *at_io = at;
    return code;
}

void fsdpc_json_quote(fsdpc_json_text *text, const char *string, bool ascii)
{
    static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
    const unsigned char *at = (const unsigned char *)string;
    fsdpc_json_put(text, "\"");
    while (*at) {
        const unsigned char *begin = at;
        while (*at >= 0x20 && *at != '"' && *at != '\\' && (!ascii || *at < 0x7f))
            at++;
        fsdpc_json_put(text, "%.*s", (int)(at - begin), (const char *)begin);
        if (!*at)
            break;
        const char *known = strchr(from, *at);
        uint32_t code = next_code(&at);
        if (known) {
            fsdpc_json_put(text, "\\%c", to[known - from]);
        } else if (code < 0x10000) {
            fsdpc_json_put(text, "\\u%04x", code);
        } else {
            code -= 0x10000;
            fsdpc_json_put(text, "\\u%04x\\u%04x", 0xd800 | code >> 10, 0xdc00 | (code & 0x3ff));
        }
    }
    fsdpc_json_put(text, "\"");
}

fsdpc_status fsdpc_json_text_end(const fsdpc_json_text *text, const char *what)
{
    return text->failed ? fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for %s", what) : FSDPC_OK;
}
