/* Head-wise lookup: scores, selection, softmax and weighted sums in one pass over the tokens.
 *
 * Tokens stand side by side in a vector while slots are selected: lane t of every vector is token t of a block. */

#include "products.h"
#include "threads.h"
#include "vectors.h"

#include <math.h>

/* A call, as `library.py` packs it. */
struct lookup {
    const void *query, *row_keys, *column_keys, *bank;
    const void *transform, *residual; /* [heads][width][width], and as the output; NULL for none */
    void *output, *slots;
    float *weights;
    int64_t tokens, heads, n, half, width, k;
    int64_t query_token, query_head, residual_token, residual_head, bank_head; /* strides, in numbers */
    int64_t narrow, residual_narrow, slot_bytes;
    int64_t raw, threads; /* raw: weights are scores without softmax */
    /* What follows is not the caller's, who leaves room for it. */
    struct tables tables;
    int64_t groups;
};

/* Enter a score for each token into the token's k best, which descend; of equal ones the first stays in front. */
INLINE void enter(floats score, ints number, int64_t k, floats *best, ints *numbers) {
    ints here = score > best[k - 1];
    for (int64_t i = k - 1; i > 0; i--) {
        ints above = score > best[i - 1];
        best[i] = pick(above, best[i - 1], pick(here, score, best[i]));
        numbers[i] = pick_ints(above, numbers[i - 1], pick_ints(here, number, numbers[i]));
        here = above;
    }
    best[0] = pick(here, score, best[0]);
    numbers[0] = pick_ints(here, number, numbers[0]);
}

/* Whether a comparison holds in any lane. */
INLINE int any(ints where) {
    int64_t parts[sizeof where / 8], bits = 0;
    memcpy(parts, &where, sizeof where);
    for (unsigned i = 0; i < sizeof where / 8; i++) bits |= parts[i];
    return bits != 0;
}

#define KEYS_AT_ONCE 8 /* whose scores the registers hold */

/* Find the k best of n keys for each token of a block, whose queries are transposed: [half][LANES]. Return which
 * tokens met a NaN. */
INLINE ints
best_keys(const floats *queries, const float *keys, int64_t n, int64_t half, int64_t k, floats *best, ints *numbers) {
    ints spoiled = {0};
    for (int64_t i = 0; i < k; i++) {
        best[i] = all(-INFINITY);
        numbers[i] = (ints){0};
    }
    for (int64_t first = 0; first < n; first += KEYS_AT_ONCE) {
        const float *key[KEYS_AT_ONCE];
        floats scores[KEYS_AT_ONCE];
        for (int i = 0; i < KEYS_AT_ONCE; i++) {
            key[i] = keys + smaller(first + i, n - 1) * half;
            scores[i] = (floats){0};
        }
        for (int64_t p = 0; p < half; p++)
            for (int i = 0; i < KEYS_AT_ONCE; i++) scores[i] += queries[p] * key[i][p];
        for (int i = 0; i < KEYS_AT_ONCE && first + i < n; i++) {
            spoiled |= scores[i] != scores[i];
            if (k <= 4 || any(scores[i] > best[k - 1]))
                enter(scores[i], (ints){0} + (int32_t)(first + i), k, best, numbers);
        }
    }
    return spoiled;
}

/* Find slots and weights of a block, [k] vectors each, best first. A token that met a NaN has weights that are NaN. */
INLINE void select_block(
    const struct lookup *call, const floats *queries, const float *row_keys, const float *column_keys, int64_t k,
    floats *weights, ints *slots, floats *best, ints *numbers
) {
    floats *row_best = best, *column_best = best + k;
    ints *rows = numbers, *columns = numbers + k;
    ints spoiled = best_keys(queries, row_keys, call->n, call->half, k, row_best, rows);
    spoiled |= best_keys(queries + call->half, column_keys, call->n, call->half, k, column_best, columns);
    for (int64_t i = 0; i < k; i++) {
        weights[i] = all(-INFINITY);
        slots[i] = (ints){0};
    }
    /* The sum of ranks i and j is among the k best only if (i + 1)(j + 1) <= k: so many sums are at least as large. */
    for (int64_t i = 0; i < k; i++)
        for (int64_t j = 0; (i + 1) * (j + 1) <= k; j++)
            enter(row_best[i] + column_best[j], rows[i] * (int32_t)call->n + columns[j], k, weights, slots);
    if (call->raw) {
        for (int64_t i = 0; i < k; i++) weights[i] = pick(spoiled, all(NAN), weights[i]);
        return;
    }
    floats total = {0}, largest = pick(spoiled, all(NAN), weights[0]);
    for (int64_t i = 0; i < k; i++) {
        weights[i] = exponential(weights[i] - largest);
        total += weights[i];
    }
    for (int64_t i = 0; i < k; i++) weights[i] /= total;
}

