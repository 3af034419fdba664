"""One arm of ``bench step``: a Llama of Transformers, random tokens, forward, backward, optimiser.

Runs in a process of its own. Every arm does the same but for attention and linears: layers and loss
compiled one by one (a layer is compiled once for all of them), fused AdamW. Layers are called one
after the other, as they are causal without a mask: Transformers' own forward looks for packed
sequences in the positions, which waits for the device in every step.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from hf_deltamatch.benchmarks import timing
from hf_deltamatch.hf import ATTN_IMPLEMENTATION, set_attention_recipe, swap_linears

VOCABULARY = 32768
LEARNING_RATE = 1e-4
WARM_UP, QUEUES, QUEUE = 3, 3, 5


class Size(NamedTuple):
    """A Llama with heads of 128 (two query heads a key head) and a feed-forward of 4·hidden."""

    layers: int = 20
    hidden: int = 2048
    tokens: int = 8192
    batch: int = 4

    def __str__(self) -> str:
        return f"{self.layers} layers, hidden {self.hidden}, {self.batch} x {self.tokens} tokens"

    def config(self) -> LlamaConfig:
        """Raises ValueError: ``hidden`` is no multiple of 256, or there is nothing of something."""
        if min(self) < 1 or self.hidden % 256:
            raise ValueError(
                f"the size is {self}; all must be at least 1, hidden a multiple of 256 (two heads of "
                "128)."
            )
        heads = self.hidden // 128
        return LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=self.hidden, intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers, num_attention_heads=heads, head_dim=128,
            num_key_value_heads=heads // 2, max_position_embeddings=self.tokens, use_cache=False,
            tie_word_embeddings=False,
        )  # fmt: skip

    @property
    def parameters(self) -> int:
        return 2 * VOCABULARY * self.hidden + self._matrices() + (2 * self.layers + 1) * self.hidden

    def _matrices(self) -> int:
        """Elements of the linears of all layers: q and o, k and v of half the width, three of 4."""
        return self.layers * self.hidden**2 * (2 + 1 + 12)

    @property
    def flops(self) -> float:
        """Of the model in a step, recomputation not counted: 6 an element of a matrix and token (the
        embedding is none), and attention's 4·hidden for each of T²/2 pairs, three times."""
        matrices = self._matrices() + VOCABULARY * self.hidden
        attention = 3 * self.layers * 4 * self.hidden * self.tokens**2 / 2
        return self.batch * (6.0 * matrices * self.tokens + attention)


class Arm(NamedTuple):
    """``linears``: False, or ``fuse_gated`` of :func:`swap_linears`."""

    attention: bool
    linears: bool | str


ARMS = {
    "bf16": Arm(False, False),
    "fp8": Arm(True, "whole"),
    "fp8-gated": Arm(True, True),
    "fp8-attention": Arm(True, False),
    "fp8-linears": Arm(False, "whole"),
}
WEIGHTS = ("bf16", "fp32")


def run_arm(
    arm: str,
    size: list[int],
    weights: str,
    compiler: str | None = "inductor",
    device: str = "cuda",
) -> dict[str, Any]:
    """Times, memory, and what is compared between arms.

    Args:
        arm: a name of :data:`ARMS`.
        weights: ``bf16``, everything in it; or ``fp32``, under autocast to BF16.
        compiler: a backend of ``torch.compile``, or None.
    """
    started = time.perf_counter()
    step_size, chosen = Size(*size), ARMS[arm]
    autocast = lambda: (
        torch.autocast(device, torch.bfloat16) if weights == "fp32" else nullcontext()
    )
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (step_size.batch, step_size.tokens + 1), device=device)
    row: dict[str, Any] = {}
    if chosen.attention or chosen.linears:
        for name, backend in (("kernels", None), ("reference", "reference")):
            # Of one layer: rounding alone takes deeper ones apart.
            model, _ = _model(step_size._replace(layers=1), chosen, weights, device, backend)
            with autocast():
                row[name] = _first_gradients(model, ids[:1])
            del model
    model, swapped = _model(step_size, chosen, weights, device)
    row |= {"parameters": sum(p.numel() for p in model.parameters()), "swapped": swapped}
    loss_of = _loss(model)
    if compiler is not None:
        torch._dynamo.config.recompile_limit = 4  # else every layer could quietly be a case
        for layer in model.model.layers:
            layer.compile(dynamic=False, backend=compiler)
        loss_of = torch.compile(loss_of, dynamic=False, backend=compiler)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, fused=True, betas=(0.9, 0.95),
        capturable=device != "cpu",
    )  # fmt: skip

    def forward_backward() -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        with autocast():
            loss = loss_of(_hidden(model, ids[:, :-1]), ids[:, 1:])
        loss.backward()
        return loss.detach()

    def step() -> Tensor:
        loss = forward_backward()
        optimiser.step()
        return loss

    with ExitStack() as stack:
        if not chosen.attention:
            row["sdpa"] = _choose_sdpa(stack, forward_backward, device)
        losses = [forward_backward()]
        row["first"] = _looked_at(model, losses[0])
        optimiser.step()
        losses += [step() for _ in range(WARM_UP)]
        row["losses"] = [loss.item() for loss in losses]
        row["graphs"] = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
        row["graph_breaks"] = sum(torch._dynamo.utils.counters["graph_break"].values())
        row |= _timed(step, device)
        row["kernels_ms"] = _largest_kernels(step) if device != "cpu" else {}
        if device != "cpu":
            del losses
            row |= _recorded(step)
    return row | {"process_s": time.perf_counter() - started}


