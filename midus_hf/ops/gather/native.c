/* The three sums behind gathering: of rows by weight, of gradients by row, and of products by weight. */

#include "products.h"
#include "threads.h"
#include "vectors.h"

#define MOST_CACHED (1 << 21) /* bytes of some columns of a table, up to which these are worth a pass of their own */

static int reaches_outside(const void *slots, int64_t count, int64_t bytes, int64_t rows) {
    uint64_t largest = 0; /* of slots below zero: larger than any other */
    for (int64_t i = 0; i < count; i++) {
        uint64_t slot = (uint64_t)slot_at(slots, i, bytes);
        largest = slot > largest ? slot : largest;
    }
    return count && largest >= (uint64_t)rows;
}

#define OUTSIDE 2 /* returned where a slot is outside of the table */

/* A call, as `library.py` packs it. */
struct gathers {
    const void *bank, *slots, *factors; /* factors: weights [tokens][k], float32, or vectors [tokens][width] */
    void *into;
    int64_t tokens, rows, width, k, factors_token, narrow, factors_narrow, slot_bytes, threads;
    int64_t passes; /* not the caller's, who leaves room: passes over some columns each, or 1 over all */
};

/* Columns of the weighted sum of a token's rows. */
INLINE void weigh_columns(const struct gathers *call, int64_t token, int64_t column, int64_t end, int narrow) {
    int64_t width = call->width, entry = token * call->k;
    const float *weights = (const float *)call->factors + entry;
    for (; column + 4 * LANES <= end; column += 4 * LANES) {
        floats sums[4] = {0};
        for (int64_t m = 0; m < call->k; m++) {
            int64_t offset = slot_at(call->slots, entry + m, call->slot_bytes) * width + column;
            for (int i = 0; i < 4; i++) sums[i] += weights[m] * load(call->bank, offset + i * LANES, narrow);
        }
        for (int i = 0; i < 4; i++) store(call->into, token * width + column + i * LANES, narrow, sums[i]);
    }
    for (; column < end; column += LANES) {
        int64_t count = smaller(LANES, end - column);
        floats sum = {0};
        for (int64_t m = 0; m < call->k; m++) {
            int64_t offset = slot_at(call->slots, entry + m, call->slot_bytes) * width + column;
            floats row =
                count == LANES ? load(call->bank, offset, narrow) : load_some(call->bank, offset, narrow, count);
            sum += weights[m] * row;
        }
        if (count == LANES) store(call->into, token * width + column, narrow, sum);
        else store_some(call->into, token * width + column, narrow, sum, count);
    }
}

static void weigh_unit(const void *argument, int64_t unit, char *scratch) {
    const struct gathers *call = argument;
    (void)scratch;
    int64_t stretches = (call->tokens + STRETCH - 1) / STRETCH, from = unit % stretches * STRETCH,
            pass = unit / stretches;
    int64_t to = smaller(from + STRETCH, call->tokens), column = pass * 4 * LANES;
    int64_t end = call->passes == 1 ? call->width : smaller(column + 4 * LANES, call->width);
    for (int64_t token = from; token < to; token++) {
        if (token + 1 < to)
            for (int64_t m = 0; m < call->k; m++) {
                int64_t offset =
                    slot_at(call->slots, (token + 1) * call->k + m, call->slot_bytes) * call->width + column;
                prefetch(call->bank, offset, smaller(end - column, 4 * LANES), (int)call->narrow);
            }
        call->narrow ? weigh_columns(call, token, column, end, 1) : weigh_columns(call, token, column, end, 0);
    }
}

/* The weighted sums of rows. A table of which the cache holds some columns is read some columns at a time. Return 0, 1
 * where there is no memory, or OUTSIDE. */
EXPORTED int midus_weighted_rows(const struct gathers *caller) {
    struct gathers call = *caller;
    int64_t bytes = call.rows * 4 * LANES * (call.narrow ? 2 : 4), stretches = (call.tokens + STRETCH - 1) / STRETCH;
    if (reaches_outside(call.slots, call.tokens * call.k, call.slot_bytes, call.rows)) return OUTSIDE;
    call.passes = bytes <= MOST_CACHED && call.width ? (call.width + 4 * LANES - 1) / (4 * LANES) : 1;
    return run_units(weigh_unit, &call, call.passes * stretches, call.threads, 0);
}

INLINE void multiply_token(const struct gathers *call, int64_t token, const float *vector, int narrow) {
    float *into = (float *)call->into + token * call->k;
    for (int64_t m = 0; m < call->k; m++) {
        int64_t entry = token * call->k + m;
        if (entry + AHEAD < call->tokens * call->k)
            prefetch(
                call->bank, slot_at(call->slots, entry + AHEAD, call->slot_bytes) * call->width, call->width, narrow
            );
        into[m] = product(
            vector, call->bank, slot_at(call->slots, entry, call->slot_bytes) * call->width, call->width, narrow
        );
    }
}

