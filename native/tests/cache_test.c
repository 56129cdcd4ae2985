/* cache_test.c: what a C programmer may rely on: one entry a key, bounds, ends, and what a duplicate is told. */
#include "cache.h"
#include "check.h"

static const char REPLY[] = "{\"id\":1,\"ok\":true,\"status\":\"OK\",\"output_json\":\"1\",\"error\":\"\",\"ds_state\":{}}\n";

static tb_entry *begin(tb_cache *c, const char *key) {
    tb_entry *e = tb_entry_new(key, strlen(key));
    if (e) tb_cache_begin(c, e);
    return e;
}

static tb_entry *find(tb_cache *c, const char *key, double now) { return tb_cache_find(c, key, strlen(key), now); }

static void keep(tb_cache *c, const char *key, const char *reply, double now) {
    tb_entry *e = begin(c, key);
    CHECK(e && !tb_cache_finish(c, e, reply, strlen(reply), now));
    tb_entry_release(e);
}

static int knows(tb_cache *c, const char *key, double now) {
    tb_entry *e = find(c, key, now);
    tb_entry_release(e);
    return e != NULL;
}

static void a_key_is_under_way_then_answered_then_forgotten(void) {
    tb_cache *c = tb_cache_new(10, 100, 1 << 20);
    CHECK(!find(c, "k", 1));
    tb_entry *first = begin(c, "k"), *second = find(c, "k", 1);
    CHECK(second == first && first->until == 0 && tb_cache_entries(c) == 1);
    CHECK(!tb_cache_finish(c, first, REPLY, strlen(REPLY), 2));
    CHECK(first->until == 12 && tb_cache_bytes(c) == first->size);
    CHECK(same(second->hit, second->hit_len,
               "\"ok\":true,\"status\":\"OK\",\"output_json\":\"1\",\"error\":\"\",\"idempotent_hit\":true,\"ds_state\":{}}\n"));
    CHECK(!tb_cache_finish(c, first, "{}", 2, 9) && first->until == 12); /* the first answer counts */
    CHECK(knows(c, "k", 11.9) && !knows(c, "k", 12) && !tb_cache_entries(c) && !tb_cache_bytes(c));
    CHECK(second->hit_len > 0); /* for those who hold it */
    tb_entry_release(first);
    tb_entry_release(second);
    tb_cache_free(c);
}

static void a_call_that_has_not_run_frees_its_key(void) {
    tb_cache *c = tb_cache_new(10, 100, 1 << 20);
    tb_entry *e = begin(c, "k");
    tb_cache_drop(c, e);
    tb_cache_drop(c, e);
    CHECK(!knows(c, "k", 1) && !tb_cache_entries(c));
    CHECK(!tb_cache_finish(c, e, REPLY, strlen(REPLY), 1) && e->hit_len && !tb_cache_entries(c));
    tb_entry_release(e);
    tb_cache_free(c);
}

static void the_least_used_makes_room_but_none_under_way(void) {
    tb_cache *c = tb_cache_new(10, 2, 1 << 20);
    tb_entry *busy = begin(c, "busy");
    keep(c, "a", REPLY, 1);
    keep(c, "b", REPLY, 2);
    CHECK(knows(c, "a", 3));
    keep(c, "c", REPLY, 3);
    CHECK(knows(c, "a", 3) && !knows(c, "b", 3) && knows(c, "c", 3) && knows(c, "busy", 3) && tb_cache_entries(c) == 3);
    tb_cache_expire(c, 11.5);
    CHECK(!knows(c, "a", 3) && knows(c, "c", 3));
    tb_entry_release(busy);
    tb_cache_free(c);

    c = tb_cache_new(10, 1000, 1000);
    char big[700];
    memset(big, ' ', sizeof big);
    memcpy(big, "{\"output_json\":\"", 16);
    memset(big + 16, 'x', 600);
    memcpy(big + 616, "\"}", 3);
    keep(c, "a", big, 1);
    keep(c, "b", big, 1);
    CHECK(!knows(c, "a", 1) && knows(c, "b", 1) && tb_cache_bytes(c) <= 1000);
    tb_cache_free(c);
}

static void many_keys_are_all_found(void) {
    tb_cache *c = tb_cache_new(10, 5000, 1 << 30);
    char key[32];
    for (int i = 0; i < 5000; i++) {
        snprintf(key, sizeof key, "key-%d", i);
        keep(c, key, REPLY, 1);
    }
    for (int i = 0; i < 5000; i++) {
        snprintf(key, sizeof key, "key-%d", i);
        CHECK(knows(c, key, 2));
    }
    tb_cache_expire(c, 11);
    CHECK(!tb_cache_entries(c) && !tb_cache_bytes(c));
    tb_cache_free(c);
}

static void keys_of_different_calls_differ(void) {
    char one[64], other[64];
    CHECK(tb_key_size(1, 2, 1) == tb_key_size(2, 1, 1));
    tb_key(one, "a", 1, "bc", 2, "d", 1, 0);
    tb_key(other, "ab", 2, "c", 1, "d", 1, 0);
    CHECK(memcmp(one, other, tb_key_size(1, 2, 1)));
    tb_key(other, "a", 1, "bc", 2, "d", 1, 1);
    CHECK(memcmp(one, other, tb_key_size(1, 2, 1)));
}

static void a_hit_says_what_the_first_reply_said(void) {
    const char *cases[][2] = {
        {"{}", "\"ok\":false,"},
        {" { \"error\" : \"x\" , \"ok\" : true } ", "\"ok\":true,\"error\":\"x\","},
        {"{\"\\u006fk\":true,\"aid\":\"T\",\"type\":\"crash\"}", "\"ok\":true,\"type\":\"crash\",\"aid\":\"T\","},
        {"{\"ok\":false,\"ok\":true,\"output_json\":{\"a\":[1,\"}\"]}}", "\"ok\":true,\"output_json\":{\"a\":[1,\"}\"]},"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tb_cache *c = tb_cache_new(10, 10, 10000);
        tb_entry *e = begin(c, "k");
        char expected[256];
        snprintf(expected, sizeof expected, "%s\"idempotent_hit\":true,\"ds_state\":{}}\n", cases[i][1]);
        CHECK(!tb_cache_finish(c, e, cases[i][0], strlen(cases[i][0]), 1) && same(e->hit, e->hit_len, expected));
        tb_entry_release(e);
        tb_cache_free(c);
    }
}

int main(void) {
    a_key_is_under_way_then_answered_then_forgotten();
    a_call_that_has_not_run_frees_its_key();
    the_least_used_makes_room_but_none_under_way();
    many_keys_are_all_found();
    keys_of_different_calls_differ();
    a_hit_says_what_the_first_reply_said();
    printf("%d checks, %d failures\n", checks, failures);
    return failures != 0;
}
