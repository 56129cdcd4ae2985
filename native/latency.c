/* latency.c: how long calls took, in buckets. */
#include "board.h"

/* As TB_BUCKETS counts them, and one more: all that took longer. */
const double tb_bounds[TB_BUCKETS - 1] = {50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3,
                                          50e-3, 100e-3, 250e-3, 500e-3, 1,    2.5,    5,    10,    30};

void tb_latency_add(tb_latency *l, double seconds, int64_t calls) {
    int i = 0;
    while (i < TB_BUCKETS - 1 && seconds > tb_bounds[i]) i++;
    l->buckets[i] += calls;
    l->seconds += seconds * (double)calls;
}
