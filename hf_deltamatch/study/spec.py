"""The study's file: what it may say, and the runs that follow from it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_deltamatch.hf.model_config import positions_of
from hf_deltamatch.ops.backend import BACKENDS
from hf_deltamatch.recipes import AttentionRecipe, LinearRecipe
from hf_deltamatch.study import checks
from hf_deltamatch.study.evaluate import Evaluate
from hf_deltamatch.training.schedule import SCHEDULES
from hf_deltamatch.training.study_rows import key_of

ARMS: dict[str, dict] = {
    "MP": {"attention": "sdpa"},
    "SD": {"attention": "stale_delta"},
    "DM": {"attention": "delta_matching"},
}
"""Arms that need no description: mixed precision with SDPA, FP8 with stale and with matched δ."""

PRECISIONS = ("auto", "bfloat16", "float32")


@dataclass(frozen=True)
class Train:
    """One run's training. AdamW; decay on matrices only."""

    steps: int = 800
    batch_size: int = 32
    seq_len: int = 512
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup: int = 200
    schedule: str = "constant"
    floor: float = 0.1
    precision: str = "auto"
    """``bfloat16``: BF16 weights and activations in the model, FP32 master weights in the optimiser;
    ``auto``: that on a GPU, FP32 on a CPU."""
    last: int = 100
    """Steps whose mean is the run's loss."""
    residual_every: int = 200
    """Steps between measurements of the row-sum residual; 0 for none."""
    held_out_sequences: int = 128
    max_skipped: int = 20
    """Steps with a loss or gradient that is not finite are skipped; more of them end the run."""
    diverged_above: float = 0.5
    """Diverged: the last steps' mean loss is this far (nats) above the best such mean of the run."""

    def __post_init__(self) -> None:
        at = lambda name: (f"train.{name}", getattr(self, name))
        for name in ("steps", "batch_size", "seq_len", "last", "held_out_sequences"):
            checks.whole(*at(name), 1)
        for name in ("warmup", "residual_every", "max_skipped"):
            checks.whole(*at(name), 0)
        for name in ("lr", "clip", "diverged_above"):
            checks.number(*at(name), above=0)
        checks.number(*at("weight_decay"))
        checks.number(*at("floor"), most=1.0)
        checks.one_of(*at("schedule"), SCHEDULES)
        checks.one_of(*at("precision"), PRECISIONS)
        if not isinstance(self.betas, list | tuple) or len(self.betas) != 2:
            checks.refuse(*at("betas"), "a list of two numbers, as [0.9, 0.95]")
        for beta in self.betas:
            checks.number("train.betas", beta, most=0.999999999)
        object.__setattr__(self, "betas", tuple(self.betas))


@dataclass(frozen=True)
class Run:
    """One training: everything that its numbers depend on is in ``config``."""

    setting: str
    arm: str
    seed: int
    config: dict[str, Any] = field(hash=False)

    @property
    def name(self) -> str:
        return f"{self.setting} / {self.arm} / seed {self.seed}"

    @property
    def stage(self) -> str | None:
        """The name of the setting's second stage, None without one."""
        if "then" not in self.config:
            return None
        return f"{self.setting}, then {self.config['then']['train']['seq_len']} tokens"

    @property
    def key(self) -> str:
        """Changes with anything that can change the result."""
        return key_of(self.config)


@dataclass(frozen=True)
class Claim:
    """A gap to report: of ``arm`` to the arm ``to``, and the bound that it is to keep, if any."""

    arm: str
    to: str
    within: float | None = None
    """Nats: the mean of the paired gaps is at most so far from zero, in every setting."""


@dataclass(frozen=True)
class Study:
    """A checked file. ``runs`` are in the order in which they are worth having."""

    name: str
    baseline: str
    arms: dict[str, dict]
    settings: list[str]
    seeds: list[int]
    corpus: dict[str, Any]
    runs: list[Run]
    runtime: dict[str, Any]
    claims: list[Claim]
    source: dict[str, Any]


_TOP = {
    "name",
    "baseline",
    "arms",
    "seeds",
    "corpus",
    "model",
    "train",
    "then",
    "settings",
    "claims",
    "evaluate",
    "runtime",
}
_SETTING = {"name", "model", "train", "then", "priority"}
_TRAIN = {f.name for f in dataclasses.fields(Train)}
_RUNTIME = {"workers": 4, "cuda_graph": "auto", "backend": None}
_CORPUS = {"source": "stdlib", "held_out_every": 50, "limit_bytes": 64 * 2**20}


def load_study(path: str | Path) -> Study:
    """Read and check a study file (``examples/configs/study_table.yaml`` shows every part).

    Raises:
        ValueError: not YAML, an unknown key, or a value that is not allowed.
        OSError: no such file.
    """
    import yaml

    if not Path(path).is_file():
        raise FileNotFoundError(
            f"study: there is no file {path}; examples/configs/ has study files to start from."
        )
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"study: {path} is not YAML: {error}") from error
    return parse_study(data, str(path))


