"""The option `addressing`: slots are retrieved by the content of a token, or at random."""

from collections.abc import Mapping
from typing import Any, Literal

from midus_hf.config.memory_types import DeclaredControl

Addressing = Literal["content", "random"]
ADDRESSING_HELP = (
    "what slots are retrieved by. content: what a token holds; random: a query that is drawn anew for every token and pass, of the "
    "length of its own, so that addresses say nothing: a control"
)
# Control of every memory that has the option `addressing`.
RANDOM_SLOTS: Mapping[DeclaredControl, Mapping[str, Any]] = {"random-slots": {"addressing": "random"}}
