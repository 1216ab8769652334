"""Rates at which variants are trained, and the names of these rates."""

from collections.abc import Mapping

# Rate keys of `midus train`, such as `learning_rate`, with their values.
Rate = Mapping[str, float]


def rate_name(rate: Rate) -> str:
    """Return the folder name of a rate, without `learning_rate` in its keys: `0.001`, or `0.001,value=0.01`; `recipe` if empty."""
    named = [(key.removesuffix("learning_rate").rstrip("_"), value) for key, value in rate.items()]
    return ",".join(f"{name}={value:g}" if name else f"{value:g}" for name, value in named) or "recipe"


def check_rates(rates: list[float | dict[str, float]] | None) -> None:
    """Check that rates are numbers above 0, no two of them with the same folder name.

    Args:
        rates: Rates of a comparison or of a variant; None passes.

    Raises:
        ValueError: If the list is empty, a rate is not above 0, or two rates have the same name.
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
            raise ValueError(f"rates has {name} twice; expected rates that differ, since each names a folder.")
        names.add(name)


def as_keys(rate: float | Mapping[str, float]) -> Rate:
    """Return a rate as keys of `midus train`; a plain number is the value of `learning_rate`."""
    return rate if isinstance(rate, Mapping) else {"learning_rate": rate}
