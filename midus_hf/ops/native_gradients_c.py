"""C of the gradients of head-wise lookup: of scores, query and keys in one pass over the tokens; of tables row by row."""

GRADIENTS = r"""
INLINE float product(const float *vector, const void *table, int64_t place, int64_t width, int narrow) {
    floats sums[2] = {0};
    int64_t column = 0;
    for (; column + 2 * LANES <= width; column += 2 * LANES)
        for (int i = 0; i < 2; i++)
            sums[i] += load(vector, column + i * LANES, 0) * load(table, place + column + i * LANES, narrow);
    for (; column + LANES <= width; column += LANES) sums[0] += load(vector, column, 0) * load(table, place + column, narrow);
    if (column < width)
        sums[1] += load_some(vector, column, 0, width - column) * load_some(table, place + column, narrow, width - column);
    return sum_of(sums[0] + sums[1]);
}

INLINE void add(float *into, float weight, const float *vector, int64_t width) {
    int64_t column = 0;
    for (; column + LANES <= width; column += LANES)
        store(into, column, 0, load(into, column, 0) + weight * load(vector, column, 0));
    for (; column < width; column++) into[column] += weight * vector[column];
}

INLINE void narrow_row(const float *row, int64_t width, void *into, int64_t place) {
    int64_t column = 0;
    for (; column + LANES <= width; column += LANES) store(into, place + column, 1, load(row, column, 0));
    if (column < width) store_some(into, place + column, 1, load_some(row, column, 0, width - column), width - column);
}

/* One side of one token: its keys, weighed, are the gradient of its query; its query, weighed, is added to that of its keys. */
INLINE void side_gradients(
    const float *query, const float *keys, const int64_t *chosen, const float *into_scores, float *into_query, float *into_keys,
    int64_t half, int64_t k
) {
    int64_t p = 0;
    for (; p + LANES <= half; p += LANES) {
        floats asked = load(query, p, 0), sum = {0};
        for (int64_t m = 0; m < k; m++) {
            sum += into_scores[m] * load(keys, chosen[m] * half + p, 0);
            store(into_keys, chosen[m] * half + p, 0, load(into_keys, chosen[m] * half + p, 0) + into_scores[m] * asked);
        }
        store(into_query, p, 0, sum);
    }
    for (; p < half; p++) {
        float sum = 0;
        for (int64_t m = 0; m < k; m++) {
            sum += into_scores[m] * keys[chosen[m] * half + p];
            into_keys[chosen[m] * half + p] += into_scores[m] * query[p];
        }
        into_query[p] = sum;
    }
}

struct score_gradients {
    const void *gradient, *query, *row_keys, *column_keys, *bank, *slots;
    const float *weights;
    void *into_query, *into_row_keys, *into_column_keys;
    float *parts; /* [heads][stretches][2][n * half] */
    int64_t tokens, heads, n, half, width, k;
    int64_t gradient_token, gradient_head, query_token, query_head, bank_head;
    int64_t narrow, gradient_narrow, slot_bytes, stretch, threads;
    double temperature;
};

/* One head and a stretch of tokens: gradients of its queries, and its part of those of keys. */
INLINE void score_stretch(const struct score_gradients *call, int64_t unit, char *scratch, int64_t k, int narrow) {
    int64_t stretches = (call->tokens + call->stretch - 1) / call->stretch, n = call->n, half = call->half, width = call->width;
    int64_t head = unit / stretches, from = unit % stretches * call->stretch, to = smaller(from + call->stretch, call->tokens);
    int64_t *rows = (int64_t *)scratch, *columns = rows + k;
    float *wide_gradient = (float *)(columns + k), *wide_query = wide_gradient + width;
    float *wide_answer = wide_query + 2 * half, *into_scores = wide_answer + 2 * half, *wide_keys = into_scores + k;
    float *into_rows = call->parts + unit * 2 * n * half, *into_columns = into_rows + n * half;
    const char *bank = (const char *)call->bank + head * call->bank_head * (narrow ? 2 : 4);
    const float *row_keys = (const float *)call->row_keys + head * n * half;
    const float *column_keys = (const float *)call->column_keys + head * n * half;
    memset(into_rows, 0, 4 * 2 * n * half);
    if (narrow) {
        widen(call->row_keys, head * n * half, narrow, wide_keys, n * half);
        widen(call->column_keys, head * n * half, narrow, wide_keys + n * half, n * half);
        row_keys = wide_keys, column_keys = wide_keys + n * half;
    }
    for (int64_t token = from; token < to; token++) {
        int64_t entry = (token * call->heads + head) * k, answer = (token * call->heads + head) * 2 * half;
        int64_t gradient_place = token * call->gradient_token + head * call->gradient_head;
        int64_t query_place = token * call->query_token + head * call->query_head;
        const float *gradient = (const float *)call->gradient + gradient_place;
        const float *query = (const float *)call->query + query_place, *weights = call->weights + entry;
        if (call->gradient_narrow) {
            widen(call->gradient, gradient_place, 1, wide_gradient, width);
            gradient = wide_gradient;
        }
        if (narrow) {
            widen(call->query, query_place, 1, wide_query, 2 * half);
            query = wide_query;
        }
        if (token + AHEAD < to) {
            int64_t later = entry + AHEAD * call->heads * k;
            prefetch(call->gradient, gradient_place + AHEAD * call->gradient_token, width, (int)call->gradient_narrow);
            prefetch(call->query, query_place + AHEAD * call->query_token, 2 * half, narrow);
            for (int64_t m = 0; m < k; m++)
                prefetch(bank, slot_at(call->slots, later + m, call->slot_bytes) * width, width, narrow);
        }
        float mean = 0;
        for (int64_t m = 0; m < k; m++) {
            into_scores[m] = product(gradient, bank, slot_at(call->slots, entry + m, call->slot_bytes) * width, width, narrow);
            mean += into_scores[m] * weights[m];
        }
        for (int64_t m = 0; m < k; m++) {
            uint32_t slot = (uint32_t)slot_at(call->slots, entry + m, call->slot_bytes); /* of 32 bits: divided in half the time */
            into_scores[m] = weights[m] * (into_scores[m] - mean) / (float)call->temperature;
            rows[m] = slot / (uint32_t)n, columns[m] = slot % (uint32_t)n;
        }
        float *into_query = narrow ? wide_answer : (float *)call->into_query + answer;
        side_gradients(query, row_keys, rows, into_scores, into_query, into_rows, half, k);
        side_gradients(query + half, column_keys, columns, into_scores, into_query + half, into_columns, half, k);
        if (narrow) narrow_row(into_query, 2 * half, call->into_query, answer);
    }
}

static void score_unit(const void *given, int64_t unit, char *scratch) {
    const struct score_gradients *call = given;
    if (call->k == 4)
        call->narrow ? score_stretch(call, unit, scratch, 4, 1) : score_stretch(call, unit, scratch, 4, 0);
    else
        call->narrow ? score_stretch(call, unit, scratch, call->k, 1) : score_stretch(call, unit, scratch, call->k, 0);
}

/* The parts of a head's gradients of keys, summed in the order of their stretches. */
static void key_unit(const void *given, int64_t head, char *scratch) {
    const struct score_gradients *call = given;
    int64_t stretches = (call->tokens + call->stretch - 1) / call->stretch, size = call->n * call->half;
    float *sums = (float *)scratch;
    memset(sums, 0, 4 * 2 * size);
    for (int64_t part = 0; part < stretches; part++) add(sums, 1, call->parts + (head * stretches + part) * 2 * size, 2 * size);
    if (call->narrow) {
        narrow_row(sums, size, call->into_row_keys, head * size);
        narrow_row(sums + size, size, call->into_column_keys, head * size);
    } else {
        memcpy((float *)call->into_row_keys + head * size, sums, 4 * size);
        memcpy((float *)call->into_column_keys + head * size, sums + size, 4 * size);
    }
}

EXPORTED int midus_score_gradients(const struct score_gradients *call) {
    int64_t stretches = (call->tokens + call->stretch - 1) / call->stretch, keys = 2 * call->n * call->half;
    int64_t numbers = call->width + 4 * call->half + 5 * call->k + (call->narrow ? keys : 0);
    return run_units(score_unit, call, call->heads * stretches, call->threads, 4 * numbers) ||
           run_units(key_unit, call, call->heads, call->threads, 4 * keys);
}

struct row_sums {
    const void *gradient, *slots;
    const float *weights;
    float *into; /* [heads of the table][rows][width] */
    int64_t tokens, heads, rows, width, k;
    int64_t gradient_token, gradient_head, into_head; /* strides; into_head is 0 where heads share a table */
    int64_t gradient_narrow, slot_bytes, ranges, threads;
};

/* A range of rows of one table, by its one thread in the order of tokens: the same bits, however many ranges there are. */
INLINE void sum_range(const struct row_sums *call, int64_t unit, char *scratch, int64_t k) {
    int64_t range = unit % call->ranges, from = call->rows * range / call->ranges, to = call->rows * (range + 1) / call->ranges;
    int64_t table = unit / call->ranges, heads = call->into_head ? 1 : call->heads, width = call->width;
    float *into = call->into + table * call->into_head, *wide_gradient = (float *)scratch;
    memset(into + from * width, 0, 4 * (to - from) * width);
    for (int64_t token = 0; token < call->tokens; token++)
        for (int64_t head = table; head < table + heads; head++) {
            int64_t place = token * call->gradient_token + head * call->gradient_head, entry = (token * call->heads + head) * k;
            const float *gradient = (const float *)call->gradient + place;
            if (call->gradient_narrow) {
                widen(call->gradient, place, 1, wide_gradient, width);
                gradient = wide_gradient;
            }
            for (int64_t m = 0; m < k; m++) {
                int64_t slot = slot_at(call->slots, entry + m, call->slot_bytes);
                if (from <= slot && slot < to) add(into + slot * width, call->weights[entry + m], gradient, width);
            }
        }
}

static void sum_unit(const void *given, int64_t unit, char *scratch) {
    const struct row_sums *call = given;
    sum_range(call, unit, scratch, call->k);
}

EXPORTED int midus_row_sums(const struct row_sums *call) {
    int64_t tables = call->into_head ? call->heads : 1;
    return run_units(sum_unit, call, tables * call->ranges, call->threads, 4 * call->width);
}
"""
