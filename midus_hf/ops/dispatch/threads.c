/* Threads: OpenMP's where PyTorch has brought it, others where it has not. */

#include "threads.h"

#include "vectors.h"

#include <pthread.h>
#include <stdatomic.h>

struct work {
    unit_function *unit;
    const void *call;
    char *scratch;
    int64_t units, threads, scratch_bytes;
    atomic_llong next, joined; /* the unit to take next; how many threads have joined */
};

static void take_units(void *argument) {
    struct work *work = argument;
    int64_t self = atomic_fetch_add(&work->joined, 1);
    if (self >= work->threads) return;
    for (int64_t number; (number = atomic_fetch_add(&work->next, 1)) < work->units;)
        work->unit(work->call, number, work->scratch + self * work->scratch_bytes);
}

static void *join_in(void *argument) {
    take_units(argument);
    return NULL;
}

#if defined(__linux__)
/* OpenMP's, if PyTorch has brought it: its threads exist, and spin while they wait for work; others would compete with
 * them. */
extern void GOMP_parallel(void (*function)(void *), void *argument, unsigned threads, unsigned flags)
    __attribute__((weak));
#endif

#define MOST_THREADS 256

/* Start threads for this work, as many as can be had. */
static void run_by_new_threads(struct work *work) {
    pthread_t started[MOST_THREADS];
    int64_t running = 0;
    while (running < work->threads - 1 && !pthread_create(&started[running], NULL, join_in, work)) running++;
    take_units(work);
    for (int64_t i = 0; i < running; i++) pthread_join(started[i], NULL);
}

int64_t groups_of(int64_t heads, int64_t stretches, int64_t threads, int64_t has_own_bank) {
    if (has_own_bank) return heads;
    return threads == 1 || stretches < 1 ? 1 : smaller(heads, (4 * threads + stretches - 1) / stretches);
}

int run_units(unit_function *unit, const void *call, int64_t units, int64_t threads, int64_t scratch_bytes) {
    struct work work = {
        .unit = unit,
        .call = call,
        .units = units,
        .threads = smaller(smaller(threads, units), MOST_THREADS),
        .scratch_bytes = aligned(scratch_bytes + 64),
    };
    if (work.threads < 1) return 0;
    work.scratch = aligned_alloc(64, work.threads * work.scratch_bytes);
    if (!work.scratch) return 1;
    if (work.threads == 1) take_units(&work);
#if defined(__linux__)
    else if (GOMP_parallel) GOMP_parallel(take_units, &work, (unsigned)work.threads, 0);
#endif
    else run_by_new_threads(&work);
    free(work.scratch);
    return 0;
}
