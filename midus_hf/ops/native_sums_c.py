"""C of the sums behind gathering: of gradients by row of a table."""

SUMS = r"""
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
    int64_t vectors, across, ranges; /* of a piece; pieces beside one another; ranges of rows, below one another */
};

/* Some columns of a range of rows of one table, by one thread in the order of tokens: the same bits, whatever the pieces. */
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
            int64_t place = token * call->gradient_token + head * call->gradient_head + column;
            int64_t entry = (token * call->heads + head) * call->k;
            floats gradient[4];
            for (int i = 0; i < vectors; i++)
                if (i < whole)
                    gradient[i] = load(call->gradient, place + i * LANES, narrow);
                else if (i == whole)
                    gradient[i] = load_some(call->gradient, place + i * LANES, narrow, rest);
            for (int64_t m = 0; m < call->k; m++) {
                int64_t slot = slot_at(call->slots, entry + m, call->slot_bytes);
                if (slot < from || slot >= to) continue;
                float *row = into + slot * width, weight = call->weights[entry + m];
                if (whole == vectors) {
                    for (int i = 0; i < vectors; i++) store(row, i * LANES, 0, load(row, i * LANES, 0) + weight * gradient[i]);
                    continue;
                }
                for (int i = 0; i < whole; i++) store(row, i * LANES, 0, load(row, i * LANES, 0) + weight * gradient[i]);
                floats last = load_some(row, whole * LANES, 0, rest) + weight * gradient[whole];
                store_some(row, whole * LANES, 0, last, rest);
            }
        }
}

static void sum_unit(const void *given, int64_t unit, char *scratch) {
    const struct pieces *pieces = given;
    (void)scratch;
    if (pieces->vectors == 4)
        pieces->call->gradient_narrow ? sum_piece(pieces, unit, 4, 1) : sum_piece(pieces, unit, 4, 0);
    else if (pieces->vectors == 2)
        pieces->call->gradient_narrow ? sum_piece(pieces, unit, 2, 1) : sum_piece(pieces, unit, 2, 0);
    else
        pieces->call->gradient_narrow ? sum_piece(pieces, unit, 1, 1) : sum_piece(pieces, unit, 1, 0);
}

/* Pieces are so narrow that a table's lies in a processor's cache, and as many as threads can share evenly. */
EXPORTED int midus_row_sums(const struct row_sums *call) {
    int64_t tables = call->into_head ? call->heads : 1, threads = call->threads;
    struct pieces pieces = {call, 8, 0, 1};
    int64_t units;
    do {
        pieces.vectors /= 2;
        pieces.across = (call->width + pieces.vectors * LANES - 1) / (pieces.vectors * LANES);
        units = tables * pieces.across;
    } while (pieces.vectors > 1 && (units < threads || (units < 8 * threads && units % threads)));
    if (units < threads) pieces.ranges = (2 * threads + units - 1) / units;
    return run_units(sum_unit, &pieces, units * pieces.ranges, threads, 0);
}
"""