def parse_study(data: Any, where: str = "study") -> Study:
    """A :class:`Study` from what the YAML file holds."""
    if not isinstance(data, dict):
        raise ValueError(f"study: {where} holds {type(data).__name__}; it must be a mapping.")
    checks.json_types(data, where)
    _known(data, _TOP, where)
    arms = _arms(data.get("arms", list(ARMS)))
    for arm, choice in arms.items():
        others = [other for other in arms if other != arm and arms[other] == choice]
        if others:
            raise ValueError(
                f"study: arms {arm!r} and {others[0]!r} are the same, so one result would stand for both. "
                "Remove one; for the noise of an arm give more seeds."
            )
    baseline = data.get("baseline", next(iter(arms)))
    if not isinstance(baseline, str) or baseline not in arms:
        raise ValueError(f"study: baseline is {baseline!r}; arms are {', '.join(arms)}.")
    seeds = data.get("seeds", [0])
    if not isinstance(seeds, list) or not seeds:
        checks.refuse("seeds", seeds, "a list of whole numbers")
    for seed in seeds:
        checks.whole("a seed", seed, 0)
    if len(set(seeds)) < len(seeds):
        checks.refuse("seeds", seeds, "a list without repetitions")
    corpus = {**_CORPUS, **_section(data, "corpus", set(_CORPUS), where)}
    checks.text("corpus.source", corpus["source"])
    for name in ("held_out_every", "limit_bytes"):
        checks.whole(f"corpus.{name}", corpus[name], 1)
    runtime = {**_RUNTIME, **_section(data, "runtime", set(_RUNTIME), where)}
    checks.whole("runtime.workers", runtime["workers"], 1)
    checks.one_of("runtime.cuda_graph", runtime["cuda_graph"], (True, False, "auto"))
    checks.one_of("runtime.backend", runtime["backend"], (None, *BACKENDS))
    base_train = _section(data, "train", _TRAIN, where)
    base_model = _section(data, "model", None, where)
    evaluation = _section(data, "evaluate", {f.name for f in dataclasses.fields(Evaluate)}, where)
    base_then = _section(data, "then", _TRAIN | {"model"}, where)
    settings = data.get("settings", [{"name": "default"}])
    if not isinstance(settings, list) or not settings:
        raise ValueError("study: settings must be a list with at least one entry.")
    rows, names = [], []
    for at, setting in enumerate(settings):
        here = f"settings[{at}]"
        if not isinstance(setting, dict) or "name" not in setting:
            raise ValueError(f"study: {here} must be a mapping with a name; it is {setting!r}.")
        _known(setting, _SETTING, here)
        checks.text(f"name in {here}", setting["name"])
        checks.number(f"priority in {here}", setting.get("priority", 0), least=-1e9)
        if setting["name"] in names:
            raise ValueError(f"study: two settings are called {setting['name']!r}.")
        names.append(setting["name"])
        train = Train(**{**base_train, **_section(setting, "train", _TRAIN, here)})
        model = {**base_model, **_section(setting, "model", None, here)}
        if not isinstance(model.get("model_type"), str):
            raise ValueError(f"study: {here}: the model has no model_type, as in `llama`.")
        _fits("train", train, model, here)
        then = {**base_then, **_section(setting, "then", _TRAIN | {"model"}, here)}
        stage = _stage(train, model, then, f"then in {here}") if then else None
        for index, (arm, choice) in enumerate(arms.items()):
            for seed in seeds:
                config = {
                    **choice,
                    "model": model,
                    "train": dataclasses.asdict(train),
                    "corpus": corpus,
                    "seed": seed,
                }
                if evaluation:
                    config["evaluate"] = dataclasses.asdict(Evaluate(**evaluation))
                if stage is not None:
                    config["then"] = stage
                # As JSON has it: tuples are lists, so that a key does not depend on where it is made.
                config = json.loads(json.dumps(config))
                order = (setting.get("priority", 0), seeds.index(seed), at, index)
                rows.append((order, Run(setting["name"], arm, seed, config)))
    runs = [run for _, run in sorted(rows, key=lambda row: row[0])]
    name = data.get("name", Path(where).stem)
    checks.text("name", name)
    claims = _claims(data.get("claims"), arms, baseline)
    return Study(name, baseline, arms, names, seeds, corpus, runs, runtime, claims, data)


def select(study: Study, only: list[str] | None, shard: str | None) -> list[Run]:
    """The runs whose name has every word of one of ``only``, and of these shard ``i/n``.

    Raises:
        ValueError: nothing is left, or a malformed shard.
    """
    runs = study.runs
    if only:
        wanted = [_words(text) for text in only]
        runs = [r for r in runs if any(ws <= _words(r.name) for ws in wanted)]
        if not runs:
            some = ", ".join(repr(r.name) for r in study.runs[:3])
            raise ValueError(
                f"study: --only {' '.join(only)!r} matches no run; names are {some}, …"
            )
    if shard is not None:
        i, _, n = shard.partition("/")
        if not (i.isdigit() and n.isdigit() and 1 <= int(i) <= int(n)):
            raise ValueError(f"study: --shard is {shard!r}; it must be like 1/2 or 2/2.")
        runs = runs[int(i) - 1 :: int(n)]
    return runs


