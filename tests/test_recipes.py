"""Recipes: names, validation, round trips, and the equations they print."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import pickle

import pytest

from hf_deltamatch import formats
from hf_deltamatch.recipes import AttentionRecipe, LinearRecipe

# Every name with all its fields, written out: a changed default must be noticed.
ATTENTION = {
    "delta_matching": ("128xD", "pow2", "matched", "e4m3", False, True, True),
    "stale_delta": ("128xD", "pow2", "stale", "e4m3", False, True, True),
    "dequantized_delta": ("128xD", "pow2", "dequantized", "e4m3", False, True, True),
    "forward_delta": ("128xD", "pow2", "forward", "e4m3", False, True, True),
    "bf16": ("128xD", "pow2", "matched", "e4m3", False, True, False),
}
ATTENTION_FIELDS = "block descale delta do_format project_row_sum deterministic quantize".split()
LINEAR = {
    "blockwise": ("blockwise", "fp32", "e4m3", False),
    "rowwise": ("rowwise", "fp32", "e4m3", False),
    "mx": ("mx", "pow2", "e4m3", False),
}
LINEAR_FIELDS = "scaling descale grad_format grad_weight_hp".split()

NAMED = [(AttentionRecipe, name) for name in ATTENTION] + [(LinearRecipe, name) for name in LINEAR]
CLASSES = pytest.mark.parametrize("cls", [AttentionRecipe, LinearRecipe])


def all_recipes() -> list[AttentionRecipe | LinearRecipe]:
    """Every combination of field values that is allowed."""
    attention = itertools.product(
        formats.ATTENTION_BLOCKS,
        ("pow2", "fp32"),
        ("matched", "stale", "dequantized", "forward"),
        ("e4m3", "e5m2"),
        *[(False, True)] * 3,
    )
    linear = itertools.product(
        ("blockwise", "rowwise", "mx"), ("pow2", "fp32"), ("e4m3", "e5m2"), (False, True)
    )
    return [
        cls(*fields)
        for cls, product in ((AttentionRecipe, attention), (LinearRecipe, linear))
        for fields in product
        if not (fields[0] == "mx" and fields[1] == "fp32")
        # Without quantisation every rule is the same number.
        if not (fields[0] == "mx" and fields[2] == "forward" and fields[-1])
    ]


ALL = all_recipes()


def test_named_recipes_fields() -> None:
    assert {
        name: tuple(AttentionRecipe.from_name(name).to_dict().values())
        for name in AttentionRecipe.NAMES
    } == ATTENTION
    assert {
        name: tuple(LinearRecipe.from_name(name).to_dict().values()) for name in LinearRecipe.NAMES
    } == LINEAR
    assert list(AttentionRecipe().to_dict()) == ATTENTION_FIELDS
    assert list(LinearRecipe().to_dict()) == LINEAR_FIELDS
    assert AttentionRecipe() == AttentionRecipe.from_name("delta_matching")
    assert LinearRecipe() == LinearRecipe.from_name("blockwise")


@pytest.mark.parametrize("cls,name", NAMED)
def test_name_of_named(cls, name: str) -> None:
    assert cls.from_name(name).name == name


@pytest.mark.parametrize(
    "recipe,name",
    [
        (AttentionRecipe(block="1xD"), "delta_matching(block='1xD')"),
        (AttentionRecipe(delta="stale", block="mx"), "stale_delta(block='mx')"),
        (
            AttentionRecipe(project_row_sum=True, do_format="e5m2"),
            "delta_matching(do_format='e5m2', project_row_sum=True)",
        ),
        (AttentionRecipe(quantize=False, block="1xD"), "bf16(block='1xD')"),
        (LinearRecipe(descale="pow2"), "blockwise(descale='pow2')"),
        (LinearRecipe("rowwise", grad_format="e5m2"), "rowwise(grad_format='e5m2')"),
        (LinearRecipe("mx", "pow2", "e5m2"), "mx(grad_format='e5m2')"),
    ],
)
def test_name_with_overrides(recipe, name: str) -> None:
    assert recipe.name == name


def test_name_is_unique() -> None:
    assert len({(type(r), r.name) for r in ALL}) == len(ALL)


def test_from_name_overrides() -> None:
    recipe = AttentionRecipe.from_name("stale_delta", block="1xD", descale="fp32")
    assert recipe == AttentionRecipe(block="1xD", descale="fp32", delta="stale")
    # An override beats the name's own field.
    assert AttentionRecipe.from_name("stale_delta", delta="matched") == AttentionRecipe()
    assert LinearRecipe.from_name("mx", grad_format="e5m2") == LinearRecipe("mx", "pow2", "e5m2")


@CLASSES
def test_from_name_unknown_name(cls) -> None:
    with pytest.raises(ValueError) as error:
        cls.from_name("fp8")
    for part in (cls.KIND, "'fp8'", *cls.NAMES):
        assert part in str(error.value)


@CLASSES
def test_from_name_unknown_field(cls) -> None:
    with pytest.raises(TypeError) as error:
        cls.from_name(next(iter(cls.NAMES)), granularity="tile", block_n=3)
    for part in (cls.__name__, "block_n, granularity", *(f.name for f in dataclasses.fields(cls))):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "cls,field,value,allowed",
    [
        (AttentionRecipe, "block", "64xD", ("'128xD'", "'1xD'", "'mx'")),
        (AttentionRecipe, "descale", "e8m0", ("'pow2'", "'fp32'")),
        (AttentionRecipe, "delta", "fresh", ("'matched'", "'stale'", "'dequantized'", "'forward'")),
        (AttentionRecipe, "do_format", "E4M3", ("'e4m3'", "'e5m2'")),
        (AttentionRecipe, "project_row_sum", "yes", ("True", "False")),
        (AttentionRecipe, "deterministic", None, ("True", "False")),
        (AttentionRecipe, "quantize", 2, ("True", "False")),
        (LinearRecipe, "scaling", "tensorwise", ("'blockwise'", "'rowwise'", "'mx'")),
        (LinearRecipe, "descale", None, ("'pow2'", "'fp32'")),
        (LinearRecipe, "grad_format", ["e4m3"], ("'e4m3'", "'e5m2'")),
    ],
)
def test_unknown_value(cls, field: str, value, allowed: tuple[str, ...]) -> None:
    for make in (cls, lambda **kw: cls.from_name(next(iter(cls.NAMES)), **kw)):
        with pytest.raises(ValueError) as error:
            make(**{field: value})
        for part in (cls.__name__, f"`{field}`", repr(value), *allowed):
            assert part in str(error.value)


@pytest.mark.parametrize("value", [0, 1, 1.0])
def test_number_for_a_bool(value: float) -> None:
    """Either refused, or the same recipe in every form: equal recipes encode equally."""
    for field in ("project_row_sum", "deterministic", "quantize"):
        try:
            recipe = AttentionRecipe(**{field: value})
        except ValueError:
            continue
        assert recipe.encoded == AttentionRecipe(**{field: bool(value)}).encoded


@pytest.mark.parametrize(
    "make",
    [
        lambda: AttentionRecipe(block="mx", descale="fp32"),
        lambda: LinearRecipe(scaling="mx", descale="fp32"),
        lambda: LinearRecipe(scaling="mx"),  # fp32 is the default descale
        lambda: LinearRecipe.from_name("mx", descale="fp32"),
    ],
)
def test_mx_refuses_fp32_descales(make) -> None:
    with pytest.raises(ValueError, match="'fp32'.*'mx'.*powers of two.*descale='pow2'"):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: AttentionRecipe(block="mx", delta="forward"),
        lambda: AttentionRecipe.from_name("forward_delta", block="mx"),
        lambda: AttentionRecipe.from_dict({"block": "mx", "delta": "forward"}),
    ],
)
def test_mx_refuses_the_forward_rule(make) -> None:
    with pytest.raises(ValueError, match="'forward'.*'mx'.*another copy of V.*'128xD' or '1xD'"):
        make()


def test_two_terms() -> None:
    assert [r.delta for r in ALL if getattr(r, "two_terms", False)]
    for recipe in ALL:
        if isinstance(recipe, AttentionRecipe):
            assert recipe.two_terms is (recipe.delta == "forward" and recipe.quantize)


@pytest.mark.parametrize("cls,name", NAMED)
def test_resolve(cls, name: str) -> None:
    recipe = cls.from_name(name)
    assert cls.resolve(name) == recipe
    assert cls.resolve(name) is cls.resolve(name)  # a look-up
    assert cls.resolve(recipe) is recipe
    assert cls.resolve(recipe.to_dict()) == recipe


@CLASSES
def test_resolve_errors(cls) -> None:
    with pytest.raises(ValueError, match="'fp8'.*Known names"):
        cls.resolve("fp8")
    other = LinearRecipe if cls is AttentionRecipe else AttentionRecipe
    for bad in (None, 3, other()):
        with pytest.raises(TypeError) as error:
            cls.resolve(bad)
        for part in (cls.__name__, *cls.NAMES, type(bad).__name__):
            assert part in str(error.value)


@CLASSES
def test_from_dict_unknown_field(cls) -> None:
    with pytest.raises(ValueError) as error:
        cls.from_dict({**cls().to_dict(), "sparsity": 2})
    for part in (cls.__name__, "sparsity", "newer", *(f.name for f in dataclasses.fields(cls))):
        assert part in str(error.value)


def test_from_dict_fills_defaults() -> None:
    """A recipe stored before a field existed loads with the field's default."""
    assert AttentionRecipe.from_dict({"delta": "stale"}) == AttentionRecipe.from_name("stale_delta")


