"""The package's structure: tiers, no import cycles, no reads of other modules' private names."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from shardcast.config import ShardcastConfig

PACKAGE = Path(__file__).parents[1] / "shardcast"
# A folder or top-level module may import itself and those in the lines above it.
TIERS: tuple[frozenset[str], ...] = (
    frozenset(
        {
            "config",
            "option_values",
            "option_files",
            "_compat",
            "hook",
            "launched",
            "messages",
        }
    ),
    frozenset({"plan", "comm"}),
    frozenset({"memory"}),
    frozenset({"step"}),
    frozenset({"optimizer"}),
    frozenset({"extensions"}),
    frozenset({"checkpoint", "estimate", "serving", "testing"}),
    frozenset({"frameworks"}),
    frozenset({"accelerate", "metrics", "publish", "transformers", "lightning", "run"}),
    frozenset({"cli", "__main__"}),
)
# Private interfaces of torch and other packages are used only here, so that a new release of
# theirs affects one folder.
ALLOWED = {"_compat"}
# The core, which every user runs, imports nothing optional. `optimizer/api.py` joins both. Parts
# that a call, a class or a codec needs, rather than an option, are loaded by one of these names.
ASSEMBLY = "shardcast.optimizer.api"
CORE = ("plan", "comm", "memory", "step", "optimizer", "config")
BY_NAME = {"any_optimizer", "offload"}
# It declares types of higher tiers.
DECLARES = "option_values.py"
# Modules with imports in functions: of third-party packages, or of modules for mesh= only.
INSIDE = {f"shardcast.{name}" for name in ("cli.launch", "run", "optimizer.api")}


@functools.cache
def modules() -> dict[str, Path]:
    return {
        ".".join(("shardcast", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in PACKAGE.rglob("*.py")
    }


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def tier_of(name: str) -> int:
    _, *rest = name.split(".")
    found = [number for number, names in enumerate(TIERS) if rest and rest[0] in names]
    assert found or not rest, f"{name} has no tier: give it one in TIERS"
    return found[0] if found else len(TIERS)  # shardcast/__init__.py imports the public names


def imports(path: Path, types: bool = True) -> Iterator[str]:
    """Yield our modules that ``path`` imports, also in functions and, with ``types``, for types.

    Imports for types in :data:`DECLARES` are left out.
    """
    skipped = for_types(path) if not types or path == PACKAGE / DECLARES else set()
    for node in ast.walk(parsed(path.read_text())):
        if id(node) not in skipped:
            yield from imported_by(node)


def imported_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardcast"):
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        return [name if name in modules() else str(node.module) for name in inner]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.startswith("shardcast")]
    return []


def for_types(path: Path) -> set[int]:
    """Return the nodes below ``if TYPE_CHECKING:``."""
    nodes = ast.walk(parsed(path.read_text()))
    blocks = [n for n in nodes if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    return {id(node) for block in blocks for line in block.body for node in ast.walk(line)}


def inside_functions() -> set[str]:
    """Return the modules that import one of ours below the top level."""
    found = set()
    for name, path in modules().items():
        tree = parsed(path.read_text())
        skipped = for_types(path) | {id(node) for node in tree.body}
        if any(imported_by(node) for node in ast.walk(tree) if id(node) not in skipped):
            found.add(name)
    return found


def upward_arrows() -> list[str]:
    return [
        f"{name} imports {other}"
        for name, path in modules().items()
        if name != "shardcast"
        for other in imports(path)
        if other != "shardcast" and tier_of(other) > tier_of(name)
        if not (name == ASSEMBLY and other.startswith("shardcast.extensions"))
    ]


def crossings() -> list[str]:
    """Return the core's imports of optional modules, also in functions and for types."""
    return [
        f"{name} imports {other}"
        for name, path in modules().items()
        if name.split(".")[1:2] and name.split(".")[1] in CORE
        if name != ASSEMBLY
        for other in dict.fromkeys(imports(path))
        if other.startswith(("shardcast.extensions", "shardcast.serving"))
    ]


def cycles() -> list[str]:
    """Return the modules in import cycles or leading to one, including imports in functions."""
    arrows = {name: set(imports(path, types=False)) for name, path in modules().items()}
    arrows = {name: {o for o in others if o in arrows} - {name} for name, others in arrows.items()}
    while arrows:  # remove modules that import none of the remaining ones
        free = {name for name, others in arrows.items() if not others & arrows.keys()}
        if not free:
            return sorted(arrows)
        arrows = {name: others for name, others in arrows.items() if name not in free}
    return []


