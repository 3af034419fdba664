"""The mask function: its three forms, and the same model as with SDPA in every way to run one."""

from __future__ import annotations

import inspect

import pytest
import torch
from tiny_models import (
    NEWEST,
    batch,
    build,
    grads_of,
    one_thread,  # noqa: F401
    padded,
    plain,
    run,
    use,
)
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    create_bidirectional_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from hf_deltamatch.hf.masks import NO_WINDOW, fp8_delta_matching_mask
from hf_deltamatch.testing import assert_bitwise_equal, assert_close

NO_PADDING = torch.ones(2, 12, dtype=torch.bool)
LEFT = torch.ones(2, 12, dtype=torch.bool)
LEFT[1, :3] = False


def form(mask: Tensor | None) -> str:
    if mask is None:
        return "none"
    assert mask.dim() == 4
    return {torch.int32: "compact", torch.bool: "boolean"}[mask.dtype]


def dense(mask: Tensor, q_length: int) -> Tensor:
    """The compact form spelled out, ``[B, 1, Tq, Tk]``."""
    assert mask.dtype == torch.int32 and mask.shape[1:3] == (3, 1)
    position, window, offset = mask[:, :, 0].long().unbind(1)
    query = offset[:, :1] + torch.arange(q_length)
    query, position, window = query[:, :, None], position[:, None], window[:, None]
    return ((position >= 0) & (position <= query) & (query - position < window))[:, None]


def tiny_config(**kwargs) -> LlamaConfig:
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, **kwargs)
    config._attn_implementation = "fp8_delta_matching"
    return config


EMBEDS = torch.zeros(2, 12, 16)
PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]] * 2)
PLAIN_POSITIONS = torch.arange(12)[None]


def seen(length: int, kind=DynamicCache):
    cache = kind() if kind is DynamicCache else kind(config=tiny_config(), max_cache_len=20)
    if length:
        cache.update(torch.zeros(2, 2, length, 8), torch.zeros(2, 2, length, 8), 0)
    elif kind is StaticCache:
        cache.early_initialization(2, 2, 8, torch.float32, "cpu")
    return cache


# Transformers 5.4 asks for a whole mask of a static cache, not saying why.
STATIC = "compact" if NEWEST else "boolean"


@pytest.mark.parametrize(
    "expected,create,config,kwargs",
    [
        ("none", create_causal_mask, {}, {}),
        ("none", create_causal_mask, {}, {"attention_mask": NO_PADDING}),
        ("none", create_causal_mask, {}, {"attention_mask": NO_PADDING.long()}),
        ("none", create_causal_mask, {}, {"position_ids": PLAIN_POSITIONS}),
        ("none", create_causal_mask, {}, {"past_key_values": seen(0)}),
        ("compact", create_causal_mask, {}, {"attention_mask": LEFT}),
        ("compact", create_causal_mask, {}, {"attention_mask": LEFT.flip(1)}),
        ("compact", create_causal_mask, {}, {"past_key_values": seen(4)}),
        (STATIC, create_causal_mask, {}, {"past_key_values": seen(0, StaticCache)}),
        (STATIC, create_causal_mask, {}, {"past_key_values": seen(1, StaticCache)}),
        ("compact", create_sliding_window_causal_mask, {"sliding_window": 4}, {}),
        ("compact", create_sliding_window_causal_mask, {"sliding_window": 40}, {}),
        ("boolean", create_causal_mask, {}, {"position_ids": PACKED}),
        (
            "boolean",
            create_sliding_window_causal_mask,
            {"sliding_window": 4},
            {"position_ids": PACKED},
        ),
        ("boolean", create_chunked_causal_mask, {"attention_chunk_size": 4}, {}),
        ("boolean", create_chunked_causal_mask, {"attention_chunk_size": 40}, {}),
        ("boolean", create_bidirectional_mask, {}, {"attention_mask": LEFT}),
        ("boolean", create_causal_mask, {}, {"or_mask_function": lambda b, h, q, k: k < 2}),
        ("boolean", create_causal_mask, {}, {"and_mask_function": lambda b, h, q, k: k != 2}),
        ("boolean", create_causal_mask, {}, {"block_sequence_ids": torch.zeros(2, 12).long()}),
        ("boolean", create_causal_mask, {}, {"allow_is_causal_skip": False}),
        ("boolean", create_causal_mask, {"is_causal": False}, {"attention_mask": LEFT}),
        ("none", create_causal_mask, {"is_causal": False}, {}),
    ],
)
def test_fp8_delta_matching_mask_form(expected: str, create, config: dict, kwargs: dict) -> None:
    """None, compact or boolean exactly as documented, and the pattern that SDPA would get."""
    takes = inspect.signature(create).parameters
    if not set(kwargs) <= set(takes):
        pytest.skip(f"{create.__name__} takes no {', '.join(set(kwargs) - set(takes))} here")
    config = tiny_config(**config)
    arguments = {
        "config": config,
        "inputs_embeds": EMBEDS,
        "attention_mask": None,
        "past_key_values": None,
        **kwargs,
    }
    mask = create(**arguments)
    assert form(mask) == expected
    config._attn_implementation = "sdpa"
    if expected != "none":
        if "allow_is_causal_skip" in takes:
            arguments["allow_is_causal_skip"] = False
    theirs = create(**arguments)
    if expected != "none" and theirs is None:
        theirs = torch.ones(12, 12).tril().bool().expand(2, 1, 12, 12)
    if expected == "compact":
        mask = dense(mask, 12)
    if expected != "none":
        assert torch.equal(mask.expand_as(theirs), theirs)
    elif not kwargs.get("past_key_values"):
        assert theirs is None


