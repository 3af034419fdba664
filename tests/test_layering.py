"""Dependency direction, read from the imports: formats → recipes → reference | kernels → ops → hf."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_deltamatch"

# Each layer may import itself and the layers named here.
ALLOWED = {
    "formats": set(),
    "testing": set(),
    "recipes": {"formats"},
    "reference": {"formats", "recipes", "testing"},
    "kernels": {"formats", "recipes"},
    "ops": {"formats", "recipes", "testing", "reference", "kernels"},
    "numerics": {"formats", "recipes", "testing", "reference"},
    "monitor": {"formats", "recipes", "testing", "reference", "ops"},
    "diagnostics": {"formats", "recipes", "testing", "reference", "ops", "monitor"},
    "environment": set(),
    "benchmarks": {"formats", "recipes", "testing", "reference", "kernels", "ops", "hf"},
    "hf": {"formats", "recipes", "testing", "ops", "diagnostics", "environment"},
    "training": {"recipes", "ops", "hf", "diagnostics", "environment"},
    "study": {"recipes", "ops", "hf", "diagnostics", "environment", "training"},
    "evaluation": {"hf", "environment"},
    "export": {"formats", "recipes", "reference", "hf", "training"},
    "cli": {
        "recipes",
        "ops",
        "hf",
        "diagnostics",
        "numerics",
        "environment",
        "benchmarks",
        "study",
        "training",
        "evaluation",
        "export",
    },
    "__init__": {"recipes", "ops", "hf", "diagnostics"},
    "__main__": {"cli"},
}
# Third-party packages and the only layers that may import them.
ONLY_IN = {
    "triton": {"kernels"},
    "transformers": {"hf", "cli", "benchmarks", "study", "export"},
    "lm_eval": {"hf", "evaluation"},
    "peft": {"hf"},
    "accelerate": set(),
    "datasets": set(),
}


def imports(path: Path) -> set[str]:
    """Dotted names of every module imported anywhere in a file, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_layering(path: Path) -> None:
    layer = layer_of(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "hf_deltamatch" and len(parts) > 1 and parts[1] in ALLOWED:
            assert parts[1] in ALLOWED[layer] | {layer}, f"{path}: imports {name}"
        if parts[0] in ONLY_IN:
            assert layer in ONLY_IN[parts[0]], f"{path}: imports {name}"


def test_every_module_has_a_layer() -> None:
    assert {layer_of(p) for p in FILES} <= set(ALLOWED)


def test_files_are_small_enough_to_read() -> None:
    code = [p for d in ("hf_deltamatch", "examples", "tests") for p in (ROOT / d).rglob("*.py")]
    long = {
        str(p.relative_to(ROOT)): n for p in code if (n := len(p.read_text().splitlines())) > 450
    }
    assert not long, f"split these files: {long}"
