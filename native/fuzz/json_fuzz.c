/* json_fuzz.c: the JSON reader takes what yyjson takes, in the range that ours has; and strings decode to the same. */
#include "fuzz.h"
#include "json.h"

#include <math.h>
#include <yyjson.h>

enum { DEPTH = 64, LONGEST_INTEGER = 4300 };

static int in_range(const char *number) {
    if (number[strcspn(number, ".eE")]) return isfinite(strtod(number, NULL));
    return strlen(number) <= LONGEST_INTEGER;
}

/* Numbers in range, at any depth; and how deep it is. */
static int fits(yyjson_val *value, int depth, int *deepest) {
    if (yyjson_is_ctn(value) && depth + 1 > *deepest) *deepest = depth + 1;
    if (*deepest > DEPTH) return 1;
    if (yyjson_is_raw(value)) return in_range(yyjson_get_raw(value));
    size_t i, n;
    yyjson_val *key, *inner;
    if (yyjson_is_arr(value)) {
        yyjson_arr_foreach(value, i, n, inner) if (!fits(inner, depth + 1, deepest)) return 0;
    } else if (yyjson_is_obj(value)) {
        yyjson_obj_foreach(value, i, n, key, inner) if (!fits(inner, depth + 1, deepest)) return 0;
    }
    return 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *text = exactly(data, size);
    json_reader r = {text, text, text + size, DEPTH, 0};
    int valid = json_value(&r, 0);
    const char *end = r.p;
    valid = valid && json_space(&r) && r.p == r.end;

    yyjson_doc *doc = yyjson_read(text, size, YYJSON_READ_NUMBER_AS_RAW);
    yyjson_val *root = yyjson_doc_get_root(doc);
    int deepest = 0;
    const int good = doc && fits(root, 0, &deepest);
    if (r.too_deep) MUST(!doc || deepest > DEPTH);
    else MUST(valid == (good && deepest <= DEPTH));

    if (valid && yyjson_is_str(root)) {
        const char *from = memchr(text, '"', size);
        const size_t len = (size_t)(end - from) - 2;
        char *plain = malloc(len + 1);
        MUST(plain);
        MUST(json_unescape(from + 1, len, plain) == yyjson_get_len(root));
        MUST(!memcmp(plain, yyjson_get_str(root), yyjson_get_len(root)));
        free(plain);
    }
    yyjson_doc_free(doc);
    free(text);
    return 0;
}
