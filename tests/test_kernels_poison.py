"""Numbers that are not finite: kernels have them where the reference has, and nowhere else.

In the interpreter as on a device (``interpreter_nan``), with fewer cases.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_cases import Shape

pytest.importorskip("triton")
from hf_deltamatch import kernels as package

if package.missing("attention", torch.device("cuda" if torch.cuda.is_available() else "cpu")):
    pytest.skip("no device for the kernels", allow_module_level=True)

from interpreter_nan import nan_codes  # noqa: E402
from kernel_cases import (  # noqa: E402
    DEVICE,
    difference,
    make_call,
    through_kernels,
    through_reference,
)

pytestmark = pytest.mark.interpreted
BLOCKS = pytest.mark.parametrize("block", ["128xD", "1xD", "mx"])
HEADS = pytest.mark.parametrize("D", [64, 128] if DEVICE.type == "cuda" else [32])


@pytest.fixture(autouse=True)
def _nan() -> Iterator[None]:
    with nan_codes():
        yield


@pytest.mark.parametrize("which", ["q", "k", "v", "do"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@BLOCKS
@HEADS
def test_poison_reaches_what_depends_on_it(which: str, value: float, block: str, D: int) -> None:
    """One bad token: non-finite just where the reference's results are."""
    call = make_call(Shape(1, 2, 1, 300, 300, D, D), fields=dict(block=block))
    getattr(call, which)[:, :, 170, 3] = value
    fwd, bwd = through_kernels(call)
    ref_fwd, ref_bwd = through_reference(call)
    for a, b in (
        (fwd.o, ref_fwd.o),
        (bwd.dq, ref_bwd.dq),
        (bwd.dk, ref_bwd.dk),
        (bwd.dv, ref_bwd.dv),
    ):
        bad, must = (~x.isfinite().all(-1) for x in (a, b))
        assert torch.equal(bad, must)
        assert difference(a[~bad], b[~must]) < 1.5e-2


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("which", ["q", "k"])
@BLOCKS
@HEADS
def test_poison_without_a_gradient_of_the_output(
    block: str, D: int, which: str, dlse: bool
) -> None:
    """Queries whose dO is zero, in their whole tile, and that are NaN or see it: NaN in dV as the reference has it."""
    shape = Shape(1, 2, 1, 300, 300, D, D)
    call = make_call(shape, fields=dict(block=block), dlse=dlse, window=60)
    call.do[:, :, 128:256] = 0
    getattr(call, which)[:, :, 170, 3] = float("nan")
    _, bwd = through_kernels(call)
    _, ref_bwd = through_reference(call)
    for name in ("dq", "dk", "dv"):
        a, b = getattr(bwd, name), getattr(ref_bwd, name)
        bad, must = (~x.isfinite().all(-1) for x in (a, b))
        assert torch.equal(bad, must) and must.any() and not must.all(), name
        assert difference(a[~bad], b[~must]) < 1.5e-2, name


@pytest.mark.parametrize("block", ["128xD", "1xD"])
def test_poison_behind_a_soft_cap_stays_hidden(block: str) -> None:
    """A NaN query or key: pairs that hide it add 0, not 0 times the cap's NaN slope."""
    shape = Shape(1, 2, 1, 200, 200, 32, 32)
    for which in ("q", "k"):
        call = make_call(shape, fields=dict(block=block), softcap=5.0, window=60)
        getattr(call, which)[:, :, 70, 3] = float("nan")
        fwd, bwd = through_kernels(call)
        ref_fwd, ref_bwd = through_reference(call)
        for name in ("o", "dq", "dk", "dv"):
            a, b = (
                getattr(f if name == "o" else g, name) for f, g in ((fwd, bwd), (ref_fwd, ref_bwd))
            )
            bad, must = (~x.isfinite().all(-1) for x in (a, b))
            assert torch.equal(bad, must) and must.any() and not must.all(), (which, name)
