/* Reads the environment into the fields of one table.
 *
 * It makes two passes. First, it rejects unknown FSDPC_ names, because a misspelt setting that is
 * silently ignored can cost a user a day. Then it parses each field and checks its range. A
 * variable that is set but empty counts as not set, which is what `VAR= command` means. Numbers are
 * always parsed in the C locale, because "0.5" must not depend on the user's language.
 */
#include "base/env.h"

#include <errno.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern char **environ;

enum { MAX_NAME = 64, NEAR_ENOUGH = 3 };

static const char *const known[] = {
#define X(field, type, variable, fallback, lowest, highest, text) variable,
    FSDPC_ENV_TABLE(X)
#undef X
        FSDPC_ENV_FOREIGN};

enum { KNOWN_COUNT = sizeof known / sizeof *known };

static size_t min3(size_t a, size_t b, size_t c)
{
    size_t ab = a < b ? a : b;
    return ab < c ? ab : c;
}

/* Returns the edit distance between two names: the number of letters to insert, delete or
 * replace. */
static size_t edit_distance(const char *a, size_t a_length, const char *b)
{
    size_t b_length = strlen(b);
    if (a_length >= MAX_NAME || b_length >= MAX_NAME)
        return MAX_NAME;
    size_t row[MAX_NAME]; /* distances from a's first i letters to each prefix of b */
    for (size_t j = 0; j <= b_length; j++)
        row[j] = j;
    for (size_t i = 1; i <= a_length; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b_length; j++) {
            size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = min3(replaced, row[j] + 1, row[j - 1] + 1);
        }
    }
    return row[b_length];
}

static fsdpc_status check_name(const char *entry)
{
    size_t length = strcspn(entry, "=");
    const char *nearest = NULL;
    size_t nearest_distance = NEAR_ENOUGH + 1;
    for (int i = 0; i < KNOWN_COUNT; i++) {
        size_t distance = edit_distance(entry, length, known[i]);
        if (distance == 0)
            return FSDPC_OK;
        if (distance < nearest_distance) {
            nearest = known[i];
            nearest_distance = distance;
        }
    }
    if (nearest)
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "environment variable %.*s is not known; did you mean %s? Rename or "
                          "unset it (docs/environment.md lists all)",
                          (int)length, entry, nearest);
    return fsdpc_fail(FSDPC_ERR_VALUE,
                      "environment variable %.*s is not known, and names that begin with FSDPC_ "
                      "are the library's; unset it (docs/environment.md lists all)",
                      (int)length, entry);
}

static fsdpc_status parse_real(const char *variable, const char *value, double lowest,
                               double highest, double *out)
{
    locale_t c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    char *end;
    double number = c_locale ? strtod_l(value, &end, c_locale) : strtod(value, &end);
    if (c_locale)
        freelocale(c_locale);
    if (end == value || *end != '\0' || !(number >= lowest && number <= highest))
        return fsdpc_fail(FSDPC_ERR_VALUE, "%s='%s': need a number from %g to %g", variable, value,
                          lowest, highest);
    *out = number;
    return FSDPC_OK;
}

static fsdpc_status parse_integer(const char *variable, const char *value, double lowest,
                                  double highest, long *out)
{
    char *end;
    errno = 0;
    long number = strtol(value, &end, 10);
    if (end == value || *end != '\0' || errno == ERANGE ||
        !((double)number >= lowest && (double)number <= highest))
        return fsdpc_fail(FSDPC_ERR_VALUE, "%s='%s': need a whole number from %.0f to %.0f",
                          variable, value, lowest, highest);
    *out = number;
    return FSDPC_OK;
}

static fsdpc_status parse_flag(const char *variable, const char *value, double lowest,
                               double highest, bool *out)
{
    (void)lowest, (void)highest;
    if (strcmp(value, "0") != 0 && strcmp(value, "1") != 0)
        return fsdpc_fail(FSDPC_ERR_VALUE, "%s='%s': need 0 or 1", variable, value);
    *out = value[0] == '1';
    return FSDPC_OK;
}

/* Accepts any text; the code that uses the field checks it (fsdpc_isa_parse). */
static fsdpc_status parse_text(const char *variable, const char *value, double lowest,
                               double highest, const char **out)
{
    (void)variable, (void)lowest, (void)highest;
    *out = value;
    return FSDPC_OK;
}

fsdpc_status fsdpc_env_read(fsdpc_env *out)
{
    for (char **entry = environ; entry && *entry; entry++) {
        if (strncmp(*entry, "FSDPC_", 6) == 0)
            FSDPC_TRY(check_name(*entry));
    }
    fsdpc_env env = {
#define X(field, type, variable, fallback, lowest, highest, text) .field = fallback,
        FSDPC_ENV_TABLE(X)
#undef X
    };
    const char *value;
#define X(field, type, variable, fallback, lowest, highest, text)                                  \
    value = getenv(variable);                                                                      \
    if (value && value[0] != '\0')                                                                 \
        FSDPC_TRY(parse_##type(variable, value, lowest, highest, &env.field));
    FSDPC_ENV_TABLE(X)
#undef X
    *out = env;
    return FSDPC_OK;
}
