"""C of head-wise lookup: scores, selection, softmax and weighted sums in one pass over the tokens."""

LOOKUP = r"""
/* Tokens stand side by side in a vector while slots are selected: lane t of every vector is token t of a block. */

struct lookup {
    const void *query, *row_keys, *column_keys, *bank, *residual;
    void *output, *slots;
    float *weights;
    int64_t tokens, heads, n, half, width, k;
    int64_t query_token, query_head, residual_token, residual_head, bank_head; /* strides, in numbers */
    int64_t narrow, residual_narrow, slot_bytes, stretch, threads;
    double temperature;
};

/* Enters a score for each token into its k best, descending; among equal ones the first stays in front. */
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

INLINE int any(ints where) {
    int64_t parts[sizeof where / 8], found = 0;
    memcpy(parts, &where, sizeof where);
    for (unsigned i = 0; i < sizeof where / 8; i++) found |= parts[i];
    return found != 0;
}

#define AHEAD 6 /* tokens whose rows are asked for before they are read */
#define KEYS_AT_ONCE 8

/* The k best of n keys for each token of a block; `asked` is its query, turned: [half][LANES]. Tells which tokens met a NaN. */
INLINE ints best_keys(const floats *asked, const float *keys, int64_t n, int64_t half, int64_t k, floats *best, ints *numbers) {
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
            for (int i = 0; i < KEYS_AT_ONCE; i++) scores[i] += asked[p] * key[i][p];
        for (int i = 0; i < KEYS_AT_ONCE && first + i < n; i++) {
            spoiled |= scores[i] != scores[i];
            if (k <= 4 || any(scores[i] > best[k - 1])) enter(scores[i], (ints){0} + (int32_t)(first + i), k, best, numbers);
        }
    }
    return spoiled;
}

/* Slots and weights of a block, [k] vectors each, best first. A token that met a NaN has weights that are NaN. */
INLINE void select_block(
    const struct lookup *call, const floats *asked, const float *row_keys, const float *column_keys, int64_t k, floats *weights,
    ints *slots, floats *best, ints *numbers
) {
    floats *row_best = best, *column_best = best + k;
    ints *rows = numbers, *columns = numbers + k;
    ints spoiled = best_keys(asked, row_keys, call->n, call->half, k, row_best, rows);
    spoiled |= best_keys(asked + call->half, column_keys, call->n, call->half, k, column_best, columns);
    for (int64_t i = 0; i < k; i++) {
        weights[i] = all(-INFINITY);
        slots[i] = (ints){0};
    }
    /* Of ranks i and j only those with (i + 1)(j + 1) <= k can be among the k best sums: so many are at least as large. */
    for (int64_t i = 0; i < k; i++)
        for (int64_t j = 0; (i + 1) * (j + 1) <= k; j++)
            enter(row_best[i] + column_best[j], rows[i] * (int32_t)call->n + columns[j], k, weights, slots);
    floats total = {0}, temperature = all((float)call->temperature);
    floats largest = pick(spoiled, all(NAN), weights[0] / temperature);
    for (int64_t i = 0; i < k; i++) {
        weights[i] = exponential(weights[i] / temperature - largest);
        total += weights[i];
    }
    for (int64_t i = 0; i < k; i++) weights[i] /= total;
}

/* Rounds as the table does, then adds the residual, in the dtype of the latter. */
INLINE void put_sum(const struct lookup *call, floats sum, int64_t residual, int64_t output, int narrow, int64_t count) {
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

/* The weighted sum of k rows of a table, for one token and head. */
INLINE void gather(
    const struct lookup *call, int64_t token, int64_t head, int64_t k, int narrow, const int32_t *slots, const float *weights
) {
    int64_t width = call->width, column = 0;
    const char *bank = (const char *)call->bank + head * call->bank_head * (narrow ? 2 : 4);
    int64_t residual = token * call->residual_token + head * call->residual_head;
    int64_t output = (token * call->heads + head) * width;
    for (; column + 4 * LANES <= width; column += 4 * LANES) {
        floats sums[4] = {0};
        for (int64_t m = 0; m < k; m++)
            for (int i = 0; i < 4; i++) sums[i] += weights[m] * load(bank, slots[m] * width + column + i * LANES, narrow);
        for (int i = 0; i < 4; i++) put_sum(call, sums[i], residual + column + i * LANES, output + column + i * LANES, narrow, LANES);
    }
    for (; column < width; column += LANES) {
        int64_t count = smaller(LANES, width - column);
        floats sum = {0};
        for (int64_t m = 0; m < k; m++)
            sum += weights[m] * (count == LANES ? load(bank, slots[m] * width + column, narrow)
                                                : load_some(bank, slots[m] * width + column, narrow, count));
        put_sum(call, sum, residual + column, output + column, narrow, count);
    }
}

/* One head and a stretch of tokens. */
INLINE void lookup_stretch(const struct lookup *call, int64_t unit, char *scratch, int64_t k, int narrow) {
    int64_t stretches = (call->tokens + call->stretch - 1) / call->stretch, n = call->n, half = call->half;
    int64_t head = unit / stretches, from = unit % stretches * call->stretch, to = smaller(from + call->stretch, call->tokens);
    floats *asked = (floats *)scratch, *best = asked + 2 * half, *weights = best + 2 * k;
    ints *numbers = (ints *)(weights + k), *slots = numbers + 2 * k;
    float *lane_weights = (float *)(slots + k);
    int32_t *lane_slots = (int32_t *)(lane_weights + k * LANES);
    float *wide_keys = (float *)(lane_slots + k * LANES);
    const float *row_keys = (const float *)call->row_keys + head * n * half;
    const float *column_keys = (const float *)call->column_keys + head * n * half;
    if (narrow) {
        widen(call->row_keys, head * n * half, narrow, wide_keys, n * half);
        widen(call->column_keys, head * n * half, narrow, wide_keys + n * half, n * half);
        row_keys = wide_keys, column_keys = wide_keys + n * half;
    }
    for (int64_t first = from; first < to; first += LANES) {
        int64_t count = smaller(LANES, to - first);
        for (int64_t lane = 0; lane < LANES; lane++) {
            int64_t token = smaller(first + lane, to - 1); /* lanes that no token is left for repeat the last one */
            int64_t place = token * call->query_token + head * call->query_head;
            if (first + LANES + lane < to) prefetch(call->query, place + LANES * call->query_token, 2 * half, narrow);
            for (int64_t p = 0; p < 2 * half; p++) ((float *)asked)[p * LANES + lane] = one_of(call->query, place + p, narrow);
        }
        select_block(call, asked, row_keys, column_keys, k, weights, slots, best, numbers);
        for (int64_t lane = 0; lane < LANES; lane++)
            for (int64_t m = 0; m < k; m++) {
                lane_weights[lane * k + m] = ((float *)weights)[m * LANES + lane];
                lane_slots[lane * k + m] = ((int32_t *)slots)[m * LANES + lane];
            }
        const char *bank = (const char *)call->bank + head * call->bank_head * (narrow ? 2 : 4);
        for (int64_t lane = 0; lane < count; lane++) {
            for (int64_t m = 0; m < k && lane + AHEAD < count; m++)
                prefetch(bank, lane_slots[(lane + AHEAD) * k + m] * call->width, call->width, narrow);
            gather(call, first + lane, head, k, narrow, lane_slots + lane * k, lane_weights + lane * k);
        }
        if (!call->slots) continue;
        for (int64_t lane = 0; lane < count; lane++)
            for (int64_t m = 0; m < k; m++) {
                int64_t place = ((first + lane) * call->heads + head) * k + m;
                call->weights[place] = lane_weights[lane * k + m];
                put_slot(call->slots, place, call->slot_bytes, lane_slots[lane * k + m]);
            }
    }
}

static void lookup_unit(const void *given, int64_t unit, char *scratch) {
    const struct lookup *call = given;
    if (call->k == 4) /* a number that the compiler knows is three times as fast */
        call->narrow ? lookup_stretch(call, unit, scratch, 4, 1) : lookup_stretch(call, unit, scratch, 4, 0);
    else
        call->narrow ? lookup_stretch(call, unit, scratch, call->k, 1) : lookup_stretch(call, unit, scratch, call->k, 0);
}

EXPORTED int midus_lookup(const struct lookup *call) {
    int64_t vectors = 2 * call->half + 8 * call->k, keys = call->narrow ? 2 * call->n * call->half : 0;
    int64_t stretches = (call->tokens + call->stretch - 1) / call->stretch;
    return run_units(lookup_unit, call, call->heads * stretches, call->threads, 4 * (vectors * LANES + keys));
}
"""
