"""The attention function of Transformers: what it honours, what it refuses by name, and its layout.

Unquantised results are compared with the functions of Transformers, given the same arguments.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from tiny_models import (
    OURS,
    batch,
    build,
    one_thread,  # noqa: F401
    padded,
    padded_for,
    plain,
    rel_grads,
    run,
    use,
)
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as eager_softcap
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as eager_sinks
from transformers.utils import quantization_config as hf_quantization_config

import hf_deltamatch
from hf_deltamatch import AttentionRecipe
from hf_deltamatch.hf import attention, masks, quantizer
from hf_deltamatch.hf.attention import fp8_delta_matching_attention
from hf_deltamatch.hf.modules import AttentionChoice
from hf_deltamatch.testing import assert_bitwise_equal, assert_close, rel_rms

EXACT = 1e-6  # measured: 3e-7 at most


class Layer(nn.Module):
    """What the functions of Transformers read of an attention module."""

    def __init__(self, recipe="bf16", *, is_causal: bool = True, groups: int = 2) -> None:
        super().__init__()
        self.is_causal, self.num_key_value_groups = is_causal, groups
        self.deltamatch = AttentionChoice(AttentionRecipe.resolve(recipe))
        self.sinks = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]))


def qkv(B: int = 2, T: int = 24, Tk: int | None = None, D: int = 16, Dv: int = 16):
    """As models send them: heads first in shape, tokens first in memory, keys not repeated."""
    Tk = Tk or T
    return tuple(
        torch.randn(B, t, h, d).transpose(1, 2) for h, t, d in ((4, T, D), (2, Tk, D), (2, Tk, Dv))
    )


def ours(q, k, v, mask=None, *, module: nn.Module | None = None, **kwargs) -> Tensor:
    output, weights = fp8_delta_matching_attention(module or Layer(), q, k, v, mask, **kwargs)
    assert weights is None
    return output


def sdpa(q, k, v, mask=None, *, module: nn.Module | None = None, **kwargs) -> Tensor:
    return sdpa_attention_forward(module or Layer(), q, k, v, mask, **kwargs)[0]


def causal(T: int, *, window: int | None = None) -> Tensor:
    """``[1, 1, T, T]``, True = attend."""
    i = torch.arange(T)
    back = i[:, None] - i[None]
    return ((back >= 0) & (back < (window or T)))[None, None]


def assert_registered() -> None:
    current = importlib.import_module("hf_deltamatch.hf.attention").fp8_delta_matching_attention
    assert ALL_ATTENTION_FUNCTIONS[OURS].__qualname__ == current.__qualname__
    assert ALL_MASK_ATTENTION_FUNCTIONS[OURS] is masks.fp8_delta_matching_mask
    assert OURS in AttentionInterface._global_mapping
    assert OURS in AttentionMaskInterface._global_mapping


def test_register_twice() -> None:
    """Importing registers both functions; doing it again, or reloading, changes nothing."""
    ids = batch()
    expected = use(build("llama"))(ids).logits
    assert_registered()
    saved = {m: dict(vars(m)) for m in (attention, quantizer)}
    try:
        attention.register()
        quantizer.register()
        importlib.import_module("hf_deltamatch")
        for module in (attention, quantizer):
            importlib.reload(module)
            module.register()
        assert_registered()
        assert_bitwise_equal(use(build("llama"))(ids).logits, expected)
    finally:
        for module, names in saved.items():
            vars(module).update(names)
        attention.register()
    assert hf_deltamatch.DeltaMatchConfig is quantizer.DeltaMatchConfig
    assert isinstance(
        hf_deltamatch.DeltaMatchConfig(), hf_quantization_config.QuantizationConfigMixin
    )


@pytest.mark.parametrize(
    "name,value,part",
    [
        ("position_bias", torch.zeros(1, 4, 24, 24), "additive bias"),
        ("indices", torch.zeros(2, 24, 4, dtype=torch.long), "sparse attention over selected keys"),
        ("block_indices", torch.zeros(2, 24, 1, dtype=torch.long), "selected blocks"),
        ("temperature", torch.ones(4), "does not know"),
        ("window_pattern", "global", "'global'"),
        ("alibi", False, "does not know"),
    ],
)
def test_fp8_delta_matching_attention_refuses(name: str, value, part: str) -> None:
    with pytest.raises(NotImplementedError) as error:
        ours(*qkv(), **{name: value})
    for expected in (f"`{name}`", part, 'attn_implementation="sdpa"'):
        assert expected in str(error.value)
    ours(*qkv(), **{name: None})  # what a model sends when it does not use the argument


def test_fp8_delta_matching_attention_ignores_only_noise() -> None:
    """Arguments without an effect on attention, as models send them, change no bit."""
    q, k, v = qkv()
    noise = {name: 1 for name in attention.IGNORED} | {"position_ids": torch.arange(24)[None]}
    assert_bitwise_equal(ours(q, k, v, **noise), ours(q, k, v))


def test_fp8_delta_matching_attention_dropout() -> None:
    model = use(build("llama", attention_dropout=0.1))
    ids = batch()
    model(ids)  # eval mode sends 0
    with pytest.raises(NotImplementedError, match="dropout is 0.1.*attention_dropout = 0.0"):
        model.train()(ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("low", ["-inf", "min"])
def test_fp8_delta_matching_attention_additive_mask(low: str, dtype: torch.dtype) -> None:
    """0 and −inf are a boolean mask in other words; anything between is a bias."""
    q, k, v = qkv()
    visible = causal(24, window=5)
    value = -torch.inf if low == "-inf" else torch.finfo(dtype).min
    additive = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, value)
    assert_bitwise_equal(ours(q, k, v, additive), ours(q, k, v, visible))
    for bias in (-1.0, 0.5, -1e4):
        additive[0, 0, 3, 3] = bias
        with pytest.raises(ValueError, match="attention_mask.*a bias on the logits"):
            ours(q, k, v, additive)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_fp8_delta_matching_attention_integer_mask(dtype: torch.dtype) -> None:
    """A 4-D mask of 0 and 1 has no agreed meaning, and the int32 one is not the compact form."""
    mask = causal(24).expand(2, -1, -1, -1).to(dtype)
    for call in (lambda: ours(*qkv(), mask), lambda: use(build("llama"))(batch(2, 24), mask)):
        with pytest.raises(ValueError) as error:
            call()
        for part in (f"`attention_mask` is {dtype} (2, 1, 24, 24)", "True = attend", "mask.bool()"):
            assert part in str(error.value)


def test_fp8_delta_matching_attention_mask_without_heads() -> None:
    """It would be broadcast along heads and not along the batch."""
    q, k, v = qkv()
    for visible in (causal(24)[0].expand(2, -1, -1), torch.zeros(2, 24, 24)):
        with pytest.raises(
            ValueError, match=r"attention_mask.*without a dimension.*mask\[:, None\]"
        ):
            ours(q, k, v, visible)
    assert_bitwise_equal(ours(q, k, v, causal(24)[0]), ours(q, k, v, causal(24)))  # [1, Tq, Tk]


def test_fp8_delta_matching_attention_meta() -> None:
    """Shapes without data, as of a model on the meta device, which has no autocast."""
    q, k, v = (x.to("meta") for x in qkv())
    assert ours(q, k, v).shape == (2, 24, 4, 16)
    model, ids = use(build("llama")).to("meta"), torch.zeros(2, 24, dtype=torch.long, device="meta")
    for mask in (None, torch.ones_like(ids), torch.zeros(2, 1, 24, 24, device="meta")):
        assert model(ids, attention_mask=mask).logits.shape == (2, 24, 128)


def test_fp8_delta_matching_attention_one_query_keeps_its_window() -> None:
    """A single query sees all keys, and still no more than its window of them."""
    q, k, v = qkv(T=1, Tk=24)
    assert_bitwise_equal(ours(q, k, v), ours(q, k, v, is_causal=False))
    visible = (torch.arange(24) >= 24 - 5)[None, None, None]
    for window in (5, 2**31 + 5):
        mask = visible if window == 5 else None
        assert_close(ours(q, k, v, sliding_window=window), sdpa(q, k, v, mask), rms=EXACT)


def test_fp8_delta_matching_attention_context_parallel() -> None:
    """It replaces SDPA and shards the sequence; our op would see the local shard only."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    model, ids = use(build("llama")), batch()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]):
            with pytest.raises(NotImplementedError, match="context parallelism is active"):
                model(ids)
        model(ids)
    finally:
        dist.destroy_process_group()


