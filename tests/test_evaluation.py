"""FP8 attention under lm-eval: scores of padded batches, of the bare model, and our task groups.

The tasks are in `lm_eval_tasks/`: log-likelihood, multiple choice and generation over a few sentences.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
import yaml
from tiny_models import build
from transformers import AutoModelForCausalLM, ByT5Tokenizer

import hf_deltamatch
from hf_deltamatch import AttentionRecipe, cli
from hf_deltamatch.testing import rel_rms

lm_eval = pytest.importorskip("lm_eval")
lm_eval_tasks = pytest.importorskip("lm_eval.tasks")

from hf_deltamatch.evaluation import groups  # noqa: E402
from hf_deltamatch.hf.lm_eval import DeltaMatchLM  # noqa: E402

TASKS = Path(__file__).parent / "lm_eval_tasks"
COMMONSENSE = [
    *("arc_easy", "arc_challenge", "boolq", "hellaswag", "openbookqa", "piqa", "sciq"),
    *("winogrande", "lambada_openai"),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Many small products: threads cost more than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    build("llama", vocab_size=259, max_position_embeddings=512).save_pretrained(folder)
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    return folder


def evaluate(
    checkpoint, tasks: list[str], batch_size: int, block: str = "128xD", **options
) -> dict:
    """Responses by task and document, one list for each request."""
    # ByT5's tokenizer ends every text with </s> unless told.
    options = {"dtype": "float32", "batch_size": batch_size, "add_bos_token": False}
    lm = DeltaMatchLM(str(checkpoint), device="cpu", **options)
    hf_deltamatch.set_attention_recipe(lm.model, AttentionRecipe(block=block))
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    out = lm_eval.simple_evaluate(
        model=lm,
        tasks=tasks,
        task_manager=groups.task_manager(TASKS, include_defaults=False),
        bootstrap_iters=0,
    )
    assert sum(out["config"]["deltamatch"]["attention"].values()) == 2
    return {
        task: {s["doc_id"]: s["filtered_resps"] for s in samples}
        for task, samples in out["samples"].items()
    }


def numbers(responses: dict) -> torch.Tensor:
    return torch.tensor([float(r[0]) for _, doc in sorted(responses.items()) for r in doc])


@pytest.mark.parametrize("block", ["128xD", "1xD"])
def test_scores_do_not_depend_on_the_batch_size(checkpoint, block) -> None:
    """Documents of 1 to 210 bytes, so rows of a batch are padded over tile boundaries.

    lm-eval pads on the right and gives no mask. Padding lies after every real token: it changes no
    tile's place, and no statistic but the descale of the last tile (a power of two, so values stay the
    same). What is left is the order of FP32 sums in batched products.
    """
    one = evaluate(checkpoint, ["tiny"], 1, block)
    many = evaluate(checkpoint, ["tiny"], 5, block)
    for task in ("tiny_ll", "tiny_mc"):
        assert len(one[task]) == 13 and one[task].keys() == many[task].keys()
        assert rel_rms(numbers(many[task]), numbers(one[task])) < 1e-6
        greedy = lambda out, t=task: [[r[1] for r in doc] for _, doc in sorted(out[t].items())]
        assert greedy(many) == greedy(one)


def fp8_model(checkpoint, block: str = "128xD"):
    config = hf_deltamatch.DeltaMatchConfig(AttentionRecipe(block=block))
    return AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=config, dtype=torch.float32
    ).eval()


def encode(text: str) -> list[int]:
    return ByT5Tokenizer(extra_ids=0)(text, add_special_tokens=False).input_ids


def contexts() -> list[str]:
    task = groups.task_manager(TASKS, include_defaults=False).load(["tiny_gen"])["tasks"][
        "tiny_gen"
    ]
    return [doc["context"] for doc in task.test_docs()]


@pytest.mark.parametrize("block", ["128xD", "1xD"])
def test_answers_do_not_depend_on_the_batch_size(checkpoint, block) -> None:
    """Padded on the left, with a mask: keys sit elsewhere in their tiles, so sums have another order.

    That is FP32 rounding, but where it moves a number over an FP8 rounding edge a near tie between two
    tokens can fall the other way. Nothing else may change an answer.
    """
    one = evaluate(checkpoint, ["tiny_gen"], 1, block)["tiny_gen"]
    many = evaluate(checkpoint, ["tiny_gen"], 4, block)["tiny_gen"]
    differ = [i for i in one if one[i] != many[i]]
    assert len(one) == 13 and len(differ) <= 3 and len(set(map(str, one.values()))) > 3
    model = fp8_model(checkpoint, block)
    for i in differ:
        ids = torch.tensor([encode(contexts()[i])])
        out = model.generate(
            ids, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        logits = torch.cat(out.logits)
        first, second = logits.topk(2).values.unbind(1)
        assert ((first - second) / logits.square().mean(1).sqrt()).min() < 0.05, i


@pytest.mark.parametrize("block", ["128xD", "1xD"])
def test_padding_on_the_left_moves_tiles(checkpoint, block) -> None:
    """Over more than one tile the answers agree to the rounding of FP8, not bitwise.

    Left padding moves the tile boundaries, and P is cast after the running maximum of its tiles.
    """
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation="fp8_delta_matching"
    )
    hf_deltamatch.set_attention_recipe(model, AttentionRecipe(block=block))
    ids = torch.randint(3, 259, (1, 200))
    padded = torch.cat([torch.zeros(1, 40, dtype=ids.dtype), ids], 1)
    mask = torch.cat([torch.zeros(1, 40), torch.ones(1, 200)], 1).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = model(ids).logits
        left = model(padded, attention_mask=mask, position_ids=positions).logits[:, 40:]
        exact = AutoModelForCausalLM.from_pretrained(checkpoint)(ids).logits
    error = rel_rms(alone, exact)
    assert 0 < error < 0.05 and rel_rms(left, alone) < error


def test_scores_are_those_of_the_model_itself(checkpoint) -> None:
    found = evaluate(checkpoint, ["tiny_ll", "tiny_mc"], 1)
    model = fp8_model(checkpoint)

    def score(context: str, rest: str) -> float:
        ids = torch.tensor([encode(context) + encode(rest)])
        with torch.no_grad():
            logp = model(ids[:, :-1]).logits.log_softmax(-1)
        n = len(encode(rest))
        return logp[0, -n:].gather(1, ids[0, -n:, None]).sum().item()

    documents = groups.task_manager(TASKS, include_defaults=False).load(["tiny_ll"])["tasks"][
        "tiny_ll"
    ]
    expected = {"tiny_ll": {}, "tiny_mc": {}}
    for i, doc in enumerate(documents.test_docs()):
        choices = [score(doc["context"], f" {c}") for c in doc["choices"]]
        expected["tiny_mc"][i] = [[c] for c in choices]
        expected["tiny_ll"][i] = [[choices[doc["answer"]]]]
    for task, responses in expected.items():
        torch.testing.assert_close(numbers(found[task]), numbers(responses), rtol=1e-6, atol=0)


def test_answers_are_those_of_the_model_itself(checkpoint) -> None:
    found = evaluate(checkpoint, ["tiny_gen"], 1)["tiny_gen"]
    tokenizer, model = ByT5Tokenizer(extra_ids=0), fp8_model(checkpoint)
    for i, context in enumerate(contexts()):
        ids = torch.tensor([encode(context)])
        out = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=1, pad_token_id=0)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert found[i] == [text.split("\n\n\n")[0]], i


def test_task_groups_name_lm_evals_own_tasks() -> None:
    """Of every member: a task of that name is in lm-eval, and of the RULER group all of lm-eval's."""
    root = Path(lm_eval_tasks.__file__).parent
    folders = ["arc", "hellaswag", "lambada", "openbookqa", "piqa", "ruler", "sciq", "super_glue"]
    theirs = [str(root / name) for name in (*folders, "winogrande")]
    manager = groups.task_manager(theirs, include_defaults=False)
    assert {"delta_matching", "delta_matching_long"} <= set(manager.all_groups)
    read = lambda name: yaml.safe_load((groups.TASK_GROUPS / f"{name}.yaml").read_text())
    short, long = read("delta_matching"), read("delta_matching_long")
    assert short["task"] == COMMONSENSE and set(COMMONSENSE) <= set(manager.all_subtasks)
    ruler = yaml.safe_load((root / "ruler" / "ruler.yaml").read_text())["task"]
    assert [t["task"] for t in long["task"]] == ruler
    assert all(t["metadata"]["max_seq_lengths"] == [8192] for t in long["task"])