def private_reads(source: str) -> list[str]:
    """Return reads of ``x._name`` in which ``x`` is not ``self``, ``cls`` or ``super()``.

    Private names that the same file defines may be read on any object.
    """
    tree = parsed(source)
    own = {  # every private name that this file itself defines or assigns to self
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    } | {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
    }
    own |= {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in own
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and not (isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super")
    ]


def foreign(read: str) -> bool:
    return read.rsplit(".", 1)[-1] in FOREIGN


# Private names of other packages that are read outside of _compat/. Tests of the code that reads
# them run with every version that the README names.
FOREIGN: frozenset[str] = frozenset(
    {
        "_replace",  # of a NamedTuple, which is public
        "_C",
        "_schema",
        "_version",
        "_amp_update_scale_",
        "_foreach_copy_",  # torch
        "_foreach_zero_",
        "_foreach_norm",
        "_foreach_lerp",
        "_foreach_lerp_",
        "_foreach_mul_",
        "_foreach_add_",
        "_parameters",
        "_buffers",
        "_non_persistent_buffers_set",  # torch.nn.Module
        "_forward_pre_hooks",
        "_get_backend",  # torch.distributed.ProcessGroup
        "_models",
        "_optimizers",
        "_model",  # accelerate.Accelerator
    }
)


def test_no_module_imports_a_higher_tier():
    assert upward_arrows() == []


def test_the_guide_has_the_same_tiers():
    guide = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    picture = guide.partition("no import cycles:")[2].partition(".\n")[0]
    assert [{*re.findall(r"`(\w+)`", tier)} for tier in picture.split("<")] == [*TIERS]


def test_imports_go_round_nowhere():
    assert cycles() == []


def test_a_function_imports_only_what_needs_a_package_or_an_option():
    assert inside_functions() == INSIDE


def test_the_core_imports_nothing_of_what_is_optional():
    assert crossings() == []
    core = [path for name, path in modules().items() if name.split(".")[1:2] != ["extensions"]]
    asked = [re.findall(r'load_extension\("(\w+)"\)', path.read_text()) for path in core]
    assert {*itertools.chain(*asked)} == BY_NAME


def options_read(source: str) -> list[str]:
    """Return reads of extensions' options by name, such as ``config.offload``."""
    names = {each.name for each in fields(ShardcastConfig) if "off" in each.metadata}
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Attribute) and node.attr in names
        if ast.unparse(node.value).rsplit(".", 1)[-1] in ("config", "_config")
    ]


def test_the_core_reads_no_option_of_an_extension_by_its_name():
    """An option passes hooks, signals and other parts to the core, in its ``Option``."""
    core = {
        str(path.relative_to(PACKAGE)): path.read_text()
        for name, path in modules().items()
        if name.split(".")[1:2] and name.split(".")[1] in CORE
    }
    assert {name: found for name, text in core.items() if (found := options_read(text))} == {}
    asked = [re.findall(r'(?:hook|signal)_of\("(\w+)"\)', text) for text in core.values()]
    assert {*itertools.chain(*asked)} == set()


def test_private_members_are_read_in_their_own_module_only():
    found = {
        str(path.relative_to(PACKAGE)): reads
        for path in PACKAGE.rglob("*.py")
        if not ALLOWED & {*path.with_suffix("").parts}
        and (reads := [r for r in private_reads(path.read_text()) if not foreign(r)])
    }
    assert found == {}


def test_the_checks_see_what_they_are_for(monkeypatch: pytest.MonkeyPatch):
    """Negative controls: an upward import, a cycle, a read of another object's private member."""
    monkeypatch.setattr("test_architecture.TIERS", TIERS[::-1])
    assert any(arrow.startswith("shardcast.step") for arrow in upward_arrows())
    monkeypatch.setattr("test_architecture.CORE", ("extensions",))
    assert "shardcast.extensions.digest imports shardcast.extensions.chance" in crossings()
    assert options_read("def f(self):\n    return self._config.offload") != []
    assert options_read("def f(config):\n    return config.pack_mb") == []
    assert private_reads("def f(x):\n    return x._secret") == ["line 2: x._secret"]
    assert private_reads("class A:\n    def f(self, o):\n        self._a = o._a") == []
    arrows = {"a": ["b"], "b": ["a"]}
    monkeypatch.setattr("test_architecture.modules", lambda: {n: Path(n) for n in arrows})
    monkeypatch.setattr("test_architecture.imports", lambda p, types: arrows[str(p)])
    assert cycles() == ["a", "b"]


def test_the_checks_see_imports_in_functions_and_leave_out_those_for_types(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    monkeypatch.setattr(
        "test_architecture.modules", lambda: {"shardcast.one": one, "shardcast.two": two}
    )
    one.write_text("from shardcast.two import b\n")
    two.write_text("if TYPE_CHECKING:\n    from shardcast.one import a\n")
    assert cycles() == [] and inside_functions() == set()
    two.write_text("def b():\n    from shardcast.one import a\n")
    assert cycles() == ["shardcast.one", "shardcast.two"]
    assert inside_functions() == {"shardcast.two"}
