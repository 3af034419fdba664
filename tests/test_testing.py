"""The metrics on hand-made values, and what their messages say."""

from __future__ import annotations

import math

import pytest
import torch

from hf_deltamatch.testing import (
    assert_bitwise_equal,
    assert_close,
    rel_rms,
    row_sum_parts,
    row_sum_residual,
    sqnr_db,
)

inf, nan = math.inf, math.nan


def t(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize(
    "actual,expected,error",
    [
        (t(3.0, 4.0), t(3.0, 4.0), 0.0),
        (t(3.0, 4.5), t(3.0, 4.0), 0.1),  # 0.5 / 5
        (t(0.0, 0.0), t(3.0, 4.0), 1.0),
        (t(-3.0, -4.0), t(3.0, 4.0), 2.0),
        (t(0.0, 0.0), t(0.0, 0.0), 0.0),
        (t(1e-30, 0.0), t(0.0, 0.0), inf),
        (torch.empty(0), torch.empty(0), 0.0),
    ],
)
def test_rel_rms(actual, expected, error: float) -> None:
    assert rel_rms(actual, expected) == error


def test_rel_rms_sums_in_fp64() -> None:
    # FP32 would overflow to inf in the squares of the first, and to 0 in those of the second.
    for size in (1e30, 1e-30):
        assert rel_rms(t(size * 1.5, 0.0), t(size, 0.0)) == pytest.approx(0.5, rel=1e-6)
    # 1 + 2**-30 is 1 in FP32: FP64 inputs keep their difference.
    x = torch.ones(4, dtype=torch.float64)
    assert rel_rms(x + 2.0**-30, x) == 2.0**-30


def test_rel_rms_takes_any_dtype() -> None:
    x = torch.tensor([1.0, 2.0])
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32):
        assert rel_rms(x.to(dtype), x) == 0.0


def test_rel_rms_nan_is_not_small() -> None:
    assert math.isnan(rel_rms(t(nan, 1.0), t(1.0, 1.0)))


@pytest.mark.parametrize(
    "actual,expected,db",
    [
        (t(0.9), t(1.0), 20.0),
        (t(0.0), t(1.0), 0.0),
        (t(11.0), t(1.0), -20.0),
        (t(1.0), t(1.0), inf),
        (t(0.0), t(0.0), inf),
        (t(1.0), t(0.0), -inf),
    ],
)
def test_sqnr_db(actual, expected, db: float) -> None:
    assert sqnr_db(actual, expected) == pytest.approx(db, abs=1e-5)


@pytest.mark.parametrize(
    "ds,sink,rows,total",
    [
        (t([1.0, -1.0], [2.0, -2.0]), None, 0.0, 6.0),
        (t([1.0, -0.5], [2.0, -2.5]), None, 1.0, 6.0),  # |0.5| + |−0.5|: rows do not cancel
        (t([1.0, -0.5], [2.0, -2.5]), t(-0.5, 0.5), 0.0, 7.0),  # the sink's column closes them
        (t([1.0, -1.0], [2.0, -2.0]), t(1.0, 0.0), 1.0, 7.0),
        (t([0.0, 0.0]), None, 0.0, 0.0),
        (torch.empty(2, 0), None, 0.0, 0.0),
    ],
)
def test_row_sum_parts(ds, sink, rows: float, total: float) -> None:
    assert row_sum_parts(ds, sink) == (rows, total)
    assert row_sum_residual(ds, sink) == (rows / total if total else 0.0)


def test_row_sum_residual_sums_in_fp64() -> None:
    # 2**24 + 1 − 2**24 is 0 in FP32.
    assert row_sum_residual(t([2.0**24, 1.0, -(2.0**24)])) == 1 / (2.0**25 + 1)


@pytest.mark.parametrize("bad", [nan, inf])
def test_row_sum_residual_bad_values(bad: float) -> None:
    assert math.isnan(row_sum_residual(t([bad, 1.0])))
    assert math.isnan(row_sum_residual(t([0.0, 0.0]), t(bad)))


def test_row_sum_residual_batched() -> None:
    ds = torch.randn(2, 3, 5, 7)
    parts = [row_sum_parts(part) for part in ds.flatten(0, 1)]
    total = sum(p[0] for p in parts) / sum(p[1] for p in parts)
    assert row_sum_residual(ds) == pytest.approx(total, rel=1e-12)


def test_assert_close_passes() -> None:
    x = torch.randn(4, 5)
    assert_close(x, x, rms=0.0, max_rel=0.0)
    assert_close(x * 1.01, x, rms=0.0101, max_rel=0.0101)
    assert_close(torch.zeros(3), torch.zeros(3), rms=0.0, max_rel=0.0)
    assert_close(torch.empty(0, 3), torch.empty(0, 3), rms=0.0, max_rel=0.0)
    assert_close(t(1.0, nan, inf, -inf), t(1.0, nan, inf, -inf), rms=0.0, max_rel=0.0)
    assert_close(x.requires_grad_(), x, rms=0.0)
    assert_close(torch.tensor(1.0), torch.tensor(1.0), rms=0.0)


