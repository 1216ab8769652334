/* Products of small matrices that lie in the processor's cache: values are transformed while a block of tokens is at
 * hand. */

#ifndef MIDUS_PRODUCTS_H
#define MIDUS_PRODUCTS_H

#include "vectors.h"

/* Rows of a tile, and vectors across: registers hold a tile's sums and factors. */
#define ROWS 4
#define ACROSS (LANES == 16 ? 4 : 2)
#define MOST_ACROSS 4

/* A table of floats, [rows][width], widened and padded by zeros: [rows][padded], of which vectors can be read. */
INLINE void pad(
    const void *table, int64_t offset, int narrow, int64_t rows, int64_t width, float *into, int64_t padded
) {
    for (int64_t row = 0; row < rows; row++, offset += width) {
        int64_t column = 0;
        for (; column + LANES <= width; column += LANES)
            store(into, row * padded + column, 0, load(table, offset + column, narrow));
        for (; column < width; column++) into[row * padded + column] = one_of(table, offset + column, narrow);
        for (; column < padded; column++) into[row * padded + column] = 0;
    }
}

/* The same transposed: [width][padded], where `rows` are padded. */
INLINE void pad_transposed(
    const void *table, int64_t offset, int narrow, int64_t rows, int64_t width, float *into, int64_t padded
) {
    for (int64_t column = 0; column < width; column++) {
        for (int64_t row = 0; row < rows; row++)
            into[column * padded + row] = one_of(table, offset + row * width + column, narrow);
        for (int64_t row = rows; row < padded; row++) into[column * padded + row] = 0;
    }
}

/* Tables of all heads in float32, as they are computed with; `keys` is where their memory begins. */
struct tables {
    float *keys, *transforms; /* [heads][2][n * half]; [heads][width][padded] */
    int64_t transform; /* numbers of one head's transform */
};

/* Make room for the tables of a call. Return 1 where there is no memory, else 0; `free(tables->keys)` frees all. */
static inline int new_tables(struct tables *tables, int64_t heads, int64_t keys, int64_t transform) {
    tables->keys = aligned_alloc(64, aligned(4 * heads * keys) + aligned(4 * heads * transform) + 64);
    if (!tables->keys) return 1;
    tables->transforms = tables->keys + aligned(4 * heads * keys) / 4;
    tables->transform = transform;
    return 0;
}

static inline void widen_keys(
    const struct tables *tables, const void *row_keys, const void *column_keys, int64_t head, int64_t size
) {
    widen(row_keys, head * size, 1, tables->keys + head * 2 * size, size);
    widen(column_keys, head * size, 1, tables->keys + head * 2 * size + size, size);
}

/* Some vectors of some rows of the sum over p, in order, of left[i][p] * right[p][j]; `more` adds the sum to `into`.
 */
INLINE void tile(
    const float *left, int64_t left_row, int64_t left_inner, const float *right, int64_t right_row, float *into,
    int64_t into_row, int64_t rows, int64_t inner, int across, int more
) {
    floats sums[ROWS][MOST_ACROSS];
    const float *from[ROWS];
    for (int i = 0; i < ROWS; i++) {
        int64_t row = smaller(i, rows - 1); /* rows that are not there repeat the last one, and are not stored */
        from[i] = left + row * left_row;
        for (int j = 0; j < across; j++) sums[i][j] = more ? load(into, row * into_row + j * LANES, 0) : (floats){0};
    }
    for (int64_t p = 0; p < inner; p++) {
        floats factors[MOST_ACROSS];
        for (int j = 0; j < across; j++) factors[j] = load(right, p * right_row + j * LANES, 0);
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < across; j++) sums[i][j] += from[i][p * left_inner] * factors[j];
    }
    for (int i = 0; i < ROWS && i < rows; i++)
        for (int j = 0; j < across; j++) store(into, i * into_row + j * LANES, 0, sums[i][j]);
}

/* into[i][j] (+)= left[i][p] * right[p][j], where the columns j are a multiple of LANES. An element is summed in the
 * same order in any tile. */
static inline void multiply(
    const float *left, int64_t left_row, int64_t left_inner, const float *right, int64_t right_row, float *into,
    int64_t into_row, int64_t rows, int64_t columns, int64_t inner, int more
) {
    for (int64_t row = 0; row < rows; row += ROWS) {
        const float *first = left + row * left_row;
        float *there = into + row * into_row;
        int64_t column = 0, left_rows = rows - row;
        for (; column + ACROSS * LANES <= columns; column += ACROSS * LANES) {
            const float *factors = right + column;
            if (more)
                tile(
                    first, left_row, left_inner, factors, right_row, there + column, into_row, left_rows, inner,
                    ACROSS, 1
                );
            else
                tile(
                    first, left_row, left_inner, factors, right_row, there + column, into_row, left_rows, inner,
                    ACROSS, 0
                );
        }
        for (; column < columns; column += LANES)
            tile(
                first, left_row, left_inner, right + column, right_row, there + column, into_row, left_rows, inner, 1,
                more
            );
    }
}

/* The product of a vector with a row of a table. */
INLINE float product(const float *vector, const void *table, int64_t offset, int64_t width, int narrow) {
    floats sums[2] = {0};
    int64_t column = 0;
    for (; column + 2 * LANES <= width; column += 2 * LANES)
        for (int i = 0; i < 2; i++)
            sums[i] += load(vector, column + i * LANES, 0) * load(table, offset + column + i * LANES, narrow);
    for (; column + LANES <= width; column += LANES)
        sums[0] += load(vector, column, 0) * load(table, offset + column, narrow);
    if (column < width)
        sums[1] +=
            load_some(vector, column, 0, width - column) * load_some(table, offset + column, narrow, width - column);
    return sum_of(sums[0] + sums[1]);
}

#endif
