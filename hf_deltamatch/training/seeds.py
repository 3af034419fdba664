"""Numbers of runs that differ in their seed: mean, deviation, and gaps of pairs that share one."""

from __future__ import annotations

import math
import statistics


def spread(values: list) -> dict:
    """Mean and standard deviation of the finite values; None where there are too few."""
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return {
        "n": len(finite),
        "mean": statistics.fmean(finite) if finite else None,
        "std": statistics.stdev(finite) if len(finite) > 1 else None,
        "values": finite,
    }


def paired_gap(found: dict[int, dict], to: dict[int, dict], name: str = "final_loss") -> dict:
    """:func:`spread` of the number ``name``, ``found`` minus ``to``, over the seeds that both have; runs
    that failed do not count, and ``not_finite`` counts pairs without a number."""
    ran = {seed: row for seed, row in found.items() if row["status"] != "failed"}
    pairs = {
        seed: (row[name], to[seed][name])
        for seed, row in ran.items()
        if seed in to and to[seed]["status"] != "failed"
    }
    finite = {seed: a - b for seed, (a, b) in pairs.items() if None not in (a, b)}
    return {
        **spread(list(finite.values())),
        "by_seed": {str(seed): gap for seed, gap in finite.items()},
        "not_finite": len(pairs) - len(finite),
    }
