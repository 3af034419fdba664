"""What the demo prints and plots of its arms."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from demo import Arm

CHANCE = 0.25  # four candidates, see demo_data
STYLES = {"mp": ("-", "C0"), "sd": ("--", "C1"), "dm": (":", "C2")}
SHORT = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}


def label(name: str, arm: Arm) -> str:
    """The arm's name with the dtype that it really computed in."""
    compute = SHORT.get(arm.dtype["compute"], arm.dtype["compute"])
    return {
        "mp": f"MP, {compute} with SDPA",
        "sd": "SD, FP8 with stale δ",
        "dm": "DM, FP8 with matched δ",
    }[name]


def format_table(arms: dict[str, Arm]) -> str:
    """One line an arm, and what the columns mean."""
    lines = [
        f"{'arm':<24}{'loss':>15}{'bits/byte':>11}{'lm-eval acc':>13}{'row-sum residual':>18}"
        f"{'FP8 attn calls':>16}{'FP8 linear calls':>18}{'time':>9}"
    ]
    for name, a in arms.items():
        attention = sum(n for op, n in a.calls.items() if op.startswith("attention"))
        linear = sum(n for op, n in a.calls.items() if op.startswith("linear"))
        lines.append(
            f"{label(name, a):<24}{a.loss_first:>7.3f} → {a.loss_last:<5.3f}"
            f"{a.bits_per_byte:>11.3f}{a.lm_eval['continuation_acc']:>13.3f}"
            f"{a.row_sum_residual:>18.1e}{attention:>16}{linear:>18}{a.seconds:>8.1f}s"
        )
    documents = next(iter(arms.values())).lm_eval["documents"]
    spread = math.sqrt(CHANCE * (1 - CHANCE) / documents)
    lines += [
        "",
        "loss: first step → mean of the last tenth. row-sum residual: the largest of the "
        f"{len(next(iter(arms.values())).residuals)} steps it was measured at.",
        f"lm-eval acc: {documents} documents, chance is {CHANCE} ± {spread:.2f}. MP, SD, DM: mixed "
        "precision, FP8 with stale δ, FP8 with matched δ.",
    ]
    if "mp" in arms:
        lines.append("MP's residual is that of unquantised operands with δ = rowsum(dO ∘ O).")
    lines += [
        "A run this small shows the invariant (the residual: about 1e-7 matched, 1e-3 and more "
        "stale), not the",
        "divergence, which takes scale, time or a learning rate near the edge of stability.",
    ]
    return "\n".join(lines)


def plot(arms: dict[str, Arm], path: Path) -> None:
    """Loss, its difference to MP's where MP ran beside others, and the residual, over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    others = [name for name in arms if name != "mp"] if "mp" in arms else []
    panels = 3 if others else 2
    figure, axes = plt.subplots(
        panels, 1, figsize=(8, 3.3 * panels), sharex=True, layout="constrained"
    )
    top, bottom = axes[0], axes[-1]
    for name, arm in arms.items():
        style, color = STYLES[name]
        text = label(name, arm)
        top.plot(arm.loss, style, color=color, label=text, linewidth=1.8)
        bottom.semilogy(
            arm.residual_steps, arm.residuals, "o" + style, color=color, label=text, markersize=4
        )
    top.set_ylabel("training loss\n(nats per token)")
    bottom.set_ylabel("row-sum residual of dS")
    bottom.set_xlabel("step")
    for name in others:
        style, color = STYLES[name]
        difference = [a - b for a, b in zip(arms[name].loss, arms["mp"].loss, strict=True)]
        axes[1].plot(difference, style, color=color, label=f"{name.upper()} − MP", linewidth=1.8)
        axes[1].axhline(0, color="0.6", linewidth=0.8)
        axes[1].set_ylabel("difference of losses\n(nats per token)")
    for axis in axes:
        axis.legend()
        axis.grid(alpha=0.3, which="major")
    title = f"{', '.join(name.upper() for name in arms)}: one seed, same data"
    if "dm" in arms:
        title += "; the matched δ keeps the rows of dS at zero sum"
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)
