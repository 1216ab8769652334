"""Options of methods and runs, as given in a request."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from midus_hf.config.errors import RequestError
from midus_hf.config.options import read_options

_SEEDS = 2**63
_OF_THE_COMMAND = {"layers": "placement", "num_new_layers": "num-new-layers"}
_OF_THE_COMMAND |= {name: name for name in ("placement", "seed", "dtype")}


def parse_options(options_class: type, values: Mapping[str, Any], subject: str) -> Any:
    """Read options as `midus_hf.config.options.read_options` does, but name the command's option for a key of its."""
    fields = {field.name for field in dataclasses.fields(options_class)}
    for key in values.keys() & _OF_THE_COMMAND.keys() - fields:
        raise RequestError(
            f"{subject} has no option {key!r}. It is an option of the command: --{_OF_THE_COMMAND[key]}."
        )
    return read_options(options_class, values, subject)


def check_seed(seed: Any) -> None:
    """Raise `RequestError` if a seed, of any type, is not an integer from 0 to 2^63 - 1."""
    if type(seed) is not int or not 0 <= seed < _SEEDS:
        raise RequestError(f"seed is {seed!r}; expected an integer from 0 to {_SEEDS - 1}.")