def test_fp8_delta_matching_mask_layer_types() -> None:
    """Models with layers of other kinds index the 4-D mask themselves: they get the boolean one."""
    inputs = {"batch_size": 2, "q_length": 12, "kv_length": 12, "attention_mask": LEFT}
    for types, expected in (
        (["full_attention", "sliding_attention"], "compact"),
        (["linear_attention", "full_attention"], "compact"),
        (["mamba", "full_attention"], "compact"),
        (["full_attention", "heavily_compressed_attention"], "boolean"),
        (["something_new"], "boolean"),
    ):
        config = tiny_config()
        config.layer_types = types
        assert form(fp8_delta_matching_mask(**inputs, config=config)) == expected, types


@pytest.mark.parametrize("window", [None, 1, 3, 30])
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(
    "q_length,kv_length,q_offset,kv_offset",
    [(9, 9, 0, 0), (4, 9, 5, 0), (1, 9, 8, 0), (4, 20, 5, 0), (1, 20, 0, 0), (3, 9, 14, 8)],
)
def test_fp8_delta_matching_mask_pattern(
    q_length: int, kv_length: int, q_offset: int, kv_offset: int, as_tensor: bool, window
) -> None:
    """Caches, static and sliding: the compact form says exactly what SDPA's mask says."""
    function = causal_mask_function
    if window is not None:
        function = sliding_window_causal_mask_function(window)
    last = q_offset + q_length
    for hidden in (None, 0, 3):
        padding = None
        if hidden is not None:
            padding = torch.ones(2, last, dtype=torch.bool)
            padding[1, :hidden] = False
        arguments = {
            "batch_size": 2,
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": torch.tensor(q_offset) if as_tensor else q_offset,
            "kv_offset": kv_offset,
            "mask_function": function,
            "attention_mask": padding,
            "local_size": window,
        }
        expected = sdpa_mask(**arguments, allow_is_causal_skip=False)
        actual = fp8_delta_matching_mask(**arguments, config=tiny_config())
        if actual is None:
            assert window is None and q_length == kv_length and not hidden
            continue
        assert form(actual) == "compact"
        assert torch.equal(dense(actual, q_length), expected)
        assert bool((actual[:, 1] == (window or NO_WINDOW)).all())


@pytest.mark.parametrize("function", ["chunked", "bidirectional"])
def test_fp8_delta_matching_mask_pattern_boolean(function: str) -> None:
    config = tiny_config(attention_chunk_size=4)
    arguments = {"batch_size": 2, "q_length": 12, "kv_length": 12, "attention_mask": LEFT}
    if function == "chunked":
        arguments["mask_function"] = chunked_causal_mask_function(4, torch.tensor([0, 3]))
        arguments["local_size"] = 4
    else:
        arguments["mask_function"] = bidirectional_mask_function
        arguments["allow_is_causal_skip"] = False
    actual = fp8_delta_matching_mask(**arguments, config=config)
    expected = sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
    assert actual.dtype == torch.bool and torch.equal(actual, expected)


MODELS = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4},
    "llama4_text": {"attention_chunk_size": 4},
}
MODES = {
    "no_cache": None,
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "chunked_prefill": {"prefill_chunk_size": 4},
    "beam": {"num_beams": 2},
}


