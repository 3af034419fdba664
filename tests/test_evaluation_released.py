"""``hf-deltamatch eval --released``: the catalogue, what is missing, and what lm-eval is given."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys

import huggingface_hub
import pytest
from huggingface_hub import errors

from hf_deltamatch import cli
from hf_deltamatch.evaluation import released

NAME = "DM-GDNMLA-1.7B-DM"
REPOSITORY = f"tturing/{NAME}"
# huggingface_hub 1 has httpx, 2 has httpx2.
http = importlib.import_module(errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0])
RESPONSE = http.Response(404, request=http.Request("GET", "https://huggingface.co"))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub answers with ``config``, or raises it; and flash-linear-attention is there or not."""

    def answer(config, fla: bool = True) -> list:
        asked = []

        def download(repository, filename, *, revision=None):
            asked.append((repository, filename, revision))
            if isinstance(config, Exception):
                raise config
            file = tmp_path / "config.json"
            file.write_text(json.dumps(config))
            return str(file)

        stock = importlib.util.find_spec
        find = lambda name, *a: (object() if fla else None) if name == "fla" else stock(name, *a)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        monkeypatch.setattr(importlib.util, "find_spec", find)
        return asked

    return answer


@pytest.fixture
def lm_eval_gets(monkeypatch) -> list[list[str]]:
    """What lm-eval is called with."""
    main = pytest.importorskip("lm_eval.__main__")
    seen = []
    monkeypatch.setattr(main, "cli_evaluate", lambda: seen.append(sys.argv[1:]))
    return seen


def test_catalogue() -> None:
    names = list(released.RELEASED)
    assert len(names) == 12 and NAME in names and "DM-GDNGQA-1.7B-NoQK-SD" in names
    assert {n.rsplit("-", 1)[1] for n in names} == set(released.ARMS) == {"MP", "SD", "DM"}
    for name in names:
        assert released.resolve(f"tturing/{name}") == released.resolve(name.lower()) == name
    assert {f.needs for n, f in released.RELEASED.items() if "Mamba" in n} == {None}
    assert {f.needs for n, f in released.RELEASED.items() if "Mamba" not in n} == {"fla"}


def test_without_a_name_lists_them(capsys) -> None:
    assert cli.main(["eval", "--released"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in released.RELEASED)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--released", "without a name"),
        ("--released=", "without a name"),
        ("--released DM-7B", "'DM-7B'"),
        ("--released other/DM-GDNMLA-1.7B-DM", "'other/DM-GDNMLA-1.7B-DM'"),
    ],
)
def test_wrong_name_lists_them(argv, words, lm_eval_gets, capsys) -> None:
    assert cli.main(["eval", "--tasks", "x", *argv.split()]) == 2
    err = capsys.readouterr().err
    assert words in err and all(name in err for name in released.RELEASED)
    assert len(err.splitlines()) == 1 and not lm_eval_gets


OFFLINE = errors.LocalEntryNotFoundError("no connection")
GATED = errors.GatedRepoError("gated", response=RESPONSE)
ABSENT = errors.RepositoryNotFoundError("absent", response=RESPONSE)
CUSTOM = {"model_type": "flame", "auto_map": {"AutoConfig": "configuration_flame.C"}}


@pytest.mark.parametrize(
    ("config", "fla", "options", "says"),
    [
        (OFFLINE, True, "", ["hub cannot be reached", "may bring its own modelling code"]),
        (
            OFFLINE,
            False,
            "--trust_remote_code",
            ["hub cannot", "pip install flash-linear-attention"],
        ),
        (GATED, True, "--trust_remote_code", ["access to it has to be granted"]),
        (ABSENT, True, "--trust_remote_code", ["the hub answers 404"]),
        (
            CUSTOM,
            True,
            "",
            ["it brings its own modelling code, which runs on this machine: read it"],
        ),
        (CUSTOM, True, "-a trust_remote_code=False", ["brings its own modelling code"]),
        (CUSTOM, False, "", ["its own modelling code", "GatedDeltaNet layers need flash-linear"]),
        (CUSTOM, False, "-a trust_remote_code=True", ["flash-linear-attention"]),
    ],
)
def test_what_is_missing_is_one_sentence(
    config, fla, options, says, hub, lm_eval_gets, capsys
) -> None:
    hub(config, fla)
    argv = ["eval", "--released", NAME, "--tasks", "x", *options.split()]
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and f"{REPOSITORY} cannot be evaluated here: " in err
    assert all(words in err for words in says), err
    assert err.count(";") == len(says) - 1, err
    assert not lm_eval_gets


def test_mamba_needs_no_flash_linear_attention(hub) -> None:
    hub(CUSTOM, fla=False)
    assert released.missing("DM-MambaGQA-1.7B-SD", trusted=True) == []


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (CUSTOM, "--trust_remote_code --batch_size 8"),
        (CUSTOM, "--model_args trust_remote_code=True,dtype=bfloat16"),
        (CUSTOM, '-a {"trust_remote_code":true}'),
        ({"model_type": "llama"}, "--batch_size 8"),
    ],
)
def test_the_rest_is_lm_evals(config, options, hub, lm_eval_gets) -> None:
    hub(config)
    assert cli.main(["eval", "--tasks", "x", f"--released={NAME}", *options.split()]) == 0
    (argv,) = lm_eval_gets
    assert argv[:4] == ["run", "--model", "hf-deltamatch", "--model_args"]
    assert json.loads(argv[4]) == {"pretrained": REPOSITORY, "attention": "none", "linear": "none"}
    assert argv[5:] == ["--tasks", "x", *options.split()]
    assert ("trust_remote_code" in " ".join(argv)) == ("trust_remote_code" in options)


def test_recipe_and_revision_are_the_users(hub, lm_eval_gets) -> None:
    asked = hub({})
    argv = ["eval", "--released", NAME, "--tasks", "x", "-a", "attention=stale_delta,revision=v2"]
    assert cli.main(argv) == 0
    assert json.loads(lm_eval_gets[0][4]) == {"pretrained": REPOSITORY, "linear": "none"}
    assert asked == [(REPOSITORY, "config.json", "v2")]


def test_another_model_of_lm_eval_gets_the_name_alone(hub, lm_eval_gets) -> None:
    hub({})
    assert cli.main(["eval", "--model", "hf", "--released", NAME, "--tasks", "x"]) == 0
    (argv,) = lm_eval_gets
    assert argv[:2] == ["run", "--model_args"] and json.loads(argv[2]) == {"pretrained": REPOSITORY}
    assert argv[3:] == ["--model", "hf", "--tasks", "x"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tasks x -a pretrained=y", "given twice"),
        ("--config c.yaml", "does not go with --config"),
    ],
)
def test_two_models_are_refused(options, words, hub, lm_eval_gets, capsys) -> None:
    asked = hub({})
    assert cli.main(["eval", "--released", NAME, *options.split()]) == 2
    assert words in capsys.readouterr().err and not lm_eval_gets and not asked
