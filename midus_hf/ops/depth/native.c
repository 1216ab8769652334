/* Attention over the depth: the query heads of each token read the slots of the token's own position.
 *
 * Slots are as many tensors, each of which lies in memory by itself. A block of tokens reads slot after slot, so that
 * what it reads of a slot lies together; while its gradient is computed, the rows that were read are still in the
 * processor's cache. */

#include "threads.h"
#include "vectors.h"

/* Heads of all tokens, [texts][heads][tokens][width], of any strides. */
struct heads {
    const void *table;
    int64_t text, head, token;
};

struct slot {
    struct heads key, value;
    void *into_key, *into_value; /* [texts][tokens][kv_heads][width]; NULL where no gradient is wanted */
};

/* A call, as `calls.py` packs it. */
struct depth {
    struct heads query, gradient; /* gradient: of the output */
    const struct slot *slots;
    void *output; /* [texts][tokens][heads][width] */
    float *lse; /* [texts][tokens][heads] */
    const float *lse_gradient; /* as lse */
    void *into_query; /* as the output; NULL where none is wanted */
    int64_t texts, heads, kv_heads, tokens, width, count;
    int64_t narrow, threads;
    double scaling, softcap; /* softcap 0: scores are not capped */
    /* Not the caller's, who leaves room: tokens of a unit, numbers of a padded row, numbers of padded scores. */
    int64_t block, padded, columns;
};

#define MOST_BLOCK 8
#define BLOCK_BYTES (1 << 15) /* of the scratch of a block, which a processor's first cache holds */
#define TOGETHER 4 /* rows whose sums registers hold while another row is read once for all */

/* Read, or write, a vector of a row, of whose last numbers there may be fewer than a vector has. */
INLINE floats load_row(const void *table, int64_t offset, int64_t column, int64_t width, int narrow) {
    if (column + LANES <= width) return load(table, offset + column, narrow);
    return load_some(table, offset + column, narrow, width - column);
}

INLINE void store_row(void *table, int64_t offset, int64_t column, int64_t width, int narrow, floats x) {
    if (column + LANES <= width) store(table, offset + column, narrow, x);
    else store_some(table, offset + column, narrow, x, width - column);
}

/* The products of up to TOGETHER rows with one row of a table. */
INLINE void some_products(
    const float *rows, int64_t padded, const void *table, int64_t offset, int64_t width, int narrow, float *into,
    int64_t step, int count
) {
    floats sums[TOGETHER];
    for (int row = 0; row < count; row++) sums[row] = (floats){0};
    for (int64_t column = 0; column < width; column += LANES) {
        floats numbers = load_row(table, offset, column, width, narrow);
        for (int row = 0; row < count; row++) sums[row] += load(rows, row * padded + column, 0) * numbers;
    }
    for (int row = 0; row < count; row++) into[row * step] = sum_of(sums[row]);
}

/* The products of any number of rows with one row of a table. */
INLINE void products(
    const float *rows, int64_t count, int64_t padded, const void *table, int64_t offset, int64_t width, int narrow,
    float *into, int64_t step
) {
    for (; count >= TOGETHER; count -= TOGETHER, rows += TOGETHER * padded, into += TOGETHER * step)
        some_products(rows, padded, table, offset, width, narrow, into, step, TOGETHER);
    if (count == 1) some_products(rows, padded, table, offset, width, narrow, into, step, 1);
    if (count == 2) some_products(rows, padded, table, offset, width, narrow, into, step, 2);
    if (count == 3) some_products(rows, padded, table, offset, width, narrow, into, step, 3);
}

/* Which text, and which of its tokens, a unit is of. */
struct block {
    int64_t text, from, tokens;
};

INLINE struct block block_of(const struct depth *call, int64_t unit) {
    int64_t blocks = (call->tokens + call->block - 1) / call->block, from = unit % blocks * call->block;
    return (struct block){unit / blocks, from, smaller(call->block, call->tokens - from)};
}

INLINE int64_t offset_of(const struct heads *heads, struct block block, int64_t head, int64_t t) {
    return block.text * heads->text + head * heads->head + (block.from + t) * heads->token;
}

/* Widen the rows of heads of a block, and pad them by zeros: [tokens][heads][padded]. */
INLINE void widen_heads(
    const struct depth *call, struct block block, const struct heads *heads, float *into, int narrow
) {
    for (int64_t t = 0; t < block.tokens; t++)
        for (int64_t h = 0; h < call->heads; h++, into += call->padded)
            for (int64_t column = 0; column < call->width; column += LANES)
                store(
                    into, column, 0, load_row(heads->table, offset_of(heads, block, h, t), column, call->width, narrow)
                );
}

/* The products of all rows of heads of a block with the rows of a slot, into [tokens][heads][columns]; `next` is read
 * after this slot. */
