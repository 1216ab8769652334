"""What a user asks for: the request of an upscaling, options as given, errors, and the display of progress."""

import contextlib
import dataclasses
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from midus_hf.config.errors import RequestError
from midus_hf.config.options import read_options

_LONGEST_REASON = 400


class MethodError(RuntimeError):
    """Error for a method that breaks its contract, not a wrong request; nothing was written."""


class VerificationError(RuntimeError):
    """Error for a result that does not do what the method promises."""


def one_line(error: BaseException) -> str:
    """Return another library's error message as one line of at most 400 characters."""
    return textwrap.shorten(str(error), _LONGEST_REASON, placeholder=" ...")


_DTYPES = ("auto", "float32", "bfloat16", "float16")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([A-Za-z]*)$")
_SEEDS = 2**63
_OF_THE_COMMAND = {"layers": "placement", "num_new_layers": "num-new-layers"}
_OF_THE_COMMAND |= {name: name for name in ("placement", "seed", "dtype")}


def parse_options(options_class: type, values: Mapping[str, Any], subject: str) -> Any:
    """Read options as `read_options` of `midus_hf.config` does; messages name the command's option."""
    fields = {field.name for field in dataclasses.fields(options_class)}
    misplaced = values.keys() & _OF_THE_COMMAND.keys() - fields
    if misplaced:
        key = min(misplaced)
        raise RequestError(
            f"{subject} has no option {key!r}. It is an option of the command: --{_OF_THE_COMMAND[key]}."
        )
    return read_options(options_class, values, subject)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What `upscale` is asked for. A file for `--config` has the same keys.

    Args:
        base: A folder or a hub id, `"owner/name"` or `"owner/name@revision"`. For a dry run, a folder with only a `config.json`
            suffices.
        method: Name of a method.
        output: The folder to make; needed unless `dry_run`. Default: None.
        corpus: Texts that the method reads; the same as its option `corpus`. Default: None.
        num_new_layers: K, number of new layers. Default: half the layers of the base, or the nearest number that the placement
            allows.
        placement: `distributed`, `top-heavy`, `bottom-heavy`, `llama-pro`, or indices, `"1,4,7"`, `[1, 4, 7]` or `4`. Default: the
            method's.
        options: The method's options. Default: none.
        seed: Random seed. Default: 0.
        dtype: Dtype of the output: `auto`, `float32`, `bfloat16` or `float16`. Default: `"auto"`, the base's.
        max_shard_size: Largest size of a weight file, such as `"5GB"`, or a number of bytes. Default: `"5GB"`.
        dry_run: Whether to only report what would be done. Default: False.
        verify: Whether to refuse NaN and infinite values in the base, and to compare both models' logits, layer by layer, in the
            memory that one module takes. Default: True.
        overwrite: Whether to replace an existing checkpoint, if `upscale` or `strip` wrote all of the folder. Default: False.
        push_to_hub: A repository to upload the result to. Default: None.
        private: Whether to make a new repository private; an existing one must be private. Default: False, the owner's default.
    """

    base: str
    method: str
    output: str | None = None
    corpus: str | None = None
    num_new_layers: int | None = None
    placement: int | str | list[int] | None = None
    options: dict | None = None
    seed: int = 0
    dtype: str = "auto"
    max_shard_size: int | str = "5GB"
    dry_run: bool = False
    verify: bool = True
    overwrite: bool = False
    push_to_hub: str | None = None
    private: bool = False

    @property
    def max_shard_bytes(self) -> int:
        return parse_size(self.max_shard_size)

    def check(self) -> None:
        """Raise `RequestError` for a value, or values together, that no base and no method would take."""
        if self.dtype not in _DTYPES:
            raise RequestError(f"dtype is {self.dtype!r}; expected one of: {', '.join(_DTYPES)}.")
        check_seed(self.seed)
        if self.base == "":
            raise RequestError("base is ''; expected a folder or a hub id.")
        parse_size(self.max_shard_size)
        if self.output is None and not self.dry_run:
            raise RequestError("output is missing; expected the folder to make. Pass --output DIR, or --dry-run.")
        if self.private and not self.push_to_hub:
            raise RequestError("private is given without push-to-hub; expected both. Pass --push-to-hub REPO as well.")


def parse_size(size: str | int) -> int:
    """Return the bytes of a size such as `"5GB"`, `"500MB"` or a plain number; refuse others."""
    match = _SIZE.match(str(size).strip())
    if not match or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise RequestError(f"max-shard-size is {size!r}; expected a positive size such as 5GB or 500MB.")
    return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))


def check_seed(seed: Any) -> None:
    """Raise `RequestError` if a seed, of any type, is not an integer from 0 to 2^63 - 1."""
    if type(seed) is not int or not 0 <= seed < _SEEDS:
        raise RequestError(f"seed is {seed!r}; expected an integer from 0 to {_SEEDS - 1}.")


class Progress:
    """Progress that shows nothing; a subclass shows stages that follow each other."""

    def start(self) -> None:
        """Start showing progress, when the work begins."""

    def stage(self, name: str, num_steps: int, unit: str = "steps") -> None:
        """Begin the next stage, which has `num_steps` steps; `unit` may be `"bytes"`."""

    def advance(self, num_steps: int = 1) -> None:
        """Count `num_steps` more steps of the stage as done."""

    def warn(self, message: str) -> None:
        """Show a warning."""

    def note(self, message: str) -> None:
        """Show a message to the user."""

    def finish(self) -> None:
        """Stop showing progress, when all work is done or has failed."""


@contextlib.contextmanager
def show_progress(progress: Progress) -> Iterator[None]:
    progress.start()
    try:
        yield
    finally:
        progress.finish()
