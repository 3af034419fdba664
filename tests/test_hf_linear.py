"""The swapper: what it swaps, what it leaves and says so, and what a swapped model keeps."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from tiny_models import (
    batch,
    build,
    one_thread,  # noqa: F401
    use,
)
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_deltamatch import LinearRecipe, SwapReport, fp8_linear, swap_linears, unswap_linears
from hf_deltamatch.diagnostics import count_calls
from hf_deltamatch.hf.linear import FP8Conv1D, FP8Linear, fp8_linears
from hf_deltamatch.testing import assert_bitwise_equal, rel_rms

LINEARS = [f"self_attn.{x}_proj" for x in "qkvo"] + [
    f"mlp.{x}_proj" for x in ("gate", "up", "down")
]


def names_of(layer: int) -> list[str]:
    return [f"model.layers.{layer}.{name}" for name in LINEARS]


def recipes(model: nn.Module) -> dict[str, str]:
    return {name: m.fp8_recipe.name for name, m in fp8_linears(model).items()}


class Special(nn.Linear):
    """A subclass: its forward is not nn.Linear's, so it is no business of ours."""

    def forward(self, x):
        return super().forward(x) * 2


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 32)
        self.experts = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])


class FusedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(4, 32, 64))
        self.bias = nn.Parameter(torch.zeros(4, 64))


