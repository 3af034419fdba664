"""Named, frozen recipes: what is quantised, how, and which δ the backward uses.

A recipe prints itself as its equations. ``from_name`` takes a known name and field overrides;
``resolve`` (used by every ``recipe=`` argument) takes a name or a recipe object.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from hf_deltamatch import formats
from hf_deltamatch.formats import Block

R = TypeVar("R", bound="_Recipe")


def _check_choice(owner: str, field: str, value: object, allowed: tuple) -> None:
    # `1 in (True, False)` holds, and 1 would be encoded differently from True.
    if value not in allowed or type(value) is not type(allowed[0]):
        raise ValueError(
            f"{owner}: `{field}` is {value!r}; allowed values are "
            f"{', '.join(repr(a) for a in allowed)}."
        )


def _variant(name: str) -> str:
    """What to write for a recipe as :attr:`_Recipe.name` prints it, which is no name to look up."""
    if not isinstance(name, str) or not name.endswith(")") or "(" not in name:
        return ""
    known, fields = name[:-1].split("(", 1)
    return (
        f" A variant is made with AttentionRecipe.from_name({known!r}, {fields}), or LinearRecipe, and "
        f"printed with the fields as flags, `hf-deltamatch recipe {known} --FIELD VALUE`."
    )


@dataclass(frozen=True)
class _Recipe:
    NAMES: ClassVar[dict[str, dict]] = {}
    KIND: ClassVar[str] = ""

    @classmethod
    def from_name(cls: type[R], name: str, **overrides) -> R:
        """The recipe called ``name``, with single fields overridden.

        Raises:
            ValueError: unknown name (the message lists the known ones) or unknown value.
            TypeError: unknown field.
        """
        if not isinstance(name, str) or name not in cls.NAMES:
            known = ", ".join(sorted(cls.NAMES))
            other = [c.KIND for c in _Recipe.__subclasses__() if name in list(c.NAMES)]
            hint = f" {name!r} is the name of a recipe of {other[0]}." if other else _variant(name)
            raise ValueError(f"Unknown {cls.KIND} recipe {name!r}. Known names: {known}.{hint}")
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(set(overrides) - set(known))
        if unknown:
            raise TypeError(
                f"{cls.__name__} has no field {', '.join(unknown)}; fields are {', '.join(known)}."
            )
        return cls(**{**cls.NAMES[name], **overrides})

    @classmethod
    def resolve(cls: type[R], recipe: str | R | dict) -> R:
        """Accepts a recipe object, a name, or the dict that :meth:`to_dict` wrote."""
        if isinstance(recipe, cls):
            return recipe
        if isinstance(recipe, str):
            # A look-up, not a construction: torch.compile traces through here.
            named = _NAMED[cls.KIND].get(recipe)
            return cls.from_name(recipe) if named is None else named
        if isinstance(recipe, dict):
            return cls.from_dict(recipe)
        raise TypeError(
            f"A {cls.KIND} recipe is a name ({', '.join(sorted(cls.NAMES))}), a {cls.__name__} or "
            f"its dict; got {type(recipe).__name__}."
        )

    def to_dict(self) -> dict:
        """All fields, resolved, as JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls: type[R], fields: dict) -> R:
        """Inverse of :meth:`to_dict`. An unknown field raises: it would change the numerics."""
        if not isinstance(fields, dict):
            raise TypeError(
                f"{cls.__name__}.from_dict: `fields` is {fields!r}; it must be the dict that to_dict "
                "wrote."
            )
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(str(k) for k in set(fields) - known)
        if unknown:
            raise ValueError(
                f"{cls.__name__}: unknown field {', '.join(unknown)}; this version knows "
                f"{', '.join(sorted(known))}. The recipe may come from a newer hf_deltamatch."
            )
        return cls(**fields)

    def __post_init__(self) -> None:
        self._validate()
        object.__setattr__(self, "encoded", json.dumps(self.to_dict(), sort_keys=True))

    def _validate(self) -> None:
        raise NotImplementedError

    encoded: ClassVar[str]
    """Canonical text form, the recipe argument of the custom ops; set per instance."""

    @classmethod
    @functools.cache
    def decode(cls: type[R], text: str) -> R:
        """Inverse of ``encoded``."""
        return cls.from_dict(json.loads(text))

    @property
    def name(self) -> str:
        """The known name of these fields, with the fields that differ from it."""
        mine = self.to_dict()
        best: tuple[str, dict] | None = None
        for name, fields in self.NAMES.items():
            named = type(self)(**fields).to_dict()
            diff = {k: v for k, v in mine.items() if named[k] != v}
            if best is None or len(diff) < len(best[1]):
                best = (name, diff)
        name, diff = best
        if not diff:
            return name
        return f"{name}({', '.join(f'{k}={v!r}' for k, v in sorted(diff.items()))})"