def test_round_trips() -> None:
    """to_dict, encoded, pickle, deepcopy, replace and JSON text, for every allowed recipe."""
    for recipe in ALL:
        cls = type(recipe)
        copies = [
            cls.from_dict(recipe.to_dict()),
            cls.from_dict(json.loads(json.dumps(recipe.to_dict()))),
            cls.decode(recipe.encoded),
            pickle.loads(pickle.dumps(recipe)),
            copy.deepcopy(recipe),
            copy.copy(recipe),
            dataclasses.replace(recipe),
        ]
        for other in copies:
            assert type(other) is cls
            assert other == recipe and hash(other) == hash(recipe)
            assert other.encoded == recipe.encoded and other.name == recipe.name
            assert str(other) == str(recipe)


def test_encoded_is_canonical() -> None:
    assert len({r.encoded for r in ALL}) == len(ALL)
    shuffled = dict(reversed(AttentionRecipe().to_dict().items()))
    assert AttentionRecipe.from_dict(shuffled).encoded == AttentionRecipe().encoded
    assert json.loads(LinearRecipe().encoded) == LinearRecipe().to_dict()
    replaced = dataclasses.replace(AttentionRecipe(), block="1xD")
    assert json.loads(replaced.encoded)["block"] == "1xD"


@CLASSES
def test_frozen_and_hashable(cls) -> None:
    recipe = cls()
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.descale = "pow2"
    assert {recipe: "x"}[cls()] == "x"
    assert len(set(ALL)) == len(ALL)