class Zoo(nn.Module):
    """One of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(32, 48)
        self.conv = Conv1D(48, 32)
        self.special = Special(32, 32)
        self.bilinear = nn.Bilinear(32, 32, 32)
        self.attention = nn.MultiheadAttention(32, 2)
        self.narrow = nn.Linear(32, 15)
        self.edge = nn.Linear(32, 16)
        self.stored = nn.Linear(32, 32)
        fp8 = torch.zeros(32, 32, dtype=torch.float8_e4m3fn)
        self.stored.weight = nn.Parameter(fp8, requires_grad=False)
        self.embedding = nn.Embedding(40, 32)
        self.tied = nn.Linear(32, 40, bias=False)
        self.tied.weight = self.embedding.weight
        self.moe, self.fused = Mixture(), FusedExperts()
        self.gated = nn.ModuleDict({"gate": nn.Linear(32, 32)})  # routes nothing
        self.router = nn.Linear(32, 32)
        self.expert_router = nn.Sequential(nn.Linear(32, 32))
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 32)})
        self.head = nn.Linear(32, 40)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_swap_linears_choice() -> None:
    """Exactly nn.Linear and Conv1D, and a reason for everything else."""
    zoo = Zoo()
    report = swap_linears(zoo)
    assert set(report.swapped) == {
        "plain", "conv", "edge", "moe.experts.0", "moe.experts.1", "gated.gate",
    }  # fmt: skip
    reasons = {
        "special": "Special is not exactly nn.Linear",
        "attention.out_proj": "NonDynamicallyQuantizableLinear is not exactly nn.Linear",
        "narrow": "out_features 15 < 16",
        "stored": "the weight is stored as torch.float8_e4m3fn",
        "tied": "weight tied with embedding.weight",
        "moe.gate": "router of a mixture of experts",
        "router": "router of a mixture of experts",
        "expert_router.0": "router of a mixture of experts",
        "fused.gate_up": "fused experts, one 4 x 32 x 64 parameter: not swapped",
        "lora_A.default": "PEFT adapter",
        "head": "output embedding",
    }
    assert report.skipped.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert reason in report.skipped[name], name
    assert type(zoo.plain) is FP8Linear and type(zoo.conv) is FP8Conv1D
    assert type(zoo.special) is Special and type(zoo.head) is nn.Linear
    assert set(fp8_linears(zoo)) == set(report.swapped)


def test_swap_linears_include() -> None:
    """What the default leaves can be asked for; what cannot be swapped stays."""
    zoo = Zoo()
    names = ["narrow", "tied", "moe.gate", "router", "expert_router.0", "lora_A.default", "head"]
    report = swap_linears(zoo, include=[*names[:4], "expert_router", "lora_A", "head", "special"])
    assert set(names) <= set(report.swapped)
    assert zoo.tied.weight is zoo.embedding.weight
    assert "not exactly nn.Linear" in report.skipped["special"]
    with_stored = swap_linears(Zoo(), include=["stored"])
    assert "float8" in with_stored.skipped["stored"]
    left = swap_linears(Zoo(), include=["head"], modules_to_not_convert=["head"])
    assert left.skipped["head"] == "in modules_to_not_convert"


def test_swap_linears_filter_fn() -> None:
    """It sees a module and its name, and can only narrow the default choice."""
    model, seen = build("llama"), {}

    def keep_mlp(module: nn.Module, name: str) -> bool:
        seen[name] = module
        return ".mlp." in name

    report = swap_linears(model, filter_fn=keep_mlp)
    assert set(seen) == {*names_of(0), *names_of(1)}  # not the output embedding
    assert all(seen[name] is model.get_submodule(name) for name in seen)
    assert set(report.swapped) == {n for n in seen if ".mlp." in n}
    assert report.skipped["model.layers.0.self_attn.q_proj"] == "filter_fn returned False"
    assert report.skipped["lm_head"] == "output embedding"


@pytest.mark.parametrize(
    "patterns",
    [
        ["model.layers.1"],
        ["model.layers.1.*"],
        ["model.layers.1.self_attn", "model.layers.1.mlp"],
        ["*.1.*_proj"],
    ],
)
def test_swap_linears_modules_to_not_convert(patterns: list[str]) -> None:
    model = build("llama", num_hidden_layers=11)
    report = swap_linears(model, modules_to_not_convert=patterns)
    left = {n for n, reason in report.skipped.items() if reason == "in modules_to_not_convert"}
    assert left == set(names_of(1))  # and not layer 10
    assert set(names_of(10)) <= set(report.swapped)
    assert len(report.swapped) == 7 * 10


def test_swap_linears_layers() -> None:
    """The most specific pattern wins, in any order of the dict."""
    layers = {
        "model.layers.*": "rowwise",
        "model.layers.1": "bf16",
        "model.layers.1.mlp": "mx",
        "*.down_proj": LinearRecipe(grad_format="e5m2"),
    }
    for order in (list(layers), sorted(layers), list(reversed(layers))):
        model = build("llama", num_hidden_layers=11)
        report = swap_linears(model, layers={p: layers[p] for p in order})
        got = recipes(model)
        for i in range(11):
            for name in names_of(i):
                expected = "rowwise"
                if i == 1:
                    expected = "mx" if ".mlp." in name else None
                assert got.get(name) == expected, (order, name)
        assert report.skipped["model.layers.1.self_attn.q_proj"] == (
            "layers['model.layers.1'] is 'bf16'"
        )
    model = build("llama")
    swap_linears(model, "rowwise", layers={"*.down_proj": "mx"})
    for name, recipe in recipes(model).items():
        assert recipe == ("mx" if name.endswith("down_proj") else "rowwise")


@pytest.mark.parametrize("argument", ["include", "modules_to_not_convert", "layers"])
def test_swap_linears_unknown_pattern(argument: str) -> None:
    for pattern in ("model.layers.7", "q_proj", "model.layer.0", "model.embed_tokens"):
        value = {pattern: "rowwise"} if argument == "layers" else [pattern]
        model = build("llama")
        with pytest.raises(ValueError) as error:
            swap_linears(model, **{argument: value})
        for part in (argument, repr(pattern), "model.layers.0.self_attn.q_proj"):
            assert part in str(error.value)
        assert not fp8_linears(model)  # nothing half done
    with pytest.raises(ValueError, match="'tensorwise'.*blockwise"):
        swap_linears(model, layers={"model.layers.0": "tensorwise"})


def test_swap_linears_nothing() -> None:
    for model, part in (
        (nn.Sequential(nn.Linear(64, 2)), "out_features 2 < 16"),
        (nn.Sequential(nn.ReLU()), "Sequential"),
        (FusedExperts(), "fused experts"),
    ):
        with pytest.raises(ValueError, match="no module of") as error:
            swap_linears(model)
        assert part in str(error.value)
    with pytest.raises(ValueError, match="filter_fn returned False"):
        swap_linears(build("llama"), filter_fn=lambda module, name: False)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "mixtral"])
def test_swap_linears_keeps_parameters(family: str) -> None:
    """Same Parameter objects, keys and dtypes; no buffers; unswapping restores the classes."""
    model = build(family)
    before = dict(model.named_parameters(remove_duplicate=False))
    state = {k: (v.dtype, v.shape) for k, v in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    classes = {name: type(m) for name, m in model.named_modules()}
    expected = model(batch()).logits
    swapped = swap_linears(model).swapped
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    assert all(after[n] is before[n] for n in before)
    assert {k: (v.dtype, v.shape) for k, v in model.state_dict().items()} == state
    assert dict(model.named_buffers()).keys() == buffers.keys()
    assert rel_rms(model(batch()).logits, expected) > 1e-3
    assert unswap_linears(model) == len(swapped)
    assert {name: type(m) for name, m in model.named_modules()} == classes
    assert not any("fp8" in key for m in model.modules() for key in vars(m))
    assert_bitwise_equal(model(batch()).logits, expected)
    assert unswap_linears(model) == 0


def test_swap_linears_tied_weights() -> None:
    model = build("llama", tie_word_embeddings=True)
    report = swap_linears(model)
    assert report.skipped["lm_head"] == "output embedding"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(model.state_dict()) == len(build("llama", tie_word_embeddings=True).state_dict())


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_swap_linears_mixtures(family: str) -> None:
    """Routers stay, and every parameter of fused experts is of a module that the report names."""
    model = build(family)
    report = swap_linears(model)
    fused = {n for n, what in report.swapped.items() if what.startswith("experts ")}
    three = [n for n, p in model.named_parameters() if p.dim() == 3 and "expert" in n]
    assert three and fused == {n.rsplit(".", 1)[0] for n in three}
    for name in report.swapped:
        assert name.rsplit(".", 1)[-1] not in ("gate", "router", "shared_expert_gate")


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_swap_linears_optimizer_survives(optimizer) -> None:
    """A step before the swap, one after: the same optimiser still moves the parameters."""
    model = use(build("llama")).train()
    opt = optimizer(model.parameters(), lr=1e-2)
    for swap in (False, True):
        if swap:
            swap_linears(model)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        opt.zero_grad()
        model(batch(), labels=batch()).loss.backward()
        opt.step()
        for name, param in model.named_parameters():
            assert not torch.equal(param, before[name]), name


def test_swap_linears_twice() -> None:
    """Again with the same arguments changes nothing; with another recipe, the recipe."""
    model = build("llama")
    first = swap_linears(model)
    expected = model(batch()).logits
    assert swap_linears(model) == first
    assert_bitwise_equal(model(batch()).logits, expected)
    swap_linears(model, "rowwise")
    assert set(recipes(model).values()) == {"rowwise"}
    assert not torch.equal(model(batch()).logits, expected)
    fresh = build("llama")
    swap_linears(fresh, "rowwise")
    assert_bitwise_equal(model(batch()).logits, fresh(batch()).logits)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"modules_to_not_convert": ["model.layers.1"]},
        {"layers": {"model.layers.1": "bf16"}},
        {"filter_fn": lambda module, name: "layers.1" not in name},
    ],
    ids=["modules_to_not_convert", "layers", "filter_fn"],
)
def test_swap_linears_twice_leaves_what_it_says(kwargs: dict) -> None:
    """The report of a second swap is true: a module it lists as left does not run in FP8."""
    model = build("llama")
    swap_linears(model)
    report = swap_linears(model, **kwargs)
    assert set(fp8_linears(model)) == set(report.swapped)
    fresh = build("llama")
    swap_linears(fresh, **kwargs)
    assert_bitwise_equal(model(batch()).logits, fresh(batch()).logits)


def test_swap_linears_replaced_forward() -> None:
    """A forward set on the instance (Accelerate's hooks for offloading do that) runs whatever the
    class is, so a swap would have no effect: such a module must not be reported as FP8."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    add_hook_to_module(model[0], ModelHook())
    report = swap_linears(model)
    with count_calls() as calls:
        model(torch.randn(4, 32))
    assert calls["linear_fwd"] == len(report.swapped)
    assert len(report.swapped) + len(report.skipped) == 2


def test_swap_report_text() -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 2))
    report = swap_linears(model, layers={"0": "mx"})
    assert isinstance(report, SwapReport)
    assert str(report).splitlines() == [
        "3 linears in FP8, 1 left as they are",
        "     2 x 48 -> 48, blockwise",
        "     1 x 64 -> 48, mx",
        "  left 3: out_features 2 < 16",
    ]
    assert repr(model[0]) == "FP8Linear(in_features=64, out_features=48, bias=True, fp8=mx)"
    conv = nn.Sequential(Conv1D(48, 64))
    assert swap_linears(conv).swapped == {"0": "64 -> 48, blockwise"}
    assert "FP8Conv1D(" in repr(conv) and "fp8=blockwise" in repr(conv)


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "torch.save"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_swapped_model_copies(family: str, how: str) -> None:
    model = use(build(family))
    swap_linears(model, layers={"*.0.*": "rowwise"})
    if how == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    elif how == "deepcopy":
        copied = copy.deepcopy(model)
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copied = torch.load(buffer, weights_only=False)
    assert recipes(copied) == recipes(model)
    assert set(recipes(model).values()) == {"rowwise", "blockwise"}
    assert_bitwise_equal(copied(batch()).logits, model(batch()).logits)
    assert next(copied.parameters()) is not next(model.parameters())