def _largest_kernels(step: Callable[[], Any], count: int = 20) -> dict[str, float]:
    """Milliseconds a step of the kernels that take most, and of all others together."""
    times: Counter[str] = Counter()
    for name, ms in timing.kernel_times(step, 2).items():
        times[name[:120]] += ms  # templates of hundreds of characters
    largest = times.most_common(count)
    rest = times.total() - sum(ms for _, ms in largest)
    return {name: round(ms, 3) for name, ms in largest} | {"(others)": round(rest, 3)}


def _hidden(model: nn.Module, ids: Tensor) -> Tensor:
    inner = model.model
    x = inner.embed_tokens(ids)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    places = inner.rotary_emb(x, position_ids=positions)
    for layer in inner.layers:
        x = layer(x, attention_mask=None, position_embeddings=places)
    return inner.norm(x)


def _first_gradients(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """Of one sequence, nothing compiled."""
    loss = _loss(model)(_hidden(model, ids[:, :-1]), ids[:, 1:])
    loss.backward()
    return _looked_at(model, loss.detach())


def _looked_at(model: nn.Module, loss: Tensor) -> dict[str, Any]:
    """The loss and, by parameter, the norm of its gradient and a sample."""
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {
        "loss": loss.item(),
        "grad_norms": {n: g.float().norm().item() for n, g in grads.items()},
        "gradients": {n: _sample(g) for n, g in grads.items()},
    }


def _sample(x: Tensor, count: int = 512) -> list[float]:
    """Elements at even distances."""
    flat = x.flatten()
    return flat[:: max(1, flat.numel() // count)][:count].tolist()


def _model(
    size: Size, arm: Arm, weights: str, device: str, backend: str | None = None
) -> tuple[PreTrainedModel, int]:
    """The same weights in every call; and the number of FP8 linears. ``backend`` None: by device."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if weights == "bf16" else torch.float32
    implementation = ATTN_IMPLEMENTATION if arm.attention else "sdpa"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            size.config(), dtype=dtype, attn_implementation=implementation
        )
    if arm.attention:
        set_attention_recipe(model, backend=backend)
    if not arm.linears:
        return model, 0
    report = swap_linears(model, backend=backend, fuse_gated=arm.linears)
    return model, len(report.swapped)


def _loss(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = model.lm_head(hidden)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return loss


def _choose_sdpa(stack: ExitStack, run: Callable[[], Tensor], device: str) -> str:
    """cuDNN's kernel, FlashAttention-2 where it does not do this case; the name of what runs."""
    if device == "cpu":
        return "cpu"
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            run()
    except RuntimeError as error:
        torch.compiler.reset()
        stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
        line = (str(error).strip().splitlines() or [""])[0]
        return f"FlashAttention-2 (cuDNN: {line})"
    stack.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
    return "cuDNN"


def _timed(step: Callable[[], Any], device: str) -> dict[str, Any]:
    """Median of queues of steps launched without a wait, and the memory peak of them."""
    if device == "cpu":
        start = time.perf_counter()
        step()
        return {"step_ms": 1e3 * (time.perf_counter() - start), "peak_GiB": None}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    between = torch.cuda.memory_allocated()
    times = _queues(step)
    return {
        "step_ms": statistics.median(times),
        "step_ms_range": [min(times), max(times)],
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30,
        "between_steps_GiB": between / 2**30,
    }


def _recorded(step: Callable[[], Any]) -> dict[str, Any]:
    """The same step as a CUDA graph, replayed: no time of the host in it."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    try:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                step()
        times = _queues(graph.replay)
    except RuntimeError as error:
        return {"not_recorded": str(error).strip().splitlines()[0]}
    return {"recorded_ms": statistics.median(times), "recorded_ms_range": [min(times), max(times)]}


def _queues(step: Callable[[], Any]) -> list[float]:
    times = []
    for _ in range(QUEUES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(QUEUE):
            step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / QUEUE)
    return times