/* Round to the dtype of the bank, then add the residual, in the residual's dtype. */
INLINE void put_sum(
    const struct lookup *call, floats sum, int64_t residual, int64_t output, int narrow, int64_t count
) {
    if (narrow) {
        halves upper = rounded(sum);
        sum = (floats)(__builtin_convertvector(upper, words) << 16);
    }
    int into = call->residual ? (int)call->residual_narrow : narrow;
    if (count == LANES) {
        if (call->residual) sum = load(call->residual, residual, into) + sum;
        store(call->output, output, into, sum);
    } else {
        if (call->residual) sum = load_some(call->residual, residual, into, count) + sum;
        store_some(call->output, output, into, sum, count);
    }
}

/* The weighted sum of k rows of a table, for one token and head: into the output, or, padded, into `gathered`. */
INLINE void gather(
    const struct lookup *call, int64_t token, int64_t head, int64_t k, int narrow, const int32_t *slots,
    const float *weights, float *gathered
) {
    int64_t width = call->width, column = 0;
    const char *bank = (const char *)call->bank + head * call->bank_head * (narrow ? 2 : 4);
    int64_t residual = token * call->residual_token + head * call->residual_head;
    int64_t output = (token * call->heads + head) * width;
    for (; column + 4 * LANES <= width; column += 4 * LANES) {
        floats sums[4] = {0};
        for (int64_t m = 0; m < k; m++)
            for (int i = 0; i < 4; i++)
                sums[i] += weights[m] * load(bank, slots[m] * width + column + i * LANES, narrow);
        for (int i = 0; i < 4; i++)
            if (gathered) store(gathered, column + i * LANES, 0, sums[i]);
            else put_sum(call, sums[i], residual + column + i * LANES, output + column + i * LANES, narrow, LANES);
    }
    for (; column < width; column += LANES) {
        int64_t count = smaller(LANES, width - column);
        floats sum = {0};
        for (int64_t m = 0; m < k; m++)
            sum += weights[m] * (count == LANES ? load(bank, slots[m] * width + column, narrow)
                                                : load_some(bank, slots[m] * width + column, narrow, count));
        if (gathered) store(gathered, column, 0, sum);
        else put_sum(call, sum, residual + column, output + column, narrow, count);
    }
}

/* Put what a block of tokens gathered, [count][padded], multiplied by a transform that was transposed. */
INLINE void put_transformed(
    const struct lookup *call, int64_t first, int64_t count, int64_t head, int narrow, const float *transform,
    const float *gathered, float *products
) {
    int64_t width = call->width, padded = whole_vectors(width);
    multiply(gathered, padded, 1, transform, padded, products, padded, count, padded, width, 0);
    for (int64_t token = first; token < first + count; token++)
        for (int64_t column = 0; column < width; column += LANES)
            put_sum(
                call, load(products, (token - first) * padded + column, 0),
                token * call->residual_token + head * call->residual_head + column,
                (token * call->heads + head) * width + column, narrow, smaller(LANES, width - column)
            );
}

/* Transpose the queries of a block of tokens: [numbers][LANES]. Lanes without a token repeat the last one. */
INLINE void transpose_queries(
    const struct lookup *call, int64_t first, int64_t count, int64_t head, int narrow, floats *queries
) {
    int64_t numbers = 2 * call->half, offsets[LANES], p = 0;
    for (int64_t lane = 0; lane < LANES; lane++)
        offsets[lane] = (first + smaller(lane, count - 1)) * call->query_token + head * call->query_head;
    for (; p + LANES <= numbers; p += LANES) {
        for (int lane = 0; lane < LANES; lane++) queries[p + lane] = load(call->query, offsets[lane] + p, narrow);
        transpose(queries + p);
    }
    for (; p < numbers; p++)
        for (int lane = 0; lane < LANES; lane++)
            ((float *)queries)[p * LANES + lane] = one_of(call->query, offsets[lane] + p, narrow);
}

