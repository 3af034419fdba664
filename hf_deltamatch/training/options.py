"""Options of a training script: a YAML file, flags over it, and what of them makes the run."""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import yaml

from hf_deltamatch.ops.backend import BACKENDS
from hf_deltamatch.recipes import AttentionRecipe, LinearRecipe
from hf_deltamatch.training.arms import ARMS
from hf_deltamatch.training.optim import OPTIMIZERS
from hf_deltamatch.training.schedule import SCHEDULES

ASIDE = {"about": "aside"}
"""Metadata of fields that may change when a run is resumed: they do not change what is trained."""


REPEATED = ("micro_batch", "eval_rows")
"""May change when a run is resumed; a command that is to give the same numbers names them."""


def aside(default: Any) -> Any:
    return field(default=default, metadata=ASIDE)


_SMALLEST, _LARGEST = 1e-300, 1e300
_POSITIVE = (_SMALLEST, _LARGEST, "a positive number")
_SHARE = (0.0, 1.0, "a share, from 0 to 1")
_RANGES = {
    "lr": (0.0, _LARGEST, "a number, 0 or more"),
    "weight_decay": (0.0, _LARGEST, "a number, 0 or more"),
    "clip": (_SMALLEST, _LARGEST, "a positive number (1.0e30 clips nothing)"),
    "peak_flops": _POSITIVE,
    "floor": _SHARE,
    "decay": _SHARE,
    "seed": (0, 2**32 - 1, "a whole number from 0 to 4294967295"),
}
"""Smallest and largest value of numbers, and both in words."""
_WHOLE = {
    **dict.fromkeys(("batch_size", "micro_batch", "steps", "max_skipped", "log_every", "keep"), 1),
    **dict.fromkeys(("eval_every", "save_every", "eval_rows"), 1),
    **dict.fromkeys(("warmup", "held_out", "monitor_every"), 0),
    "seq_len": 2,
}
"""Smallest value of whole numbers."""


