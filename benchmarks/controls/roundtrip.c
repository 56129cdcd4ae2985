/* roundtrip.c: the raw round trip: one line into a toolhost's pipe, one line back, with nothing in between.
 *
 *   roundtrip CALLS LINE COMMAND [ARGUMENT…]     prints the median and the 99th percentile in microseconds
 *
 * The first reply has to be a success, and all others the same bytes. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    static char reply[2 * 1024 * 1024], first[sizeof reply];
    size_t first_len = 0;
    int in[2], out[2];
    if (argc < 4 || pipe(in) || pipe(out)) return fprintf(stderr, "usage: roundtrip CALLS LINE COMMAND…\n"), 2;
    if (!fork()) {
        dup2(in[0], 0);
        dup2(out[1], 1);
        for (int fd = 3; fd < 16; fd++) close(fd);
        execv(argv[3], argv + 3);
        _exit(127);
    }
    close(in[0]);
    close(out[1]);
    const int calls = atoi(argv[1]), warm = calls / 10;
    const size_t len = strlen(argv[2]);
    char *line = malloc(len + 1);
    memcpy(line, argv[2], len);
    line[len] = '\n';
    double *took = calloc((size_t)calls, sizeof *took);
    for (int i = -warm; i < calls; i++) {
        const double begin = now();
        if (write(in[1], line, len + 1) != (ssize_t)(len + 1)) return fprintf(stderr, "the toolhost is gone\n"), 1;
        size_t got = 0;
        do {
            const ssize_t n = read(out[0], reply + got, sizeof reply - got);
            if (n <= 0) return fprintf(stderr, "the toolhost is gone\n"), 1;
            got += (size_t)n;
        } while (reply[got - 1] != '\n');
        if (i >= 0) took[i] = now() - begin;
        if (!first_len) {
            memcpy(first, reply, first_len = got);
            if (!memmem(first, first_len, "\"status\":\"OK\"", 13)) return fprintf(stderr, "not a success: %.200s\n", first), 1;
        } else if (got != first_len || memcmp(reply, first, got)) {
            return fprintf(stderr, "another reply than the first: %.200s\n", reply), 1;
        }
    }
    qsort(took, (size_t)calls, sizeof *took, by_size);
    printf("%.2f %.2f\n", took[calls / 2], took[(int)(calls * 0.99)]);
    return 0;
}
