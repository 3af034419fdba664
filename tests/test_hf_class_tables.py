"""Models that look their attention up in a table of classes refuse ours with a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from coverage_models import tiny_model
from tiny_models import (
    OURS,
    batch,
    one_thread,  # noqa: F401
)

from hf_deltamatch import DeltaMatchConfig, swap_linears
from hf_deltamatch.hf import class_tables

# Speech and vision on their own, which no language model of Transformers holds.
NOT_LANGUAGE = {
    "altclip", "bark", "beit", "data2vec", "mimi", "sam", "sam_hq", "superglue",
}  # fmt: skip
TABLES = class_tables.tables()


def test_every_table_of_a_language_model_is_known() -> None:
    """Looked for in the sources of the installed Transformers."""
    root = Path(transformers.__file__).parent / "models"
    lookup = re.compile(r"\w+_CLASSES\[[\w.]*attn_implementation\]")
    found = {p.parent.name for p in root.glob("*/modeling_*.py") if lookup.search(p.read_text())}
    assert found - NOT_LANGUAGE == {name.split(".")[0] for name in TABLES}


@pytest.mark.parametrize("table", TABLES)
def test_tables_refuse_with_a_sentence(table: str) -> None:
    with pytest.raises(ValueError) as error:
        TABLES[table][OURS](None, layer_idx=0)
    for part in (repr(OURS), table.split(".")[0], "takes 'eager'", "swap_linears(model)"):
        assert part in str(error.value)
    before = dict(TABLES[table])
    class_tables.register()
    assert TABLES[table] == before


@pytest.mark.parametrize("family", ["falcon", "git", "gpt_neo", "gptj"])
def test_models_with_a_table(family: str) -> None:
    """At load, not as a KeyError; their own attention and FP8 linears work as before."""
    if not any(name.startswith(f"{family}.") for name in TABLES):
        pytest.skip(f"{family} uses the attention interface in this version")
    with pytest.raises(ValueError, match=f"{family} chooses its attention from a table"):
        tiny_model(family, OURS)
    model = tiny_model(family, "eager")
    if family == "falcon":  # its linears are of a class of its own
        with pytest.raises(ValueError, match="FalconLinear is not exactly nn.Linear"):
            swap_linears(model)
    else:
        assert swap_linears(model).swapped
    assert model(input_ids=batch(1, 8)).logits.isfinite().all()
    config = DeltaMatchConfig(linear=None)
    if family != "git":  # whose image encoder does use the interface
        with pytest.raises(ValueError, match="does not use the attention interface"):
            config.apply_to(tiny_model(family, "eager"))
