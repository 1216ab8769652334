/* Units of work, shared by threads. */

#ifndef MIDUS_THREADS_H
#define MIDUS_THREADS_H

#include <stdint.h>

#define STRETCH 64 /* tokens of one unit of work, where rows of a table are gathered */

/* One unit of the work of a call. What a unit writes, no other unit writes: which thread takes which changes no bit.
 */
typedef void unit_function(const void *call, int64_t unit, char *scratch);

/* Run units 0 to `units` - 1 by up to `threads` threads, each with `scratch_bytes` of scratch of its own, aligned to
 * 64 bytes. Return 0, or 1 where there is no memory for the scratch. */
int run_units(unit_function *unit, const void *call, int64_t units, int64_t threads, int64_t scratch_bytes);

/* Into how many groups heads are divided. The heads of a group are worked on one after another in each stretch of
 * tokens: all heads are one group where they share a bank and there are stretches enough for all threads; each head is
 * a group where it has a bank of its own, so that this bank stays in the cache. */
int64_t groups_of(int64_t heads, int64_t stretches, int64_t threads, int64_t has_own_bank);

#endif
