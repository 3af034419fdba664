"""Metrics and assertions for low-precision results, public so that users measure with the same ruler.

Imports torch only. Every assertion says where the first disagreement is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rel_rms(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in FP64; 0 where both are zero, inf where only expected is."""
    actual, expected = actual.double(), expected.double()
    error, norm = (actual - expected).norm().item(), expected.norm().item()
    if norm == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / norm


def sqnr_db(actual: Tensor, expected: Tensor) -> float:
    """Signal to quantisation noise in dB: −20·log10 of :func:`rel_rms`."""
    error = rel_rms(actual, expected)
    return math.inf if error == 0.0 else -20.0 * math.log10(error)


def row_sum_residual(ds: Tensor, ds_sink: Tensor | None = None) -> float:
    """How far the softmax gradient is from its zero-row-sum invariant.

    ``Σ_i |Σ_j dS_ij| / Σ_i Σ_j |dS_ij|`` with FP64 sums of dS before its cast and before the soft
    cap's derivative. About 1e-7 with a matched δ, 1e-3 and more with a stale one.

    Args:
        ds: ``[..., Tq, Tk]``.
        ds_sink: ``[..., Tq]``, the gradient of the sink's column where there are sinks.

    Returns:
        The residual; 0.0 where dS is all zero.
    """
    rows, total = row_sum_parts(ds, ds_sink)
    return rows / total if total > 0.0 else (0.0 if rows == 0.0 else math.nan)


def row_sum_parts(ds: Tensor, ds_sink: Tensor | None = None) -> tuple[float, float]:
    """Numerator and denominator of :func:`row_sum_residual`, to be summed over blocks of rows."""
    ds = ds.double()
    rows, total = ds.sum(-1), ds.abs().sum()
    if ds_sink is not None:
        rows, total = rows + ds_sink.double(), total + ds_sink.double().abs().sum()
    return rows.abs().sum().item(), total.item()


def _first(index: Tensor, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(index, shape))


def assert_close(
    actual: Tensor,
    expected: Tensor,
    *,
    rms: float,
    max_rel: float | None = None,
    what: str = "tensor",
) -> None:
    """Bounds the relative RMS and, optionally, the largest error relative to the largest value.

    A single RMS bound is blind to a few rows that are wholly wrong; give ``max_rel`` too where rows
    are comparable. NaN and infinities must agree exactly in place and sign.
    """
    if actual.shape != expected.shape:
        raise AssertionError(
            f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        )
    actual, expected = actual.detach().double(), expected.detach().double()
    a_bad, e_bad = ~actual.isfinite(), ~expected.isfinite()
    same = torch.where(e_bad, (actual == expected) | (actual.isnan() & expected.isnan()), ~a_bad)
    if not bool(same.all()):
        at = _first((~same).flatten().int().argmax(), actual.shape)
        raise AssertionError(
            f"{what}: {int((~same).sum())} elements differ in being finite, the first at {at}: "
            f"{actual[at].item()} against {expected[at].item()}"
        )
    actual = torch.where(e_bad, 0.0, actual)
    expected = torch.where(e_bad, 0.0, expected)
    error = rel_rms(actual, expected)
    if error > rms:
        raise AssertionError(f"{what}: relative RMS error {error:.3e} exceeds {rms:.3e}")
    if max_rel is not None and actual.numel():
        diff = (actual - expected).abs()
        worst = diff.max().item() / max(expected.abs().max().item(), 1e-300)
        if worst > max_rel:
            at = _first(diff.flatten().argmax(), actual.shape)
            raise AssertionError(
                f"{what}: largest error {worst:.3e} of the largest value exceeds {max_rel:.3e}, at "
                f"{at}: {actual[at].item()} against {expected[at].item()}"
            )


def assert_bitwise_equal(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Equal in every bit but the payload of NaN; reports the first place that differs."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: {actual.dtype} {tuple(actual.shape)} against {expected.dtype} "
            f"{tuple(expected.shape)}"
        )
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    a, e = actual.detach().contiguous(), expected.detach().contiguous()
    differ = a.view(bits) != e.view(bits)
    if a.is_floating_point():
        differ &= ~(a.float().isnan() & e.float().isnan())
    if bool(differ.any()):
        at = _first(differ.flatten().int().argmax(), a.shape)
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {a.numel()} elements differ, the first at {at}: "
            f"{a[at].item()} against {e[at].item()}"
        )
