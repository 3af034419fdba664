"""The quantisers of a linear layer bit for bit against the reference's, and the layer through them.

In the interpreter on a CPU, where the GEMMs are emulated; ``test_linear_gpu.py`` is the rest.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from hf_deltamatch import kernels as package

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if package.missing("linear", DEVICE):
    pytest.skip("no device for the kernels", allow_module_level=True)

from kernel_cases import poison_empty  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from hf_deltamatch import LinearRecipe, formats, fp8_linear, reference  # noqa: E402
from hf_deltamatch.kernels import linear as kernels  # noqa: E402
from hf_deltamatch.kernels import linear_operands as lq  # noqa: E402
from hf_deltamatch.ops import linear as ops  # noqa: E402
from hf_deltamatch.ops.observe import CALLS  # noqa: E402
from hf_deltamatch.testing import assert_bitwise_equal, assert_close  # noqa: E402

NAN, INF = float("nan"), float("inf")
NAMED = [LinearRecipe.from_name(name) for name in LinearRecipe.NAMES]
EVERY_NAME = pytest.mark.parametrize("recipe", NAMED, ids=lambda r: r.name)

# Blocks of [tokens, features] for an operand that contracts features, and for one that contracts
# tokens.
BLOCKS = {
    lq.VECTOR: (formats.BLOCKWISE_1X128, formats.BLOCKWISE_128X1),
    lq.TILE_128: (formats.BLOCKWISE_128X128, formats.BLOCKWISE_128X128),
    lq.ROW: (formats.ROWWISE, formats.COLUMNWISE),
    lq.MX: (formats.MX_1X32, formats.MX_TOKENS),
}
PAIRS = [*BLOCKS, (lq.VECTOR, lq.TILE_128), (lq.TILE_128, lq.VECTOR)]
KINDS = [
    (block, fmt, kind)
    for block, fmt, kind in itertools.product(PAIRS, ("e4m3", "e5m2"), ("fp32", "pow2"))
    if (block, kind) != (lq.MX, "fp32")
]
EVERY_KIND = pytest.mark.parametrize("block,fmt,kind", KINDS)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    check = poison_empty(monkeypatch)
    yield
    check()


def values(R: int, C: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Magnitudes over many octaves, a zero row, zero columns, subnormals and a huge element."""
    x = torch.randn(R, C) * torch.exp2(4 * torch.randn(R, C)) * torch.exp2(2 * torch.randn(R, 1))
    x[R // 3 : R // 3 + 1] = 0
    x[:, C // 2 : C // 2 + 2] = 0
    x[: R // 8] *= 1e-41 if dtype == torch.float32 else 1e-6
    x[-1:, -1:] = 3e38 if dtype != torch.float16 else 6e4
    return x.to(dtype)


def descales(x: lq.Operand) -> Tensor:
    """``[outer, blocks along the contraction]`` without padding, as the reference has them."""
    if x.block == lq.ROW:
        return x.descale[: x.outer, None]
    if x.block == lq.TILE_128:
        return x.descale[:, : -(-x.contracted // 128)]
    return x.descale[: -(-x.contracted // lq.group_of(x.block)), : x.outer].t()


def assert_operand(x: lq.Operand, expected: reference.Quantized) -> None:
    """Payload and descales bit for bit, zeros in what pads the payload, nothing left unwritten."""
    code = x.payload.view(torch.uint8)
    assert x.payload.shape == lq.payload_shape(x.outer, x.contracted)
    assert x.descale.shape == lq.descale_shape(x.block, x.outer, x.contracted)
    assert x.payload.dtype == expected.payload.dtype and x.descale.dtype == torch.float32
    own = code[: x.outer, : x.contracted]
    assert torch.equal(own, expected.payload.view(torch.uint8).to(own.device))
    assert not code[x.outer :].any() and not code[:, x.contracted :].any()
    assert_bitwise_equal(descales(x).cpu(), expected.descale)
    if x.block != lq.TILE_128 and x.payload.numel():
        if x.block != lq.ROW:
            assert bool((x.descale[-(-x.contracted // lq.group_of(x.block)) :] == 1).all())
        assert bool((x.descale[..., x.outer :] == 1).all())


def check(x: Tensor, block: str, fmt: str, kind: str, sides: str = "both") -> None:
    """Against the reference on the CPU. ``block``: of rows and columns, or of each."""
    f = formats.FORMATS[fmt]
    wanted = {"rows": sides != "columns", "columns": sides != "rows"}
    block, across = block if isinstance(block, tuple) else (block, block)
    rows, columns = lq.quantize_matrix(
        x, block, f.dtype, kind == "pow2", **wanted, columns_block=across
    )
    assert (rows is not None, columns is not None) == tuple(wanted.values())
    along_features, along_tokens = BLOCKS[block][0], BLOCKS[across][1]
    if rows is not None:
        assert_operand(rows, reference.quantize(x.cpu(), f, along_features, kind))
    if columns is not None:
        payload, descale = reference.quantize(x.cpu(), f, along_tokens, kind)
        code = payload.view(torch.uint8).t().contiguous().view(f.dtype)
        assert_operand(columns, reference.Quantized(code, descale.t()))


SHAPES = [(130, 200), (1, 128), (37, 33), (256, 16), (0, 64), (64, 1), (128, 256)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@EVERY_KIND
def test_quantize_matrix(block: str, fmt: str, kind: str, shape: tuple[int, int]) -> None:
    check(values(*shape).to(DEVICE), block, fmt, kind)


@pytest.mark.parametrize("shape", [(140, 200), (256, 256)], ids=str)
@EVERY_KIND
def test_quantize_matrix_poisoned(block: str, fmt: str, kind: str, shape: tuple[int, int]) -> None:
    """NaN and infinity: payload 0 and descale NaN of their own blocks, of no other."""
    x = values(*shape)
    x[5, 7], x[70, 130], x[-1, -1] = NAN, INF, -INF
    check(x.to(DEVICE), block, fmt, kind)


@pytest.mark.parametrize("sides", ["rows", "columns", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", PAIRS, ids=str)
def test_quantize_matrix_dtypes_and_sides(block: str, dtype: torch.dtype, sides: str) -> None:
    check(values(140, 136, dtype).to(DEVICE), block, "e4m3", "pow2", sides)


HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def words(x: Tensor) -> bool:
    """Whether ``x`` is read as words of two neighbours."""
    plan = lq._plan(
        x.shape, x.stride(), x.dtype, lq.MX, lq.MX, torch.float8_e5m2, True, True, True,
        x.data_ptr() % 4 == 0,
    )  # fmt: skip
    return plan.pairs


@pytest.mark.parametrize("shape", [(300, 130), (1, 2), (37, 264), (256, 128)], ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("block", PAIRS, ids=str)
@HALVES
def test_quantize_words(block: str, fmt: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """NaN and infinity in either half of a word, subnormals, zeros of both signs."""
    x = values(*shape)
    x[3:5] = 3 * torch.finfo(dtype).smallest_normal * torch.rand(1, shape[1])
    x[-2:, ::3] = -0.0
    x = x.to(dtype)
    assert words(x)
    for kind in ("pow2", "pow2" if block == lq.MX else "fp32"):
        check(x.to(DEVICE), block, fmt, kind)
        x[shape[0] // 2, 1], x[-1, shape[1] // 2], x[0, 0] = NAN, INF, -INF


@HALVES
def test_which_are_read_as_words(dtype: torch.dtype) -> None:
    x = torch.zeros(64, 130, dtype=dtype)
    assert words(x) and words(x.t()) and words(x[:, 2:]) and words(x[::2, :64])
    assert not words(x[:, 1:]) and not words(x[:, 1:129]) and not words(x[:, ::2])
    assert not words(x[:, :129].contiguous()) and not words(x.float())


LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "sliced": lambda x: torch.cat([x, x], 1)[::2, 3 : 3 + x.shape[1]],
    "sliced-evenly": lambda x: torch.cat([x, x], 1)[::2, 2 : 2 + x.shape[1]],
    "broadcast": lambda x: x[:, :1].expand_as(x),
    "constant": lambda x: x[:1, :1].expand_as(x),
}


@pytest.mark.parametrize("sides", ["rows", "columns", "both"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", PAIRS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_quantize_matrix_layouts(block: str, layout: str, sides: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](values(140, 72, dtype).to(DEVICE))
    check(x, block, "e4m3", "fp32" if block != lq.MX else "pow2", sides)


@pytest.mark.parametrize("block,fmt,kind", [k for k in KINDS if k[0] in BLOCKS and k[2] == "pow2"])
def test_dequantize_is_exact_in_bf16(block: str, fmt: str, kind: str) -> None:
    """What block ``mx`` multiplies where the device has no block-scaled instruction."""
    x = values(140, 200)[18:]  # without subnormals, which BF16 holds to 2**-133 only
    f = formats.FORMATS[fmt]
    rows, _ = lq.quantize_matrix(x.to(DEVICE), block, f.dtype, True, rows=True)
    exact = reference.dequantize(
        *reference.quantize(x, f, BLOCKS[block][0], kind), BLOCKS[block][0]
    )
    for dtype in (torch.float32, torch.bfloat16):
        assert_bitwise_equal(lq.dequantize(rows, dtype).float().cpu(), exact)


def test_swizzled_e8m0() -> None:
    """Row 32 q + r and block b of a tile of 128 x 4 at byte 16 r + 4 q + b; tiles row by row."""
    descale = torch.exp2(torch.randint(-126, 120, (6, 272)).float())
    descale[3, 5] = NAN
    codes = kernels.swizzled_e8m0(descale).view(torch.uint8)
    expected = torch.zeros(384 * 8, dtype=torch.uint8)
    for row, b in itertools.product(range(272), range(6)):
        at = (row // 128 * 2 + b // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + b % 4
        value = descale[b, row]
        expected[at] = 255 if value.isnan() else int(value.log2()) + 127
    assert torch.equal(codes, expected)


# The layer.


def make(*shape: int, n_out: int = 48, dtype=torch.float32, bias: bool = True):
    x = torch.randn(shape).to(DEVICE, dtype)
    weight = (0.1 * torch.randn(n_out, shape[-1])).to(DEVICE, dtype)
    b = torch.randn(n_out).to(DEVICE, dtype) if bias else None
    dy = (0.01 * torch.randn(*shape[:-1], n_out)).to(DEVICE, dtype)
    return *(t if t is None else t.requires_grad_() for t in (x, weight, b)), dy


def run(fn, x, weight, bias, dy) -> dict[str, Tensor]:
    output = fn(x, weight, bias)
    leaves = {"grad_input": x, "grad_weight": weight}
    if bias is not None:
        leaves["grad_bias"] = bias
    grads = torch.autograd.grad(output, list(leaves.values()), dy)
    return {"output": output.detach(), **dict(zip(leaves, grads, strict=True))}


def through(backend: str, recipe: LinearRecipe):
    return lambda x, w, b: fp8_linear(x, w, b, recipe, backend)


cpu_only = pytest.mark.skipif(DEVICE.type != "cpu", reason="the GEMMs of the interpreter")


@cpu_only
@pytest.mark.parametrize("hp", [False, True], ids=["fp8", "hp"])
@pytest.mark.parametrize("shape", [(130, 200), (2, 3, 5, 33), (1, 64), (0, 64), (64,)], ids=str)
@EVERY_NAME
def test_fp8_linear_in_the_interpreter(recipe: LinearRecipe, shape: tuple, hp: bool) -> None:
    """The same operands as the reference's; only the order of FP32 sums differs (padded rows make
    another product of another shape)."""
    recipe = LinearRecipe.from_name(recipe.name, grad_weight_hp=hp, grad_format="e5m2")
    args = make(*shape, n_out=35)
    ours, expected = run(through("triton", recipe), *args), run(through("reference", recipe), *args)
    assert ours.keys() == expected.keys()
    for name in expected:
        assert ours[name].shape == expected[name].shape and ours[name].is_contiguous()
        assert_close(ours[name], expected[name], rms=5e-7, max_rel=2e-6, what=name)


@cpu_only
@pytest.mark.parametrize("frozen", ["x", "weight", "neither"])
def test_calls_and_saved_tensors(frozen: str) -> None:
    """One op for both gradients; one byte an element of x, tokens last and padded."""
    x, weight, b, dy = make(2, 65, 64, dtype=torch.bfloat16)
    if frozen != "neither":
        {"x": x, "weight": weight}[frozen].requires_grad_(False)
    before, saved = Counter(CALLS), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = fp8_linear(x, weight, b, backend="triton")
    output.backward(dy)
    expected = {"linear_fwd": 1, "linear_bwd_input": 1, "linear_bwd_weight": 1}
    if frozen != "neither":
        del expected[{"x": "linear_bwd_input", "weight": "linear_bwd_weight"}[frozen]]
    assert dict(CALLS - before) == expected
    kept, payload, descale = saved
    assert kept.data_ptr() == weight.data_ptr()
    if frozen == "weight":
        assert payload.numel() == descale.numel() == 0
    else:
        assert payload.dtype == torch.float8_e4m3fn and payload.shape == (64, 256)
        assert descale.dtype == torch.float32 and descale.shape == (
            1,
            4,
        )  # tiles of 128x128, tokens padded to four


@cpu_only
@EVERY_NAME
def test_linear_opcheck(recipe: LinearRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # it compares offsets and writes to whole storages itself
    x, weight, b, dy = (t.detach() for t in make(5, 40, dtype=torch.bfloat16))
    options = (recipe.encoded, "triton")
    for save in (True, False):
        torch.library.opcheck(ops.linear_fwd, (x, weight, b, save, *options))
        torch.library.opcheck(ops.linear_quantize, (x, save, recipe.encoded))
    _, payload, descale = ops.linear_fwd(x, weight, b, True, *options)
    rows = ops.linear_quantize(x, False, recipe.encoded)[:2]
    torch.library.opcheck(ops.linear_bwd_input, (dy, weight, *options))
    # Not test_schema: it compares FP8 inputs before and after with a product they do not have here.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    quantized = (*rows, weight, b, len(x), x.dtype, recipe.encoded)
    torch.library.opcheck(ops.linear_fwd_quantized, quantized, test_utils=tests)
    saved = (payload, descale, 40, torch.float32, *options)
    torch.library.opcheck(ops.linear_bwd_weight, (dy, *saved), test_utils=tests)
    saved = (dy, weight, payload, descale, torch.float32, *options)
    torch.library.opcheck(ops.linear_bwd, saved, test_utils=tests)


@cpu_only
@EVERY_NAME
def test_compile_and_checkpoint(recipe: LinearRecipe) -> None:
    """One graph, and the bits of eager."""
    torch._dynamo.reset()
    fn = lambda *args: through("triton", recipe)(*args).relu()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=True)
    args = make(2, 70, 40, dtype=torch.bfloat16)
    expected = run(fn, *args)
    recompute = lambda *args: checkpoint(fn, *args, use_reentrant=False)
    for other in (compiled, recompute):
        for name, value in run(other, *args).items():
            assert_bitwise_equal(value, expected[name], name)


@cpu_only
def test_compiled_linears_of_one_input_quantise_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As q, k and v of attention do; and one FP8 copy of it is kept."""
    torch._dynamo.reset()
    quantized = []
    quantize = kernels.quantize

    def counted(x: Tensor, recipe: LinearRecipe, what: str, **sides: bool):
        quantized.append(what)
        return quantize(x, recipe, what, **sides)

    monkeypatch.setattr(kernels, "quantize", counted)
    through_kernels = through("triton", LinearRecipe())
    x, *weights = (
        torch.randn(n, 128, dtype=torch.bfloat16, requires_grad=True) for n in (130,) * 4
    )
    fn = lambda: [through_kernels(x, w, None) for w in weights]
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager_decomp_partition")
    found = {}
    for name, run_it in (("eager", fn), ("compiled", compiled)):
        kept: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.setdefault(t.data_ptr(), t.nbytes) and t, lambda t: t
        ):
            outputs = run_it()
        fp8 = sum(kept.values()) - sum(w.nbytes for w in weights)
        counts = Counter(quantized)
        quantized.clear()
        grads = torch.autograd.grad([y.float().square().sum() for y in outputs], (x, *weights))
        found[name] = counts, fp8, (*outputs, *grads)
        quantized.clear()
    assert found["eager"][0] == {"x": 3, "weight": 3}
    assert found["compiled"][0] == {"x": 1, "weight": 3}
    assert found["compiled"][1] * 3 == found["eager"][1]
    for a, b in zip(found["compiled"][2], found["eager"][2], strict=True):
        assert_bitwise_equal(a, b)


def test_unsupported_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences that say what was asked, where, and what to do."""
    device = torch.device("cuda")

    def reason(capability: tuple[int, int], cuda: str, **fields) -> str | None:
        monkeypatch.setattr(package, "capability_of", lambda d: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        return package.unsupported_linear(LinearRecipe(**fields), device)

    assert reason((9, 0), "13.0") is None and reason((9, 0), "12.9") is None
    old = reason((9, 0), "12.8")
    assert "9.0 with CUDA 12.8" in old and "CUDA 12.9" in old and "'rowwise'" in old
    assert "10.0 with CUDA 13.0" in reason((10, 0), "13.0") and "'mx'" in reason((10, 0), "13.0")
    assert "8.9" in reason((8, 9), "13.0")
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        assert reason(capability, "12.8", scaling="rowwise") is None
        assert reason(capability, "13.0", scaling="mx", descale="pow2") is None
    for hp in (False, True):
        refused = reason((9, 0), "13.0", grad_format="e5m2", grad_weight_hp=hp)
        assert all(w in refused for w in ("'e5m2'", "grad_format='e4m3'", "'rowwise'", "'mx'"))
    assert reason((9, 0), "13.0", scaling="mx", descale="pow2", grad_format="e5m2") is None
    e5m2 = dict(scaling="rowwise", grad_format="e5m2")
    assert reason((9, 0), "12.9", **e5m2) is None
    assert "grad_format='e4m3'" in reason((10, 0), "13.0", **e5m2)
