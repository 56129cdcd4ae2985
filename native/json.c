/* json.c: a strict, iterative JSON reader (RFC 8259, UTF-8, bounded depth) that validates and finds ends. */
#include "json.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Eight bytes at once: a set high bit marks a quote, a backslash, a control character or a byte beyond ASCII. Borrows
 * may mark bytes above a marked one, so only the lowest mark is to be believed. */
static uint64_t special(uint64_t v) {
    const uint64_t ones = 0x0101010101010101u, high = 0x8080808080808080u;
    const uint64_t quote = v ^ (ones * '"'), back = v ^ (ones * '\\');
    return (((quote - ones) & ~quote) | ((back - ones) & ~back) | (v - ones * 0x20) | v) & high;
}

/* The first byte from p on that a string cannot just contain; some byte before it near the end of the line. */
static const char *plain_run(const char *p, const char *end) {
    while (end - p >= 8) {
        uint64_t eight;
        memcpy(&eight, p, 8);
        const uint64_t marks = special(eight);
        if (!marks) {
            p += 8;
            continue;
        }
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        p += __builtin_ctzll(marks) >> 3;
#endif
        break;
    }
    return p;
}

static int hex4(const char *p, unsigned *out) {
    unsigned v = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned char c = (unsigned char)p[i];
        unsigned d;
        if (c >= '0' && c <= '9') d = c - '0';
        else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f') d = (unsigned)(c | 0x20) - 'a' + 10;
        else return 0;
        v = v << 4 | d;
    }
    *out = v;
    return 1;
}

/* Behind a backslash: the length of the escape's rest, or 0. A lone surrogate is no character. */
static size_t escape(const char *p, const char *end) {
    if (p >= end) return 0;
    switch (*p) {
    case '"': case '\\': case '/': case 'b': case 'f': case 'n': case 'r': case 't':
        return 1;
    case 'u': {
        unsigned unit;
        if (end - p < 5 || !hex4(p + 1, &unit)) return 0;
        if (unit < 0xD800 || unit > 0xDFFF) return 5;
        if (unit > 0xDBFF || end - p < 11 || p[5] != '\\' || p[6] != 'u') return 0;
        if (!hex4(p + 7, &unit) || unit < 0xDC00 || unit > 0xDFFF) return 0;
        return 11;
    }
    default:
        return 0;
    }
}

/* The length of the UTF-8 sequence at p, or 0: no overlong forms, no surrogates, nothing past U+10FFFF. */
static size_t utf8(const unsigned char *p, const unsigned char *end) {
    const size_t left = (size_t)(end - p);
    const unsigned char a = p[0];
    if (a >= 0xC2 && a <= 0xDF) return left >= 2 && (p[1] & 0xC0) == 0x80 ? 2 : 0;
    if (a >= 0xE0 && a <= 0xEF) {
        if (left < 3 || (p[1] & 0xC0) != 0x80 || (p[2] & 0xC0) != 0x80) return 0;
        if ((a == 0xE0 && p[1] < 0xA0) || (a == 0xED && p[1] > 0x9F)) return 0;
        return 3;
    }
    if (a >= 0xF0 && a <= 0xF4) {
        if (left < 4 || (p[1] & 0xC0) != 0x80 || (p[2] & 0xC0) != 0x80 || (p[3] & 0xC0) != 0x80) return 0;
        if ((a == 0xF0 && p[1] < 0x90) || (a == 0xF4 && p[1] > 0x8F)) return 0;
        return 4;
    }
    return 0;
}

int json_string(json_reader *r, int *escaped) {
    const char *p = r->p + 1, *end = r->end;
    *escaped = 0;
    for (;;) {
        p = plain_run(p, end);
        if (p >= end) return 0;
        const unsigned char c = (unsigned char)*p;
        if (c == '"') {
            r->p = p + 1;
            return 1;
        }
        if (c == '\\') {
            const size_t n = escape(p + 1, end);
            if (!n) return 0;
            *escaped = 1;
            p += 1 + n;
        } else if (c < 0x20) {
            return 0;
        } else if (c < 0x80) {
            p++;
        } else {
            const size_t n = utf8((const unsigned char *)p, (const unsigned char *)end);
            if (!n) return 0;
            p += n;
        }
    }
}

static int digits(const char **p, const char *end) {
    const char *from = *p;
    while (*p < end && **p >= '0' && **p <= '9') (*p)++;
    return *p > from;
}

enum { LONGEST_INTEGER = 4300 }; /* characters, sign included: where Python's own readers stop */

