"""The models that the authors of the paper released, and what evaluating one needs.

Names and facts are those of the model cards on the hub. In all three arms of a family the export runs
attention in BF16 through SDPA: the arms share the architecture and differ in their weights.
"""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path

OWNER = "tturing"
ARMS = {
    "MP": "BF16 attention; FP8 GEMMs in the feed-forward layers only",
    "SD": "FP8 attention with the stale δ; FP8 GEMMs in feed-forward layers and projections",
    "DM": "FP8 attention with the matched δ; FP8 GEMMs in feed-forward layers and projections",
}
"""How the weights of each arm were trained."""


@dataclass(frozen=True)
class Family:
    """One architecture: 24 layers, three recurrent ones to each layer of attention."""

    stem: str
    """Repository name without the arm."""
    recurrent: str
    attention: str
    parameters: int
    needs: str | None = None
    """Module that the recurrent layers are made of, as it is imported."""


FAMILIES = (
    Family("DM-MambaGQA-1.7B", "Mamba2", "GQA 16/4, QK-norm", 1_666_495_872),
    Family("DM-GDNGQA-1.7B-NoQK", "GatedDeltaNet", "GQA 16/4", 1_665_440_832, "fla"),
    Family("DM-KDAGQA-1.7B", "Kimi Delta Attention", "GQA 16/4, QK-norm", 1_664_776_224, "fla"),
    Family("DM-GDNMLA-1.7B", "GatedDeltaNet", "MLA 16, QK-norm", 1_665_444_672, "fla"),
)
RELEASED = {f"{family.stem}-{arm}": family for family in FAMILIES for arm in ARMS}
"""Name to family; the repository is ``tturing/NAME``."""


def listing() -> str:
    """The catalogue, a line per model."""
    lines = [
        f"Released models ({OWNER}/NAME on the hub), trained on 30B tokens, context 8,192:",
        "",
    ]
    for name, family in RELEASED.items():
        shape = f"{family.recurrent} + {family.attention}"
        lines.append(f"  {name:<24} {shape:<40} {family.parameters:,} parameters")
    lines += ["", "Arms, by how the weights were trained (all are exported for BF16 attention):"]
    lines += [f"  {arm}  {how}" for arm, how in ARMS.items()]
    return "\n".join(lines)


def resolve(name: str) -> str:
    """The name in the catalogue of ``name``, in any case and with or without the owner.

    Raises:
        ValueError: not in the catalogue; names it.
    """
    short = name.lower().removeprefix(f"{OWNER}/")
    for known in RELEASED:
        if known.lower() == short:
            return known
    raise ValueError(
        f"--released is {name!r}; allowed names are {', '.join(RELEASED)}. Other models: "
        "hf-deltamatch eval PATH."
    )


def arguments(argv: list[str], *, ours: bool = True) -> list[str]:
    """``argv`` with ``--released NAME`` as lm-eval's ``--model_args``; the rest as it is.

    ``ours``: whether lm-eval will load it with our model, which then leaves the arithmetic alone
    unless ``attention`` or ``linear`` are given.

    Raises:
        ValueError: unknown name, or a second model.
        FileNotFoundError: what is missing to evaluate the model here, in one sentence.
    """
    at = next((i for i, a in enumerate(argv) if a.split("=")[0] == "--released"), None)
    if at is None:
        return argv
    _, given, name = argv[at].partition("=")
    rest = argv[:at] + argv[at + 1 :]
    if not given:
        name = argv[at + 1] if at + 1 < len(argv) else ""
        name = "" if name.startswith("-") else name
        rest = argv[:at] + argv[at + (2 if name else 1) :]
    if not name:
        raise ValueError(f"--released is without a name; allowed names are {', '.join(RELEASED)}.")
    name = resolve(name)
    if any("pretrained" in a for a in rest):
        raise ValueError(
            "the model is given twice: --released, and pretrained= in --model_args. Leave out one."
        )
    if any(a.startswith(("--config", "-C")) for a in rest):
        raise ValueError(
            "--released does not go with --config, whose model_args it would replace: write "
            f"`pretrained: {OWNER}/{name}` there."
        )
    said = " ".join(rest)
    lacking = missing(name, trusted=_trusted(said), revision=_value("revision", said))
    if lacking:
        raise FileNotFoundError(f"{OWNER}/{name} cannot be evaluated here: {'; '.join(lacking)}.")
    options = {"pretrained": f"{OWNER}/{name}"}
    if ours:  # the arithmetic of the export; a recipe of ours is the user's to name
        options |= {k: "none" for k in ("attention", "linear") if _value(k, said) is None}
    return ["--model_args", json.dumps(options), *rest]


def missing(name: str, *, trusted: bool, revision: str | None = None) -> list[str]:
    """What evaluating the model ``name`` would fail for, each with what to do; empty if nothing.

    Looks for the repository's ``config.json`` (from the local cache where there is one) and for the
    modules that the layers are made of. Loads no code of the repository.
    """
    family, lacking = RELEASED[name], []
    config, why = _config(f"{OWNER}/{name}", revision)
    if config is None:
        lacking.append(why)
        if not trusted:
            lacking.append(
                "it may bring its own modelling code (read it, then pass --trust_remote_code)"
            )
    elif "auto_map" in config and not trusted:
        lacking.append(
            "it brings its own modelling code, which runs on this machine: read it, then pass "
            "--trust_remote_code"
        )
    if family.needs and importlib.util.find_spec(family.needs) is None:
        lacking.append(
            f"its {family.recurrent} layers need flash-linear-attention "
            "(pip install flash-linear-attention)"
        )
    return lacking


def _config(repository: str, revision: str | None) -> tuple[dict | None, str]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        file = hf_hub_download(repository, "config.json", revision=revision)
        return json.loads(Path(file).read_text()), ""
    except LocalEntryNotFoundError:
        why = (
            "the hub cannot be reached and the model is not in the local cache (download it where "
            "there is access, with `hf download`, and copy the cache)"
        )
    except GatedRepoError:
        why = "access to it has to be granted on the hub (ask there, then `hf auth login`)"
    except HfHubHTTPError as error:  # also: no such repository, no such revision
        status = getattr(error.response, "status_code", "an error")
        why = (
            f"the hub answers {status} for its config.json (is the name public, is your login valid: "
            "`hf auth login`?)"
        )
    return None, why


def _value(key: str, said: str) -> str | None:
    """What ``key`` is set to in lm-eval's ``key=value`` or JSON arguments; None if it is not."""
    found = re.search(rf"""\b{key}["']?\s*[=:]\s*["']?([^\s,"'}}]+)""", said)
    return found[1] if found else None


def _trusted(said: str) -> bool:
    value = _value("trust_remote_code", said)
    return "--trust_remote_code" in said.split() or (value or "").lower() in ("true", "1")