def test_fp8_delta_matching_attention_patched_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = lambda *args, **kwargs: None
    fake.__module__ = "torch.distributed.tensor.experimental._attention"
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fake)
    with pytest.raises(NotImplementedError, match="context parallelism is active"):
        ours(*qkv())


CASES = {
    "causal": {},
    "scaling": {"scaling": 0.4},
    "not-causal": {"is_causal": False},
    "causal-of-module": {"module": Layer(is_causal=False)},
    "causal-over-module": {"module": Layer(is_causal=False), "is_causal": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [{}, {"T": 1, "Tk": 24}, {"Dv": 24}], ids=str)
def test_fp8_delta_matching_attention_against_sdpa(case: str, shape: dict) -> None:
    q, k, v = qkv(**shape)
    assert_close(ours(q, k, v, **CASES[case]), sdpa(q, k, v, **CASES[case]), rms=EXACT)
    visible = torch.rand(2, 1, q.shape[2], 24) < 0.7
    visible[..., 0] = True
    expected = sdpa(q, k, v, visible, **CASES[case])
    assert_close(ours(q, k, v, visible, **CASES[case]), expected, rms=EXACT)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "sliding_window", "all"])
def test_fp8_delta_matching_attention_honours(name: str) -> None:
    q, k, v = qkv()
    window = 5 if name in ("sliding_window", "all") else None
    float_mask = torch.zeros(1, 1, 24, 24).masked_fill(~causal(24, window=window), -1e30)
    exact = {"scaling": 0.25, "dropout": 0.0}
    module = Layer()
    if name == "softcap":
        kwargs, eager = {"softcap": 0.7}, eager_softcap
    elif name == "sliding_window":
        kwargs, eager = {"sliding_window": 5}, eager_softcap
    else:  # eager has no sinks together with a soft cap
        kwargs, eager = {"s_aux": module.sinks}, eager_sinks
    if name == "all":
        kwargs["sliding_window"] = 5
    expected, _ = eager(module, q, k, v, float_mask, **exact, **kwargs)
    plain, _ = eager_softcap(module, q, k, v, float_mask, **exact)
    actual = ours(q, k, v, module=module, **exact, **kwargs)
    assert_close(actual, expected, rms=EXACT)
    if name != "sliding_window":
        assert rel_rms(plain, expected) > 0.01  # it does something