INLINE void slot_products(
    const struct depth *call, struct block block, const float *rows, const struct heads *slot,
    const struct heads *next, float *into, int narrow
) {
    int64_t group = call->heads / call->kv_heads;
    for (int64_t t = 0; t < block.tokens; t++)
        for (int64_t k = 0; k < call->kv_heads; k++) {
            int64_t first = t * call->heads + k * group;
            if (next) prefetch(next->table, offset_of(next, block, k, t), call->width, narrow);
            products(
                rows + first * call->padded, group, call->padded, slot->table, offset_of(slot, block, k, t),
                call->width, narrow, into + first * call->columns, call->columns
            );
        }
}

/* Scores from products, in place. */
INLINE void scale_and_cap(const struct depth *call, float *scores) {
    for (int64_t column = 0; column < call->columns; column += LANES)
        store(scores, column, 0, load(scores, column, 0) * (float)call->scaling);
    if (call->softcap)
        for (int64_t j = 0; j < call->count; j++)
            scores[j] = (float)call->softcap * tanhf(scores[j] / (float)call->softcap);
}

/* Which lanes are beyond the last slot. */
INLINE ints beyond(int64_t column, int64_t count) {
    ints lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    return lanes >= (int32_t)smaller(count - column, LANES);
}

/* Put weights in place of scores, 0 beyond the last slot. Return the logarithm of the sum of exponentials. */
INLINE float softmax_of(const struct depth *call, float *scores) {
    float most = scores[0], sum = 0;
    for (int64_t j = 1; j < call->count; j++) most = scores[j] > most ? scores[j] : most;
    for (int64_t column = 0; column < call->columns; column += LANES) {
        floats weights = exponential(load(scores, column, 0) - most);
        weights = pick(beyond(column, call->count), (floats){0}, weights);
        store(scores, column, 0, weights);
        sum += sum_of(weights);
    }
    for (int64_t column = 0; column < call->columns; column += LANES)
        store(scores, column, 0, load(scores, column, 0) / sum);
    return most + logf(sum);
}

INLINE void read_block(const struct depth *call, int64_t unit, char *scratch, int narrow) {
    struct block block = block_of(call, unit);
    int64_t rows = block.tokens * call->heads, group = call->heads / call->kv_heads, padded = call->padded;
    float *query = (float *)scratch, *read = query + call->block * call->heads * padded;
    float *scores = read + call->block * call->heads * padded;
    widen_heads(call, block, &call->query, query, narrow);
    memset(read, 0, 4 * rows * padded);
    memset(scores, 0, 4 * rows * call->columns);
    for (int64_t j = 0; j < call->count; j++) {
        const struct slot *slot = call->slots + j;
        const struct heads *next = j + 1 < call->count ? &slot[1].key : &call->slots->value;
        slot_products(call, block, query, &slot->key, next, scores + j, narrow);
    }
    for (int64_t row = 0; row < rows; row++) {
        int64_t offset = (block.text * call->tokens + block.from) * call->heads + row;
        scale_and_cap(call, scores + row * call->columns);
        call->lse[offset] = softmax_of(call, scores + row * call->columns);
    }
    for (int64_t j = 0; j < call->count; j++) {
        const struct slot *slot = call->slots + j;
        for (int64_t t = 0; t < block.tokens; t++)
            for (int64_t k = 0; k < call->kv_heads; k++) {
                int64_t first = t * call->heads + k * group, offset = offset_of(&slot->value, block, k, t);
                if (j + 1 < call->count)
                    prefetch(slot[1].value.table, offset_of(&slot[1].value, block, k, t), call->width, narrow);
                const float *weights = scores + first * call->columns + j;
                float *into = read + first * padded;
                for (int64_t column = 0; column < call->width; column += LANES) {
                    floats value = load_row(slot->value.table, offset, column, call->width, narrow);
                    for (int64_t g = 0; g < group; g++) {
                        floats sum = load(into, g * padded + column, 0) + weights[g * call->columns] * value;
                        store(into, g * padded + column, 0, sum);
                    }
                }
            }
    }
    for (int64_t row = 0; row < rows; row++) {
        int64_t offset = ((block.text * call->tokens + block.from) * call->heads + row) * call->width;
        for (int64_t column = 0; column < call->width; column += LANES)
            store_row(call->output, offset, column, call->width, narrow, load(read, row * padded + column, 0));
    }
}

/* Gradients of scores in place of what values add along the gradient, and weights in place of scores. */
INLINE void differentiate_row(const struct depth *call, float *scores, float *added, float lse, float mean) {
    for (int64_t column = 0; column < call->columns; column += LANES) {
        floats score = load(scores, column, 0), scale = all((float)call->scaling);
        floats weights = pick(beyond(column, call->count), (floats){0}, exponential(score - lse));
        if (call->softcap) {
            floats ratio = score / (float)call->softcap;
            scale *= 1 - ratio * ratio;
        }
        store(scores, column, 0, weights);
        store(added, column, 0, weights * (load(added, column, 0) - mean) * scale);
    }
}

