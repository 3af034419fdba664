"""AdamW and Muon over the right parameters, and their learning rates as a function of the step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

OPTIMIZERS = ("adamw", "muon")
_EMBEDDINGS = ("embed", "wte", "wpe", "lm_head", "output_embeddings")


def build_optimizers(
    model: nn.Module,
    kind: str = "adamw",
    *,
    lr: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
) -> list[torch.optim.Optimizer]:
    """``adamw``: one AdamW; vectors do not decay. ``muon``: ``torch.optim.Muon`` for the matrices
    between embedding and head, with updates of AdamW's size so that one ``lr`` serves both, and
    AdamW for all else.

    Raises:
        ValueError: unknown ``kind``, nothing to train, or no Muon in this torch.
    """
    if kind not in OPTIMIZERS:
        raise ValueError(
            f"optimizer: {kind!r} is unknown; allowed values are {', '.join(map(repr, OPTIMIZERS))}."
        )
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("optimizer: the model has no parameter that requires a gradient.")
    outer = {id(p) for p in _outer_parameters(model)}
    is_hidden = lambda p: kind == "muon" and p.dim() == 2 and id(p) not in outer
    hidden = [p for _, p in named if is_hidden(p)]
    rest = [p for _, p in named if not is_hidden(p)]
    made: list[torch.optim.Optimizer] = []
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if groups:
        fused = all(p.device.type == "cuda" for p in rest)
        made.append(torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused or None))
    if hidden:
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(
                f"optimizer: torch {torch.__version__} has no Muon; 2.9 and newer do. Use 'adamw'."
            )
        made.append(
            torch.optim.Muon(
                hidden, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    return made


def _outer_parameters(model: nn.Module) -> Iterable[nn.Parameter]:
    """Embeddings and heads: rows are looked up or are classes, not directions to orthogonalise."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield from module.parameters(recurse=False)
    for name, p in model.named_parameters():
        if any(word in name for word in _EMBEDDINGS):
            yield p


def set_lr(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Every group to ``factor`` of the rate that its optimiser was made with."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * factor
