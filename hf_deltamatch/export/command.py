"""The ``export`` command."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = """\
Write what a training run left as a folder ready to upload: safetensors, config, tokenizer, card.

  hf-deltamatch export runs/pretrain_125m --output out/my-model
  hf-deltamatch export runs/pretrain_125m --checkpoint 4000 --output out/my-model-4000
  hf-deltamatch export runs/dm-0 --seeds runs/dm-1 runs/dm-2 --output out/my-model
  hf-deltamatch export runs/dm-0 --fp8 --output out/my-model-fp8
  hf-deltamatch export runs/dm-0 --lm-eval results/*/results_*.json --output out/my-model
  hf-deltamatch export runs/table/models/1f94190464f810e3 --output out/my-model    # of a study

RUN is the output folder of examples/pretrain.py, finetune.py or extend_context.py, one of its checkpoints,
OUTPUT/models/KEY of `hf-deltamatch study --save`, or a saved model. The folder loads with plain
Transformers; the recipe of training is in config.train.json. It is loaded once and compared with the run's
weights before it gets its name.

Of a study, other seeds, the gap to its baseline and its scores come from OUTPUT/runs.jsonl, and study.yaml
is the run alone: --seeds and --checkpoint are refused; the other flags mean what they mean elsewhere. A
run that diverged or failed is refused.
"""


def add_parser(commands) -> None:
    """The command's arguments, on the subparsers of the main command."""
    parser = commands.add_parser(
        "export",
        help="a training run as a folder ready to upload, also in FP8",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN")
    add("--output", type=Path, required=True, metavar="DIR", help="new or empty")
    add(
        "--checkpoint",
        type=int,
        metavar="N",
        help="of this step (default: the newest; a study has one)",
    )
    add(
        "--fp8",
        action="store_true",
        help="linears in Transformers' fine-grained FP8 format, as training multiplied with them",
    )
    add(
        "--dtype",
        default="bfloat16",
        help="of the weights, or of those that are not in FP8: bfloat16, float16 or float32 "
        "(default: %(default)s)",
    )
    add(
        "--keep-recipe",
        action="store_true",
        help="the recipe in config.json too: hf_deltamatch then runs it by itself, Transformers alone "
        "warns, and servers that know every quantisation by name may refuse",
    )
    add("--name", help="in the card (default: the name of DIR)")
    add("--license", metavar="ID", help="in the card, as the hub names it: apache-2.0, mit …")
    add("--about", metavar="TEXT", help="first sentence of the card")
    add("--limit", dest="limits", action="append", default=[], metavar="TEXT",
        help="a line among the card's limits; may be repeated")  # fmt: skip
    add("--seeds", type=Path, nargs="+", default=[], metavar="RUN",
        help="runs of other seeds, for the spread of the losses (a study's are found)")  # fmt: skip
    add("--lm-eval", type=Path, nargs="+", default=[], metavar="FILE",
        help="results files of lm-eval on the exported folder: into the card and .eval_results/")  # fmt: skip
    add("--text", type=Path, metavar="FILE", help="quote the loss on this text in the card")


def run_command(args: argparse.Namespace) -> int:
    from transformers.utils import logging

    from hf_deltamatch.export.folder import Request, export

    logging.disable_progress_bar()
    fields = {k: v for k, v in vars(args).items() if k != "command"}
    results = export(Request(**fields))
    weights = results["weights"]
    size = sum(f["bytes"] for f in weights["files"].values())
    print(f"{weights['parameters']:,} parameters, {size:,} bytes of safetensors")
    if found := weights.get("fp8"):
        print(f"{found['stored_count']} linears in FP8; left in {weights['dtype']}:")
        for name, reason in found["left"].items():
            print(f"  {name}: {reason}")
    if results["tokenizer"].startswith("none"):
        print(f"tokenizer: {results['tokenizer']}")
    print(f"Written: {args.output}/: {', '.join(sorted(p.name for p in args.output.iterdir()))}")
    return 0
