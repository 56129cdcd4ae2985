// The smallest test harness that will do: TEST("a sentence") { CHECK(condition); }
#pragma once

#include <cstdio>
#include <vector>

namespace check {

struct Test {
    const char* name;
    void (*run)();
};

inline std::vector<Test> tests;
inline int failures = 0;

struct Register {
    Register(const char* name, void (*run)()) { tests.push_back({name, run}); }
};

inline void that(bool condition, const char* text, const char* file, int line) {
    if (condition) return;
    ++failures;
    std::printf("    %s:%d: not so: %s\n", file, line, text);
}

}  // namespace check

#define CHECK(condition) ::check::that(static_cast<bool>(condition), #condition, __FILE__, __LINE__)

#define CHECK_JOIN_(a, b) a##b
#define CHECK_JOIN(a, b) CHECK_JOIN_(a, b)
#define TEST(name) TEST_AT(name, CHECK_JOIN(test_at_line_, __LINE__))
#define TEST_AT(name, function)                                                      \
    static void function();                                                          \
    static const ::check::Register CHECK_JOIN(function, _registered)(name, function); \
    static void function()
