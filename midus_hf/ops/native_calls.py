"""What the compiled bodies are called with: C's structures, field by field, as bytes.

They are packed, not built of `ctypes.Structure`: that takes longer than a decoding step's lookup.
"""

import struct


def _structure(addresses: str, numbers: str, more: str = "") -> struct.Struct:
    """A structure of pointers, zero for none, and of 64-bit integers, in this order; `more` are codes of further fields."""
    return struct.Struct(f"@{len(addresses.split())}P{len(numbers.split())}q{more}")


_OWN = "32x"
"""Fields that C adds to its own copy, zero until then: `struct tables` and the number of groups of heads."""

LOOKUP_CALL = _structure(
    "query row_keys column_keys bank transform residual output slots weights",
    "tokens heads n half width k query_token query_head residual_token residual_head bank_head "
    "narrow residual_narrow slot_bytes raw threads",
    f"d{_OWN}",  # temperature
)

SCORE_GRADIENTS_CALL = _structure(
    "gradient query row_keys column_keys bank transform slots weights into_query into_row_keys into_column_keys into_transform "
    "passed parts transform_parts",
    "tokens heads n half width k gradient_token gradient_head query_token query_head bank_head "
    "narrow gradient_narrow slot_bytes stretch raw threads",
    f"d{_OWN}",  # temperature
)

ROW_SUMS_CALL = _structure(
    "gradient slots weights into",
    "tokens heads rows width k gradient_token gradient_head into_head gradient_narrow slot_bytes threads",
)

GATHERS_CALL = _structure(
    "bank slots given into", "tokens rows width k given_token narrow given_narrow slot_bytes threads", "8x"
)

DEPTH_CALL = struct.Struct("@P3qP3q5P8qdd24x")
"""Of query and gradient address and strides of texts, heads and tokens; the addresses of slots, output, lse, lse_gradient and
into_query; texts, heads, kv_heads, tokens, width, count, narrow, threads; scaling and softcap."""