@dataclass
class Options:
    """Of every training script; each field is a key of the YAML file and a flag."""

    model: Any = None
    """A mapping (a new model of ``model_type``), a local path or a hub name."""
    tokenizer: str | None = None
    """Path or hub name; default: that of ``model``, or UTF-8 bytes for a new model."""
    arm: str = "dm"
    """``mp`` (SDPA in BF16), ``sd`` (FP8, stale δ), ``dm`` (FP8, matched δ)."""
    linear: str | None = None
    """Recipe of FP8 linears, as ``blockwise``; null keeps them in high precision."""
    block: str = "128xD"
    """What shares a descale in FP8 attention: ``128xD``, ``1xD`` or ``mx``."""
    backend: str | None = None
    """Of the FP8 ops, ``reference`` or ``triton``; default: by device, as ``hf-deltamatch env`` says."""
    data: str = "stdlib"
    """``stdlib`` (the running Python's own source), a local file or folder, or a hub name."""
    data_config: str | None = None
    """Configuration of a data set of the hub."""
    split: str = "train"
    text_column: str = "text"
    streaming: bool = False
    """Read the data set as a stream, never whole."""
    documents: str = "separate"
    """``separate``: documents packed into a row do not see each other; ``joined``: they do."""
    held_out: int = 16
    """Documents kept for evaluation (of a stream: the first ones); 0 for none."""
    eval_rows: int = aside(64)
    """At most so many rows of them."""
    seq_len: int = 1024
    """Tokens of a row."""
    batch_size: int = 32
    """Sequences per step, over all processes."""
    micro_batch: int = 8
    """Sequences per forward and process."""
    steps: int = 1000
    lr: float = 3e-4
    """The largest learning rate."""
    warmup: int = 100
    """Steps of linear growth to it."""
    schedule: str = "cosine"
    """``cosine``, ``wsd`` (constant, then a linear decay) or ``constant``."""
    floor: float = 0.1
    """Last learning rate, as a share of the largest."""
    decay: float = 0.2
    """Share of the steps in which ``wsd`` decays."""
    optimizer: str = "adamw"
    """``adamw``, or ``muon`` for the matrices between embedding and head."""
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Of AdamW."""
    clip: float = 1.0
    """Largest gradient norm."""
    seed: int = 0
    precision: str = "auto"
    """``bf16``, ``no``, or ``auto``: BF16 autocast on a GPU. Weights are FP32."""
    checkpointing: bool = False
    """Gradient checkpointing."""
    compile: bool = False
    """``torch.compile`` of every block."""
    max_skipped: int = aside(10)
    """Stop after so many steps in a row that are not finite."""
    eval_every: int = aside(100)
    """Steps between evaluations."""
    log_every: int = aside(10)
    save_every: int = aside(200)
    """Steps between checkpoints."""
    keep: int = aside(3)
    """So many checkpoints, the newest, are kept."""
    monitor_every: int = aside(200)
    """Steps between looks at the attention's numerics; 0 for none."""
    tracker: str = aside("tensorboard")
    """A tracker that Accelerate knows, or ``none``."""
    resume: str = aside("auto")
    """``auto`` (the newest checkpoint in ``output``), ``never`` (an ``output`` that has some is
    refused), or a checkpoint's folder."""
    peak_flops: float | None = aside(None)
    """Of one device, for MFU; default: a table by its name."""
    output: str = aside("runs/pretrain")
    """Folder of the run."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("arm", tuple(ARMS)),
            ("schedule", SCHEDULES),
            ("optimizer", OPTIMIZERS),
            ("documents", ("separate", "joined")),
            ("linear", (None, *LinearRecipe.NAMES)),
            ("backend", (None, *BACKENDS)),
            ("precision", ("auto", "bf16", "no")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"`{name}` is {getattr(self, name)!r}; allowed values are "
                    f"{', '.join(map(repr, allowed))}."
                )
        try:
            AttentionRecipe(block=self.block)
        except ValueError as error:  # which begins with the class
            raise ValueError(str(error).partition(": ")[2]) from error
        usual = {f.name: f.default for f in fields(self)}
        for name, least in _WHOLE.items():
            value = getattr(self, name)
            if value != usual[name] and not least <= value < 2**63:
                raise ValueError(f"`{name}` is {value}; it must be at least {least}.")
        for name, (low, high, words) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not (low <= value <= high):  # NaN is nowhere
                raise ValueError(f"`{name}` is {value}; it must be {words}.")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(
                f"`betas` is {self.betas}; it must be two numbers of at least 0 and below 1, as "
                "[0.9, 0.95]."
            )
        if not self.output:
            raise ValueError("`output` is empty; it must be the folder of the run.")
        if self.model is None:
            raise ValueError(
                "`model` is missing; name a YAML file with --config (examples/configs/ has some), or "
                "a path or hub name with --model."
            )

        if not isinstance(self.model, str | dict):
            raise ValueError(
                f"`model` is {self.model!r}; it must be a mapping, a path or a hub name."
            )

    def identity(self) -> dict:
        """What makes the run: a checkpoint is resumed only with the same. How it is spread over
        processes does not."""
        out = asdict(self)
        for f in fields(self):
            if f.metadata == ASIDE:
                del out[f.name]
        for name in (*REPEATED, "backend", "checkpointing", "compile", "precision"):
            out.pop(name, None)
        return out

    def aside(self) -> dict:
        """What is not compared and yet belongs to a command that repeats the run and its numbers."""
        return {name: getattr(self, name) for name in REPEATED}


Kind = TypeVar("Kind", bound=Options)


def parse_options(kind: type[Kind], argv: Sequence[str] | None, about: str) -> Kind:
    """Options from ``--config FILE`` and flags, which go before the file.

    Exits with a message for what does not fit.
    """
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        usage="%(prog)s [-h] [--config FILE] [--OPTION VALUE ...]",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    helps = field_docs(kind)
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of the keys below")
    for f in fields(kind):
        value = f.default if f.default_factory is MISSING else f.default_factory()
        default = "" if value is None else f"(default: {value})"
        text = f"{helps.get(f.name, '')} {default}".strip().replace("%", "%%")
        parser.add_argument(f"--{f.name.replace('_', '-')}", metavar="VALUE", help=text)
    argv = [_with_dashes(a) for a in (sys.argv[1:] if argv is None else argv)]
    args = vars(parser.parse_args(argv))
    config = args.pop("config")
    try:
        where = "options"
        flags = checked(kind, {n: yaml.safe_load(v) for n, v in args.items() if v is not None})
        where = config or where
        values = {} if config is None else checked(kind, read_yaml(config))
        if config is not None and flags:
            where = f"{config} with the flags"
        return kind(**(values | flags))
    except (ValueError, OSError, RecursionError, yaml.YAMLError) as error:
        parser.error(f"{where}: {error}")


def _with_dashes(argument: str) -> str:
    """``--eval_every``, as the key of the file is spelt, is ``--eval-every``."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def field_docs(kind: type[Options]) -> dict[str, str]:
    """The text below each field, in the class and in those that it extends."""
    found = {}
    for cls in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
        for a, b in pairwise(body):
            text = b.value if isinstance(b, ast.Expr) else None
            if isinstance(a, ast.AnnAssign) and isinstance(text, ast.Constant):
                found[a.target.id] = " ".join(text.value.replace("``", "").split())
    return found


def read_yaml(path: Path) -> dict:
    if not path.is_file():
        raise ValueError("there is no such file; examples/configs/ has one for each script.")
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"holds {type(values).__name__}; a mapping of options is needed.")
    return values


def checked(kind: type[Options], values: dict) -> dict:
    """Values of known keys in the types of their fields.

    Raises:
        ValueError: an unknown key or a value of another type, with what is allowed.
    """
    hints = typing.get_type_hints(kind)
    out = {}
    for name, value in values.items():
        if name not in hints:
            near = difflib.get_close_matches(str(name), hints, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown option {name!r}{hint} Known: {', '.join(sorted(hints))}.")
        if name == "precision" and value is False:
            value = "no"  # which YAML reads as false
        out[name] = _as(name, value, hints[name])
    return out


_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


def _as(name: str, value: Any, hint: Any) -> Any:
    if hint is Any:
        return value
    if isinstance(hint, types.UnionType):
        kinds = typing.get_args(hint)
        if value is None and types.NoneType in kinds:
            return None
        hint = next(k for k in kinds if k is not types.NoneType)
    if typing.get_origin(hint) is list:
        if not isinstance(value, list):
            raise ValueError(f"`{name}` is {value!r}; it must be a list, as [a, b].")
        return [_as(name, v, typing.get_args(hint)[0]) for v in value]
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:  # YAML reads 3e-4 as text
            return float(value)
        except (ValueError, OverflowError):
            pass
    if type(value) is not hint:
        raise ValueError(
            f"`{name}` is {value!r}; it must be {_WORDS.get(hint, f'of type {hint.__name__}')}."
        )
    return value