def test_fp8_delta_matching_attention_sinks_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    module = Layer()
    float_mask = torch.zeros(1, 1, 24, 24).masked_fill(~causal(24), -1e30)
    leaves, do = (q, k, v, module.sinks), torch.randn(2, 24, 4, 16)
    expected = eager_sinks(module, q, k, v, float_mask, scaling=0.25, s_aux=module.sinks)[0]
    expected = torch.autograd.grad(expected, leaves, do)
    actual = ours(q, k, v, module=module, scaling=0.25, s_aux=module.sinks)
    for mine, theirs in zip(torch.autograd.grad(actual, leaves, do), expected, strict=True):
        assert_close(mine, theirs, rms=5e-6)  # measured: 1e-6, the sinks', a sum that cancels


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("mask", [None, "bool"])
@pytest.mark.parametrize("pair", [False, True], ids=["one", "pair"])
def test_fp8_delta_matching_attention_cu_seq_lens(mask, window, pair: bool) -> None:
    """Each sequence as alone, also when the model made a mask of its own beside them."""
    q, k, v = qkv(B=1, T=30)
    cu = torch.tensor([0, 7, 8, 30], dtype=torch.int32)
    kwargs = {"cu_seq_lens_q": cu, "max_length_q": 22, "max_length_k": 22, "sliding_window": window}
    if pair:
        kwargs["cu_seq_lens_k"] = cu
    visible = causal(30, window=window) if mask else None
    packed = ours(q, k, v, visible, **kwargs)
    for start, stop in ((0, 7), (7, 8), (8, 30)):
        part = [x[:, :, start:stop] for x in (q, k, v)]
        alone = sdpa(*part, causal(stop - start, window=window))
        assert_close(packed[:, start:stop], alone, rms=EXACT)
    with pytest.raises(ValueError, match="cu_seqlens.*batch 2"):
        ours(*qkv(), cu_seq_lens_q=torch.tensor([0, 24], dtype=torch.int32))


