"""The ``eval`` command: lm-eval's own, with our model, our task groups and the released models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hf_deltamatch.evaluation import released

HELP = """\
hf-deltamatch eval: lm-eval's own command with our model as the default (--model hf-deltamatch).

  hf-deltamatch eval PATH --tasks delta_matching --batch_size 8 --output_path results --log_samples
  hf-deltamatch eval --model_args pretrained=PATH,attention=stale_delta --tasks lambada_openai
  hf-deltamatch eval --released DM-GDNMLA-1.7B-DM --tasks delta_matching --trust_remote_code
  hf-deltamatch eval ls tasks

PATH is a local path or hub name, short for --model_args pretrained=PATH. Task groups of ours:
  delta_matching       arc_easy, arc_challenge, boolq, hellaswag, openbookqa, piqa, sciq, winogrande,
                       lambada_openai
  delta_matching_long  RULER at 8,192 tokens (needs lm-eval[ruler])

model_args of ours, besides those of lm-eval's `hf`:
  pretrained    a local path or hub name (needed)
  attention     recipe name, `none`, or `auto`: what config.json says, else the config.train.json of
                an exported folder, else delta_matching
  linear        recipe name, `none`, or `auto`: the same, else blockwise
  fp8_backend   a backend by name, `reference` for the slow path on a GPU without a kernel

--released NAME evaluates a model that the authors of the paper released, in BF16 unless attention or
linear are given; without a name it lists them. Code that a model brings along is run only if you say so
(--trust_remote_code).

Results record under config.deltamatch what really ran; `hf-deltamatch compare` puts them side by side.
The rest is lm-eval's own help.
"""


def run(argv: list[str]) -> int:
    """Run lm-eval's command on ``argv``; returns the exit status.

    Raises:
        ImportError: lm-eval, or what one of its tasks needs, is not installed.
        ValueError, KeyError, TypeError, OSError, NotImplementedError: lm-eval's own, and what our
            model cannot do without, said before anything is loaded.
    """
    if argv == ["--released"]:
        print(released.listing())
        return 0
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise ImportError(
            f"lm-eval is not installed ({error}). Install it with: pip install "
            '"hf-deltamatch[eval]"'
        ) from error
    import hf_deltamatch.hf.lm_eval  # noqa: F401 - registers the model
    from hf_deltamatch.evaluation.groups import task_groups

    saved = sys.argv
    try:
        sys.argv = ["lm-eval", *lm_eval_arguments(argv)]
        with task_groups():
            cli_evaluate()
    finally:
        sys.argv = saved
    return 0


def lm_eval_arguments(argv: list[str]) -> list[str]:
    """lm-eval's own arguments: ``run`` and our model unless another is named.

    Raises:
        ValueError: what our model cannot do without.
    """
    if argv[:1] in (["ls"], ["validate"]):
        return argv
    if argv[:1] == ["run"]:
        argv = argv[1:]
    if any(a in ("-h", "--help") for a in argv):
        print(HELP, flush=True)
        return ["run", "--help"]
    argv = _with_positional(argv)
    has = lambda *starts: any(a.startswith(starts) for a in argv)
    ours = not has("--model=", "-M") and "--model" not in argv
    if not has("--config", "-C"):  # else the file may say it
        if not has("--task", "-t"):
            raise ValueError("--tasks is missing; `hf-deltamatch eval ls tasks` lists them.")
        if ours and not any("pretrained" in a for a in argv) and not has("--released"):
            raise ValueError(
                "--model_args pretrained=PATH is missing; PATH is a local path or hub name."
            )
    argv = released.arguments(argv, ours=ours)
    return ["run", *(["--model", "hf-deltamatch"] if ours else []), *argv]


def _with_positional(argv: list[str]) -> list[str]:
    """``PATH --tasks …`` as ``--model_args``, in the form that no character of a path can break."""
    if not argv or argv[0].startswith("-"):
        return argv
    path, *rest = argv
    if path.startswith(("/", "./", "../", "~")) and not Path(path).is_dir():
        raise ValueError(f"{path} is no folder; PATH is a folder with a model, or a hub name.")
    if any("pretrained" in a for a in rest):
        raise ValueError(
            f"the model is given twice: {path!r}, and pretrained= in --model_args. Leave out one."
        )
    return ["--model_args", json.dumps({"pretrained": path}), *rest]
