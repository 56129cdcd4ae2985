/* check.h: what the unit tests count and compare with. */
#ifndef TB_CHECK_H
#define TB_CHECK_H

#include <stdio.h>
#include <string.h>

static int checks, failures;

#define CHECK(cond) \
    do { \
        checks++; \
        if (!(cond)) { \
            failures++; \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond); \
        } \
    } while (0)

static int same(const char *data, size_t len, const char *text) { return len == strlen(text) && !memcmp(data, text, len); }

#endif
