"""The option `addressing`: slots are retrieved by the content of a token, or at random."""

from collections.abc import Mapping
from typing import Any, Literal

from midus_hf.config.memory_types import DeclaredControl

Addressing = Literal["content", "random"]
ADDRESSING_HELP = (
    "how slots are retrieved. content: by what a token holds; random: by a query that is drawn anew for every token and pass, as "
    "long as the token's own query, so that it says nothing of the text: a control"
)
# Control of every memory that has the option `addressing`.
RANDOM_SLOTS: Mapping[DeclaredControl, Mapping[str, Any]] = {"random-slots": {"addressing": "random"}}
