"""``DeltaMatchConfig``: the choice of recipes as Transformers keeps it in config.json."""

from __future__ import annotations

import difflib
import warnings
from typing import Any, NoReturn

from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_deltamatch.hf.layer_words import HIGH_PRECISION, check_word, linear_or_bf16, resolve_layer
from hf_deltamatch.hf.linear import DEFAULT_RECIPE
from hf_deltamatch.hf.modules import check_backend, pattern_dict, pattern_list
from hf_deltamatch.recipes import AttentionRecipe, LinearRecipe

QUANT_METHOD = "delta_matching"
FORMAT_VERSION = 1
_FIELDS = ("attention", "linear", "modules_to_not_convert", "layers", "include")
_HEADER = ("quant_method", "format_version")


class _Default(str):
    """A default, told apart from the same name given by the caller."""


class DeltaMatchConfig(QuantizationConfigMixin):
    """FP8 attention and FP8 linears as a quantisation config of Transformers.

    A checkpoint that was saved with such a config keeps its recipes, as in Transformers: passing
    another ``backend`` to ``from_pretrained`` is honoured, passing recipes that differ from the saved
    ones raises. Change them after loading, with ``set_attention_recipe`` and ``swap_linears``.

    Args:
        attention: recipe (name, object or dict) of every attention module; None leaves attention.
        linear: recipe of every linear; None leaves them.
        modules_to_not_convert: patterns of linears to leave in high precision.
        layers: module pattern to recipe, the most specific one wins. A value is the name of an
            attention or a linear recipe, ``"bf16"`` (both in high precision), or a dict with keys
            ``attention`` and ``linear``. Or one word for it all, ``"first_last_bf16"``: the first and
            the last layer in high precision, saved under their names.
        include: patterns of linears to swap although the default leaves them.
        backend: ``"reference"``, ``"triton"`` … or ``None`` (by device). A choice of this run: not
            saved.

    Raises:
        ValueError: unknown recipe or backend, nothing to do, or a config written by a newer version.
        TypeError: unknown argument, or a string instead of a list of patterns. (A config.json may
            hold unknown keys; they are named in a warning.)

    >>> config = DeltaMatchConfig(layers={"model.layers.0": "bf16"})
    >>> model = AutoModelForCausalLM.from_pretrained(name, quantization_config=config)
    """

    def __init__(
        self,
        attention: str | AttentionRecipe | dict | None = _Default("delta_matching"),  # noqa: B008
        linear: str | LinearRecipe | dict | None = _Default(DEFAULT_RECIPE),  # noqa: B008
        modules_to_not_convert: list[str] | None = None,
        layers: dict[str, Any] | str | None = None,
        *,
        include: list[str] | None = None,
        backend: str | None = None,
        **kwargs,
    ) -> None:
        given = {"attention": attention, "linear": linear, "layers": layers, "include": include}
        given["modules_to_not_convert"] = modules_to_not_convert
        self._given = [
            k
            for k, v in given.items()
            if not isinstance(v, _Default) and (v is not None or k in ("attention", "linear"))
        ]
        self.quant_method = QUANT_METHOD
        _check_header(kwargs)
        _refuse_unknown(kwargs)
        check_backend("DeltaMatchConfig", backend)
        self.attention = None if attention is None else AttentionRecipe.resolve(attention)
        self.linear = None if linear is None else LinearRecipe.resolve(linear)
        if self.attention is None and self.linear is None:
            raise ValueError(
                "DeltaMatchConfig: attention and linear are both None; name a recipe for at least "
                "one, or load the model without a quantization_config."
            )
        what = "DeltaMatchConfig: `{}`".format
        leave = pattern_list(what("modules_to_not_convert"), modules_to_not_convert)
        self.modules_to_not_convert = None if modules_to_not_convert is None else leave
        self.include = pattern_list(what("include"), include) or None
        for name in ("modules_to_not_convert", "include"):
            if self.linear is None and getattr(self, name):
                raise ValueError(
                    f"DeltaMatchConfig: {name} is {getattr(self, name)!r} with linear=None, where no "
                    f"linear is converted; leave {name} out, or name a recipe for `linear`."
                )
        if isinstance(layers, str):
            check_word(what("layers"), layers)
            self.layers: dict[str, dict] | str | None = layers
        else:
            layers = pattern_dict(what("layers"), layers)
            self.layers = {p: _resolve_layer(p, r) for p, r in layers.items()} or None
        self.backend = backend

    @classmethod
    def from_dict(
        cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs
    ) -> DeltaMatchConfig | tuple[DeltaMatchConfig, dict]:
        """From what :meth:`to_dict` wrote, perhaps in a newer version: unknown keys only warn."""
        if not isinstance(config_dict, dict):
            raise TypeError(
                f"DeltaMatchConfig.from_dict: `config_dict` is {config_dict!r}; it must be the dict that "
                "to_dict wrote."
            )
        unknown = sorted(set(config_dict) - {*_FIELDS, *_HEADER, "backend"})
        _check_header(dict(config_dict))
        if unknown:
            warnings.warn(
                f"DeltaMatchConfig: unknown {', '.join(unknown)}; ignored. The config may come "
                "from a newer hf_deltamatch.",
                stacklevel=2,
            )
        known = {k: v for k, v in config_dict.items() if k not in unknown}
        return super().from_dict(known, return_unused_kwargs, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """JSON types, recipes resolved to all their fields."""
        out = {
            "quant_method": QUANT_METHOD,
            "format_version": FORMAT_VERSION,
            "attention": _plain(self.attention),
            "linear": _plain(self.linear),
            "modules_to_not_convert": self.modules_to_not_convert,
            "layers": self.layers
            if isinstance(self.layers, str)
            else self.layers
            and {p: {k: _plain(r) for k, r in d.items()} for p, d in self.layers.items()},
        }
        return out | ({"include": self.include} if self.include else {})

    def __iter__(self):
        yield from self.to_dict().items()

    def get_loading_attributes(self) -> dict[str, Any]:
        """What Transformers sets on the config of a checkpoint when this one is passed for it."""
        attributes = {} if self.backend is None else {"backend": self.backend}
        return attributes | ({"passed_config": self} if self._given else {})

    @property
    def passed_config(self) -> None:
        """Nothing; setting it raises where the config that was passed contradicts this one."""

    @passed_config.setter
    def passed_config(self, passed: DeltaMatchConfig) -> None:
        saved, asked = self.to_dict(), passed.to_dict()
        for name in passed._given:
            if name == "layers" and isinstance(passed.layers, str):
                self.asked_layers = passed.layers  # compared when there is a model to name them
            elif (saved.get(name) or None) != (asked.get(name) or None):
                self.refuse_change(name, getattr(passed, name))

    def refuse_change(self, name: str, asked: Any) -> NoReturn:
        raise ValueError(
            f"DeltaMatchConfig: {name} is {_short(asked)}, but the checkpoint was saved with "
            f"{_short(getattr(self, name))}, and what is saved is what is loaded. Leave it out, and "
            "change the model after loading: set_attention_recipe(model, …), swap_linears(model, …) "
            "or DeltaMatchConfig(…).apply_to(model)."
        )

    def apply_to(self, model: nn.Module) -> nn.Module:
        """Make a model that is already built (``from_config``, or loaded) run this config, in place.

        What it ran before is undone: a half that is None here is plain afterwards. A ``backend`` of
        None keeps the one of each module. The config is then saved with the model as if it had been
        loaded with it. A config that cannot be applied leaves the model as it was.
        """
        return AUTO_QUANTIZER_MAPPING[QUANT_METHOD](self, pre_quantized=False).apply_to(model)


def _check_header(kwargs: dict) -> None:
    method = kwargs.pop("quant_method", QUANT_METHOD)
    if method != QUANT_METHOD:
        raise ValueError(
            f"DeltaMatchConfig: quant_method is {method!r}; this class reads {QUANT_METHOD!r}."
        )
    version = kwargs.pop("format_version", FORMAT_VERSION)
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise ValueError(
            f"DeltaMatchConfig: format_version is {version!r}; this hf_deltamatch reads 1 to "
            f"{FORMAT_VERSION}. Upgrade hf_deltamatch to load this checkpoint."
        )


def _refuse_unknown(kwargs: dict) -> None:
    for name in kwargs:
        known = (*_FIELDS, "backend")
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        raise TypeError(
            f"DeltaMatchConfig has no argument {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else ".")
            + f" Known are {', '.join(known)}."
        )


def _short(value: Any) -> str:
    return repr(value.name) if isinstance(value, (AttentionRecipe, LinearRecipe)) else repr(value)


def _plain(recipe: Any) -> Any:
    return recipe.to_dict() if isinstance(recipe, (AttentionRecipe, LinearRecipe)) else recipe


def _resolve_layer(pattern: str, value: Any) -> dict[str, Any]:
    """``{"attention": recipe, "linear": recipe or "bf16"}``, either key optional."""
    if isinstance(value, AttentionRecipe):
        return {"attention": value}
    if isinstance(value, LinearRecipe):
        return {"linear": value}
    if isinstance(value, str):
        out = {}
        if value in AttentionRecipe.NAMES:
            out["attention"] = AttentionRecipe.from_name(value)
        if value in LinearRecipe.NAMES or value == HIGH_PRECISION:
            out["linear"] = linear_or_bf16("DeltaMatchConfig", pattern, value)
        if out:
            return out
    if isinstance(value, dict) and value and set(value) <= {"attention", "linear"}:
        out = {}
        if "attention" in value:
            out["attention"] = resolve_layer(
                AttentionRecipe, "DeltaMatchConfig", pattern, value["attention"]
            )
        if "linear" in value:
            out["linear"] = linear_or_bf16("DeltaMatchConfig", pattern, value["linear"])
        return out
    raise ValueError(
        f"DeltaMatchConfig: layers[{pattern!r}] is {value!r}; it must be the name of an attention "
        f"recipe ({', '.join(sorted(AttentionRecipe.NAMES))}), of a linear recipe "
        f"({', '.join(sorted(LinearRecipe.NAMES))}), {HIGH_PRECISION!r}, or a dict with keys attention and linear."
    )