static void multiply_unit(const void *argument, int64_t unit, char *scratch) {
    const struct gathers *call = argument;
    float *wide = (float *)scratch;
    for (int64_t token = unit * STRETCH; token < smaller((unit + 1) * STRETCH, call->tokens); token++) {
        widen(call->factors, token * call->factors_token, (int)call->factors_narrow, wide, call->width);
        call->narrow ? multiply_token(call, token, wide, 1) : multiply_token(call, token, wide, 0);
    }
}

/* The products of vectors with rows. Return 0, 1 where there is no memory, or OUTSIDE. */
EXPORTED int midus_gathered_products(const struct gathers *call) {
    if (reaches_outside(call->slots, call->tokens * call->k, call->slot_bytes, call->rows)) return OUTSIDE;
    return run_units(multiply_unit, call, (call->tokens + STRETCH - 1) / STRETCH, call->threads, 4 * call->width);
}

/* A call, as `library.py` packs it. */
struct row_sums {
    const void *gradient, *slots;
    const float *weights;
    float *into; /* [heads of the table][rows][width] */
    int64_t tokens, heads, rows, width, k;
    int64_t gradient_token, gradient_head, into_head; /* strides; into_head is 0 where heads share a table */
    int64_t gradient_narrow, slot_bytes, threads;
};

struct pieces {
    const struct row_sums *call;
    int64_t vectors; /* across one piece */
    int64_t across, ranges; /* pieces beside one another; ranges of rows below one another */
};

/* Some columns of a range of rows of one table, by one thread in the order of tokens: the same bits, whatever the
 * pieces. */
INLINE void sum_piece(const struct pieces *pieces, int64_t unit, int64_t vectors, int narrow) {
    const struct row_sums *call = pieces->call;
    int64_t piece = unit % pieces->across, below = unit / pieces->across, range = below % pieces->ranges;
    int64_t table = below / pieces->ranges;
    int64_t from = call->rows * range / pieces->ranges, to = call->rows * (range + 1) / pieces->ranges;
    int64_t heads = call->into_head ? 1 : call->heads, width = call->width, column = piece * vectors * LANES;
    int64_t columns = smaller(vectors * LANES, width - column), whole = columns / LANES, rest = columns % LANES;
    float *into = call->into + table * call->into_head + column;
    for (int64_t row = from; row < to; row++) memset(into + row * width, 0, 4 * columns);
    for (int64_t token = 0; token < call->tokens; token++)
        for (int64_t head = table; head < table + heads; head++) {
            int64_t offset = token * call->gradient_token + head * call->gradient_head + column;
            int64_t entry = (token * call->heads + head) * call->k;
            floats gradient[4];
            for (int i = 0; i < vectors; i++)
                if (i < whole) gradient[i] = load(call->gradient, offset + i * LANES, narrow);
                else if (i == whole) gradient[i] = load_some(call->gradient, offset + i * LANES, narrow, rest);
            for (int64_t m = 0; m < call->k; m++) {
                int64_t slot = slot_at(call->slots, entry + m, call->slot_bytes);
                if (slot < from || slot >= to) continue;
                float *row = into + slot * width, weight = call->weights[entry + m];
                if (whole == vectors) {
                    for (int i = 0; i < vectors; i++)
                        store(row, i * LANES, 0, load(row, i * LANES, 0) + weight * gradient[i]);
                    continue;
                }
                for (int i = 0; i < whole; i++)
                    store(row, i * LANES, 0, load(row, i * LANES, 0) + weight * gradient[i]);
                floats last = load_some(row, whole * LANES, 0, rest) + weight * gradient[whole];
                store_some(row, whole * LANES, 0, last, rest);
            }
        }
}

static void sum_unit(const void *argument, int64_t unit, char *scratch) {
    const struct pieces *pieces = argument;
    (void)scratch;
    if (pieces->vectors == 4)
        pieces->call->gradient_narrow ? sum_piece(pieces, unit, 4, 1) : sum_piece(pieces, unit, 4, 0);
    else if (pieces->vectors == 2)
        pieces->call->gradient_narrow ? sum_piece(pieces, unit, 2, 1) : sum_piece(pieces, unit, 2, 0);
    else pieces->call->gradient_narrow ? sum_piece(pieces, unit, 1, 1) : sum_piece(pieces, unit, 1, 0);
}

/* The sums of gradients by row. Pieces are so narrow that a processor's cache holds a table's piece, and as many as
 * threads can share evenly. Return 0, 1 where there is no memory, or OUTSIDE. */
EXPORTED int midus_row_sums(const struct row_sums *call) {
    int64_t tables = call->into_head ? call->heads : 1, threads = call->threads;
    struct pieces pieces = {call, 8, 0, 1};
    int64_t units;
    if (reaches_outside(call->slots, call->tokens * call->heads * call->k, call->slot_bytes, call->rows))
        return OUTSIDE;
    do {
        pieces.vectors /= 2;
        pieces.across = (call->width + pieces.vectors * LANES - 1) / (pieces.vectors * LANES);
        units = tables * pieces.across;
    } while (pieces.vectors > 1 && (units < threads || (units < 8 * threads && units % threads)));
    if (units < threads) pieces.ranges = (2 * threads + units - 1) / units;
    return run_units(sum_unit, &pieces, units * pieces.ranges, threads, 0);
}