/* A stretch of tokens, head by head: what lies side by side in memory is read and written soon after one another. */
INLINE void lookup_stretch(const struct lookup *call, int64_t unit, char *scratch, int64_t k, int narrow) {
    int64_t stretches = (call->tokens + STRETCH - 1) / STRETCH, from = unit % stretches * STRETCH,
            group = unit / stretches;
    int64_t to = smaller(from + STRETCH, call->tokens), first_head = call->heads * group / call->groups;
    int64_t last_head = call->heads * (group + 1) / call->groups;
    int64_t n = call->n, half = call->half, padded = whole_vectors(call->width);
    floats *queries = (floats *)scratch, *best = queries + 2 * half, *weights = best + 2 * k;
    ints *numbers = (ints *)(weights + k), *slots = numbers + 2 * k;
    float *lane_weights = (float *)(slots + k);
    int32_t *lane_slots = (int32_t *)(lane_weights + k * LANES);
    float *gathered = (float *)(lane_slots + k * LANES), *products = gathered + LANES * padded;
    for (int64_t head = first_head; head < last_head; head++) {
        const float *transform = call->tables.transforms + head * call->tables.transform;
        const float *row_keys = (const float *)call->row_keys + head * n * half;
        const float *column_keys = (const float *)call->column_keys + head * n * half;
        if (narrow) row_keys = call->tables.keys + head * 2 * n * half, column_keys = row_keys + n * half;
        const char *bank = (const char *)call->bank + head * call->bank_head * (narrow ? 2 : 4);
        for (int64_t first = from; first < to; first += LANES) {
            int64_t count = smaller(LANES, to - first);
            transpose_queries(call, first, count, head, narrow, queries);
            int64_t later = first + LANES, next = head;
            if (later >= to && head + 1 < last_head) later = from, next = head + 1;
            for (int64_t token = later; token < smaller(later + LANES, call->tokens); token++)
                prefetch(call->query, token * call->query_token + next * call->query_head, 2 * half, narrow);
            select_block(call, queries, row_keys, column_keys, k, weights, slots, best, numbers);
            for (int64_t lane = 0; lane < LANES; lane++)
                for (int64_t m = 0; m < k; m++) {
                    lane_weights[lane * k + m] = ((float *)weights)[m * LANES + lane];
                    lane_slots[lane * k + m] = ((int32_t *)slots)[m * LANES + lane];
                }
            for (int64_t lane = 0; lane < count; lane++) {
                for (int64_t m = 0; m < k && lane + AHEAD < count; m++)
                    prefetch(bank, lane_slots[(lane + AHEAD) * k + m] * call->width, call->width, narrow);
                int64_t output = ((first + lane) * call->heads + head) * call->width;
                prefetch_output(
                    call->output, output, call->width, call->residual ? (int)call->residual_narrow : narrow
                );
                float *into = call->transform ? gathered + lane * padded : NULL;
                gather(call, first + lane, head, k, narrow, lane_slots + lane * k, lane_weights + lane * k, into);
            }
            if (call->transform) put_transformed(call, first, count, head, narrow, transform, gathered, products);
            if (!call->slots) continue;
            for (int64_t lane = 0; lane < count; lane++)
                for (int64_t m = 0; m < k; m++) {
                    int64_t offset = ((first + lane) * call->heads + head) * k + m;
                    call->weights[offset] = lane_weights[lane * k + m];
                    put_slot(call->slots, offset, call->slot_bytes, lane_slots[lane * k + m]);
                }
        }
    }
}

static void lookup_unit(const void *argument, int64_t unit, char *scratch) {
    const struct lookup *call = argument;
    if (call->k == 4) /* with a number that the compiler knows, a lookup takes a third of the time */
        call->narrow ? lookup_stretch(call, unit, scratch, 4, 1) : lookup_stretch(call, unit, scratch, 4, 0);
    else
        call->narrow ? lookup_stretch(call, unit, scratch, call->k, 1)
                     : lookup_stretch(call, unit, scratch, call->k, 0);
}

static void lookup_tables_unit(const void *argument, int64_t head, char *scratch) {
    const struct lookup *call = argument;
    (void)scratch;
    if (call->narrow) widen_keys(&call->tables, call->row_keys, call->column_keys, head, call->n * call->half);
    if (call->transform) {
        int64_t width = call->width, offset = head * width * width;
        float *into = call->tables.transforms + head * call->tables.transform;
        pad_transposed(call->transform, offset, (int)call->narrow, width, width, into, whole_vectors(width));
    }
}

/* Return 0, or 1 where there is no memory. */
EXPORTED int midus_lookup(const struct lookup *caller) {
    struct lookup call = *caller;
    int64_t stretches = (call.tokens + STRETCH - 1) / STRETCH, padded = whole_vectors(call.width), failed = 0;
    call.groups = groups_of(call.heads, stretches, call.threads, call.bank_head);
    if (call.narrow || call.transform) {
        int64_t keys = call.narrow ? 2 * call.n * call.half : 0, transform = call.transform ? call.width * padded : 0;
        failed = new_tables(&call.tables, call.heads, keys, transform) ||
                 run_units(lookup_tables_unit, &call, call.heads, 1, 0);
    }
    int64_t vectors = 2 * call.half + 8 * call.k, transformed = call.transform ? 2 * LANES * padded : 0;
    failed = failed ||
             run_units(lookup_unit, &call, call.groups * stretches, call.threads, 4 * (vectors * LANES + transformed));
    free(call.tables.keys);
    return (int)failed;
}
