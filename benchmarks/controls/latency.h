/* latency.h: what the callers in C share: a clock, a histogram of latencies, and how a run is told. */
#include <stdint.h>
#include <stdio.h>
#include <time.h>

enum { STEPS = 7, BUCKETS = 64 << STEPS };

static long counts[BUCKETS]; /* of latencies: each power of two in 128 steps */
static long wrong, failed;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void count(int64_t ns) {
    const uint64_t value = ns > 0 ? (uint64_t)ns : 1;
    const int shift = 63 - __builtin_clzll(value) - STEPS;
    counts[shift <= 0 ? (long)value : ((long)shift << STEPS) + (long)(value >> shift)]++;
}

static double percentile(long total, double share) {
    const long wanted = (long)((double)total * share);
    long seen = 0;
    for (long i = 0; i < BUCKETS; i++) {
        seen += counts[i];
        const int shift = (int)(i >> STEPS) - 1;
        if (seen > wanted) return shift <= 0 ? (double)i : ((double)(i - ((long)shift << STEPS)) + 0.5) * (double)(1ull << shift);
    }
    return 0;
}

/* One JSON object; the exit code. */
static int tell(long total, int64_t begin) {
    const double took = (double)(now() - begin) / 1e9;
    printf("{\"calls\":%ld,\"seconds\":%.3f,\"per_second\":%.0f,\"p50_us\":%.2f,\"p99_us\":%.2f,\"wrong\":%ld,\"failed\":%ld}\n", total, took,
           (double)total / took, percentile(total, 0.5) / 1e3, percentile(total, 0.99) / 1e3, wrong, failed);
    return wrong != 0;
}