/* The grammar, and the range: what no double can hold is refused here, as every reader behind us would. */
static int number(json_reader *r) {
    const char *from = r->p, *p = from, *end = r->end;
    if (p < end && *p == '-') p++;
    if (p < end && *p == '0') p++;
    else if (!digits(&p, end)) return 0;
    int integer = 1, exponent = 0;
    if (p < end && *p == '.') {
        integer = 0;
        p++;
        if (!digits(&p, end)) return 0;
    }
    if (p < end && (*p == 'e' || *p == 'E')) {
        integer = 0;
        exponent = 1;
        p++;
        if (p < end && (*p == '+' || *p == '-')) p++;
        if (!digits(&p, end)) return 0;
    }
    r->p = p;
    const size_t len = (size_t)(p - from);
    if (integer) return len <= LONGEST_INTEGER;
    if (!exponent && len < 300) return 1;
    char small[64], *text = len < sizeof small ? small : malloc(len + 1);
    if (!text) return 0;
    memcpy(text, from, len);
    text[len] = 0;
    const int finite = isfinite(strtod(text, NULL));
    if (text != small) free(text);
    return finite;
}

static int word(json_reader *r, const char *text, size_t len) {
    if ((size_t)(r->end - r->p) < len || memcmp(r->p, text, len)) return 0;
    r->p += len;
    return 1;
}

static int scalar(json_reader *r) {
    int escaped;
    if (r->p >= r->end) return 0;
    switch (*r->p) {
    case '"': return json_string(r, &escaped);
    case 't': return word(r, "true", 4);
    case 'f': return word(r, "false", 5);
    case 'n': return word(r, "null", 4);
    default: return number(r);
    }
}

/* An object's member name and colon. */
static int name(json_reader *r) {
    int escaped;
    json_space(r);
    if (r->p >= r->end || *r->p != '"' || !json_string(r, &escaped)) return 0;
    json_space(r);
    if (r->p >= r->end || *r->p != ':') return 0;
    r->p++;
    return 1;
}

int json_value(json_reader *r, int depth) {
    json_space(r);
    if (r->p < r->end && *r->p != '{' && *r->p != '[') return scalar(r);

    uint64_t objects[JSON_MAX_DEPTH / 64] = {0}; /* a bit a level: is it an object? */
    int open = 0;
    for (;;) {
        json_space(r);
        if (r->p >= r->end) return 0;
        const char c = *r->p;
        if (c == '{' || c == '[') {
            if (depth + open >= r->max_depth || open >= JSON_MAX_DEPTH) {
                r->too_deep = 1;
                return 0;
            }
            const uint64_t bit = (uint64_t)1 << (open & 63);
            if (c == '{') objects[open >> 6] |= bit;
            else objects[open >> 6] &= ~bit;
            open++;
            r->p++;
            json_space(r);
            if (r->p < r->end && *r->p == (c == '{' ? '}' : ']')) {
                r->p++;
                open--;
            } else {
                if (c == '{' && !name(r)) return 0;
                continue;
            }
        } else if (!scalar(r)) {
            return 0;
        }
        /* A value is complete: close what ends here, or go on to the next member. */
        for (;;) {
            if (!open) return 1;
            json_space(r);
            if (r->p >= r->end) return 0;
            const int object = (int)(objects[(open - 1) >> 6] >> ((open - 1) & 63) & 1);
            const char next = *r->p++;
            if (next == ',') {
                if (object && !name(r)) return 0;
                break;
            }
            if (next != (object ? '}' : ']')) return 0;
            open--;
        }
    }
}

static size_t put_utf8(unsigned v, char *out) {
    if (v < 0x80) {
        out[0] = (char)v;
        return 1;
    }
    if (v < 0x800) {
        out[0] = (char)(0xC0 | v >> 6);
        out[1] = (char)(0x80 | (v & 0x3F));
        return 2;
    }
    if (v < 0x10000) {
        out[0] = (char)(0xE0 | v >> 12);
        out[1] = (char)(0x80 | (v >> 6 & 0x3F));
        out[2] = (char)(0x80 | (v & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | v >> 18);
    out[1] = (char)(0x80 | (v >> 12 & 0x3F));
    out[2] = (char)(0x80 | (v >> 6 & 0x3F));
    out[3] = (char)(0x80 | (v & 0x3F));
    return 4;
}

size_t json_unescape(const char *text, size_t len, char *out) {
    static const char from[] = "bfnrt", to[] = "\b\f\n\r\t";
    const char *p = text, *end = text + len;
    char *o = out;
    while (p < end) {
        if (*p != '\\') {
            *o++ = *p++;
            continue;
        }
        const char c = p[1];
        if (c != 'u') {
            const char *letter = memchr(from, c, sizeof from - 1);
            *o++ = letter ? to[letter - from] : c;
            p += 2;
            continue;
        }
        unsigned unit = 0, low = 0;
        hex4(p + 2, &unit);
        p += 6;
        if (unit >= 0xD800 && unit <= 0xDBFF) {
            hex4(p + 2, &low);
            p += 6;
            unit = 0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00);
        }
        o += put_utf8(unit, o);
    }
    return (size_t)(o - out);
}
