/* Attention of some tokens to extra keys, and to keys in the blocks of a cache, in one softmax. */

#include "products.h"
#include "threads.h"
#include "vectors.h"

#define MOST_ROWS 32 /* queries of a unit of work, unless more heads share their keys */

/* Neighbouring tokens of a request, as `native.py` packs them. */
struct part {
    const void *const *tables; /* extra keys and values of each layer, [heads][extra][width] */
    const uint8_t *reads; /* [tokens][extra] */
    const float *bias; /* the same, or none */
    const void *blocks; /* of the request, in the order of its tokens */
    int64_t first, tokens, position, extra; /* `first` of all tokens, at `position` of the request */
};

/* A call, as `library.py` packs it. All tables are narrow, or none is. */
struct paged_attention {
    const void *query, *cache;
    void *output;
    const struct part *parts;
    double scale;
    int64_t layer, count, heads, group, width, block_tokens, block_bytes; /* parts; bytes of a block's number */
    int64_t query_token, query_head, output_token, cache_block; /* strides */
    int64_t first_key, key_head, first_value,
        value_head; /* in a block: keys [width][tokens], values [tokens][width] */
    int64_t window; /* tokens that a token reads, with itself; 0 for all */
    int64_t narrow, threads;
    int64_t stretch, padded_width, columns; /* not the caller's, who leaves room */
};

/* A table of which vectors can be read: where it lies, or a copy that is widened and padded. */
INLINE const float *readable(
    const void *table, int64_t offset, int64_t narrow, int64_t rows, int64_t width, int64_t padded, float *copy
) {
    if (!narrow && width == padded) return (const float *)table + offset;
    pad(table, offset, (int)narrow, rows, width, copy, padded);
    return copy;
}

/* Score the extra keys for the queries of one token. Return whether it reads any. */
static int score_extra(
    const struct paged_attention *call, const struct part *part, int64_t head, int64_t token, const float *query,
    float *scores
) {
    int some = 0;
    for (int64_t key = 0; key < whole_vectors(part->extra); key++) {
        int is_read = key < part->extra && part->reads[token * part->extra + key];
        int64_t offset = (head * part->extra + key) * call->width;
        float bias = is_read && part->bias ? part->bias[token * part->extra + key] : 0;
        some |= is_read;
        for (int64_t row = 0; row < call->group; row++) {
            const float *vector = query + row * call->width;
            float score = -INFINITY;
            if (is_read && call->narrow)
                score = product(vector, part->tables[2 * call->layer], offset, call->width, 1) + bias;
            else if (is_read) score = product(vector, part->tables[2 * call->layer], offset, call->width, 0) + bias;
            scores[row * call->columns + key] = score;
        }
    }
    return some;
}

/* Turn scores into shares, up to a factor. Return their sum. */
static float weigh(float *scores, int64_t columns) {
    floats mosts = all(-INFINITY), sums = {0};
    for (int64_t column = 0; column < columns; column += LANES) {
        floats score = load(scores, column, 0);
        mosts = pick(score > mosts, score, mosts);
    }
    float most = mosts[0];
    for (int lane = 1; lane < LANES; lane++) most = mosts[lane] > most ? mosts[lane] : most;
    for (int64_t column = 0; column < columns; column += LANES) {
        floats share = exponential(load(scores, column, 0) - most);
        store(scores, column, 0, share);
        sums += share;
    }
    return sum_of(sums);
}

static int64_t stretches_of(const struct paged_attention *call, const struct part *part) {
    return (part->tokens + call->stretch - 1) / call->stretch;
}