def test_assert_close_shape() -> None:
    with pytest.raises(AssertionError, match=r"dq: shape \(1, 3\), expected \(3,\)"):
        assert_close(torch.zeros(1, 3), torch.zeros(3), rms=1.0, what="dq")


@pytest.mark.parametrize(
    "actual,expected",
    [
        (t(1.0, nan), t(1.0, 2.0)),  # NaN where a number belongs
        (t(1.0, 2.0), t(1.0, nan)),  # a laundered NaN
        (t(1.0, inf), t(1.0, 2.0)),
        (t(1.0, 2.0), t(1.0, inf)),
        (t(1.0, inf), t(1.0, -inf)),  # sign
        (t(1.0, inf), t(1.0, nan)),
        (t(1.0, nan), t(1.0, inf)),
    ],
)
def test_assert_close_non_finite(actual, expected) -> None:
    with pytest.raises(AssertionError, match=r"dv: 1 elements differ in being finite.*\(1,\)"):
        assert_close(actual, expected, rms=1e9, what="dv")


def test_assert_close_non_finite_position() -> None:
    actual = torch.zeros(3, 4, 5)
    actual[1, 2, 3] = nan
    actual[2, 0, 0] = inf
    with pytest.raises(AssertionError, match=r"2 elements.*\(1, 2, 3\): nan against 0.0"):
        assert_close(actual, torch.zeros(3, 4, 5), rms=1.0)


def test_assert_close_finite_part_is_still_compared() -> None:
    with pytest.raises(AssertionError, match="relative RMS error 1.000e-01 exceeds 9.000e-02"):
        assert_close(t(nan, 1.1, inf), t(nan, 1.0, inf), rms=0.09)


def test_assert_close_rms() -> None:
    with pytest.raises(AssertionError, match="o: relative RMS error 5.000e-01 exceeds 4.000e-01"):
        assert_close(t(1.5, 0.0), t(1.0, 0.0), rms=0.4, what="o")
    with pytest.raises(AssertionError, match="relative RMS error inf"):
        assert_close(t(1.0), t(0.0), rms=1e9)


def test_assert_close_max_rel_position() -> None:
    expected = torch.ones(10, 20)
    actual = expected.clone()
    actual[3, 7], actual[5, 5] = 1.25, 0.9
    with pytest.raises(AssertionError, match=r"2.500e-01 of the .*\(3, 7\): 1.25 against 1.0"):
        assert_close(actual, expected, rms=1.0, max_rel=0.2499)
    assert_close(actual, expected, rms=1.0, max_rel=0.25)


def test_assert_close_zero_dim_message() -> None:
    with pytest.raises(AssertionError, match=r"at \(\): 1.0 against 2.0"):
        assert_close(torch.tensor(1.0), torch.tensor(2.0), rms=1.0, max_rel=0.1)


def test_loose_rms_is_blind_to_zeroed_rows() -> None:
    """Four zeroed rows of 4096 score 10·log10(4096 / 4) = 30.1 dB; the largest error does not."""
    expected = torch.randn(4096, 64).sign()
    actual = expected.clone()
    actual[::1024] = 0.0
    assert sqnr_db(actual, expected) == pytest.approx(10 * math.log10(1024), abs=1e-9)
    assert_close(actual, expected, rms=10 ** (-30 / 20))
    with pytest.raises(AssertionError, match=r"largest error 1.000e\+00.*at \(0, 0\)"):
        assert_close(actual, expected, rms=10 ** (-30 / 20), max_rel=0.1)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int32,
        torch.int64,
        torch.bool,
    ],
    ids=str,
)
def test_assert_bitwise_equal_dtypes(dtype: torch.dtype) -> None:
    expected = torch.zeros(3, 4).to(dtype)
    assert_bitwise_equal(expected.clone(), expected)
    actual = torch.zeros(3, 4)
    actual[1, 2] = actual[2, 0] = 1
    with pytest.raises(AssertionError, match=r"dk: 2 of 12 elements differ, the first at \(1, 2\)"):
        assert_bitwise_equal(actual.to(dtype), expected, "dk")


def test_assert_bitwise_equal_sees_one_ulp_and_signed_zero() -> None:
    for a, e in ((1.0 + 2.0**-23, 1.0), (-0.0, 0.0), (1e-45, 0.0), (nan, 0.0), (inf, nan)):
        with pytest.raises(AssertionError, match=r"1 of 1 elements differ, the first at \(0,\)"):
            assert_bitwise_equal(t(a), t(e))


def test_assert_bitwise_equal_nan_payloads() -> None:
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert_bitwise_equal(quiet, other)
    assert_bitwise_equal(t(-nan, 1.0), t(nan, 1.0))


def test_assert_bitwise_equal_shape_dtype_strides() -> None:
    x = torch.randn(3, 4)
    assert_bitwise_equal(x.T.contiguous(), x.T)  # strides do not matter
    assert_bitwise_equal(torch.empty(0, 3), torch.empty(0, 3))
    with pytest.raises(AssertionError, match=r"torch.float32 \(3, 4\) against .*float64 \(3, 4\)"):
        assert_bitwise_equal(x, x.double())
    with pytest.raises(AssertionError, match=r"\(3, 4\) against torch.float32 \(4, 3\)"):
        assert_bitwise_equal(x, x.T)
