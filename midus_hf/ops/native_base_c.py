"""C that the compiled bodies share: vectors as wide as the processor's, numbers of 16 bits, threads.

It is text of a Python module, and not a file of its own, since a checkpoint carries along modules alone. It needs the C library and
POSIX threads, and GCC or Clang for vectors.
"""

BASE = r"""
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define INLINE static inline __attribute__((always_inline))
#define EXPORTED __attribute__((visibility("default")))

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef float fours __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

INLINE floats all(float number) { return number - (floats){0}; }

INLINE floats pick(ints where, floats yes, floats no) { return (floats)((where & (ints)yes) | (~where & (ints)no)); }

INLINE ints pick_ints(ints where, ints yes, ints no) { return (where & yes) | (~where & no); }

INLINE float sum_of(floats x) {
    fours part[LANES / 4], sum = {0};
    memcpy(part, &x, sizeof x);
    for (int i = 0; i < LANES / 4; i++) sum += part[i];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* The exponential of numbers that are not positive, to 2 units in the last place; 0 below the normal numbers, NaN of NaN. */
INLINE floats exponential(floats x) {
    const float rounding = 12582912.0f; /* 1.5 * 2^23: what is added to it is rounded to a whole number */
    floats clamped = pick(x < -87.3f, all(-87.3f), x);
    floats shifted = clamped * 1.44269504f + rounding;
    floats whole = shifted - rounding;
    floats rest = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;
    floats series = all(1.9875691500e-4f);
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * (rest * rest) + rest + 1.0f;
    words power = ((words)shifted - (words)all(rounding) + 127u) << 23;
    return pick(x < -87.3f, (floats){0}, series * (floats)power);
}

/* Tables are float32, or bfloat16 (`narrow`), which is the upper half of it. */

INLINE float one_of(const void *table, int64_t place, int narrow) {
    if (!narrow) return ((const float *)table)[place];
    uint32_t word = (uint32_t)((const uint16_t *)table)[place] << 16;
    float number;
    memcpy(&number, &word, sizeof number);
    return number;
}

INLINE floats load(const void *table, int64_t place, int narrow) {
    floats found;
    if (narrow) {
        halves upper;
        memcpy(&upper, (const uint16_t *)table + place, sizeof upper);
        found = (floats)(__builtin_convertvector(upper, words) << 16);
    } else {
        memcpy(&found, (const float *)table + place, sizeof found);
    }
    return found;
}

/* bfloat16 by rounding to the nearest, to even where there are two. */
INLINE halves rounded(floats x) {
    words bits = (words)x;
    words nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    words quiet_nan = (words)((ints){0} + 0x7fc0);
    return __builtin_convertvector((words)pick_ints(x != x, (ints)quiet_nan, (ints)nearest), halves);
}

INLINE void store(void *table, int64_t place, int narrow, floats x) {
    if (narrow) {
        halves upper = rounded(x);
        memcpy((uint16_t *)table + place, &upper, sizeof upper);
    } else {
        memcpy((float *)table + place, &x, sizeof x);
    }
}

/* The same for fewer numbers than a vector has. */

INLINE floats load_some(const void *table, int64_t place, int narrow, int64_t count) {
    float lane[LANES] = {0};
    floats found;
    for (int64_t i = 0; i < count; i++) lane[i] = one_of(table, place + i, narrow);
    memcpy(&found, lane, sizeof found);
    return found;
}

INLINE void store_some(void *table, int64_t place, int narrow, floats x, int64_t count) {
    halves upper = rounded(x);
    if (narrow)
        memcpy((uint16_t *)table + place, &upper, 2 * count);
    else
        memcpy((float *)table + place, &x, 4 * count);
}

INLINE void widen(const void *table, int64_t place, int narrow, float *into, int64_t count) {
    for (int64_t i = 0; i < count; i++) into[i] = one_of(table, place + i, narrow);
}

/* Slots are integers of 2, 4 or 8 bytes. */

INLINE int64_t slot_at(const void *slots, int64_t place, int64_t bytes) {
    if (bytes == 2) return ((const int16_t *)slots)[place];
    return bytes == 4 ? ((const int32_t *)slots)[place] : ((const int64_t *)slots)[place];
}

INLINE void put_slot(void *slots, int64_t place, int64_t bytes, int32_t slot) {
    if (bytes == 2)
        ((int16_t *)slots)[place] = (int16_t)slot;
    else if (bytes == 4)
        ((int32_t *)slots)[place] = slot;
    else
        ((int64_t *)slots)[place] = slot;
}

/* Asks for a row that is read soon: where rows lie, processors cannot foresee. */
INLINE void prefetch(const void *table, int64_t place, int64_t numbers, int narrow) {
    const char *row = (const char *)table + place * (narrow ? 2 : 4);
    for (int64_t byte = 0; byte < numbers * (narrow ? 2 : 4); byte += 64) __builtin_prefetch(row + byte);
}

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Work is cut into units, each of which writes what no other one does: which thread takes which changes no bit. */
struct work {
    void (*unit)(const void *call, int64_t number, char *scratch);
    const void *call;
    int64_t units;
    atomic_llong next;
};

struct worker {
    struct work *work;
    char *scratch;
};

static void *take_units(void *given) {
    struct worker *worker = given;
    struct work *work = worker->work;
    for (int64_t number; (number = atomic_fetch_add(&work->next, 1)) < work->units;)
        work->unit(work->call, number, worker->scratch);
    return NULL;
}

#define MOST_THREADS 256

/* Runs all units, by as many threads as can be had; 1 where there is no memory for their scratch, else 0. */
static int run_units(
    void (*unit)(const void *, int64_t, char *), const void *call, int64_t units, int64_t threads, int64_t scratch_bytes
) {
    struct work work = {unit, call, units, 0};
    struct worker workers[MOST_THREADS];
    pthread_t started[MOST_THREADS];
    threads = smaller(smaller(threads, units), MOST_THREADS);
    if (threads < 1) return 0;
    scratch_bytes = aligned(scratch_bytes + 64);
    char *scratch = aligned_alloc(64, threads * scratch_bytes);
    if (!scratch) return 1;
    int64_t running = 0;
    for (int64_t i = 0; i < threads; i++) workers[i] = (struct worker){&work, scratch + i * scratch_bytes};
    while (running < threads - 1 && !pthread_create(&started[running], NULL, take_units, &workers[running])) running++;
    take_units(&workers[threads - 1]);
    for (int64_t i = 0; i < running; i++) pthread_join(started[i], NULL);
    free(scratch);
    return 0;
}
"""
