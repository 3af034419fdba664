"""Seeds, and the marks that need hardware or files this machine may lack."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Read when a kernel is defined, so before anything imports one.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("fuzz", max_examples=config.getoption("--fuzz-examples"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-examples",
        type=int,
        default=200,
        help="examples of the fuzz tests together; `make test-all` asks for 2000",
    )
    parser.addoption(
        "--interpret-gpu",
        action="store_true",
        help="without a CUDA device, run the tests marked gpu in Triton's interpreter where they can: "
        "slow, and only to try the tests themselves",
    )


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if "interpreted" in item.keywords:
                item.add_marker("gpu")
        return
    interpret = config.getoption("--interpret-gpu")
    for item in items:
        if "gpu" in item.keywords and not (interpret and "interpretable" in item.keywords):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> str:
    """A file of text that tiny models of the study learn something from in three steps."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(f"Line {i}: the quick brown fox, {i * i} times.\n" for i in range(300)))
    return str(path)


@pytest.fixture(scope="session")
def corpus(text):
    from hf_deltamatch.study.corpus import load_corpus

    return load_corpus(text, 5, 10**6)
