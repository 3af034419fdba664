"""Fuzz of ``fp8_linear``: any shape, dtype, stride, recipe and extreme value.

As in ``test_fuzz_attention``: within the a-priori bound of an FP64 oracle, so finite wherever that
is, and a NaN or Inf visible in what depends on it and nowhere else.
"""

from __future__ import annotations

import torch
from fuzz_bounds import check, linear_bounds
from fuzz_cases import Linear, fuzz, linear_cases, peak, place
from hypothesis import given
from torch import Tensor

from hf_deltamatch import fp8_linear

LARGEST = 2.0**126


def poisoned_by(
    which: str, at: tuple[int, int], sizes: tuple[int, int, int], tile: int, tile_x: int
) -> dict:
    """Rows and columns of each result that depend on element ``at`` of ``which``, where ``tile``
    elements a side of the weight share a descale, and ``tile_x`` features of x for grad_weight."""
    tokens, n_in, n_out = sizes
    out = {
        "output": torch.zeros(tokens, n_out, dtype=torch.bool),
        "grad_input": torch.zeros(tokens, n_in, dtype=torch.bool),
        "grad_weight": torch.zeros(n_out, n_in, dtype=torch.bool),
        "grad_bias": torch.zeros(n_out, dtype=torch.bool),
    }
    row, col = at
    if which == "x":
        out["output"][row] = True
        first = col // tile_x * tile_x
        out["grad_weight"][:, first : first + tile_x] = True
    elif which == "dy":
        out["grad_input"][row] = True
        out["grad_weight"][col] = True
        out["grad_bias"][col] = True
    else:
        first = [i // tile * tile for i in at]
        out["output"][:, first[0] : first[0] + tile] = True
        out["grad_input"][:, first[1] : first[1] + tile] = True
    return out


@fuzz(0.25)
@given(case=linear_cases())
def test_linear(case: Linear) -> None:
    x, weight, bias, dy = case.inputs()
    tensors = {"x": x, "weight": weight, "dy": dy}
    clean = {n: t.double().reshape(-1, t.shape[-1]) for n, t in tensors.items()}
    sizes = len(clean["x"]), case.n_in, case.n_out
    bad: dict[str, Tensor] = {}
    if case.bad is not None and tensors[case.bad[0]].numel():
        which, where, value = case.bad
        at = place(tensors[which], where)
        tensors[which] = tensors[which].clone()
        tensors[which][at] = value
        flat = clean[which].unflatten(0, tensors[which].shape[:-1])
        flat[at] = 0.0
        row = int(torch.arange(len(clean[which])).view(flat.shape[:-1])[at[:-1]])
        tile = 128 if case.recipe.scaling == "blockwise" else 1
        tile_x = 1 if case.recipe.grad_weight_hp else tile
        bad = poisoned_by(which, (row, at[-1]), sizes, tile, tile_x)
    leaves = [tensors["x"], tensors["weight"], *([] if bias is None else [bias])]
    leaves = [t.detach().requires_grad_() for t in leaves]
    output = fp8_linear(*leaves, recipe=case.recipe)
    output.backward(tensors["dy"])
    results = {
        "output": output.detach(),
        "grad_input": leaves[0].grad,
        "grad_weight": leaves[1].grad,
    }
    if bias is not None:
        results["grad_bias"] = leaves[2].grad
    assert output.shape == (*case.batch, case.n_out)

    expected = linear_bounds(
        clean["x"], clean["weight"], None if bias is None else bias.double(), clean["dy"],
        case.recipe, case.dtype,
    )  # fmt: skip
    mx, mw, mdy = (peak(clean[n]) for n in ("x", "weight", "dy"))
    fits = {
        "output": case.n_in * mx * mw < LARGEST,
        "grad_input": case.n_out * mdy * mw < LARGEST,
        "grad_weight": sizes[0] * mdy * mx < LARGEST,
        "grad_bias": sizes[0] * mdy < LARGEST,
    }
    for name, r in results.items():
        assert r.dtype == case.dtype and r.device == x.device, name
        r = r.reshape(expected[name].exact.shape)
        touched = bad.get(name, torch.zeros(r.shape, dtype=torch.bool))
        laundered = touched & r.isfinite()
        assert not bool(laundered.any()), (
            f"{name}: {case.bad} is not visible in {laundered.nonzero()[0].tolist()}"
        )
        if fits[name]:
            check(r, expected[name], ~touched, name)