/* Some tokens of a part, and heads that share their keys. */
static void attend_unit(const void *argument, int64_t unit, char *scratch) {
    const struct paged_attention *call = argument;
    const struct part *part = call->parts;
    for (; unit >= stretches_of(call, part) * call->heads; part++) unit -= stretches_of(call, part) * call->heads;
    int64_t group = call->group, width = call->width, padded = call->padded_width, block = call->block_tokens;
    int64_t head = unit % call->heads, first = unit / call->heads * call->stretch;
    int64_t count = smaller(call->stretch, part->tokens - first), rows = count * group;
    int64_t position = part->position + first, length = position + count, number = part->first + first;
    int64_t extra = whole_vectors(part->extra), columns = extra, some = 0, reads[MOST_ROWS];
    int64_t from = call->window && position >= call->window ? (position + 1 - call->window) / block : 0;
    float *sums = (float *)scratch, *scores = sums + call->stretch * group * padded;
    float *query = scores + call->stretch * group * call->columns, *copy = query + call->stretch * group * width;

    for (int64_t each = 0; each < count; each++) {
        float *of_token = query + each * group * width;
        for (int64_t row = 0; row < group; row++) {
            int64_t offset = (number + each) * call->query_token + (head * group + row) * call->query_head;
            widen(call->query, offset, (int)call->narrow, of_token + row * width, width);
        }
        for (int64_t column = 0; column < group * width; column++) of_token[column] *= (float)call->scale;
        reads[each] = score_extra(call, part, head, first + each, of_token, scores + each * group * call->columns);
        some |= reads[each];
    }
    if (!some) return;
    for (int64_t n = from; n * block < length; n++) {
        int64_t there = smaller(block, length - n * block), across = whole_vectors(there);
        int64_t start = slot_at(part->blocks, n, call->block_bytes) * call->cache_block;
        const float *keys = readable(
            call->cache, start + call->first_key + head * call->key_head, call->narrow, width, block,
            whole_vectors(block), copy
        );
        multiply(query, width, 1, keys, whole_vectors(block), scores + columns, call->columns, rows, across, width, 0);
        for (int64_t row = 0; row < rows; row++) {
            float *of_row = scores + row * call->columns + columns;
            int64_t after = position + row / group + 1 - n * block; /* the place after that of the token */
            int64_t begin = call->window ? smaller(after - call->window, across) : 0, end = smaller(after, there);
            for (int64_t column = 0; column < begin; column++) of_row[column] = -INFINITY;
            for (int64_t column = end < 0 ? 0 : end; column < across; column++) of_row[column] = -INFINITY;
        }
        columns += across;
    }
    float divisors[rows];
    for (int64_t row = 0; row < rows; row++) divisors[row] = weigh(scores + row * call->columns, columns);

    const float *values = readable(
        part->tables[2 * call->layer + 1], head * part->extra * width, call->narrow, part->extra, width, padded, copy
    );
    multiply(scores, call->columns, 1, values, padded, sums, padded, rows, padded, part->extra, 0);
    columns = extra;
    for (int64_t n = from; n * block < length; n++) {
        int64_t there = smaller(block, length - n * block); /* what lies after them may be no number */
        int64_t start = slot_at(part->blocks, n, call->block_bytes) * call->cache_block;
        int64_t offset = start + call->first_value + head * call->value_head;
        values = readable(call->cache, offset, call->narrow, there, width, padded, copy);
        multiply(scores + columns, call->columns, 1, values, padded, sums, padded, rows, padded, there, 1);
        columns += whole_vectors(there);
    }
    for (int64_t row = 0; row < rows; row++) {
        if (!reads[row / group]) continue;
        int64_t start = (number + row / group) * call->output_token + (head * group + row % group) * width;
        for (int64_t column = 0; column < width; column += LANES) {
            floats share = load(sums, row * padded + column, 0) / divisors[row];
            if (column + LANES <= width) store(call->output, start + column, (int)call->narrow, share);
            else store_some(call->output, start + column, (int)call->narrow, share, width - column);
        }
    }
}

/* Overwrite the output of tokens that read an extra key. Return 0, or 1 where there is no memory. */
EXPORTED int midus_paged_attention(const struct paged_attention *caller) {
    struct paged_attention call = *caller;
    int64_t padded_block = whole_vectors(call.block_tokens), units = 0, most = 1, columns = 0;
    int64_t copied = call.block_tokens, copy = call.width * padded_block;
    for (int64_t i = 0; i < call.count; i++) {
        const struct part *part = call.parts + i;
        int64_t blocks = (part->position + part->tokens + call.block_tokens - 1) / call.block_tokens;
        int64_t across = whole_vectors(part->extra) + blocks * padded_block;
        columns = across > columns ? across : columns;
        copied = part->extra > copied ? part->extra : copied;
        most = part->tokens > most ? part->tokens : most;
    }
    call.stretch = smaller(call.group < MOST_ROWS ? MOST_ROWS / call.group : 1, most);
    call.padded_width = whole_vectors(call.width);
    call.columns = columns;
    copied *= call.padded_width;
    for (int64_t i = 0; i < call.count; i++) units += stretches_of(&call, call.parts + i) * call.heads;
    int64_t numbers = call.stretch * call.group * (call.padded_width + columns + call.width);
    numbers += copied > copy ? copied : copy;
    return run_units(attend_unit, &call, units, call.threads, 4 * numbers);
}
