"""Numbers of chapters or layers as people write them: `3,7-9`."""

import re
from collections.abc import Sequence

from upscalers.request.errors import RequestError

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def parse_numbers(text: str, num_chapters: int, option: str = "chapters") -> tuple[int, ...]:
    """Return the numbers in a list of numbers and ranges of chapters or layers, in the order in which they are named.

    Args:
        text: A list such as `"3,7-9"`, which stands for 3, 7, 8 and 9.
        num_chapters: C, the number of chapters, or of layers.
        option: Name of the option in messages. Default: `"chapters"`.

    Raises:
        RequestError: If the text is no list of this form, names a number twice, or names a number of C or more.
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise RequestError(f"{option} is {text!r}; expected numbers and ranges such as 3,7-9.")
        if last >= num_chapters:
            raise RequestError(f"{option} is {text!r}; expected numbers from 0 to {num_chapters - 1}, the model's.")
        numbers += range(first, last + 1)
    if len(set(numbers)) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise RequestError(f"{option} is {text!r}, which names {twice} twice; expected each once.")
    return tuple(numbers)


def written(numbers: Sequence[int]) -> str:
    """Return numbers in the form that `parse_numbers` reads, with successive numbers as ranges."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
