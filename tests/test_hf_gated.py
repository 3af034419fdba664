"""swap_linears(fuse_gated=True): gated feed-forward modules of Transformers, and what is passed over."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from tiny_models import COMMON
from transformers import AutoConfig, AutoModelForCausalLM

import hf_deltamatch
from hf_deltamatch.hf import gated
from hf_deltamatch.testing import assert_close


def tiny(model_type: str = "llama", **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**COMMON, **changes})
    return AutoModelForCausalLM.from_config(config)


def step(model) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    ids = torch.arange(66).view(2, 33) % model.config.vocab_size
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.item(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def feed_forwards(model) -> list:
    return [layer.mlp for layer in model.model.layers]


@pytest.mark.parametrize("fuse", [True, "whole"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "qwen2", "smollm3"])
def test_the_same_loss_and_gradients(model_type: str, fuse: bool | str) -> None:
    plain, fused = tiny(model_type), tiny(model_type)
    hf_deltamatch.swap_linears(plain)
    names = list(fused.state_dict())
    report = hf_deltamatch.swap_linears(fused, fuse_gated=fuse)
    if fuse == "whole":
        assert f"{fused.config.num_hidden_layers} of them are one op" in str(report)
    layers = fused.config.num_hidden_layers
    assert f"{layers} gated feed-forward modules keep nothing of their product" in str(report)
    base = type(feed_forwards(plain)[0])
    assert all(isinstance(m, base) and type(m) is not base for m in feed_forwards(fused))
    assert list(fused.state_dict()) == names
    (loss, grads), (other, expected) = step(fused), step(plain)
    assert loss == pytest.approx(other, rel=1e-5) and grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert_close(grad, expected[name], rms=0.02, what=name)


def test_keeps_less() -> None:
    kept = {}
    for fuse in (False, True):
        model = tiny(intermediate_size=512)
        hf_deltamatch.swap_linears(model, fuse_gated=fuse)
        sizes: dict[int, int] = {}

        def pack(t: torch.Tensor, sizes=sizes) -> torch.Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(torch.zeros(1, 33, dtype=torch.long)).logits.sum().backward()
        kept[fuse] = sum(sizes.values())
    elements = model.config.num_hidden_layers * 33 * 512
    # The FP8 copy of the product and the activation, in FP32 here.
    assert kept[False] - kept[True] >= elements * 5


def test_other_forwards_are_left() -> None:
    """Another activation, another forward, no FP8 down_proj."""
    for model in (tiny(hidden_act="gelu"), tiny("phi3", pad_token_id=0)):
        report = hf_deltamatch.swap_linears(model, fuse_gated=True)
        assert "has no gated feed-forward with the usual forward" in str(report)
        assert not any(isinstance(m, gated.FusedGated) for m in model.modules())
    model = tiny()
    report = hf_deltamatch.swap_linears(
        model, modules_to_not_convert=["*.down_proj"], fuse_gated=True
    )
    assert "are not fused: down_proj is Linear" in str(report)
    assert not any(isinstance(m, gated.FusedGated) for m in model.modules())


def test_a_hook_or_a_wrapper_is_not_passed_over() -> None:
    model = tiny()
    hf_deltamatch.swap_linears(model, fuse_gated=True)
    seen = []
    hook = feed_forwards(model)[0].down_proj.register_forward_hook(lambda *a: seen.append(a))
    step(model)
    assert len(seen) == 1
    hook.remove()
    step(model)
    assert len(seen) == 1
    report = hf_deltamatch.swap_linears(model, fuse_gated=True)
    feed_forwards(model)[0].down_proj.register_forward_hook(lambda *a: seen.append(a))
    report = hf_deltamatch.swap_linears(model, fuse_gated=True)
    assert "1 gated feed-forward modules are not fused: down_proj has hooks" in str(report)


LINEARS = ("gate_proj", "up_proj", "down_proj")
SOME_LINEARS = [[n for i, n in enumerate(LINEARS) if bits >> i & 1] for bits in range(1, 8)]


@pytest.mark.parametrize("fuse", [True, "whole"])
@pytest.mark.parametrize("targets", SOME_LINEARS, ids="+".join)
def test_lora(targets: list[str], fuse: bool | str) -> None:
    peft = pytest.importorskip("peft")
    plain, fused = tiny(), tiny()
    config = peft.LoraConfig(target_modules=targets, r=4, init_lora_weights=False)
    found = []
    for model, chosen in ((plain, False), (fused, fuse)):
        hf_deltamatch.swap_linears(model, fuse_gated=chosen)
        torch.manual_seed(1)
        found.append(step(peft.get_peft_model(model, config)))
    (loss, grads), (other, expected) = found
    assert loss == pytest.approx(other, rel=1e-6) and grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert_close(grad, expected[name], rms=1e-5, what=name)


def plain_linear(mlp, name: str) -> None:
    linear = getattr(mlp, name)
    new = torch.nn.Linear(linear.in_features, linear.out_features, bias=False)
    new.weight = linear.weight
    setattr(mlp, name, new)


CHANGES = {
    **{f"plain {n}": lambda mlp, n=n: plain_linear(mlp, n) for n in LINEARS},
    **{f"hooked {n}": lambda mlp, n=n: hook(getattr(mlp, n)) for n in (*LINEARS, "act_fn")},
    "another act_fn": lambda mlp: setattr(mlp, "act_fn", torch.nn.GELU()),
    "act_fn replaced on the instance": lambda mlp: setattr(mlp.act_fn, "forward", torch.tanh),
}


def hook(module) -> None:
    module.register_forward_hook(lambda module, args, out: 0.5 * out)


@pytest.mark.parametrize("fuse", [True, "whole"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_fusing_is_seen(change: str, fuse: bool | str) -> None:
    plain, fused = tiny(), tiny()
    losses = []
    for model, chosen in ((plain, False), (fused, fuse)):
        hf_deltamatch.swap_linears(model, fuse_gated=chosen)
        before = step(model)[0]
        # Transformers shares one activation among the layers; here each has its own.
        for mlp in feed_forwards(model):
            mlp.act_fn = copy.deepcopy(mlp.act_fn)
        CHANGES[change](feed_forwards(model)[0])
        losses.append(step(model)[0])
        assert change.startswith("plain") or abs(losses[-1] - before) > 1e-5
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("name", LINEARS)
def test_a_weight_of_another_dtype(name: str) -> None:
    """Under autocast each linear casts its own; one op of all three takes one dtype."""
    losses = []
    for fuse in (False, "whole"):
        model = tiny().bfloat16()
        hf_deltamatch.swap_linears(model, fuse_gated=fuse)
        for mlp in feed_forwards(model):
            getattr(mlp, name).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(step(model)[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_whole_where_it_can_be() -> None:
    """Biases, recipes that differ, high-precision grad_weight, hooks: down_proj alone, with the reason."""
    for options, changes, why in (
        ({}, {"mlp_bias": True}, "gate_proj has a bias"),
        ({"layers": {"*.up_proj": "rowwise"}}, {}, "up_proj and down_proj have different recipes"),
        (
            {"recipe": hf_deltamatch.LinearRecipe(grad_weight_hp=True)},
            {},
            "grad_weight_hp keeps inputs",
        ),
    ):
        model = tiny(**changes)
        report = hf_deltamatch.swap_linears(model, fuse_gated="whole", **options)
        assert "0 of them are one op" in str(report) and f"are not one op: {why}" in str(report)
        assert all(isinstance(m, gated.FusedGated) for m in feed_forwards(model))
        step(model)
    model = tiny()
    hf_deltamatch.swap_linears(model, fuse_gated="whole")
    (loss, _), seen = step(model), []
    hook = feed_forwards(model)[0].gate_proj.register_forward_hook(lambda *a: seen.append(a))
    assert step(model)[0] == pytest.approx(loss, rel=1e-5) and len(seen) == 1
    hook.remove()
    hf_deltamatch.swap_linears(model, fuse_gated=True)
    assert not any(isinstance(m, gated.FusedWhole) for m in model.modules())
    for wrong in ("all", 1, 0):
        with pytest.raises(ValueError, match=f"fuse_gated is {wrong!r}"):
            hf_deltamatch.swap_linears(model, fuse_gated=wrong)


@pytest.mark.parametrize("fuse", [True, "whole"])
def test_copies_and_going_back(fuse: bool | str) -> None:
    model = tiny()
    hf_deltamatch.swap_linears(model, fuse_gated=fuse)
    loss, _ = step(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert all(type(m) is type(feed_forwards(model)[0]) for m in feed_forwards(other))
        assert step(other)[0] == loss
        assert feed_forwards(other)[0].down_proj is not feed_forwards(model)[0].down_proj
    assert hf_deltamatch.swap_linears(model).notes == [] and isinstance(
        feed_forwards(model)[0], gated.FusedGated
    )
    hf_deltamatch.swap_linears(model, fuse_gated=False)
    assert not any(isinstance(m, gated.FusedGated) for m in model.modules())
    hf_deltamatch.swap_linears(model, fuse_gated=True)
    hf_deltamatch.unswap_linears(model)
    assert type(feed_forwards(model)[0]) is type(feed_forwards(tiny())[0])


def test_saved_and_loaded(tmp_path) -> None:
    """The choice is not saved: the same weights, plain modules."""
    model = tiny()
    hf_deltamatch.swap_linears(model, fuse_gated=True)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any(isinstance(m, gated.FusedGated) for m in loaded.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


@pytest.mark.parametrize("fuse", [True, "whole"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, fuse: bool | str) -> None:
    plain, other = tiny(), tiny()
    for model in (plain, other):
        hf_deltamatch.swap_linears(model, fuse_gated=fuse)
    other.gradient_checkpointing_enable({"use_reentrant": reentrant})
    (loss, grads), (again, expected) = step(other.train()), step(plain.train())
    assert loss == again
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name]), name


@pytest.mark.parametrize("fuse", [True, "whole"])
def test_compile(fuse: bool | str) -> None:
    torch._dynamo.reset()
    model = tiny()
    hf_deltamatch.swap_linears(model, fuse_gated=fuse)
    module = feed_forwards(model)[0]
    x = torch.randn(33, model.config.hidden_size)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), module(x))
