/* simd.h: sixteen bytes at a time: which of them a string cannot just contain; are two texts the same. Internal. */
#ifndef TB_SIMD_H
#define TB_SIMD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { BLOCK = 16 };

/* Which bytes of a block are what; as a bit a byte, the first one lowest, once it is asked for. */
#if defined(__SSE2__)

typedef struct {
    __m128i quote, back;
    __m128i other; /* control characters, and bytes beyond ASCII */
} block;

static inline block block_at(const char *p) {
    const __m128i v = _mm_loadu_si128((const void *)p);
    return (block){
        _mm_cmpeq_epi8(v, _mm_set1_epi8('"')),
        _mm_cmpeq_epi8(v, _mm_set1_epi8('\\')),
        _mm_cmplt_epi8(v, _mm_set1_epi8(0x20)), /* signed: what is beyond ASCII is below zero */
    };
}

static inline uint32_t bits(__m128i m) { return (uint32_t)_mm_movemask_epi8(m); }
static inline uint32_t marked(block b) { return bits(_mm_or_si128(_mm_or_si128(b.quote, b.back), b.other)); }

static inline int same_block(const char *a, const char *b) {
    return bits(_mm_cmpeq_epi8(_mm_loadu_si128((const void *)a), _mm_loadu_si128((const void *)b))) == 0xFFFF;
}

#else

static inline uint64_t eight(const char *p) {
    uint64_t v;
    memcpy(&v, p, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap64(v);
#endif
    return v;
}

/* The high bits of eight bytes, side by side. */
static inline uint32_t high_bits(uint64_t v) {
    return (uint32_t)((v >> 7 & 0x0101010101010101u) * 0x0102040810204080u >> 56);
}

/* A high bit where the byte is at least `least`, which is at most 0x80: no byte's sum reaches the next one. */
static inline uint64_t at_least(uint64_t v, unsigned least) {
    const uint64_t ones = 0x0101010101010101u;
    return ((v & ones * 0x7F) + ones * (0x80 - least)) | v;
}

typedef struct {
    uint32_t quote, back, other;
} block;

static inline uint32_t bits(uint32_t m) { return m; }
static inline uint32_t marked(block b) { return b.quote | b.back | b.other; }

static inline block half_block(uint64_t v) {
    const uint64_t ones = 0x0101010101010101u;
    const uint64_t quote = ~at_least(v ^ ones * '"', 1), back = ~at_least(v ^ ones * '\\', 1);
    return (block){high_bits(quote), high_bits(back), high_bits(~at_least(v, 0x20) | v)};
}

static inline block block_at(const char *p) {
    const block a = half_block(eight(p)), b = half_block(eight(p + 8));
    return (block){a.quote | b.quote << 8, a.back | b.back << 8, a.other | b.other << 8};
}

static inline int same_block(const char *a, const char *b) {
    return !((eight(a) ^ eight(b)) | (eight(a + 8) ^ eight(b + 8)));
}

#endif

/* Two overlapping halves make any length from `half` to twice of it. */
#define SAME_HALVES(type, a, b, len) \
    do { \
        type a1, b1, a2, b2; \
        memcpy(&a1, a, sizeof a1); \
        memcpy(&b1, b, sizeof b1); \
        memcpy(&a2, a + len - sizeof a2, sizeof a2); \
        memcpy(&b2, b + len - sizeof b2, sizeof b2); \
        return a1 == b1 && a2 == b2; \
    } while (0)

/* memcmp, inline, for texts that are usually the same. */
static inline int same_bytes(const char *a, const char *b, size_t len) {
    if (len >= BLOCK) {
        const size_t last = len - BLOCK;
        for (size_t i = 0; i < last; i += BLOCK)
            if (!same_block(a + i, b + i)) return 0;
        return same_block(a + last, b + last);
    }
    if (len >= 8) SAME_HALVES(uint64_t, a, b, len);
    if (len >= 4) SAME_HALVES(uint32_t, a, b, len);
    for (size_t i = 0; i < len; i++)
        if (a[i] != b[i]) return 0;
    return 1;
}

#endif
