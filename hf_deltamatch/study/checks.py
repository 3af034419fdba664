"""Checks of what a study's file holds. Each names the place, what is there and what may be there."""

from __future__ import annotations

import math
from typing import Any

_NUMBERS = ("a number", "a whole number", "a positive number")


def refuse(name: str, value: Any, allowed: str) -> None:
    """
    Raises:
        ValueError: always.
    """
    # YAML reads 3e-3 as text: the dot is part of its numbers.
    as_text = isinstance(value, str) and allowed.startswith(_NUMBERS)
    hint = " (YAML numbers need a dot: 3.0e-3)" if as_text else ""
    raise ValueError(f"study: {name} is {value!r}; it must be {allowed}{hint}.")


def whole(name: str, value: Any, least: int) -> None:
    """True is no number, though Python counts it as one; PyTorch counts in 64 bits."""
    fine = isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63
    if not fine:
        refuse(name, value, f"a whole number, {least} or more")


def number(
    name: str, value: Any, *, above: float | None = None, least: float = 0.0, most: float = math.inf
) -> None:
    """Finite; more than ``above``, or from ``least`` to ``most``."""
    fine = isinstance(value, int | float) and not isinstance(value, bool)
    fine = fine and abs(value) <= 1e300
    if above is not None:
        if not (fine and value > above):
            refuse(name, value, "a positive number")
    elif not (fine and least <= value <= most):
        end = "or more" if most == math.inf else f"to {most:g}"
        refuse(name, value, f"a number, {least:g} {end}")


def one_of(name: str, value: Any, allowed: tuple) -> None:
    # `1 in (True, False)` holds.
    if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
        refuse(name, value, f"one of {', '.join(map(repr, allowed))}")


def text(name: str, value: Any) -> None:
    """A name: it stands in headings, tables and lines of text."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        refuse(name, value, "text of printable characters, on one line")


def texts(name: str, value: Any) -> None:
    if (
        not isinstance(value, list | tuple)
        or not value
        or not all(isinstance(v, str) for v in value)
    ):
        refuse(name, value, "a list of names")
    for one in value:
        text(name, one)


def json_types(value: Any, where: str) -> None:
    """Results hold the whole file as JSON, which has no dates, bytes, NaN, or names but text."""
    if isinstance(value, dict):
        for key, inside in value.items():
            if not isinstance(key, str):
                raise ValueError(
                    f"study: {where} has the key {key!r}, a {type(key).__name__}; keys are text. Quote it."
                )
            json_types(inside, f"{where}.{key}")
    elif isinstance(value, list):
        for at, inside in enumerate(value):
            json_types(inside, f"{where}[{at}]")
    elif isinstance(value, float) and not math.isfinite(value):
        refuse(where, value, "a finite number")
    elif not isinstance(value, str | int | float | None):
        refuse(
            where,
            value,
            f"text, a number, true or false, not a {type(value).__name__}, as YAML reads it. Quote it",
        )