def test_tasks_are_listed_beside_those_of_a_user(monkeypatch, capsys) -> None:
    stock = lm_eval_tasks.TaskManager

    class OnlyGiven(stock):  # lm-eval's own take long to read
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **{**kwargs, "include_defaults": False})

    monkeypatch.setattr(lm_eval_tasks, "TaskManager", OnlyGiven)
    assert cli.main(["eval", "ls", "tasks", "--include_path", str(TASKS)]) == 0
    out = capsys.readouterr().out
    for name in ("delta_matching", "delta_matching_long", "tiny", "tiny_gen"):
        assert re.search(rf"^\|{name} *\|", out, re.MULTILINE), name
    assert lm_eval_tasks.TaskManager is OnlyGiven


def test_groups_are_in_the_package() -> None:
    """The wheel has what the folder has."""
    import tomllib

    root = Path(__file__).parent.parent
    setuptools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = setuptools["package-data"]["hf_deltamatch.evaluation"]
    package = root / "hf_deltamatch" / "evaluation"
    packed = {p for pattern in patterns for p in package.glob(pattern)}
    assert packed == {p for p in groups.TASK_GROUPS.iterdir() if p.suffix == ".yaml"} and packed


def test_model_is_an_argument(monkeypatch) -> None:
    from hf_deltamatch.evaluation.command import lm_eval_arguments

    argv = lm_eval_arguments(["run", "a,b/1", "--tasks", "x", "-a", "attention=none"])
    assert argv[:3] == ["run", "--model", "hf-deltamatch"]
    assert argv[3:5] == ["--model_args", '{"pretrained": "a,b/1"}']
    assert argv[5:] == ["--tasks", "x", "-a", "attention=none"]
    with pytest.raises(ValueError, match="given twice"):
        lm_eval_arguments(["m", "--tasks", "x", "--model_args", "pretrained=n"])


class FakeAccelerator:
    process_index, num_processes = 3, 4


def test_every_process_has_its_documents(checkpoint, monkeypatch, caplog) -> None:
    """As on a CPU, or with one visible GPU a process, or on the second of several machines."""
    lm = DeltaMatchLM(str(checkpoint), device="cpu", dtype="float32")
    assert (lm.rank, lm.world_size) == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    lm._share_documents()
    assert (lm.rank, lm.world_size) == (0, 1) and "each evaluates all documents" in caplog.text
    lm.accelerator = FakeAccelerator()
    lm._share_documents()
    assert (lm.rank, lm.world_size) == (3, 4)
    del lm.accelerator  # which would unwrap the model
    assert lm.provenance()["processes"] == 4