@dataclass(frozen=True)
class AttentionRecipe(_Recipe):
    """How the seven products of attention are quantised.

    >>> AttentionRecipe.from_name("delta_matching", block="1xD").name
    "delta_matching(block='1xD')"
    """

    block: str = "128xD"
    """Elements of Q, K, V, dO that share a descale: ``128xD`` (128 tokens), ``1xD`` (one token,
    strictly causal) or ``mx`` (32 elements along the contraction, E8M0). What other tokens may
    change: nothing under ``1xD``; under ``128xD`` only elements more than 2**14 below the largest
    of their tile, never across packed sequences or from padding; under ``mx`` the same within 32
    neighbouring tokens, across packed sequences too where a boolean mask separates them. The kernels
    multiply ``mx`` by block-scaled FP8 instructions where the device has them (Blackwell), elsewhere
    in BF16 with the same values: slower there than the other blocks."""

    descale: str = "pow2"
    """``pow2`` (exact to fold) or ``fp32``. ``fp32`` needs ``1xD``, or ``128xD`` without a causal
    mask: a tile descale would leak later tokens into earlier ones."""

    delta: str = "matched"
    """``matched``: Σ P∘dP̂ / Σ P from the backward's own operands. ``stale``: rowsum(dO∘O) with
    BF16 O. ``dequantized``: rowsum(dÔ∘O). ``forward``: the same from an O whose P the forward cast as
    two FP8 terms, so that O nearly is P V̂: close to matched, for one product more in the forward and one
    fewer in the backward (two where the matched δ takes a pass of its own). Not with ``mx``."""

    do_format: str = "e4m3"
    """Format of dO: ``e4m3`` or ``e5m2``."""

    project_row_sum: bool = False
    """Remove from dQ what the rounding of dS leaks along the mean key."""

    deterministic: bool = True
    """No atomics. ``False`` allows faster reductions where a kernel has them."""

    quantize: bool = True
    """``False``: the same code in high precision (also FP64, for gradcheck)."""

    DELTAS: ClassVar[tuple[str, ...]] = ("matched", "stale", "dequantized", "forward")

    KIND: ClassVar[str] = "attention"
    NAMES: ClassVar[dict[str, dict]] = {
        "delta_matching": {},
        "stale_delta": {"delta": "stale"},
        "dequantized_delta": {"delta": "dequantized"},
        "forward_delta": {"delta": "forward"},
        "bf16": {"quantize": False},
    }

    def _validate(self) -> None:
        own = type(self).__name__
        _check_choice(own, "block", self.block, tuple(formats.ATTENTION_BLOCKS))
        _check_choice(own, "descale", self.descale, ("pow2", "fp32"))
        _check_choice(own, "delta", self.delta, self.DELTAS)
        _check_choice(own, "do_format", self.do_format, tuple(formats.FORMATS))
        for field in ("project_row_sum", "deterministic", "quantize"):
            _check_choice(own, field, getattr(self, field), (True, False))
        if self.block == "mx" and self.descale != "pow2":
            raise ValueError(
                f"{own}: `descale` is {self.descale!r} with block 'mx'; E8M0 descales are powers of "
                "two. Use descale='pow2', or block='1xD' for FP32 descales."
            )
        if self.block == "mx" and self.two_terms:
            raise ValueError(
                f"{own}: `delta` is 'forward' with block 'mx', whose forward multiplies by another copy "
                "of V than the backward, so that O cannot match it. Use block='128xD' or '1xD', or one of "
                "'matched', 'stale' and 'dequantized' for `delta`."
            )

    @property
    def two_terms(self) -> bool:
        """The forward casts P as two FP8 terms, the second of what the first leaves."""
        return self.quantize and self.delta == "forward"

    def __str__(self) -> str:
        if not self.quantize:
            return f"{self.name}: all seven products in high precision (BF16 or FP32 operands)"
        op = f"E4M3[{self.block}, {self.descale}]"
        dop = f"{formats.FORMATS[self.do_format]}[{self.block}, {self.descale}]"
        if self.block == "mx":
            fwd_p = row = col = "E4M3[1x32 along the contraction, E8M0]"
            tok = "E4M3[32 tokens, E8M0, re-encoded]"
            dtok = f"{formats.FORMATS[self.do_format]}[32 tokens, E8M0, re-encoded]"
        else:
            fwd_p = "E4M3[2^8 after the running max]"
            if self.two_terms:
                fwd_p += f" + E4M3[2^{formats.P_REST_CAST_LOG2} x what is left]"
            row = "E4M3[query row x key tile, pow2]"
            col = "E4M3[key x query tile, pow2]"
            tok, dtok = op, dop
        delta = {
            "matched": "δ = Σ_j P·dP / (Σ_j P + P_sink)      FP32, the operands of 3 and 4",
            "stale": "δ = rowsum(dO ∘ O)                   stale: O in BF16, dO unquantised",
            "dequantized": "δ = rowsum(dÔ ∘ O)                   half matched: dO as in 4, O stale",
            "forward": "δ = rowsum(dÔ ∘ O)                   nearly matched: dO as in 4, O in BF16 from 2",
        }[self.delta]
        lines = [
            f"{self.name}",
            f"  1 fwd  S  = Q Kᵀ    Q {op}, K {op}",
            f"  2 fwd  O  = P V     P {fwd_p}, V {tok}",
            "  3 bwd  S  = Q Kᵀ    as 1, the same payloads",
            f"  4 bwd  dP = dO Vᵀ   dO {dop}, V {op}",
            f"    bwd  {delta}",
            "    bwd  dS = P ∘ (dP − δ)                    FP32",
            f"  5 bwd  dV = Pᵀ dO   P {col}, dO {dtok}",
            f"  6 bwd  dQ = dS K    dS {row}, K {tok}",
            f"  7 bwd  dK = dSᵀ Q   dS {col}, Q {tok}",
        ]
        if (self.delta, self.block, self.project_row_sum) == ("matched", "128xD", False):
            sweep = "    bwd  kernels to D 128: dQ = (P ∘ (dP − z)) K − (δ − z)(P K) in the sweep that finds δ,"
            power = formats.P_SWEEP_CAST_LOG2
            lines[-1:-1] = [sweep, f"         z = rowsum(dÔ ∘ O), P of P K E5M2[2^{power}]"]
        if self.project_row_sum:
            lines.append("    bwd  dQ −= (rowsum(dŜ) − rowsum(dS)) · mean key")
        return "\n".join(lines)