/* The gradient of a token's key and value of a head, and its share in those of queries. */
INLINE void differentiate_slot(
    const struct depth *call, const struct slot *slot, int64_t key, int64_t into, const float *weights,
    const float *of_scores, const float *query, const float *along, float *of_query, int narrow
) {
    int64_t group = call->heads / call->kv_heads, padded = call->padded, columns = call->columns;
    for (int64_t column = 0; column < call->width; column += LANES) {
        if (call->into_query) {
            floats numbers = load_row(slot->key.table, key, column, call->width, narrow);
            for (int64_t g = 0; g < group; g++) {
                floats sum = load(of_query, g * padded + column, 0) + of_scores[g * columns] * numbers;
                store(of_query, g * padded + column, 0, sum);
            }
        }
        if (slot->into_key) {
            floats of_key = {0}, of_value = {0};
            for (int64_t g = 0; g < group; g++) {
                of_key += of_scores[g * columns] * load(query, g * padded + column, 0);
                of_value += weights[g * columns] * load(along, g * padded + column, 0);
            }
            store_row(slot->into_key, into, column, call->width, narrow, of_key);
            store_row(slot->into_value, into, column, call->width, narrow, of_value);
        }
    }
}

INLINE void differentiate_block(const struct depth *call, int64_t unit, char *scratch, int narrow) {
    struct block block = block_of(call, unit);
    int64_t rows = block.tokens * call->heads, group = call->heads / call->kv_heads, padded = call->padded;
    int64_t most = call->block * call->heads, first_row = (block.text * call->tokens + block.from) * call->heads;
    float *query = (float *)scratch, *along = query + most * padded, *of_query = along + most * padded;
    float *scores = of_query + most * padded, *added = scores + most * call->columns;
    widen_heads(call, block, &call->query, query, narrow);
    widen_heads(call, block, &call->gradient, along, narrow);
    memset(of_query, 0, 4 * rows * padded);
    memset(scores, 0, 4 * rows * call->columns);
    memset(added, 0, 4 * rows * call->columns);
    for (int64_t j = 0; j < call->count; j++) {
        const struct slot *slot = call->slots + j;
        slot_products(call, block, query, &slot->key, &slot->value, scores + j, narrow);
        slot_products(call, block, along, &slot->value, j + 1 < call->count ? &slot[1].key : NULL, added + j, narrow);
    }
    for (int64_t row = 0; row < rows; row++) {
        int64_t offset = (first_row + row) * call->width;
        float mean;
        products(along + row * padded, 1, padded, call->output, offset, call->width, narrow, &mean, 1);
        mean -= call->lse_gradient[first_row + row];
        scale_and_cap(call, scores + row * call->columns);
        differentiate_row(
            call, scores + row * call->columns, added + row * call->columns, call->lse[first_row + row], mean
        );
    }
    for (int64_t j = 0; j < call->count; j++) {
        const struct slot *slot = call->slots + j;
        for (int64_t t = 0; t < block.tokens; t++)
            for (int64_t k = 0; k < call->kv_heads; k++) {
                int64_t first = t * call->heads + k * group;
                int64_t into = ((block.text * call->tokens + block.from + t) * call->kv_heads + k) * call->width;
                if (slot->into_key && j + 1 < call->count) {
                    prefetch_output(slot[1].into_key, into, call->width, narrow);
                    prefetch_output(slot[1].into_value, into, call->width, narrow);
                }
                differentiate_slot(
                    call, slot, offset_of(&slot->key, block, k, t), into, scores + first * call->columns + j,
                    added + first * call->columns + j, query + first * padded, along + first * padded,
                    of_query + first * padded, narrow
                );
            }
    }
    if (call->into_query)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t column = 0; column < call->width; column += LANES)
                store_row(
                    call->into_query, (first_row + row) * call->width, column, call->width, narrow,
                    load(of_query, row * padded + column, 0)
                );
}

static void read_unit(const void *call, int64_t unit, char *scratch) {
    ((const struct depth *)call)->narrow ? read_block(call, unit, scratch, 1) : read_block(call, unit, scratch, 0);
}

static void differentiate_unit(const void *call, int64_t unit, char *scratch) {
    ((const struct depth *)call)->narrow ? differentiate_block(call, unit, scratch, 1)
                                         : differentiate_block(call, unit, scratch, 0);
}

static int run_blocks(
    unit_function *unit, const struct depth *caller, int64_t heads_of_a_row, int64_t scores_of_a_row
) {
    struct depth call = *caller;
    call.padded = whole_vectors(call.width), call.columns = whole_vectors(call.count);
    int64_t token = 4 * call.heads * (heads_of_a_row * call.padded + scores_of_a_row * call.columns);
    int64_t fitting = BLOCK_BYTES / (token + 1);
    call.block = fitting < 1 ? 1 : smaller(fitting, MOST_BLOCK);
    int64_t units = call.texts * ((call.tokens + call.block - 1) / call.block);
    return run_units(unit, &call, units, call.threads, call.block * token);
}

/* What each head reads of the slots of its token, and the logarithm of the sum of exponentials of its scores. Return
 * 0, or 1 where there is no memory. */
EXPORTED int midus_depth(const struct depth *call) { return run_blocks(read_unit, call, 2, 1); }

/* The gradients of query, keys and values, for those of both results. Return 0, or 1 where there is no memory. */
EXPORTED int midus_depth_gradients(const struct depth *call) { return run_blocks(differentiate_unit, call, 3, 2); }
