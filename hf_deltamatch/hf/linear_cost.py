"""``swap_linears(..., filter_fn="auto")``: is a layer faster in FP8 than in BF16, by a small model.

Time of a forward with both gradients of one layer:

* device: 2·tokens·in·out FLOPs a product over the rate of the GEMM, and for FP8 the bytes that the
  quantisers read and write over the rate at which they do;
* host: what launching takes, whatever the size. Where all linears of a model together keep the device
  longer than the host, it is hidden behind it; else a layer takes the larger of its two times. (A step
  that is recorded as a CUDA graph has none: rates of 0.)

A layer is swapped where BF16 is predicted to take at least :data:`MARGIN` times as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_deltamatch.hf.experts import experts_weights, is_experts
from hf_deltamatch.hf.linear_rules import in_features, out_features
from hf_deltamatch.recipes import LinearRecipe

AUTO = "auto"
DEFAULT_TOKENS = 8192
"""Tokens of one call (batch times sequence) where none are given."""
MARGIN = 1.03
"""Less of a gain is within the error of the model."""


class Rates(NamedTuple):
    """What a device does; FLOP/s, bytes/s, seconds.

    ``fp8`` by scaling: the GEMMs of output and grad_input, and that of grad_weight.
    """

    bf16: float
    fp8: dict[str, tuple[float, float]]
    quantise: float
    host_bf16: float
    host_fp8: float

    @classmethod
    def from_results(cls, result: dict[str, Any]) -> Rates:
        """From what ``hf-deltamatch bench linear --json`` wrote, its first shape.

        Raises:
            ValueError: none of its rows of ours has times.
        """
        rows = result["shapes"][0]["rows"]
        timed = {name: row["parts"] for name, row in rows.items() if "parts" in row}
        names = [name for name in timed if name in LinearRecipe.NAMES]
        if not names:
            raise ValueError(
                "Rates.from_results: the first shape of the results has no plain row of "
                f"{', '.join(LinearRecipe.NAMES)} with times; it has {', '.join(rows)}."
            )
        tflops = lambda name, part: timed[name][part]["tflops"] * 1e12
        return cls(
            bf16=result["bf16_tflops"] * 1e12,
            fp8={
                LinearRecipe.from_name(n).scaling: (
                    2 / (1 / tflops(n, "output") + 1 / tflops(n, "grad_input")),
                    tflops(n, "grad_weight"),
                )
                for n in names
            },
            quantise=rows[names[0]]["share_of_copy"] * result["copy_TBps"] * 1e12,
            host_bf16=result["host_us"]["bf16"] / 1e6,
            host_fp8=result["host_us"]["fp8"] / 1e6,
        )


RATES = {
    # One H200, torch 2.11 (CUDA 13.0), Triton 3.6: `Rates.from_results` of
    # examples/benchmarks/linear_h200.json. mx is emulated there by BF16 products.
    (9, 0): Rates(
        bf16=684.6e12,
        fp8={
            "blockwise": (1240e12, 1118.7e12),
            "rowwise": (1345.3e12, 1222.6e12),
            "mx": (478.8e12, 405.4e12),
        },
        quantise=3.904e12,
        host_bf16=186.8e-6,
        host_fp8=1123.5e-6,
    ),
}
NEAREST = (9, 0)
"""Whose rates stand in for a device that is not in the table."""


class Prediction(NamedTuple):
    """Seconds of a forward with both gradients."""

    bf16: float
    fp8: float

    @property
    def pays(self) -> bool:
        return self.fp8 * MARGIN < self.bf16


def predict(
    tokens: int,
    n_in: int,
    n_out: int,
    recipe: LinearRecipe,
    rates: Rates,
    *,
    weight_bytes: int = 2,
    trains: bool = True,
) -> Prediction:
    """Of one layer.

    Args:
        weight_bytes: of an element of the master weight.
        trains: False for a frozen weight, which has no grad_weight.
    """
    product = 2.0 * tokens * n_in * n_out
    plain, over_tokens = rates.fp8[recipe.scaling]
    bf16, fp8 = 2 * product / rates.bf16, 2 * product / plain
    saves = trains and not recipe.grad_weight_hp
    if trains:
        bf16 += product / rates.bf16
        fp8 += product / (rates.bf16 if recipe.grad_weight_hp else over_tokens)
    reads = 2 if recipe.scaling == "rowwise" else 1  # whole rows: once for their largest value
    # Activations and gradients in BF16, one or two copies in FP8; the weight a copy each way.
    activations = tokens * (n_in + n_out) * (2 * reads + (2 if saves else 1))
    weights = n_in * n_out * (2 * reads * weight_bytes + 2)
    fp8 += (activations + weights) / rates.quantise
    return Prediction(max(bf16, rates.host_bf16), max(fp8, rates.host_fp8))


def auto_filter(filter_fn: Any, tokens: int | None) -> Any:
    """``"auto"`` as the filter that it stands for; anything else as it is.

    Raises:
        ValueError: another word, or ``tokens`` without it.
        TypeError: neither a word nor callable.
    """
    if filter_fn == AUTO:
        return AutoFilter(tokens)
    if isinstance(filter_fn, str):
        raise ValueError(
            f"swap_linears: `filter_fn` is {filter_fn!r}; it must be {AUTO!r} or "
            "filter_fn(module, name) -> bool."
        )
    if tokens is not None:
        raise ValueError(
            f"swap_linears: `tokens` is {tokens!r}, which only filter_fn={AUTO!r} reads; leave it out "
            f"or give filter_fn={AUTO!r}."
        )
    if filter_fn is not None and not isinstance(filter_fn, AutoFilter) and not callable(filter_fn):
        raise TypeError(
            f"swap_linears: `filter_fn` is a {type(filter_fn).__name__}; it must be {AUTO!r} or "
            "filter_fn(module, name) -> bool."
        )
    return filter_fn


class AutoFilter:
    """``filter_fn="auto"`` with other rates: ``AutoFilter(rates=Rates.from_results(json.load(…)))``.

    Args:
        tokens: of one call; None is :data:`DEFAULT_TOKENS`.
        rates: default those of the first CUDA device, by its capability; without one, or where it is
            not in :data:`RATES`, those of :data:`NEAREST`, and :attr:`note` says so.

    Raises:
        ValueError: ``tokens`` is not positive.
    """

    def __init__(self, tokens: int | None = None, rates: Rates | None = None) -> None:
        self.tokens = DEFAULT_TOKENS if tokens is None else tokens
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 1:
            raise ValueError(
                f"swap_linears: `tokens` is {tokens!r}; it must be a positive number, the tokens of "
                "one forward (batch times sequence)."
            )
        self.note: str | None = None
        if rates is None:
            found = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
            rates = RATES.get(found, RATES[NEAREST])
            if found not in RATES:
                here = "no CUDA device" if found is None else "capability {}.{}".format(*found)
                self.note = (
                    f"filter_fn='auto' has no rates for what is here ({here}); it chose by those of "
                    "capability {}.{}".format(*NEAREST)
                )
        self.rates = self._used = rates

    def look_at(self, chosen: Iterable[tuple[nn.Module, LinearRecipe]]) -> None:
        """At all that could be swapped, before :meth:`reason` of each: is the host the slower one?"""
        self._used = self.rates._replace(host_bf16=0.0, host_fp8=0.0)
        waits = host = 0.0
        for module, recipe in chosen:
            if recipe.scaling not in self.rates.fp8:
                continue
            p = self.predict(module, recipe)
            waits += min(p)
            host += self.rates.host_fp8 if p.pays else self.rates.host_bf16
        if host >= waits:
            self._used = self.rates

    def predict(self, module: nn.Module, recipe: LinearRecipe) -> Prediction:
        """Of a linear, or of the experts of a mixture."""
        of = self._predict_experts if is_experts(module) else self._predict
        return of(module, recipe)

    def reason(self, module: nn.Module, recipe: LinearRecipe) -> str | None:
        """Why BF16 is no slower for a module, or None."""
        if recipe.scaling not in self.rates.fp8:
            return f"there are no rates for recipe {recipe.name!r}"
        p = self.predict(module, recipe)
        if p.pays:
            return None
        return (
            f"BF16 is no slower: predicted {1e6 * p.fp8:.0f} µs in FP8, {1e6 * p.bf16:.0f} µs in "
            f"BF16, {self.tokens} tokens a call"
        )

    def _predict(self, module: nn.Module, recipe: LinearRecipe) -> Prediction:
        return predict(
            self.tokens,
            in_features(module),
            out_features(module),
            recipe,
            self._used,
            weight_bytes=module.weight.element_size(),
            trains=module.weight.requires_grad,
        )

    def _predict_experts(self, module: nn.Module, recipe: LinearRecipe) -> Prediction:
        """All experts of a mixture, tokens spread evenly: one product after the other in FP8, where
        BF16 has one grouped product for each of the two weights."""
        count = module.num_experts
        chosen = getattr(module.config, "num_experts_per_tok", None) or 1
        rows = max(1, round(self.tokens * chosen / count))
        bf16 = fp8 = 0.0
        for weight in (getattr(module, name) for name in experts_weights(module)):
            one = predict(
                rows,
                weight.shape[2],
                weight.shape[1],
                recipe,
                self._used,
                weight_bytes=weight.element_size(),
                trains=weight.requires_grad,
            )
            fp8 += count * one.fp8
            # `one` is no faster than the host's launches, of which a grouped product has one set.
            product = 2.0 * rows * weight.shape[1] * weight.shape[2]
            products = (3 if weight.requires_grad else 2) * product / self._used.bf16
            bf16 += max(count * products, self._used.host_bf16)
        return Prediction(bf16, fp8)