@dataclass(frozen=True)
class LinearRecipe(_Recipe):
    """How the three GEMMs of a linear layer are quantised.

    >>> print(LinearRecipe.from_name("blockwise").name)
    blockwise
    """

    scaling: str = "blockwise"
    """``blockwise``: x and grad_output 1x128 along the contraction, weight 128x128, and x 128x128 for
    grad_weight, where no token's result depends on another's and GEMMs with one operand of 128x128
    are a third faster (a NaN of x reaches the grad_weight of the 128 features of its tile).
    ``rowwise``: one descale per row of each operand along the contraction. ``mx``: 1x32, E8M0."""

    descale: str = "fp32"
    """``fp32`` or ``pow2``; ``mx`` is always ``pow2``."""

    grad_format: str = "e4m3"
    """Format of grad_output: ``e4m3`` or ``e5m2``."""

    grad_weight_hp: bool = False
    """Keep the grad_weight GEMM in the dtype of x (BF16 under autocast). x itself is saved for it:
    2 bytes an element of BF16 (4 of FP32), where the FP8 copy takes 1 and its descales."""

    KIND: ClassVar[str] = "linear"
    NAMES: ClassVar[dict[str, dict]] = {
        "blockwise": {},
        "rowwise": {"scaling": "rowwise"},
        "mx": {"scaling": "mx", "descale": "pow2"},
    }

    def _validate(self) -> None:
        own = type(self).__name__
        _check_choice(own, "scaling", self.scaling, ("blockwise", "rowwise", "mx"))
        _check_choice(own, "descale", self.descale, ("pow2", "fp32"))
        _check_choice(own, "grad_format", self.grad_format, tuple(formats.FORMATS))
        _check_choice(own, "grad_weight_hp", self.grad_weight_hp, (True, False))
        if self.scaling == "mx" and self.descale != "pow2":
            raise ValueError(
                f"{own}: `descale` is {self.descale!r} with scaling 'mx'; E8M0 descales are powers "
                "of two. Use descale='pow2'."
            )

    @property
    def row_block(self) -> Block:
        """Block of x and grad_output ``[tokens, features]`` where features are contracted."""
        return {
            "blockwise": formats.BLOCKWISE_1X128,
            "rowwise": formats.ROWWISE,
            "mx": formats.MX_1X32,
        }[self.scaling]

    @property
    def token_blocks(self) -> tuple[Block, Block]:
        """Blocks of grad_output and of x ``[tokens, features]`` where tokens are contracted."""
        return {
            "blockwise": (formats.BLOCKWISE_128X1, formats.BLOCKWISE_128X128),
            "rowwise": (formats.COLUMNWISE, formats.COLUMNWISE),
            "mx": (formats.MX_TOKENS, formats.MX_TOKENS),
        }[self.scaling]

    @property
    def weight_blocks(self) -> tuple[Block, Block]:
        """Blocks of weight ``[out, in]`` for output (in contracted) and grad_input (out contracted)."""
        return {
            "blockwise": (formats.BLOCKWISE_128X128, formats.BLOCKWISE_128X128),
            "rowwise": (formats.ROWWISE, formats.COLUMNWISE),
            "mx": (formats.MX_1X32, formats.MX_TOKENS),
        }[self.scaling]

    def __str__(self) -> str:
        grad = formats.FORMATS[self.grad_format]
        w_out, w_in = self.weight_blocks
        tokens = "dy {}[{}], x E4M3[{}]".format(grad, *self.token_blocks)
        if self.grad_weight_hp:
            tokens = "in high precision (the dtype of x)"
        return "\n".join(
            [
                f"{self.name} ({self.descale} descales)",
                f"  1 fwd  output      = x Wᵀ     x E4M3[{self.row_block}], W E4M3[{w_out}]",
                f"  2 bwd  grad_input  = dy W     dy {grad}[{self.row_block}], W E4M3[{w_in}]",
                f"  3 bwd  grad_weight = dyᵀ x    {tokens}",
            ]
        )

    @property
    def legend(self) -> str:
        """What the equations leave out: what stays in high precision, and the shapes of the blocks."""
        size = lambda n: "all" if n is None else n
        used = dict.fromkeys((self.row_block, *self.weight_blocks))
        if not self.grad_weight_hp:
            used |= dict.fromkeys(self.token_blocks)
        return "\n".join(
            [
                "    Sums in FP32; bias added in FP32; output and grad_input in the dtype of x, "
                "grad_weight in that of",
                "    W, the master weight, which stays in high precision.",
                "    Rows x columns that share a descale (x, dy: tokens x features; W: out x in):",
                *(f"      {b.name:<18} {size(b.tokens)} x {size(b.features)}" for b in used),
            ]
        )


_NAMED: dict[str, dict[str, _Recipe]] = {
    cls.KIND: {name: cls.from_name(name) for name in cls.NAMES}
    for cls in (AttentionRecipe, LinearRecipe)
}
