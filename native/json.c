/* json.c: a strict, iterative JSON reader (RFC 8259, UTF-8, bounded depth) that validates and finds ends. */
#include "json.h"
#include "wire.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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

/* Where a backslash stands before a byte and means it. In a run of backslashes each second one is meant by the one
 * before, so what matters is whether the run is of odd length: adding a run's first bit carries to the bit behind it. */
static uint32_t escaped_by(uint32_t back) {
    const uint32_t even = 0x55555555u, odd = ~even;
    const uint32_t first = back & ~(back << 1);
    const uint32_t behind_even = (back + (first & even)) & ~back, behind_odd = (back + (first & odd)) & ~back;
    return (behind_even & odd) | (behind_odd & even);
}

/* Behind the text beyond ASCII at p, or NULL. */
static const char *beyond_ascii(const char *p, const char *end) {
    do {
        const size_t n = utf8((const unsigned char *)p, (const unsigned char *)end);
        if (!n) return NULL;
        p += n;
    } while (p < end && *p & 0x80);
    return p;
}

/* An escape that is not of a quote or a backslash, a character beyond ASCII, or none at all. Behind it, or NULL. */
static const char *odd_one(const char *at, const char *end, int meant) {
    if (!meant) return *at & 0x80 ? beyond_ascii(at, end) : NULL;
    const size_t n = escape(at, end);
    return n ? at + n : NULL;
}

typedef struct {
    const char *end; /* of the line */
    int escaped;
    int ended;
} string;

/* The n bytes at p, up to the string's end. Where to go on, or NULL. */
static inline const char *step(string *s, const char *p, uint32_t n, uint32_t quote, uint32_t back, uint32_t other) {
    const uint32_t meant = escaped_by(back);
    /* Escaped quotes and backslashes, the usual ones, need no look; other escapes do. */
    const uint32_t quotes = quote & ~meant;
    const uint32_t stops = (quotes | other | (meant & ~(quote | back))) & ((1u << n) - 1);
    s->escaped |= (back & (stops ^ (stops - 1))) != 0; /* up to the first stop */
    if (!stops) return n < BLOCK ? NULL : p + n - (meant >> n); /* an escape at the end is read again, whole */
    const int i = __builtin_ctz(stops);
    s->ended = (int)(quotes >> i & 1);
    return s->ended ? p + i + 1 : odd_one(p + i, s->end, (int)(meant >> i & 1));
}

/* The line's last bytes, fewer than a block, read without a look at what stands behind them. */
static const char *last_steps(string *s, const char *p, const char *begin) {
    char copy[BLOCK] = {0};
    const size_t held = (size_t)(s->end - begin);
    if (held < BLOCK) memcpy(copy + BLOCK - held, begin, held);
    const block b = block_at(held < BLOCK ? copy : s->end - BLOCK);
    while (p && p < s->end && !s->ended) {
        const uint32_t n = (uint32_t)(s->end - p), skip = BLOCK - n;
        p = step(s, p, n, bits(b.quote) >> skip, bits(b.back) >> skip, bits(b.other) >> skip);
    }
    return s->ended ? p : NULL;
}

/* Behind the string whose inside begins at p, or NULL. */
static const char *string_end(string *s, const char *p, const char *begin) {
    while (s->end - p >= BLOCK) {
        const block b = block_at(p);
        const uint32_t any = marked(b), quote = bits(b.quote);
        if (!any) {
            p += BLOCK;
            continue;
        }
        if (quote & any & -any) return p + __builtin_ctz(any) + 1; /* the first of them: the usual end */
        p = step(s, p, BLOCK, quote, bits(b.back), bits(b.other));
        if (!p || s->ended) return p;
    }
    return last_steps(s, p, begin);
}

int json_rest(json_reader *r, const char *from, int *escaped) {
    string s = {r->end, 0, 0};
    const char *behind = string_end(&s, from, r->begin);
    *escaped = s.escaped;
    if (!behind) return 0;
    r->p = behind;
    return 1;
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

    uint64_t objects[JSON_MAX_DEPTH / 64]; /* a bit a level: is it an object? Each word is cleared when it is first used */
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
            if (bit == 1) objects[open >> 6] = 0;
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

int tb_json_check(const char *text, size_t len, int32_t max_depth) {
    json_reader r = {.begin = text, .p = text, .end = text + len, .max_depth = max_depth};
    if (json_space(&r) && json_value(&r, 0) && json_space(&r) && r.p == r.end) return TB_OK;
    return r.too_deep ? TB_TOO_DEEP : TB_INVALID_JSON;
}
