/* Gradients of head-wise lookup: those of scores, queries and keys in one pass over the tokens, then sums of the
 * parts. */

#include "products.h"
#include "threads.h"
#include "vectors.h"

/* into += weight * vector */
INLINE void add(float *into, float weight, const float *vector, int64_t width) {
    int64_t column = 0;
    for (; column + LANES <= width; column += LANES)
        store(into, column, 0, load(into, column, 0) + weight * load(vector, column, 0));
    for (; column < width; column++) into[column] += weight * vector[column];
}

/* Round a row to bfloat16. */
INLINE void narrow_row(const float *row, int64_t width, void *into, int64_t offset) {
    int64_t column = 0;
    for (; column + LANES <= width; column += LANES) store(into, offset + column, 1, load(row, column, 0));
    if (column < width)
        store_some(into, offset + column, 1, load_some(row, column, 0, width - column), width - column);
}

/* One side of one token: the sum of its keys, weighed, is the gradient of its query; its query, weighed, is added to
 * the gradient of these keys. */
INLINE void side_gradients(
    const float *query, const float *keys, const int64_t *chosen, const float *into_scores, float *into_query,
    float *into_keys, int64_t half, int64_t k
) {
    int64_t p = 0;
    for (; p + LANES <= half; p += LANES) {
        floats part = load(query, p, 0), sum = {0};
        for (int64_t m = 0; m < k; m++) {
            sum += into_scores[m] * load(keys, chosen[m] * half + p, 0);
            store(
                into_keys, chosen[m] * half + p, 0, load(into_keys, chosen[m] * half + p, 0) + into_scores[m] * part
            );
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

/* Write the weighted sum of k rows of a table into a row that is padded. */
INLINE void sum_rows(
    const void *bank, const void *slots, int64_t entry, int64_t slot_bytes, const float *weights, int64_t width,
    int64_t k, int narrow, float *into
) {
    for (int64_t column = 0; column < width; column += LANES) {
        int64_t count = smaller(LANES, width - column);
        floats sum = {0};
        for (int64_t m = 0; m < k; m++) {
            int64_t offset = slot_at(slots, entry + m, slot_bytes) * width + column;
            sum += weights[m] * (count == LANES ? load(bank, offset, narrow) : load_some(bank, offset, narrow, count));
        }
        store(into, column, 0, sum);
    }
}

/* A call, as `library.py` packs it. */
struct score_gradients {
    const void *gradient, *query, *row_keys, *column_keys, *bank, *transform, *slots;
    const float *weights;
    void *into_query, *into_row_keys, *into_column_keys, *into_transform;
    float *passed; /* [tokens][heads][width], the gradient of what was gathered, where it was transformed */
    float *parts; /* [heads][stretches][2][n * half] */
    float *transform_parts; /* [heads][stretches][width][padded] */
    int64_t tokens, heads, n, half, width, k;
    int64_t gradient_token, gradient_head, query_token, query_head, bank_head;
    int64_t narrow, gradient_narrow, slot_bytes, stretch;
    int64_t raw, threads; /* raw: `weights` are gradients of scores, [tokens][heads][k] */
    /* What follows is not the caller's, who leaves room for it. */
    struct tables tables;
    int64_t groups;
};

#define BLOCK 32 /* tokens whose gradients are passed through a transform at once */

/* One block of tokens and one head, whose gradients of tables are added to a part of these; the next block is asked
 * for. */
INLINE void score_block(
    const struct score_gradients *call, int64_t first, int64_t count, int64_t head, int64_t next_first,
    int64_t next_head, int64_t part, char *scratch, int64_t k, int narrow
) {
    int64_t n = call->n, half = call->half, width = call->width, padded = whole_vectors(width);
    int64_t transformed = call->transform ? padded : 0;
    float *gradients = (float *)scratch, *passed = gradients + BLOCK * transformed;
    float *gathered = passed + BLOCK * transformed;
    int64_t *rows = (int64_t *)(gathered + BLOCK * transformed), *columns = rows + k;
    float *wide_gradient = (float *)(columns + k), *wide_query = wide_gradient + width;
    float *wide_answer = wide_query + 2 * half, *into_scores = wide_answer + 2 * half;
    float *into_rows = call->parts + part * 2 * n * half, *into_columns = into_rows + n * half;
    float *into_transform = call->transform_parts + part * width * transformed;
    const float *transform = call->tables.transforms + head * call->tables.transform;
    const char *bank = (const char *)call->bank + head * call->bank_head * (narrow ? 2 : 4);
    const float *row_keys = (const float *)call->row_keys + head * n * half;
    const float *column_keys = (const float *)call->column_keys + head * n * half;
    if (narrow) row_keys = call->tables.keys + head * 2 * n * half, column_keys = row_keys + n * half;
    if (call->transform) {
        for (int64_t i = 0; i < count; i++) {
            int64_t offset = (first + i) * call->gradient_token + head * call->gradient_head;
            pad(call->gradient, offset, (int)call->gradient_narrow, 1, width, gradients + i * padded, padded);
        }
        multiply(gradients, padded, 1, transform, padded, passed, padded, count, padded, width, 0);
    }
    for (int64_t token = first; token < first + count; token++) {
        int64_t entry = (token * call->heads + head) * k, answer = (token * call->heads + head) * 2 * half;
        int64_t gradient_offset = token * call->gradient_token + head * call->gradient_head;
        int64_t query_offset = token * call->query_token + head * call->query_head;
        const float *gradient = (const float *)call->gradient + gradient_offset;
        const float *query = (const float *)call->query + query_offset, *weights = call->weights + entry;
        if (call->transform) {
            gradient = passed + (token - first) * padded;
            memcpy(call->passed + (token * call->heads + head) * width, gradient, 4 * width);
        } else if (call->gradient_narrow) {
            widen(call->gradient, gradient_offset, 1, wide_gradient, width);
            gradient = wide_gradient;
        }
        if (narrow) {
            widen(call->query, query_offset, 1, wide_query, 2 * half);
            query = wide_query;
        }
        int64_t later = token - first + next_first;
        if (later < call->tokens) {
            int64_t offset = later * call->heads + next_head;
            int64_t later_offset = later * call->gradient_token + next_head * call->gradient_head;
            prefetch(call->gradient, later_offset, width, (int)call->gradient_narrow);
            prefetch(call->query, later * call->query_token + next_head * call->query_head, 2 * half, narrow);
            prefetch_output(call->into_query, offset * 2 * half, 2 * half, narrow);
            if (call->transform) prefetch_output(call->passed, offset * width, width, 0);
        }
        if (token + AHEAD < call->tokens)
            for (int64_t m = 0; m < k; m++)
                prefetch(
                    bank, slot_at(call->slots, entry + AHEAD * call->heads * k + m, call->slot_bytes) * width, width,
                    narrow
                );
        float mean = 0;
        for (int64_t m = 0; m < k; m++) {
            int64_t offset = slot_at(call->slots, entry + m, call->slot_bytes) * width;
            into_scores[m] = product(gradient, bank, offset, width, narrow);
            mean += into_scores[m] * weights[m];
        }
        if (call->transform) {
            float *row = gathered + (token - first) * padded;
            sum_rows(bank, call->slots, entry, call->slot_bytes, weights, width, k, narrow, row);
        }
        for (int64_t m = 0; m < k; m++) {
            uint32_t slot =
                (uint32_t)slot_at(call->slots, entry + m, call->slot_bytes); /* 32 bits are divided in half the time */
            into_scores[m] = call->raw ? weights[m] : weights[m] * (into_scores[m] - mean);
            rows[m] = slot / (uint32_t)n, columns[m] = slot % (uint32_t)n;
        }
        float *into_query = narrow ? wide_answer : (float *)call->into_query + answer;
        side_gradients(query, row_keys, rows, into_scores, into_query, into_rows, half, k);
        side_gradients(query + half, column_keys, columns, into_scores, into_query + half, into_columns, half, k);
        if (narrow) narrow_row(into_query, 2 * half, call->into_query, answer);
    }
    if (call->transform)
        multiply(gradients, 1, padded, gathered, padded, into_transform, padded, width, padded, count, 1);
}

/* A stretch of tokens, block by block and head by head: gradients of queries, and parts of those of keys and
 * transforms. */
INLINE void score_stretch(const struct score_gradients *call, int64_t unit, char *scratch, int64_t k, int narrow) {
    int64_t stretches = (call->tokens + call->stretch - 1) / call->stretch;
    int64_t group = unit / stretches, stretch = unit % stretches;
    int64_t from = stretch * call->stretch, to = smaller(from + call->stretch, call->tokens);
    int64_t first_head = call->heads * group / call->groups, last_head = call->heads * (group + 1) / call->groups;
    int64_t keys = 2 * call->n * call->half,
            transform = call->transform ? call->width * whole_vectors(call->width) : 0;
    for (int64_t head = first_head; head < last_head; head++) {
        int64_t part = head * stretches + stretch;
        memset(call->parts + part * keys, 0, 4 * keys);
        if (transform) memset(call->transform_parts + part * transform, 0, 4 * transform);
    }
    for (int64_t first = from; first < to; first += BLOCK)
        for (int64_t head = first_head; head < last_head; head++) {
            int64_t is_last = head == last_head - 1, count = smaller(BLOCK, to - first),
                    part = head * stretches + stretch;
            int64_t next_first = is_last ? first + BLOCK : first, next_head = is_last ? first_head : head + 1;
            score_block(call, first, count, head, next_first, next_head, part, scratch, k, narrow);
        }
}

static void score_unit(const void *argument, int64_t unit, char *scratch) {
    const struct score_gradients *call = argument;
    if (call->k == 4)
        call->narrow ? score_stretch(call, unit, scratch, 4, 1) : score_stretch(call, unit, scratch, 4, 0);
    else
        call->narrow ? score_stretch(call, unit, scratch, call->k, 1) : score_stretch(call, unit, scratch, call->k, 0);
}

/* Rows of a padded sum, in the dtype of tables. */
INLINE void put_rows(
    const float *sums, int64_t rows, int64_t width, int64_t padded, void *into, int64_t offset, int narrow
) {
    for (int64_t row = 0; row < rows; row++)
        if (narrow) narrow_row(sums + row * padded, width, into, offset + row * width);
        else memcpy((float *)into + offset + row * width, sums + row * padded, 4 * width);
}

/* The parts of a head's gradients of keys and transform, summed in the order of their stretches. */
static void table_unit(const void *argument, int64_t head, char *scratch) {
    const struct score_gradients *call = argument;
    int64_t stretches = (call->tokens + call->stretch - 1) / call->stretch, size = call->n * call->half,
            width = call->width;
    int64_t padded = whole_vectors(width);
    float *sums = (float *)scratch;
    memset(sums, 0, 4 * 2 * size);
    for (int64_t part = 0; part < stretches; part++)
        add(sums, 1, call->parts + (head * stretches + part) * 2 * size, 2 * size);
    put_rows(sums, 1, size, size, call->into_row_keys, head * size, (int)call->narrow);
    put_rows(sums + size, 1, size, size, call->into_column_keys, head * size, (int)call->narrow);
    if (!call->transform) return;
    memset(sums, 0, 4 * width * padded);
    for (int64_t part = 0; part < stretches; part++)
        add(sums, 1, call->transform_parts + (head * stretches + part) * width * padded, width * padded);
    put_rows(sums, width, width, padded, call->into_transform, head * width * width, (int)call->narrow);
}

static void score_tables_unit(const void *argument, int64_t head, char *scratch) {
    const struct score_gradients *call = argument;
    (void)scratch;
    if (call->narrow) widen_keys(&call->tables, call->row_keys, call->column_keys, head, call->n * call->half);
    if (call->transform) {
        int64_t width = call->width, offset = head * width * width;
        float *into = call->tables.transforms + head * call->tables.transform;
        pad(call->transform, offset, (int)call->narrow, width, width, into, whole_vectors(width));
    }
}

/* Return 0, or 1 where there is no memory. */
EXPORTED int midus_score_gradients(const struct score_gradients *caller) {
    struct score_gradients call = *caller;
    int64_t stretches = (call.tokens + call.stretch - 1) / call.stretch, keys = 2 * call.n * call.half, failed = 0;
    int64_t padded = call.transform ? whole_vectors(call.width) : 0,
            sums = call.width * padded > keys ? call.width * padded : keys;
    call.groups = groups_of(call.heads, stretches, call.threads, call.bank_head);
    if (call.narrow || call.transform)
        failed = new_tables(&call.tables, call.heads, call.narrow ? keys : 0, call.width * padded) ||
                 run_units(score_tables_unit, &call, call.heads, 1, 0);
    int64_t numbers = 3 * BLOCK * padded + call.width + 4 * call.half + 5 * call.k;
    failed = failed || run_units(score_unit, &call, call.groups * stretches, call.threads, 4 * numbers) ||
             run_units(table_unit, &call, call.heads, call.threads, 4 * sums);
    free(call.tables.keys);
    return (int)failed;
}