def test_swapped_model_state_dict_loads_everywhere() -> None:
    """Into a plain model and back, strictly."""
    model, other = build("llama", seed=1), build("llama", seed=2)
    swap_linears(model)
    other.load_state_dict(model.state_dict())
    swap_linears(other)
    assert_bitwise_equal(other(batch()).logits, model(batch()).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", sorted(LinearRecipe.NAMES))
@pytest.mark.parametrize("make", [lambda: nn.Linear(160, 96), lambda: Conv1D(96, 160)])
def test_fp8_linear_modules(make, recipe: str, dtype: torch.dtype) -> None:
    """Output and gradients close to the plain module's, and the three GEMMs really ran."""
    module = make().to(dtype)
    x, dy = torch.randn(2, 70, 160).to(dtype), torch.randn(2, 70, 96).to(dtype)
    results = []
    for fp8 in (False, True):
        if fp8:
            swap_linears(nn.Sequential(module), recipe)
        x = x.detach().requires_grad_()
        module.zero_grad()
        with count_calls() as calls:
            output = module(x)
            output.backward(dy)
        assert calls["linear_fwd"] == calls["linear_bwd_weight"] == int(fp8)
        assert output.dtype == dtype and module.weight.grad.dtype == dtype
        if fp8:
            weight = module.weight.t() if isinstance(module, Conv1D) else module.weight
            assert_bitwise_equal(output, fp8_linear(x, weight, module.bias, recipe))
        results.append((output.detach(), x.grad, module.weight.grad, module.bias.grad))
    # Measured: 0.036 to 0.0387; the bias is summed as always.
    errors = [rel_rms(b, a) for a, b in zip(*results, strict=True)]
    assert all(0.034 < e < 0.040 for e in errors[:3]), errors
    assert errors[3] < 1e-6


def test_fp8_linear_modules_zero_tokens() -> None:
    """An expert that gets no token."""
    for module in (nn.Linear(32, 48), Conv1D(48, 32)):
        swap_linears(nn.Sequential(module))
        x = torch.zeros(0, 32, requires_grad=True)
        output = module(x)
        assert output.shape == (0, 48)
        output.sum().backward()
        assert x.grad.shape == (0, 32)
        assert not module.weight.grad.any() and not module.bias.grad.any()
