// Runs every test and names those that failed.
#include "check.h"

int main() {
    int failed = 0;
    for (const check::Test& test : check::tests) {
        const int before = check::failures;
        test.run();
        const bool passed = check::failures == before;
        if (!passed) ++failed;
        std::printf("%s  %s\n", passed ? "ok  " : "FAIL", test.name);
    }
    std::printf("%zu tests, %d failed\n", check::tests.size(), failed);
    return failed == 0 ? 0 : 1;
}
