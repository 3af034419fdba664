"""The table of families: what is committed agrees with itself and, for a sample, with a new run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from coverage_measure import EXACT, FP8_OVER_EXACT, judge, measure
from coverage_models import families, tiny_model
from coverage_table import DEFECTS, JSON, ON_OUR_OP, TABLE, counts, guarded, main, table
from tiny_models import batch, one_thread  # noqa: F401

from hf_deltamatch import check_model

RESULTS = json.loads(JSON.read_text())
ROWS = RESULTS["families"]
# The tested version, and the newest one when the table was last measured.
FOLDERS = [JSON.parent, JSON.parent / "newest"]
SAME_VERSION = RESULTS["environment"]["packages"]["transformers"] == transformers.__version__
SAMPLE = ["afmoe", "bert", "bloom", "deepseek_v4", "falcon", "gemma4_assistant", "gemma4_text", "mamba", "modernbert-decoder", "musicgen"]  # fmt: skip
# Other machines sum in another order, which can send a token to another expert.
ROOM = 1.5


def compare(row: dict, committed: dict) -> None:
    for key in ("status", "class", "calls", "backward_calls", "modules", "other"):
        assert row.get(key) == committed.get(key), (row["family"], key, row.get("error"))
    for key in ("fp8", "linears"):
        for what in ("forward", "gradient"):
            if what in committed.get(key, {}):
                assert row[key][what] < ROOM * committed[key][what] + 1e-3, (row["family"], key)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_coverage_table_matches_results(folder: Path) -> None:
    results = json.loads((folder / JSON.name).read_text())
    assert (folder / TABLE.name).read_text() == table(results)
    assert results["counts"] == counts(list(results["families"].values()))
    assert results["limits"] == {"exact": EXACT, "fp8_over_exact": FP8_OVER_EXACT}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_coverage_has_no_defect(folder: Path) -> None:
    """None silent, none wrong, at least 110 on our op, and the statuses follow from the numbers."""
    rows = json.loads((folder / JSON.name).read_text())["families"]
    assert not [f for f, r in rows.items() if r["status"] in DEFECTS]
    ours = [r for r in rows.values() if r["status"] in ON_OUR_OP]
    assert len(ours) >= 110
    for row in rows.values():
        if "exact" in row:  # the rest never ran
            assert judge(row) == row["status"], row["family"]
        if row["status"] not in ON_OUR_OP:
            assert row["error"], row["family"]
    for family, row in ((r["family"], r) for r in ours):
        assert row["calls"] >= row["called"] > 0
        # BLT's patcher chooses where patches end, and HRM's early cycles are detached: nothing goes
        # back through either.
        partly = family in ("blt", "hrm_text") and 0 < row["backward_calls"] < row["calls"]
        assert row["backward_calls"] == row["calls"] or partly, family
        assert max(row["exact"].values()) < EXACT
        # What was not called is cross-attention, or an encoder of something else than text.
        assert row["called"] + len(row["not_called"]) == row["modules"]


@pytest.mark.skipif(not SAME_VERSION, reason="the table is of another version of Transformers")
def test_coverage_names_every_family() -> None:
    assert sorted(ROWS) == families()


@pytest.mark.skipif(not SAME_VERSION, reason="the table is of another version of Transformers")
@pytest.mark.parametrize("family", SAMPLE)
def test_coverage_sample_again(family: str) -> None:
    compare(measure(family), ROWS[family])


def test_coverage_sees_silent_and_wrong() -> None:
    """The judge, on a good row spoilt in one place."""
    good = dict(ROWS["llama"])
    assert judge(good) == "works"
    assert judge({**good, "calls": 0}) == "silent"
    assert judge({**good, "foreign": 1}) == "silent"
    assert judge({**good, "exact": {"forward": 3e-5, "gradient": 1e-7}}) == "wrong"
    assert judge({**good, "exact": {"forward": float("nan"), "gradient": 1e-7}}) == "wrong"
    assert judge({**good, "fp8": {"forward": 0.5, "gradient": 0.01}}) == "wrong"
    assert judge({**good, "error": "ValueError: check_model: ..."}) == "silent"


def test_coverage_sees_attention_outside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose check passes while it calls SDPA by itself is found."""
    from transformers.models.llama import modeling_llama

    class Elsewhere:
        def get_interface(self, *args):
            sdpa = transformers.AttentionInterface()["sdpa"]
            return lambda module, q, k, v, mask, **kwargs: sdpa(module, q, k, v, None, **kwargs)

    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", Elsewhere())
    row = measure("llama")
    assert row["calls"] == 0 and row["foreign"] == 2 and row["status"] in DEFECTS


def test_coverage_survives_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    import coverage_table

    monkeypatch.setattr(coverage_table, "measure", lambda family: os._exit(3))
    assert guarded("llama")["status"] == "failed"
    monkeypatch.setattr(coverage_table, "SECONDS", 0.2)
    monkeypatch.setattr(coverage_table, "measure", lambda family: __import__("time").sleep(30))
    assert guarded("llama")["error"] == "more than the time limit"


@pytest.mark.skipif("deepseek_v4" not in families(), reason="newer than this Transformers")
def test_coverage_appended_keys_keep_their_meaning() -> None:
    """DeepSeek V4 appends a bias of 0 and -inf to its mask: it needs an additive one."""
    model = tiny_model("deepseek_v4", "fp8_delta_matching")
    seen = []
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    assert check_model(model).attention
    model(input_ids=batch(2, 24))
    assert seen[0].is_floating_point()


@pytest.mark.slow
@pytest.mark.skipif(not SAME_VERSION, reason="the table is of another version of Transformers")
def test_coverage_all_again(tmp_path) -> None:
    assert main(["--out", str(tmp_path)]) == 0
    again = json.loads((tmp_path / JSON.name).read_text())["families"]
    assert again.keys() == ROWS.keys()
    for family, row in again.items():
        compare(row, ROWS[family])
