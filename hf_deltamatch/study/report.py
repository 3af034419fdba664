"""What a study found: losses and their gaps to the baseline, paired over seeds."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

from hf_deltamatch.study.spec import Study

CLOSE, WORSE = 0.02, 0.05
"""Nats. The claim: DM within ``CLOSE`` of the baseline wherever that is stable; SD more than
``WORSE`` above it, or diverged, somewhere."""


def build_report(study: Study, rows: dict[str, dict]) -> dict:
    """JSON types: per setting and arm the losses over seeds, and the verdict on the claim.

    ``rows`` by key, as in the results file; runs of other versions of the file do not count.
    """
    mine = [(run, rows[run.key]) for run in study.runs if run.key in rows]
    settings = {}
    for setting in study.settings:
        arms = {}
        base = _by_seed(mine, setting, study.baseline)
        for arm in study.arms:
            found = _by_seed(mine, setting, arm)
            if not found:
                continue
            arms[arm] = _arm(found, None if arm == study.baseline else base)
        if arms:
            settings[setting] = arms
    some = next((row for _, row in mine if row["status"] != "failed"), {})
    return {
        "name": study.name,
        "baseline": study.baseline,
        "runs": {"planned": len(study.runs), "present": len(mine)},
        "settings": settings,
        "claim": _claim(settings, study.baseline),
        "corpus": some.get("corpus"),
        "environment": some.get("environment"),
        "precision": some.get("precision"),
        "parameters": some.get("parameters"),
        "study": study.source,
    }


def _by_seed(mine: list, setting: str, arm: str) -> dict[int, dict]:
    return {run.seed: row for run, row in mine if (run.setting, run.arm) == (setting, arm)}


def _arm(found: dict[int, dict], base: dict[int, dict] | None) -> dict:
    ran = {seed: row for seed, row in found.items() if row["status"] != "failed"}
    finals = {s: r["final_loss"] for s, r in ran.items()}
    out = {
        "seeds": sorted(found),
        "status": {str(s): r["status"] for s, r in found.items()},
        "diverged": sum(r["status"] == "diverged" for r in ran.values()),
        "failed": len(found) - len(ran),
        "final_loss": _spread(list(finals.values())),
        "held_out_loss": _spread([r["held_out_loss"] for r in ran.values()]),
        "grad_norm_last": _spread([r["grad_norm_last"] for r in ran.values()]),
        "skipped_steps": sum(r["skipped_steps"] for r in ran.values()),
        "seconds": _spread([r["seconds"] for r in ran.values()]),
        "tokens_per_second": _spread([r["tokens_per_second"] for r in ran.values()]),
    }
    residuals = [v for r in ran.values() for v in r["residual"]["values"] if v is not None]
    if residuals:
        out["residual"] = {"median": statistics.median(residuals), "max": max(residuals)}
    if base is not None:
        pairs = [
            (row["final_loss"], base[seed]["final_loss"])
            for seed, row in ran.items()
            if seed in base and base[seed]["status"] != "failed"
        ]
        out["gap"] = _spread([a - b for a, b in pairs if None not in (a, b)])
        out["gap"]["not_finite"] = sum(None in pair for pair in pairs)
    return out


def _spread(values: list) -> dict:
    """Mean and standard deviation of the finite values; None where there are too few."""
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return {
        "n": len(finite),
        "mean": statistics.fmean(finite) if finite else None,
        "std": statistics.stdev(finite) if len(finite) > 1 else None,
        "values": finite,
    }


def _claim(settings: dict, baseline: str) -> dict | None:
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
        "sd_worse": worse,
        "dm_holds": bool(close) and not far,
        "sd_holds": bool(worse),
    }


def to_markdown(report: dict, image: str | None = None) -> str:
    """The report as a page."""
    runs = report["runs"]
    lines = [f"# Study: {report['name']}", ""]
    lines.append(
        f"{runs['present']} of {runs['planned']} runs. Loss: mean of a run's last steps, nats per "
        f"token; mean ± standard deviation over seeds. Gap: to {report['baseline']}, paired over seeds "
        "(same weights, same data). Residual: row-sum residual of dS, median over steps and seeds."
    )
    lines += ["", *_facts(report), ""]
    for setting, arms in report["settings"].items():
        lines += [
            f"## {setting}",
            "",
            f"| arm | loss | gap to {report['baseline']} | diverged | held-out loss | residual | "
            "gradient norm | tokens/s |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for arm, a in arms.items():
            n = len(a["seeds"]) - a["failed"]
            residual = f"{a['residual']['median']:.1e}" if "residual" in a else ""
            failed = f", {a['failed']} failed" if a["failed"] else ""
            cells = [
                arm,
                _pm(a["final_loss"]),
                _gap(a),
                f"{a['diverged']} of {n}{failed}",
                _pm(a["held_out_loss"]),
                residual,
                _pm(a["grad_norm_last"], 2),
                ""
                if a["tokens_per_second"]["mean"] is None
                else f"{a['tokens_per_second']['mean']:,.0f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    if report["claim"] is not None:
        lines += _claim_lines(report["claim"])
    if image:
        lines += [f"![losses]({image})", ""]
    return "\n".join(lines)


def _facts(report: dict) -> list[str]:
    corpus, env = report["corpus"], report["environment"]
    if not corpus or not env:
        return []
    packages = env["packages"]
    versions = ", ".join(f"{p} {packages[p]}" for p in ("torch", "triton") if p in packages)
    return [
        f"{env['device']}, {versions}; {report['parameters']:,} parameters, {report['precision']}. "
        f"Corpus: {corpus['source']}, {corpus['documents']} documents, {corpus['train_bytes']:,} bytes "
        f"(SHA-256 {corpus['train_sha256'][:12]}…)."
    ]


def _pm(spread: dict, digits: int = 3) -> str:
    if spread["mean"] is None:
        return "not finite"
    text = f"{spread['mean']:.{digits}f}"
    return text if spread["std"] is None else f"{text} ± {spread['std']:.{digits}f}"


def _gap(arm: dict) -> str:
    gap = arm.get("gap")
    if gap is None:
        return ""
    lost = f" ({gap['not_finite']} pairs not finite)" if gap["not_finite"] else ""
    if gap["mean"] is None:
        return f"–{lost}"
    text = f"{gap['mean']:+.3f}"
    return (text if gap["std"] is None else f"{text} ± {gap['std']:.3f}") + lost


def _claim_lines(claim: dict) -> list[str]:
    names = lambda found: ", ".join(found) or "none"
    return [
        "## The claim",
        "",
        f"* DM within {CLOSE} nats of MP (mean gap) wherever MP is stable: "
        f"**{'holds' if claim['dm_holds'] else 'does not hold'}**. Close: {names(claim['dm_close'])}; "
        f"not close: {names(claim['dm_not_close'])}; MP diverged or missing: "
        f"{names(claim['mp_unstable'])}.",
        f"* SD worse by more than {WORSE} nats, or diverged more often than MP, in at least one "
        f"setting: **{'holds' if claim['sd_holds'] else 'does not hold'}**. Worse: "
        f"{names(claim['sd_worse'])}.",
        "",
    ]


def plot(study: Study, rows: dict[str, dict], path: Path) -> None:
    """Loss over steps, a panel per setting: thin lines are seeds, thick ones their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    mine = [(run, rows[run.key]) for run in study.runs if run.key in rows]
    mine = [(run, row) for run, row in mine if row["status"] != "failed"]
    shown = [s for s in study.settings if any(run.setting == s for run, _ in mine)]
    if not shown:
        return
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.6 * columns, 3.4 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, setting in zip(axes.flat, shown, strict=False):
        for index, arm in enumerate(study.arms):
            curves = [_smooth(row["loss"]) for row in _by_seed(mine, setting, arm).values()]
            for curve in curves:
                axis.plot(curve, color=f"C{index}", linewidth=0.6, alpha=0.5)
            if curves:
                mean = [statistics.fmean(p) for p in zip(*curves, strict=False)]
                axis.plot(mean, color=f"C{index}", linewidth=1.6, label=arm)
        finals = [row["best_loss"] for run, row in mine if run.setting == setting]
        finals = [f for f in finals if f is not None]
        if finals:
            axis.set_ylim(0.9 * min(finals), max(2.2 * min(finals), 1.1 * max(finals)))
        axis.set_title(setting)
        axis.set_xlabel("step")
        axis.set_ylabel("loss (nats per token)")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _smooth(losses: list, width: int = 20) -> list[float]:
    values = [math.nan if x is None else x for x in losses]
    return [statistics.fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def write_report(study: Study, rows: dict[str, dict], folder: Path, *, png: bool = True) -> dict:
    """``report.json``, ``report.md`` and, with matplotlib, ``report.png`` in ``folder``."""
    report = build_report(study, rows)
    image = None
    if png:
        try:
            plot(study, rows, folder / "report.png")
            image = "report.png"
        except ImportError:
            pass
    for name, text in (
        ("report.json", json.dumps(report, indent=2) + "\n"),
        ("report.md", to_markdown(report, image)),
    ):
        partial = folder / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(folder / name)
    return report
