"""What the compiled bodies are called with: C's structures, field by field."""

import ctypes

_NUMBER, _ADDRESS = ctypes.c_int64, ctypes.c_void_p


def _structure(name: str, addresses: str, numbers: str, *more: tuple[str, type]) -> type[ctypes.Structure]:
    fields = [
        *((field, _ADDRESS) for field in addresses.split()),
        *((field, _NUMBER) for field in numbers.split()),
        *more,
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


LookupCall = _structure(
    "LookupCall",
    "query row_keys column_keys bank residual output slots weights",
    "tokens heads n half width k query_token query_head residual_token residual_head bank_head "
    "narrow residual_narrow slot_bytes stretch threads",
    ("temperature", ctypes.c_double),
)

ScoreGradientsCall = _structure(
    "ScoreGradientsCall",
    "gradient query row_keys column_keys bank slots weights into_query into_row_keys into_column_keys parts",
    "tokens heads n half width k gradient_token gradient_head query_token query_head bank_head "
    "narrow gradient_narrow slot_bytes stretch threads",
    ("temperature", ctypes.c_double),
)

RowSumsCall = _structure(
    "RowSumsCall",
    "gradient slots weights into",
    "tokens heads rows width k gradient_token gradient_head into_head gradient_narrow slot_bytes ranges threads",
)
