"""What a study claims of its arms, and whether its runs bear it out. Gaps are paired over seeds: the
same first weights, the same data.
"""

from __future__ import annotations

from hf_deltamatch.study.spec import Claim
from hf_deltamatch.training.seeds import paired_gap

CLOSE, WORSE = 0.02, 0.05
"""Nats. The three arms' claim: DM within ``CLOSE`` of the baseline wherever that is stable; SD more
than ``WORSE`` above it, or diverged, somewhere."""


def check(claim: Claim, found: dict[int, dict], to: dict[int, dict]) -> dict:
    """A line of the file's ``claims`` in one setting. ``holds`` is None where there is no bound or no
    pair; where ``to`` diverged, there is nothing to be close to."""
    gap = paired_gap(found, to)
    stable = all(row["status"] != "diverged" for row in to.values())
    holds = None
    if claim.within is not None and stable and (gap["n"] or gap["not_finite"]):
        calm = all(row["status"] != "diverged" for row in found.values())
        holds = calm and not gap["not_finite"] and abs(gap["mean"]) <= claim.within
    return {
        "arm": claim.arm,
        "to": claim.to,
        "within": claim.within,
        "gap": gap,
        "holds": holds,
    }


def lines(found: list[dict]) -> list[str]:
    """The page's table of :func:`check`'s answers."""
    out = [
        "## Gaps and bounds",
        "",
        "Mean ± standard deviation of the gaps paired over seeds, and the gap of each seed.",
        "",
        "| setting | arm | to | gap | by seed | bound | |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        gap = one["gap"]
        mean = "–" if gap["mean"] is None else f"{gap['mean']:+.4f}"
        if gap["std"] is not None:
            mean += f" ± {gap['std']:.4f}"
        if gap["not_finite"]:
            mean += f" ({gap['not_finite']} not finite)"
        seeds = ", ".join(f"{value:+.4f}" for value in gap["by_seed"].values())
        bound = "" if one["within"] is None else f"{one['within']:g}"
        word = {True: "**holds**", False: "**does not hold**", None: ""}[one["holds"]]
        if one["within"] is not None and not word:
            paired = gap["n"] or gap["not_finite"]
            lost = "diverged or is missing" if paired else f"or {one['arm']} failed or is missing"
            word = f"{one['to']} {lost}"
        cells = [one["setting"], one["arm"], one["to"], mean, seeds, bound, word]
        out.append("| " + " | ".join(cells) + " |")
    return [*out, ""]


def three_arms(settings: dict, baseline: str) -> dict | None:
    """Whether the three arms' claim holds in what ran; None without those arms."""
    if baseline != "MP" or not any({"SD", "DM"} <= set(arms) for arms in settings.values()):
        return None
    stable = {
        n: a for n, a in settings.items() if "MP" in a and not a["MP"]["diverged"] and "DM" in a
    }
    far, close = [], []
    for name, arms in stable.items():
        gap = arms["DM"]["gap"]["mean"]
        fine = gap is not None and abs(gap) <= CLOSE and not arms["DM"]["diverged"]
        (close if fine else far).append(name)
    worse = [
        name
        for name, arms in settings.items()
        if "SD" in arms
        and (
            arms["SD"]["diverged"] > arms.get("MP", {}).get("diverged", 0)
            or (arms["SD"]["gap"]["mean"] or 0.0) > WORSE
        )
    ]
    return {
        "dm_close": close,
        "dm_not_close": far,
        "mp_unstable": [n for n in settings if n not in stable],
        "gaps": {
            arm: {
                n: {k: a[arm]["gap"][k] for k in ("mean", "std")}
                for n, a in settings.items()
                if arm in a
            }
            for arm in ("DM", "SD")
        },
        "sd_worse": worse,
        "dm_holds": bool(close) and not far,
        "sd_holds": bool(worse),
    }


def three_arms_lines(claim: dict) -> list[str]:
    def names(found: list[str], arm: str | None = None) -> str:
        # Names may hold commas.
        return (
            "; ".join(n if arm is None else f"{n}{_gap(claim['gaps'][arm][n])}" for n in found)
            or "none"
        )

    return [
        "## The claim",
        "",
        f"* DM within {CLOSE} nats of MP (mean gap) wherever MP is stable: "
        f"**{'holds' if claim['dm_holds'] else 'does not hold'}**. Close: {names(claim['dm_close'], 'DM')}. "
        f"Not close: {names(claim['dm_not_close'], 'DM')}. MP diverged or missing: "
        f"{names(claim['mp_unstable'])}.",
        f"* SD worse by more than {WORSE} nats, or diverged more often than MP, in at least one "
        f"setting: **{'holds' if claim['sd_holds'] else 'does not hold'}**. Worse: "
        f"{names(claim['sd_worse'], 'SD')}.",
        "",
    ]


def _gap(gap: dict) -> str:
    if gap["mean"] is None:
        return ""
    spread = "" if gap["std"] is None else f" ± {gap['std']:.3f}"
    return f" ({gap['mean']:+.3f}{spread})"
