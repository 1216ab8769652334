"""Rates at which arms are trained, and what they are called."""

from collections.abc import Mapping

Rate = Mapping[str, float]
"""Keys of `midus train`'s rates, with their values."""


def rate_name(rate: Rate) -> str:
    """A rate as the name of a folder, without the words that all of them share: `0.001`, or `0.001,value=0.01`."""
    named = [(key.removesuffix("learning_rate").rstrip("_"), value) for key, value in rate.items()]
    return ",".join(f"{name}={value:g}" if name else f"{value:g}" for name, value in named) or "recipe"


def check_rates(rates: list[float | dict[str, float]] | None) -> None:
    """See that rates are numbers above 0, each in a folder of its own.

    Args:
        rates: As a comparison or an arm is told them.

    Raises:
        ValueError: If they are not.
    """
    if rates is not None and not rates:
        raise ValueError("rates is an empty list; expected one or more, or leave it out.")
    names: set[str] = set()
    for rate in rates or ():
        values = as_keys(rate)
        if not values or min(values.values()) <= 0:
            raise ValueError(
                f"rates has {rate}; expected numbers above 0, or mappings from keys of rates to such numbers."
            )
        name = rate_name(values)
        if name in names:
            raise ValueError(f"rates has {name} twice, by which a folder is called; expected rates that differ.")
        names.add(name)


def as_keys(rate: float | Mapping[str, float]) -> Rate:
    """A rate as keys of `midus train`.

    Args:
        rate: A number is that of `learning_rate`.
    """
    return rate if isinstance(rate, Mapping) else {"learning_rate": rate}