@pytest.mark.parametrize("block,descale", [("128xD", "pow2"), ("1xD", "fp32")])
@pytest.mark.parametrize("do_format", ["e4m3", "e5m2"])
def test_attention_str_products(block: str, descale: str, do_format: str) -> None:
    op = f"E4M3[{block}, {descale}]"
    do = f"{do_format.upper()}[{block}, {descale}]"
    lines = str(AttentionRecipe(block, descale, do_format=do_format)).splitlines()
    products = {line.split()[0]: line for line in lines if line.split()[0].isdigit()}
    expected = {
        "1": ("fwd  S  = Q Kᵀ", f"Q {op}, K {op}"),
        "2": ("fwd  O  = P V", "P E4M3[2^8 after the running max]", f"V {op}"),
        "3": ("bwd  S  = Q Kᵀ", "as 1, the same payloads"),
        "4": ("bwd  dP = dO Vᵀ", f"dO {do}, V {op}"),
        "5": ("bwd  dV = Pᵀ dO", "P E4M3[key x query tile, pow2]", f"dO {do}"),
        "6": ("bwd  dQ = dS K", "dS E4M3[query row x key tile, pow2]", f"K {op}"),
        "7": ("bwd  dK = dSᵀ Q", "dS E4M3[key x query tile, pow2]", f"Q {op}"),
    }
    assert list(products) == list(expected)
    for number, parts in expected.items():
        for part in parts:
            assert part in products[number]


