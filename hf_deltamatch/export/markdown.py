"""Pieces of Markdown that cards are made of."""

from __future__ import annotations


def table(heads: tuple, rows: list[tuple]) -> str:
    line = lambda cells: f"| {' | '.join(map(str, cells))} |"
    return "\n".join([line(heads), line(["---"] * len(heads)), *map(line, rows)])


def mean_and_deviation(over: dict, digits: int, sign: str = "") -> str:
    """Of ``training.seeds.spread``: ``1.234 ± 0.005``, the mean alone of one value, – of none."""
    if over["mean"] is None:
        return "–"
    text = f"{over['mean']:{sign}.{digits}f}"
    return text if over["std"] is None else f"{text} ± {over['std']:.{digits}f}"