def _words(name: str) -> set[str]:
    return set(name.lower().replace(",", " ").replace("/", " ").split())


def _known(data: dict, known: set[str], where: str) -> None:
    unknown = sorted(set(data) - known)
    if unknown:
        raise ValueError(
            f"study: {where} has unknown {', '.join(map(repr, unknown))}; known are "
            f"{', '.join(sorted(known))}."
        )


def _section(data: dict, name: str, known: set[str] | None, where: str) -> dict:
    section = data.get(name)
    section = {} if section is None else section
    if not isinstance(section, dict):
        raise ValueError(f"study: {name} in {where} is {section!r}; it must be a mapping.")
    if known is not None:
        _known(section, known, f"{name} in {where}")
    return section


def _stage(train: Train, model: dict, then: dict, where: str) -> dict:
    """What is different in the second stage, over what the first one has."""
    changed = dict(then)
    fields = _section(changed, "model", None, where)
    changed.pop("model", None)
    second, model = Train(**{**dataclasses.asdict(train), **changed}), {**model, **fields}
    _fits("then", second, model, where)
    return {"train": dataclasses.asdict(second), "model": model}


def _fits(section: str, train: Train, model: dict, where: str) -> None:
    """Beyond its positions a model is trained on what it has no meaning for, or fails."""
    found = positions_of(model)
    if found is not None and train.seq_len > found[1]:
        name, most = found
        under = "model" if section == "train" else "then.model"
        raise ValueError(
            f"study: {section}.seq_len is {train.seq_len} ({where}); the model has positions for "
            f"{most:,} tokens ({name}). Set {under}.{name}, or a smaller seq_len."
        )


def _claims(claims: Any, arms: dict, baseline: str) -> list[Claim]:
    claims = [] if claims is None else claims
    if not isinstance(claims, list) or not all(isinstance(c, dict) for c in claims):
        raise ValueError(
            f"study: claims is {claims!r}; it must be a list, as in [{{arm: DM, within: 0.02}}]."
        )
    found = []
    for at, claim in enumerate(claims):
        here = f"claims[{at}]"
        _known(claim, {"arm", "to", "within"}, here)
        one = Claim(claim.get("arm", ""), claim.get("to", baseline), claim.get("within"))
        for name in (one.arm, one.to):
            if not isinstance(name, str) or name not in arms:
                raise ValueError(f"study: {here} names {name!r}; arms are {', '.join(arms)}.")
        if one.arm == one.to:
            raise ValueError(f"study: {here} compares {one.arm!r} with itself; give another `to`.")
        if one.within is not None:
            checks.number(f"{here}.within", one.within, above=0)
        found.append(one)
    return found


def _arms(arms: Any) -> dict[str, dict]:
    """Name to resolved recipes: ``attention`` is ``"sdpa"`` or fields, ``linear`` None or fields."""
    if isinstance(arms, list):
        checks.texts("arms", arms)
        arms = {name: ARMS.get(name) for name in arms}
    if not isinstance(arms, dict) or not arms:
        raise ValueError(f"study: arms is {arms!r}; it must be names or a mapping.")
    out = {}
    for name, arm in arms.items():
        checks.text("the name of an arm", name)
        arm = ARMS.get(name) if arm is None else arm
        if arm is None:
            raise ValueError(
                f"study: arm {name!r} is not one of {', '.join(ARMS)}; describe it, as in "
                f"{name}: {{attention: delta_matching, linear: blockwise}}."
            )
        if not isinstance(arm, dict):
            checks.refuse(f"arm {name!r}", arm, "a mapping, as in {attention: delta_matching}")
        _known(arm, {"attention", "linear", "leave"}, f"arm {name!r}")
        attention, linear = arm.get("attention", "sdpa"), arm.get("linear")
        out[name] = {
            "attention": attention
            if attention == "sdpa"
            else _recipe(AttentionRecipe, attention, f"arm {name!r}: attention"),
            "linear": None
            if linear is None
            else _recipe(LinearRecipe, linear, f"arm {name!r}: linear"),
        }
        leave = arm.get("leave")
        if leave is not None:
            patterns = isinstance(leave, list) and all(isinstance(p, str) for p in leave)
            if linear is None or not patterns or not leave:
                raise ValueError(
                    f"study: arm {name!r}: leave is {leave!r}; beside `linear`, it must be a list of "
                    "module patterns whose linears stay as they are, as in ['*.self_attn']."
                )
            out[name]["leave"] = leave
    return out


def _recipe(kind: type, value: Any, where: str) -> dict:
    """All fields of ``name`` or ``{recipe: name, field: value}``."""
    fields = dict(value) if isinstance(value, dict) else {"recipe": value}
    name = fields.pop("recipe", next(iter(kind.NAMES)))
    if not isinstance(name, str):
        checks.refuse(where, value, f"the name of a recipe ({', '.join(kind.NAMES)}) or its fields")
    try:
        return kind.from_name(name, **fields).to_dict()
    except (ValueError, TypeError) as error:
        raise ValueError(f"study: {where}: {error}") from error
