"""The import rules of docs/architecture.md, read off the source."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# What the AWS Ray Train image ships and in-cluster code may use.
IN_THE_IMAGE = {
    *(
        "ray",
        "torch",
        "transformers",
        "tokenizers",
        "datasets",
        "pyarrow",
        "safetensors",
        "numpy",
        "huggingface_hub",
    ),
    *("pydantic", "yaml", "jinja2", "boto3", "botocore", "triton", "flash_attn", "markupsafe"),
    *("virtualenv", "httpx"),  # come with ray[default] and huggingface_hub
}
# Brought by the job's runtime_env, and imported by one module each, inside a function.
OPTIONAL = {"training.tracking.mlflow_run": "mlflow", "training.tracking.wandb_run": "wandb"}
# Run on the laptop only.
LAPTOP = {"training.cli", "training.console", "training.hardware", "training.shapes", "training.local"}
AT_WORK_ONLY = {"boto3", "botocore", "kubernetes", "requests", "urllib", "http", "socket"}


def _modules(package: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imports(path: Path, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _reachable(start: str, modules: dict[str, Path]) -> set[str]:
    """The modules of a package that one of them imports, directly or not."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        module = todo.pop()
        if module in seen or module not in modules:
            continue
        seen.add(module)
        todo += [name for name in _imports(modules[module]) if name in modules]
    return seen


def test_infra_does_not_know_training() -> None:
    for module, path in _modules("infra").items():
        assert not {name for name in _imports(path) if name.split(".")[0] in ("training", "operations")}, (
            module
        )


def test_submission_knows_of_infra_only_its_outputs() -> None:
    for module, path in _modules("training").items():
        if not module.startswith("training.submit"):
            continue
        known = {name for name in _imports(path) if name.split(".")[0] == "infra"}
        assert all(name.startswith("infra.outputs") for name in known), f"{module}: {known}"


@pytest.mark.parametrize("entry", ["training.ray_entry", "training.probe_entry", "training.submit.inside"])
def test_what_runs_in_the_cluster_uses_only_the_image(entry: str) -> None:
    modules = _modules("training")
    inside = _reachable(entry, modules)
    assert "training.job" in inside or entry != "training.ray_entry"
    assert not inside & LAPTOP
    for module in inside:
        packages = {name.split(".")[0] for name in _imports(modules[module])}
        foreign = packages - IN_THE_IMAGE - {"training"} - set(sys.stdlib_module_names)
        assert foreign <= {OPTIONAL.get(module)}, f"{module} imports {foreign}, which the image does not have"
        at_import = {name.split(".")[0] for name in _imports(modules[module], top_level_only=True)}
        assert OPTIONAL.get(module) not in at_import, f"{module} imports it before anybody asked for it"


@pytest.mark.parametrize("package", ["infra", "training", "operations", "policy"])
def test_nothing_talks_to_the_world_at_import(package: str) -> None:
    """Clients are made inside functions. Types for annotations may be imported; calls at module level may not be made."""
    for module, path in _modules(package).items():
        for node in ast.parse(path.read_text()).body:
            calls = (
                [call for call in ast.walk(node) if isinstance(call, ast.Call)]
                if _runs_at_import(node)
                else []
            )
            names = {ast.unparse(call.func) for call in calls}
            bad = {
                name
                for name in names
                if name.startswith(("boto3.", "requests.", "urllib.", "subprocess.", "os.system"))
            }
            assert not bad, f"{module} calls {bad} at import"


def _runs_at_import(node: ast.stmt) -> bool:
    return not isinstance(
        node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    )