def outputs(model, mode: str, kind: str) -> dict[str, Tensor]:
    inputs = padded(kind if kind != "packed" else "left", length=13, hidden=5)
    arguments = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
    if kind == "packed":
        positions = torch.cat([torch.arange(5), torch.arange(8)]).expand(2, -1)
        arguments = {"input_ids": batch(2, 13), "position_ids": positions}
    if mode == "no_cache":
        logits = model(**arguments, use_cache=False).logits
        return {"logits": logits if kind == "packed" else logits[inputs.real]}
    if kind == "packed":  # generate makes positions of its own
        config = model.config
        static = mode == "static"
        cache = StaticCache(config, max_cache_len=20) if static else DynamicCache(config=config)
        return {"logits": model(**arguments, past_key_values=cache, use_cache=True).logits}
    out = model.generate(
        **arguments,
        **MODES[mode],
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return {"logits": torch.stack(out.logits), "sequences": out.sequences}


RUNS = [
    (mode, kind)
    for mode in MODES
    for kind in ("left", "right", "packed")
    if kind != "packed" or mode in ("no_cache", "dynamic", "static")
]


@pytest.mark.parametrize("mode,kind", RUNS)
@pytest.mark.parametrize("family", MODELS)
def test_fp8_delta_matching_mask_as_sdpa(family: str, mode: str, kind: str) -> None:
    model = build(family, **MODELS[family])
    if family == "llama4_text" and mode == "static":
        try:
            outputs(use(model, "sdpa"), mode, kind)
        except TypeError as error:
            pytest.xfail(f"Transformers, with SDPA too: {error}")
    with torch.no_grad():
        expected = outputs(use(model, plain(family)), mode, kind)
        use(model, recipe="bf16")
        if kind == "packed" and mode != "no_cache" and family != "llama4_text":
            # With a cache Transformers looks for no packing: SDPA crosses sequences, ours refuses.
            # (llama4 masks its chunks, here as long as the first sequence.)
            with pytest.raises(ValueError, match="`position_ids` restart.*use_cache=False"):
                outputs(model, mode, kind)
            return
        actual = outputs(model, mode, kind)
    assert_close(actual["logits"], expected["logits"], rms=1e-6, what="logits")
    if "sequences" in expected:
        assert torch.equal(actual["sequences"], expected["sequences"])


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "family,side",
    [
        ("llama", "left"),
        pytest.param("llama", None, marks=SLOW),
        pytest.param("llama", "right", marks=SLOW),
        pytest.param("gemma3_text", "left", marks=SLOW),
        pytest.param("gemma3_text", None, marks=SLOW),
    ],
)
def test_fp8_delta_matching_mask_compile(family: str, side: str | None) -> None:
    """A training step in one graph gives the bits of eager."""
    torch._dynamo.reset()
    model = use(build(family, num_hidden_layers=1, layer_types=None)).train()
    inputs = padded(side or "left", length=13, hidden=5)._asdict()
    if side is None:
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    logits, grads = run(model, **inputs, use_cache=False)
    model.zero_grad()
    step = torch.compile(lambda **kw: model(**kw), fullgraph=True, backend="aot_eager")
    out = step(**inputs, use_cache=False)
    out.loss.backward()
    assert_bitwise_equal(out.logits, logits, "logits")
    compiled = grads_of(model)
    assert compiled.keys() == grads.keys()
    for name, grad in grads.items():
        assert_bitwise_equal(compiled[name], grad, name)


@torch.no_grad()
def decode_static(model, decode, steps: int = 5) -> Tensor:
    """Logits ``[steps, B, 1, vocab]`` of ``decode`` on a static cache after a left-padded prompt, from
    the third step on without recompiling."""
    cache = StaticCache(model.config, max_cache_len=24)
    inputs = padded("left", length=13, hidden=5)
    mask, logits = inputs.attention_mask, []
    model(inputs.input_ids, attention_mask=mask, past_key_values=cache)
    for i in range(steps):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        positions = mask.sum(-1, keepdim=True) - 1
        # A fixed length, as in generate, or every step has a shape of its own.
        fixed = torch.nn.functional.pad(mask, (0, 24 - mask.shape[1]))
        with torch.compiler.set_stance("default" if i < 2 else "fail_on_recompile"):
            out = decode(
                input_ids=batch(2, 1, seed=50 + i),
                attention_mask=fixed,
                position_ids=positions,
                past_key_values=cache,
            )
        logits.append(out.logits)
    return torch.stack(logits)


@pytest.mark.parametrize(
    "family",
    ["llama", pytest.param("mistral", marks=SLOW), pytest.param("gemma3_text", marks=SLOW)],
)
def test_fp8_delta_matching_mask_compile_static_decode(family: str) -> None:
    """Decoding with a static cache in one graph, without recompiling, as generate does it."""
    torch._dynamo.reset()
    model = use(build(family, **MODELS[family]), recipe="bf16")
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert_bitwise_equal(decode_static(model, compiled), decode_static(model, model.forward))
