"""C that the compiled bodies share: vectors as wide as the processor's, numbers of 16 bits, threads.

It is text of a Python module, and not a file of its own, since a checkpoint carries along modules alone. It needs the C library and
POSIX threads, and GCC or Clang for vectors, of which only parts need AVX-512's own functions.
"""

BASE = r"""
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
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

/* The first, or the second, halves of two vectors, number by number in turn. */
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif
#if LANES == 16
#define PAIR(i) i, i + 16
#define ZIP(a, b, i) \
    SHUFFLED(a, b, PAIR(i), PAIR(i + 1), PAIR(i + 2), PAIR(i + 3), PAIR(i + 4), PAIR(i + 5), PAIR(i + 6), PAIR(i + 7))
#elif LANES == 8
#define ZIP(a, b, i) SHUFFLED(a, b, i, i + 8, i + 1, i + 9, i + 2, i + 10, i + 3, i + 11)
#else
#define ZIP(a, b, i) SHUFFLED(a, b, i, i + 4, i + 1, i + 5)
#endif

/* Turns a square of numbers: each step brings rows that are half of them apart together, number by number in turn. */
INLINE void turn(floats *square) {
    floats zipped[LANES];
    for (int size = 1; size < LANES; size *= 2) {
        for (int i = 0; i < LANES / 2; i++) {
            zipped[2 * i] = ZIP(square[i], square[i + LANES / 2], 0);
            zipped[2 * i + 1] = ZIP(square[i], square[i + LANES / 2], LANES / 2);
        }
        for (int i = 0; i < LANES; i++) square[i] = zipped[i];
    }
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

/* The same for fewer numbers than a vector has, at least one. */

INLINE floats load_some(const void *table, int64_t place, int narrow, int64_t count) {
#if defined(__AVX512F__)
    __mmask16 some = (__mmask16)((1u << count) - 1);
    if (!narrow) return (floats)_mm512_maskz_loadu_ps(some, (const float *)table + place);
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, (const uint16_t *)table + place)), 16);
#else
    float lane[LANES] = {0};
    floats found;
    for (int64_t i = 0; i < count; i++) lane[i] = one_of(table, place + i, narrow);
    memcpy(&found, lane, sizeof found);
    return found;
#endif
}

INLINE void store_some(void *table, int64_t place, int narrow, floats x, int64_t count) {
#if defined(__AVX512F__)
    __mmask16 some = (__mmask16)((1u << count) - 1);
    halves upper = rounded(x);
    if (narrow)
        _mm256_mask_storeu_epi16((uint16_t *)table + place, some, (__m256i)upper);
    else
        _mm512_mask_storeu_ps((float *)table + place, some, (__m512)x);
#else
    halves upper = rounded(x);
    if (narrow)
        memcpy((uint16_t *)table + place, &upper, 2 * count);
    else
        memcpy((float *)table + place, &x, 4 * count);
#endif
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

/* Asks for a row that is read soon, or written: where rows lie, processors cannot foresee. */
INLINE void prefetch(const void *table, int64_t place, int64_t numbers, int narrow) {
    const char *row = (const char *)table + place * (narrow ? 2 : 4);
    for (int64_t byte = 0; byte < numbers * (narrow ? 2 : 4); byte += 64) __builtin_prefetch(row + byte);
}

INLINE void prefetch_output(const void *table, int64_t place, int64_t numbers, int narrow) {
    const char *row = (const char *)table + place * (narrow ? 2 : 4);
    for (int64_t byte = 0; byte < numbers * (narrow ? 2 : 4); byte += 64) __builtin_prefetch(row + byte, 1);
}

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Numbers of a row that is padded to be read by vectors alone. */
INLINE int64_t whole_vectors(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

INLINE int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Work is cut into units, each of which writes what no other one does: which thread takes which changes no bit. */
struct work {
    void (*unit)(const void *call, int64_t number, char *scratch);
    const void *call;
    char *scratch;
    int64_t units, threads, scratch_bytes;
    atomic_llong next, joined;
};

static void take_units(void *given) {
    struct work *work = given;
    int64_t self = atomic_fetch_add(&work->joined, 1);
    if (self >= work->threads) return;
    for (int64_t number; (number = atomic_fetch_add(&work->next, 1)) < work->units;)
        work->unit(work->call, number, work->scratch + self * work->scratch_bytes);
}

static void *join_in(void *given) {
    take_units(given);
    return NULL;
}

#if defined(__linux__)
/* OpenMP's, if PyTorch has brought it: its threads are there, and spin while they wait for work, with which others had to compete. */
extern void GOMP_parallel(void (*function)(void *), void *given, unsigned threads, unsigned flags) __attribute__((weak));
#endif

#define MOST_THREADS 256

/* By threads that are started for it, as many as can be had. */
static void run_by_new_threads(struct work *work) {
    pthread_t started[MOST_THREADS];
    int64_t running = 0;
    while (running < work->threads - 1 && !pthread_create(&started[running], NULL, join_in, work)) running++;
    take_units(work);
    for (int64_t i = 0; i < running; i++) pthread_join(started[i], NULL);
}

/* Of heads, which are worked on one after another in each stretch of tokens: one group where they share a bank and stretches are
 * enough for all threads; each by itself where it has a bank of its own, which so stays in the cache. */
INLINE int64_t groups_of(int64_t heads, int64_t stretches, int64_t threads, int64_t has_own_bank) {
    if (has_own_bank) return heads;
    return threads == 1 || stretches < 1 ? 1 : smaller(heads, (4 * threads + stretches - 1) / stretches);
}

/* Runs all units; 1 where there is no memory for their scratch, else 0. */
static int run_units(
    void (*unit)(const void *, int64_t, char *), const void *call, int64_t units, int64_t threads, int64_t scratch_bytes
) {
    struct work work = {unit, call, NULL, units, smaller(smaller(threads, units), MOST_THREADS), aligned(scratch_bytes + 64), 0, 0};
    if (work.threads < 1) return 0;
    work.scratch = aligned_alloc(64, work.threads * work.scratch_bytes);
    if (!work.scratch) return 1;
    if (work.threads == 1)
        take_units(&work);
#if defined(__linux__)
    else if (GOMP_parallel)
        GOMP_parallel(take_units, &work, (unsigned)work.threads, 0);
#endif
    else
        run_by_new_threads(&work);
    free(work.scratch);
    return 0;
}
"""
