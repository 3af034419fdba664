"""What a study found: losses and their gaps to the baseline, paired over seeds."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path

from hf_deltamatch.study import claims
from hf_deltamatch.study.plot import plot
from hf_deltamatch.study.sections import by_seed, sections
from hf_deltamatch.study.spec import Study
from hf_deltamatch.training.markdown import cell
from hf_deltamatch.training.seeds import paired_gap, spread

MOST_LETTERS = 400
"""Of an error on the page."""


def build_report(study: Study, rows: dict[str, dict]) -> dict:
    """JSON types: per setting and arm the losses over seeds, and the verdict on the claim.

    ``rows`` by key, as in the results file; runs of other versions of the file do not count.
    """
    mine = [(run, rows[run.key]) for run in study.runs if run.key in rows]
    settings, gaps = {}, []
    for setting, found in sections(study, mine).items():
        by_arm = {arm: by_seed(found, arm) for arm in study.arms}
        base = by_arm[study.baseline]
        settings[setting] = {
            arm: _arm(seeds, None if arm == study.baseline else base)
            for arm, seeds in by_arm.items()
            if seeds
        }
        gaps += [
            {"setting": setting, **claims.check(claim, by_arm[claim.arm], by_arm[claim.to])}
            for claim in study.claims
            if by_arm[claim.arm] and by_arm[claim.to]
        ]
    some = next((row for _, row in mine if row["status"] != "failed"), {})
    return {
        "name": study.name,
        "baseline": study.baseline,
        "runs": {"planned": len(study.runs), "present": len(mine)},
        "settings": settings,
        "claim": claims.three_arms(settings, study.baseline),
        "claims": gaps,
        "corpus": some.get("corpus"),
        "environment": some.get("environment"),
        "precision": some.get("precision"),
        "parameters": {
            run.setting: row["parameters"] for run, row in mine if row["status"] != "failed"
        },
        "study": study.source,
    }


def _arm(found: dict[int, dict], base: dict[int, dict] | None) -> dict:
    ran = {seed: row for seed, row in found.items() if row["status"] != "failed"}
    finals = {s: r["final_loss"] for s, r in ran.items()}
    out = {
        "seeds": sorted(found),
        "status": {str(s): r["status"] for s, r in found.items()},
        "diverged": sum(r["status"] == "diverged" for r in ran.values()),
        "failed": len(found) - len(ran),
        "final_loss": spread(list(finals.values())),
        "held_out_loss": spread([r["held_out_loss"] for r in ran.values()]),
        "grad_norm_last": spread([r["grad_norm_last"] for r in ran.values()]),
        "skipped_steps": sum(r["skipped_steps"] for r in ran.values()),
        "seconds": spread([r["seconds"] for r in ran.values()]),
        "tokens_per_second": spread([r["tokens_per_second"] for r in ran.values()]),
    }
    if len(ran) < len(found):
        errors = {s: r["error"] for s, r in found.items() if s not in ran}
        out["errors"] = {str(s): " ".join(error.split()) for s, error in errors.items()}
    residuals = [v for r in ran.values() for v in r["residual"]["values"] if v is not None]
    if residuals:
        out["residual"] = {"median": statistics.median(residuals), "max": max(residuals)}
    if base is not None:
        out["gap"] = paired_gap(ran, base)
    scored = {s: r["scores"] for s, r in ran.items() if "scores" in r}
    if scored:
        to = {s: r["scores"] for s, r in (base or {}).items() if "scores" in r}
        out["scores"] = _scores(scored, to)
    before = [r["held_out_before"] for r in ran.values() if "held_out_before" in r]
    if before:
        out["held_out_before"] = spread(before)
    return out


def _scores(found: dict[int, dict], base: dict[int, dict]) -> dict[str, dict]:
    """Of each metric the :func:`spread` over seeds, lm-eval's mean standard error, and the gap to the
    baseline, paired over seeds."""
    out = {}
    names = dict.fromkeys((t, m) for tasks in found.values() for t in tasks for m in tasks[t])
    for task, metric in names:
        at = lambda scores, t=task, m=metric: scores.get(t, {}).get(m, (None, None))
        errors = [at(s)[1] for s in found.values()]
        pairs = [(at(s)[0], at(base[seed])[0]) for seed, s in found.items() if seed in base]
        out[f"{task} {metric}"] = {
            **spread([at(s)[0] for s in found.values()]),
            "stderr": spread(errors)["mean"],
            "gap": spread([a - b for a, b in pairs if None not in (a, b)]),
        }
    return out


def to_markdown(report: dict, image: str | None = None) -> str:
    """The report as a page."""
    runs = report["runs"]
    lines = [f"# Study: {report['name']}", ""]
    lines.append(
        f"{runs['present']} of {runs['planned']} runs. Loss: mean of a run's last steps, nats per "
        f"token; mean ± standard deviation over seeds. Gap: to {report['baseline']}, paired over seeds "
        "(same weights, same data). Residual: row-sum residual of dS, median over steps and seeds. "
        "Tokens/s: of runs that may share a device, so nothing that arms can be compared by."
    )
    lines += ["", *_facts(report), ""]
    for setting, arms in report["settings"].items():
        lines += [
            f"## {setting}",
            "",
            f"| arm | loss | gap to {cell(report['baseline'])} | diverged | held-out loss | residual | "
            "gradient norm | tokens/s |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for arm, a in arms.items():
            n = len(a["seeds"]) - a["failed"]
            residual = f"{a['residual']['median']:.1e}" if "residual" in a else ""
            failed = f", {a['failed']} failed" if a["failed"] else ""
            cells = [
                cell(arm),
                _pm(a["final_loss"]) if n else "failed",
                _gap(a),
                f"{a['diverged']} of {n}{failed}",
                _pm(a["held_out_loss"]) if n else "–",
                residual,
                _pm(a["grad_norm_last"], 2) if n else "–",
                ""
                if a["tokens_per_second"]["mean"] is None
                else f"{a['tokens_per_second']['mean']:,.0f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
        lines += _error_lines(arms)
        if any("scores" in a for a in arms.values()):
            lines += _score_lines(arms, report["baseline"])
        if any("held_out_before" in a for a in arms.values()):
            lines += ["Held-out loss before this stage, at its context: " + _before(arms) + ".", ""]
    if report["claim"] is not None:
        lines += claims.three_arms_lines(report["claim"])
    if report["claims"]:
        lines += claims.lines(report["claims"])
    if image:
        lines += [f"![losses]({image})", ""]
    return "\n".join(lines)


def _error_lines(arms: dict) -> list[str]:
    """One line of an arm and error; whole errors are in ``runs.jsonl``."""
    lines = []
    for arm, a in arms.items():
        errors = a.get("errors", {})
        for error in dict.fromkeys(errors.values()):
            seeds = [seed for seed, other in errors.items() if other == error]
            which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}"
            short = error if len(error) <= MOST_LETTERS else f"{error[:MOST_LETTERS]} …"
            lines.append(f"* {arm}, {which} failed: {short}")
    return [*lines, ""] if lines else []


def _score_lines(arms: dict, baseline: str) -> list[str]:
    lines = [
        "lm-eval on the final weights: mean ± standard deviation over seeds (lm-eval's own standard "
        f"error), and the gap to {baseline}, paired over seeds.",
        "",
        "| arm | task | score | gap |",
        "|---|---|---|---|",
    ]
    for arm, a in arms.items():
        for name, score in a.get("scores", {}).items():
            error = "" if score["stderr"] is None else f" ({score['stderr']:.3f})"
            gap = score["gap"]
            shown = "" if gap["mean"] is None else f"{gap['mean']:+.3f}"
            if gap["std"] is not None:
                shown += f" ± {gap['std']:.3f}"
            lines.append(f"| {cell(arm)} | {cell(name)} | {_pm(score)}{error} | {shown} |")
    return [*lines, ""]


def _before(arms: dict) -> str:
    return ", ".join(
        f"{arm} {_pm(a['held_out_before'])}" for arm, a in arms.items() if "held_out_before" in a
    )


def _facts(report: dict) -> list[str]:
    corpus, env = report["corpus"], report["environment"]
    if not corpus or not env:
        return []
    packages = env["packages"]
    versions = ", ".join(f"{p} {packages[p]}" for p in ("torch", "triton") if p in packages)
    sizes = sorted(set(report["parameters"].values()))
    size = " to ".join(f"{n:,}" for n in dict.fromkeys((sizes[0], sizes[-1])))
    return [
        f"{env['device']}, {versions}; {size} parameters, {report['precision']}. "
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


def write_report(study: Study, rows: dict[str, dict], folder: Path, *, png: bool = True) -> dict:
    """``report.json``, ``report.md`` and, with matplotlib, ``report.png`` in ``folder``."""
    report = build_report(study, rows)
    image = None
    if png:
        try:
            partial = folder / f"report.{os.getpid()}.partial.png"
            plot(study, rows, partial)
            if partial.exists():  # there may be nothing to draw
                image = "report.png"
                partial.replace(folder / image)
        except ImportError:
            pass
        if image is None:  # one of other rows would say what the report does not
            (folder / "report.png").unlink(missing_ok=True)
    for name, text in (
        ("report.json", json.dumps(report, indent=2) + "\n"),
        ("report.md", to_markdown(report, image)),
    ):
        # Shards of a study may be writing theirs.
        partial = folder / f"{name}.{os.getpid()}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(folder / name)
    return report