def test_attention_str_mx() -> None:
    lines = str(AttentionRecipe("mx", do_format="e5m2")).splitlines()
    tokens = "[32 tokens, E8M0, re-encoded]"
    along = "E4M3[1x32 along the contraction, E8M0]"
    for number, parts in {
        1: ("Q E4M3[mx, pow2], K E4M3[mx, pow2]",),
        2: (f"P {along}", f"V E4M3{tokens}"),
        4: ("dO E5M2[mx, pow2], V E4M3[mx, pow2]",),
        5: (f"P {along}", f"dO E5M2{tokens}"),
        6: (f"dS {along}", f"K E4M3{tokens}"),
        7: (f"dS {along}", f"Q E4M3{tokens}"),
    }.items():
        (line,) = (text for text in lines if text.startswith(f"  {number} "))
        for part in parts:
            assert part in line


def test_attention_str_delta_and_projection() -> None:
    shown = {d: str(AttentionRecipe(delta=d)) for d in AttentionRecipe.DELTAS}
    assert "δ = Σ_j P·dP / (Σ_j P + P_sink)" in shown["matched"]
    assert "δ = rowsum(dO ∘ O)" in shown["stale"]
    assert "δ = rowsum(dÔ ∘ O)" in shown["dequantized"]
    assert "δ = rowsum(dÔ ∘ O)" in shown["forward"] and "nearly matched" in shown["forward"]
    terms = "P E4M3[2^8 after the running max] + E4M3[2^5 x what is left], V"
    assert [d for d, text in shown.items() if terms in text] == ["forward"]
    others = {
        n: str(AttentionRecipe(**{n: v})) for n, v in (("block", "1xD"), ("project_row_sum", True))
    }
    assert [d for d, text in (shown | others).items() if "P of P K E5M2[2^15]" in text] == [
        "matched"
    ]
    assert all("mean key" not in text for text in shown.values())
    assert "mean key" in str(AttentionRecipe(project_row_sum=True))
    assert "high precision" in str(AttentionRecipe(quantize=False))


@pytest.mark.parametrize(
    "recipe,first,output,grad_input,grad_weight",
    [
        (
            LinearRecipe(),
            "blockwise (fp32 descales)",
            "x E4M3[blockwise_1x128], W E4M3[blockwise_128x128]",
            "dy E4M3[blockwise_1x128], W E4M3[blockwise_128x128]",
            "dy E4M3[blockwise_128x1], x E4M3[blockwise_128x128]",
        ),
        (
            LinearRecipe("rowwise", "pow2", "e5m2"),
            "(pow2 descales)",
            "x E4M3[rowwise], W E4M3[rowwise]",
            "dy E5M2[rowwise], W E4M3[columnwise]",
            "dy E5M2[columnwise], x E4M3[columnwise]",
        ),
        (
            LinearRecipe("mx", "pow2"),
            "mx (pow2 descales)",
            "x E4M3[mx_1x32], W E4M3[mx_1x32]",
            "dy E4M3[mx_1x32], W E4M3[mx_32x1]",
            "dy E4M3[mx_32x1], x E4M3[mx_32x1]",
        ),
        (
            LinearRecipe(grad_weight_hp=True),
            "blockwise(grad_weight_hp=True) (fp32 descales)",
            "x E4M3[blockwise_1x128], W E4M3[blockwise_128x128]",
            "dy E4M3[blockwise_1x128], W E4M3[blockwise_128x128]",
            "in high precision (the dtype of x)",
        ),
    ],
)
def test_linear_str(recipe, first, output, grad_input, grad_weight) -> None:
    lines = str(recipe).splitlines()
    assert len(lines) == 4 and first in lines[0]
    assert "output      = x Wᵀ" in lines[1] and output in lines[1]
    assert "grad_input  = dy W" in lines[2] and grad_input in lines[2]
    assert "grad_weight = dyᵀ x" in lines[3] and grad_weight in lines[3]


@pytest.mark.parametrize("cls", [AttentionRecipe, LinearRecipe])
def test_what_is_no_name_and_no_dict(cls) -> None:
    for name in ([], None, 3, {}):
        with pytest.raises(ValueError, match="Unknown .* recipe"):
            cls.from_name(name)
    for fields in ([1], None, "delta"):
        with pytest.raises(TypeError, match="from_dict: `fields` is"):
            cls.from_dict(fields)
    with pytest.raises(ValueError, match="unknown field 1, a"):
        cls.from_dict({1: 1, "a": 2})
