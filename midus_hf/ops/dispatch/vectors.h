/* Vectors as wide as the processor's, numbers of 16 bits, and rows of tables.
 *
 * GCC's and Clang's vectors do nearly all of it; some parts need AVX-512's own functions. */

#ifndef MIDUS_VECTORS_H
#define MIDUS_VECTORS_H

#include <math.h>
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
/* Always, so that the compiler knows arguments that are constants, such as whether a table is narrow. */
#define INLINE static inline __attribute__((always_inline))
#define EXPORTED __attribute__((visibility("default")))

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef float fours __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

#define AHEAD 6 /* rows, or tokens, that are asked for before they are read */

/* The same number in all lanes. */
INLINE floats all(float number) { return number - (floats){0}; }

/* `yes` where a comparison holds, `no` elsewhere. */
INLINE floats pick(ints where, floats yes, floats no) { return (floats)((where & (ints)yes) | (~where & (ints)no)); }

INLINE ints pick_ints(ints where, ints yes, ints no) { return (where & yes) | (~where & no); }

INLINE float sum_of(floats x) {
    fours part[LANES / 4], sum = {0};
    memcpy(part, &x, sizeof x);
    for (int i = 0; i < LANES / 4; i++) sum += part[i];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* The exponential of numbers that are not positive, to 2 units in the last offset; 0 below the normal numbers, NaN of
 * NaN. */
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

/* The first, or the second, halves of two vectors, number by number in turn; `i` is 0, or half of the lanes. */
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif
#if LANES == 16
#define PAIR(i) i, i + 16
#define ZIP(a, b, i)                                                                                                  \
    SHUFFLED(a, b, PAIR(i), PAIR(i + 1), PAIR(i + 2), PAIR(i + 3), PAIR(i + 4), PAIR(i + 5), PAIR(i + 6), PAIR(i + 7))
#elif LANES == 8
#define ZIP(a, b, i) SHUFFLED(a, b, i, i + 8, i + 1, i + 9, i + 2, i + 10, i + 3, i + 11)
#else
#define ZIP(a, b, i) SHUFFLED(a, b, i, i + 4, i + 1, i + 5)
#endif

/* Transpose a square of numbers: each step brings rows that are half of the square apart together, number by number in
 * turn. */
INLINE void transpose(floats *square) {
    floats zipped[LANES];
    for (int size = 1; size < LANES; size *= 2) {
        for (int i = 0; i < LANES / 2; i++) {
            zipped[2 * i] = ZIP(square[i], square[i + LANES / 2], 0);
            zipped[2 * i + 1] = ZIP(square[i], square[i + LANES / 2], LANES / 2);
        }
        for (int i = 0; i < LANES; i++) square[i] = zipped[i];
    }
}

/* Tables are float32, or bfloat16 (`narrow`), which is the upper half of float32. Offsets are in numbers. */

INLINE float one_of(const void *table, int64_t offset, int narrow) {
    if (!narrow) return ((const float *)table)[offset];
    uint32_t word = (uint32_t)((const uint16_t *)table)[offset] << 16;
    float number;
    memcpy(&number, &word, sizeof number);
    return number;
}

INLINE floats load(const void *table, int64_t offset, int narrow) {
    floats row;
    if (narrow) {
        halves upper;
        memcpy(&upper, (const uint16_t *)table + offset, sizeof upper);
        row = (floats)(__builtin_convertvector(upper, words) << 16);
    } else {
        memcpy(&row, (const float *)table + offset, sizeof row);
    }
    return row;
}

/* bfloat16: the nearest number, the even one where there are two. */
INLINE halves rounded(floats x) {
    words bits = (words)x;
    words nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    words quiet_nan = (words)((ints){0} + 0x7fc0);
    return __builtin_convertvector((words)pick_ints(x != x, (ints)quiet_nan, (ints)nearest), halves);
}

INLINE void store(void *table, int64_t offset, int narrow, floats x) {
    if (narrow) {
        halves upper = rounded(x);
        memcpy((uint16_t *)table + offset, &upper, sizeof upper);
    } else {
        memcpy((float *)table + offset, &x, sizeof x);
    }
}

/* The same for fewer numbers than a vector has, at least one. AVX-512 has masks for this, which no address sanitizer
 * watches. */

#if defined(__AVX512F__) && !defined(__SANITIZE_ADDRESS__)
#define MASKED 1
#else
#define MASKED 0
#endif

INLINE floats load_some(const void *table, int64_t offset, int narrow, int64_t count) {
#if MASKED
    __mmask16 some = (__mmask16)((1u << count) - 1);
    if (!narrow) return (floats)_mm512_maskz_loadu_ps(some, (const float *)table + offset);
    return (floats)_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, (const uint16_t *)table + offset)), 16
    );
#else
    float lane[LANES] = {0};
    floats row;
    for (int64_t i = 0; i < count; i++) lane[i] = one_of(table, offset + i, narrow);
    memcpy(&row, lane, sizeof row);
    return row;
#endif
}

INLINE void store_some(void *table, int64_t offset, int narrow, floats x, int64_t count) {
#if MASKED
    __mmask16 some = (__mmask16)((1u << count) - 1);
    halves upper = rounded(x);
    if (narrow) _mm256_mask_storeu_epi16((uint16_t *)table + offset, some, (__m256i)upper);
    else _mm512_mask_storeu_ps((float *)table + offset, some, (__m512)x);
#else
    halves upper = rounded(x);
    if (narrow) memcpy((uint16_t *)table + offset, &upper, 2 * count);
    else memcpy((float *)table + offset, &x, 4 * count);
#endif
}

INLINE void widen(const void *table, int64_t offset, int narrow, float *into, int64_t count) {
    for (int64_t i = 0; i < count; i++) into[i] = one_of(table, offset + i, narrow);
}

/* Slots are integers of 2, 4 or 8 bytes. */

INLINE int64_t slot_at(const void *slots, int64_t offset, int64_t bytes) {
    if (bytes == 2) return ((const int16_t *)slots)[offset];
    return bytes == 4 ? ((const int32_t *)slots)[offset] : ((const int64_t *)slots)[offset];
}

INLINE void put_slot(void *slots, int64_t offset, int64_t bytes, int32_t slot) {
    if (bytes == 2) ((int16_t *)slots)[offset] = (int16_t)slot;
    else if (bytes == 4) ((int32_t *)slots)[offset] = slot;
    else ((int64_t *)slots)[offset] = slot;
}

/* Ask for a row that is read soon, or written: processors cannot foresee where rows lie. */
INLINE void prefetch(const void *table, int64_t offset, int64_t numbers, int narrow) {
    const char *row = (const char *)table + offset * (narrow ? 2 : 4);
    for (int64_t byte = 0; byte < numbers * (narrow ? 2 : 4); byte += 64) __builtin_prefetch(row + byte);
}

INLINE void prefetch_output(const void *table, int64_t offset, int64_t numbers, int narrow) {
    const char *row = (const char *)table + offset * (narrow ? 2 : 4);
    for (int64_t byte = 0; byte < numbers * (narrow ? 2 : 4); byte += 64) __builtin_prefetch(row + byte, 1);
}

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* The numbers of a row that is padded so that vectors alone can read it. */
INLINE int64_t whole_vectors(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

/* Bytes, rounded up to whole lines of the cache. */
INLINE int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

#endif
