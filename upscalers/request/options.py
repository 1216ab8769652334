"""Options of methods and runs, as a person requests them."""

from collections.abc import Mapping
from typing import Any

from midus_config.options import read_options
from upscalers.request.errors import refusing_requests


def parse_options(options_class: type, values: Mapping[str, Any], what: str) -> Any:
    """As `midus_config.options.read_options`; what it refuses is a request that cannot be carried out.

    Raises:
        RequestError: If a key is unknown or a value is refused.
    """
    with refusing_requests():
        return read_options(options_class, values, what)