def test_fp8_delta_matching_attention_unmasked_packing() -> None:
    """With a cache, on by default, Transformers does not look for packing: sequences would see each
    other. Refused, each time it is tried."""
    model, ids = use(build("llama")).train(), batch(1, 30)
    positions = torch.cat([torch.arange(12), torch.arange(18)])[None]
    for _ in range(2):
        with pytest.raises(ValueError, match="`position_ids` restart.*use_cache=False"):
            model(ids, position_ids=positions)
    model(ids, position_ids=positions, use_cache=False)
    cu = torch.tensor([0, 12, 30], dtype=torch.int32)
    model(ids, position_ids=positions, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    # A buffer that is filled again for every batch.
    buffer = torch.arange(30)[None].clone()
    model(ids, position_ids=buffer)
    with torch.inference_mode():
        model(ids)
    buffer.copy_(positions)
    with pytest.raises(ValueError, match="`position_ids` restart"):
        model(ids, position_ids=buffer)


def test_fp8_delta_matching_attention_unmasked_packing_in_a_window() -> None:
    """A sliding window has a mask, which does not separate sequences either; positions of padding
    may be anything."""
    model, ids = use(build("mistral")).train(), batch(1, 30)
    positions = torch.cat([torch.arange(12), torch.arange(18)])[None]
    with pytest.raises(ValueError, match="`position_ids` restart"):
        model(ids, position_ids=positions)
    model(ids, position_ids=positions, use_cache=False)
    mask = torch.ones_like(ids)
    mask[:, :12] = 0
    model(ids, position_ids=positions, attention_mask=mask)


def test_fp8_delta_matching_attention_mixed_dtypes() -> None:
    """Rotary embeddings in FP32 leave q and k wider than v; the narrow dtype is the model's."""
    q, k, v = qkv()
    low = [x.bfloat16() for x in (q, k, v)]
    for recipe in ("bf16", "delta_matching"):
        module = Layer(recipe)
        output = ours(low[0].float(), low[1].float(), low[2], module=module)
        assert output.dtype == torch.bfloat16
        assert_bitwise_equal(output, ours(*low, module=module))
        with torch.autocast("cpu", torch.bfloat16):
            assert_bitwise_equal(ours(q, k, low[2], module=module), ours(*low, module=module))
            assert ours(q, k, v, module=module).dtype == torch.bfloat16


def test_fp8_delta_matching_attention_wide_norms() -> None:
    """PEFT keeps norms in FP32 over BF16 weights: all three arrive wider than the weights."""
    module = Layer()
    module.o_proj = nn.Linear(64, 64, dtype=torch.bfloat16)
    assert ours(*qkv(), module=module).dtype == torch.bfloat16


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_fp8_delta_matching_attention_autocast(family: str, use_cache: bool) -> None:
    """FP32 weights under BF16 autocast, as with mixed_precision="bf16"."""
    inputs = padded_for(family, "left")._asdict() | {"use_cache": use_cache}
    model = build(family)
    with torch.autocast("cpu", torch.bfloat16):
        expected, expected_grads = run(use(model, plain(family)), **inputs)
        logits, grads = run(use(model, recipe="bf16"), **inputs)
    real = inputs["attention_mask"].bool()
    # BF16 rounding in another order; measured: 0.0070 and 0.0091 (gemma2), half of that else.
    assert rel_rms(logits[real], expected[real]) < 0.009
    assert rel_grads(grads, expected_grads) < 0.012


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("recipe", ["bf16", AttentionRecipe(block="1xD")], ids=["bf16", "1xD"])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_fp8_delta_matching_attention_future_token(family: str, recipe, side: str | None) -> None:
    """No token sees a later one: not one bit of its logits moves."""
    model = use(build(family), recipe=recipe)
    inputs = padded(side or "left")
    mask = inputs.attention_mask if side else None
    ids, other = inputs.input_ids, inputs.input_ids.clone()
    other[:, 25:] = batch(seed=7)[:, 25:]
    before, after = (model(i, attention_mask=mask).logits for i in (ids, other))
    real = inputs.real[:, :25] if side else slice(None)
    assert_bitwise_equal(after[:, :25][real], before[:, :25][real])
    assert rel_rms(after[:, 25:], before[:, 25:]) > 0.1


def test_fp8_delta_matching_attention_future_token_tiles() -> None:
    """Tile descales, the default: later tokens of like size move earlier ones by underflow only
    (measured here: 0)."""
    model, ids = use(build("llama")), batch()
    other = ids.clone()
    other[:, 25:] = batch(seed=7)[:, 25:]
    before, after = (model(i).logits[:, :25] for i in (ids, other))
    assert rel_rms(after, before) < 1e-6


def test_fp8_delta_matching_attention_output_attentions() -> None:
    """Weights are never formed; asked for, they are absent, as with SDPA."""
    ids = batch()
    for family in ("llama", "gpt2", "mixtral"):
        out = use(build(family))(ids, output_attentions=True)
        assert not out.attentions or all(a is None for a in out.attentions)
        assert out.logits.isfinite().all()


@pytest.mark.parametrize("recipe", ["bf16", "delta_matching"])
def test_fp8_delta_matching_attention_layout(recipe: str) -> None:
    output = ours(*qkv(B=2, T=24, D=16, Dv=8), module=Layer(recipe))
    assert output.shape == (2, 24, 4, 8) and output.is_contiguous()


def test_fp8_delta_matching_attention_not_causal_model() -> None:
    """A decoder used as an encoder (config.is_causal = False) sees both sides."""
    for side in (None, "left", "right"):
        inputs = padded(side or "left")
        mask = inputs.attention_mask if side else None
        model = build("llama", is_causal=False)
        expected = use(model, "sdpa")(inputs.input_ids, attention_mask=mask, use_cache=False).logits
        actual = use(model, recipe="bf16")(inputs.input_ids, attention_mask=mask, use_cache=False)
        real = inputs.real if side else slice(None)
        assert_close(actual.logits[real], expected[real], rms=EXACT)


def test_fp8_delta_matching_attention_refuses_sparse_model() -> None:
    """DeepSeek's indexer selects keys; dropping its choice would be another model."""
    model = build("deepseek_v32")
    model(batch())
    with pytest.raises(NotImplementedError, match=r"`indices` \(torch.int32 \(2, 40, 8\)\)"):
        use(model)(batch())
