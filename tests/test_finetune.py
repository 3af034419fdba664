"""examples/finetune.py and examples/extend_context.py on a tiny model that pretrain.py could have made."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import extend_context  # noqa: E402
import finetune  # noqa: E402
import torch  # noqa: E402
import train_data  # noqa: E402
import yaml  # noqa: E402
from tiny_models import build, one_thread  # noqa: E402, F401
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from hf_deltamatch.testing import assert_bitwise_equal, assert_close  # noqa: E402
from hf_deltamatch.training import IGNORED, checkpoints  # noqa: E402
from hf_deltamatch.training.metrics import read_metrics  # noqa: E402

SMALL = {
    "batch_size": 2, "micro_batch": 2, "steps": 4, "warmup": 1, "held_out": 1, "log_every": 1,
    "eval_every": 4, "save_every": 2, "monitor_every": 0, "tracker": "none",
}  # fmt: skip
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3?"},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "Thanks"},
]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    build("llama", vocab_size=320).save_pretrained(folder)
    train_data.load_tokenizer(None).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": str(n) * 20}]
        for n in range(8)
    ]
    path.write_text("".join(json.dumps({"messages": r}) + "\n" for r in [*rows, TALK]))
    return path


def config(path: Path, **options) -> list[str]:
    path.write_text(yaml.safe_dump({**SMALL, **{k: str(v) if isinstance(v, Path) else v for k, v in options.items()}}))  # fmt: skip
    return ["--config", str(path)]


def tokenizer(template: str = finetune.CHATML):
    made = train_data.load_tokenizer(None)
    made.chat_template = template
    return made


def test_labels_are_the_answers() -> None:
    made = tokenizer()
    ids, labels = finetune.encode(TALK, made)
    learned = [t for t in labels if t != IGNORED]
    assert made.decode(learned) == "4<|im_end|>\n7<|im_end|>\n"
    assert [t for t, l in zip(ids, labels, strict=True) if l != IGNORED] == learned
    # The text is the template's own, up to the last answer.
    whole = made.apply_chat_template(TALK[:5], tokenize=False)
    assert made.decode(ids) == whole and "Thanks" not in whole
    assert finetune.encode(TALK[:2], made) == ([], [])


def test_a_template_that_rewrites_is_refused() -> None:
    counts = "{{ messages|length }}" + finetune.CHATML
    with pytest.raises(ValueError, match="message 2: the chat template rewrites earlier text"):
        finetune.encode(TALK, tokenizer(counts))


@pytest.mark.parametrize("arm", ["mp", "dm"])
def test_full_finetuning(arm: str, base: Path, chats: Path, tmp_path: Path) -> None:
    options = {"model": base, "data": chats, "output": tmp_path / "run", "arm": arm}
    finetune.main(config(tmp_path / "c.yaml", **options, seq_len=128, lr=1e-3))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 4 and rows[-1]["loss"] < rows[0]["loss"] and "eval_loss" in rows[-1]
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run/final").state_dict()
    assert all(not torch.equal(before[n], after[n]) for n in before)
    assert AutoTokenizer.from_pretrained(tmp_path / "run/final").chat_template == finetune.CHATML


def test_weights_in_fp8_are_refused(base: Path, chats: Path, tmp_path: Path) -> None:
    stored = json.loads((base / "config.json").read_text())
    stored["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = tmp_path / "fp8"
    shutil.copytree(base, folder)
    (folder / "config.json").write_text(json.dumps(stored))
    options = {"model": folder, "data": chats, "output": tmp_path / "run"}
    with pytest.raises(SystemExit, match="stored in FP8.*without --fp8"):
        finetune.main(config(tmp_path / "c.yaml", **options))


def test_lora(base: Path, chats: Path, tmp_path: Path) -> None:
    """Only the adapter is trained; it resumes bitwise, is saved, and merges to the same model."""
    peft = pytest.importorskip("peft")
    options = {"model": base, "data": chats, "seq_len": 128, "lr": 1e-2, "arm": "dm"}
    options |= {"lora_rank": 4, "linear": "blockwise", "checkpointing": True}
    finetune.main(config(tmp_path / "c.yaml", **options, output=tmp_path / "run"))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["loss"] < rows[0]["loss"]
    weights = AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.PeftModel.from_pretrained(weights, tmp_path / "run/final").eval()
    ids = torch.arange(10, 40)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run/merged").eval()
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        assert_close(merged(ids).logits, adapted(ids).logits, rms=1e-5)
        assert float((merged(ids).logits - plain(ids).logits).abs().max()) > 1e-3
    middle = checkpoints(tmp_path / "run")[0]
    again = {"output": tmp_path / "again", "resume": str(middle), "merge": False}
    finetune.main(config(tmp_path / "d.yaml", **options, **again))
    names = ("run", "again")
    left, right = (peft.utils.load_peft_weights(tmp_path / n / "final", "cpu") for n in names)
    for name in left:
        assert_bitwise_equal(right[name], left[name], name)
    assert not (tmp_path / "again/merged").exists()


@pytest.mark.parametrize("rope", extend_context.ROPES)
def test_context_is_extended(rope: str, base: Path, tmp_path: Path) -> None:
    """Four times the context: trained there, saved with it, and the rotations are as the name says."""
    old = AutoConfig.from_pretrained(base)
    options = {"model": base, "output": tmp_path / "run", "arm": "mp", "rope": rope, "steps": 2}
    extend_context.main(config(tmp_path / "c.yaml", **options, lr=1e-3))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/final")
    assert model.config.max_position_embeddings == 4 * old.max_position_embeddings == 1024
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["tokens"] == 2 * 2 * 1024
    before = AutoModelForCausalLM.from_pretrained(base).model.rotary_emb.inv_freq
    after = model.model.rotary_emb.inv_freq
    if rope == "base":  # the slowest rotation turns as far over the new context as over the old
        assert after[-1] == pytest.approx(before[-1].item() / 4) and after[0] == before[0]
    if rope == "linear":
        assert_close(after, before / 4, rms=1e-6)
    if rope == "yarn":  # fast rotations stay, slow ones stretch
        assert after[0] == before[0] and after[-1] == pytest.approx(before[-1].item() / 4)


def test_windows_stay_as_they_are() -> None:
    o = extend_context.ExtendOptions(model="x", factor=8, rope="linear")
    config_of = AutoConfig.for_model("gemma3_text", num_hidden_layers=6)
    before = {k: dict(v) for k, v in config_of.rope_parameters.items()}
    changes = extend_context.longer(config_of, o)
    rope = changes["rope_parameters"]
    assert rope["sliding_attention"] == before["sliding_attention"]
    assert rope["full_attention"]["factor"] == 8
    assert changes["max_position_embeddings"] == 8 * config_of.max_position_embeddings


def test_extension_that_cannot_be(base: Path, tmp_path: Path, capsys) -> None:
    scaled = AutoConfig.from_pretrained(base)
    scaled.rope_parameters = {**scaled.rope_parameters, "rope_type": "linear", "factor": 2.0}
    scaled.save_pretrained(tmp_path / "scaled")
    nowhere = config(
        tmp_path / "n.yaml", model=tmp_path / "none/of/it", output=tmp_path / "run", arm="mp"
    )
    with pytest.raises(SystemExit, match="none/of/it' is no folder here; as a name of the hub: "):
        extend_context.main(nowhere)
    with pytest.raises(SystemExit, match="its RoPE is scaled already .linear."):
        extend_context.main(["--model", str(tmp_path / "scaled"), "--tracker", "none"])
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(SystemExit, match="gpt2 without RoPE"):
        extend_context.main(["--model", str(tmp_path / "gpt2"), "--tracker", "none"])
    with pytest.raises(SystemExit, match="seq_len 2048 is beyond the new context, 1024"):
        extend_context.main(["--model", str(base), "--seq-len", "2048", "--tracker", "none"])
    with pytest.raises(SystemExit):
        extend_context.main(["--model", str(base), "--rope", "ntk"])
    assert "`rope` is 'ntk'; allowed values are 'base', 'yarn', 'linear'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("finetune_chat", finetune.FinetuneOptions),
        ("finetune_lora", finetune.FinetuneOptions),
        ("extend_context", extend_context.ExtendOptions),
    ],
)
def test_committed_configs_are_valid(name: str, kind) -> None:
    path = EXAMPLES / "configs" / f"{name}.yaml"
    o = finetune.parse_options(kind, ["--config", str(path)], "")
    assert o.output == f"runs/{name}" and o.batch_size % o.micro_batch == 0
