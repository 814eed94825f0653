"""Who may import whom, and what nobody may use: read from the source, so that a path no test runs is held too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

JOINED = ("kdtp.messages", "kdtp.watch", "kdtp.drafting", "kdtp.grammar", "kdtp.proposals")
COMMON = ("kdtp.types", "kdtp.config", "kdtp.log", "kdtp.files")
CLIENT_SIDE = ("kdtp.engine.rpc", "kdtp.engine.child", "kdtp.engine.plan", "kdtp.engine.guard")  # no torch
DRAFTERS = tuple(f"kdtp.draft.{name}" for name in ("ngram", "oracle", "none", "dflash.drafter"))
ALLOWED = {  # a module or package, and the modules and packages of this repository it may import beside itself
    "kdtp.version": (),
    "kdtp.types": (),
    "kdtp.proposals": ("kdtp.types",),
    "kdtp.watch": ("kdtp.types",),
    "kdtp.drafting": ("kdtp.types",),
    "kdtp.messages": ("kdtp.types", "kdtp.watch", "kdtp.drafting"),
    "kdtp.values": (),
    "kdtp.config": ("kdtp.types", "kdtp.values"),
    "kdtp.log": (),
    "kdtp.files": (),
    "kdtp.pair": (),
    "kdtp.kernels": ("kdtp.types",),
    "kdtp.model": ("kdtp.kernels", *COMMON),
    "kdtp.spec": ("kdtp.kernels", "kdtp.types", "kdtp.proposals"),
    "kdtp.draft": (
        "kdtp.kernels",
        "kdtp.model.layers",
        "kdtp.model.rope",
        "kdtp.model.comm",
        "kdtp.model.weights",
        "kdtp.proposals",
        "kdtp.drafting",
        *COMMON,
    ),
    "kdtp.engine": (
        "kdtp.model",
        "kdtp.spec",
        "kdtp.draft",
        "kdtp.kernels",
        "kdtp.pair",
        "kdtp.version",
        *JOINED,
        *COMMON,
    ),
    "kdtp.text": ("kdtp.log", "kdtp.files"),
    "kdtp.grammar": ("kdtp.text", "kdtp.types"),
    "kdtp.server": (*CLIENT_SIDE, "kdtp.text", "kdtp.messages", "kdtp.watch", "kdtp.version", *COMMON),
    "kdtp.train": ("kdtp.model.rope", "kdtp.model.weights", "kdtp.draft.dflash.config", "kdtp.text", *COMMON),
    "kdtp.client": (),
    "kdtp.bench": (
        "kdtp.client",
        "kdtp.engine.api",
        "kdtp.messages",
        "kdtp.watch",
        "kdtp.text",
        "kdtp.train.corpus",
        *COMMON,
    ),
    "kdtp.cli": ("kdtp", "launcher"),
    "kdtp.cli.convert": ("kdtp", "reference"),
    "kdtp.__main__": ("kdtp", "launcher"),
    "kdtp": ("kdtp.version", "kdtp.engine.api", "kdtp.types"),
    "launcher": (),
    "reference": (),
}
# However they get there, these do not load those.
APART = {
    "kdtp.engine.worker": ("kdtp.engine.coordinator", "kdtp.engine.scheduler", "kdtp.engine.pages", *DRAFTERS),
    "kdtp.engine.coordinator": ("kdtp.engine.worker", "kdtp.model.shard", "kdtp.model.cache", "kdtp.model.comm"),
    "kdtp.model": ("kdtp.spec",),
    "kdtp.spec": ("kdtp.model",),
}
THIRD_PARTY = {  # what the rooms that must stand alone may use beside the standard library; others are free
    "kdtp.version": (),
    "kdtp.log": (),
    "kdtp.files": (),
    "kdtp.pair": (),
    "kdtp.values": ("msgspec",),
    "kdtp.config": ("msgspec",),
    "kdtp.messages": ("msgspec",),
    "kdtp.drafting": ("msgspec",),
    "kdtp.types": ("msgspec",),
    "kdtp.watch": ("msgspec",),
    "kdtp.proposals": ("torch",),  # for a type checker only, which another test holds
    "kdtp.spec": ("torch",),
    "kdtp.grammar": ("llguidance",),
    "kdtp.text": ("tokenizers", "tiktoken", "jinja2"),
    "kdtp.server": ("msgspec", "starlette", "uvicorn", "h11"),
    "kdtp.client": ("msgspec",),
    "kdtp.bench": ("msgspec", "matplotlib"),
    "launcher": ("torch",),
    "reference": ("numpy",),
}
pytestmark = pytest.mark.xdist_group("imports")  # all modules are parsed once
OURS = ("kdtp", "launcher", "reference", "tests", "scripts")
UNSAFE_MODULES = ("pickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal")
UNSAFE_NAMES = ("eval", "exec", "compile", "__import__", "import_module")
UNSAFE_METHODS = ("send_pyobj", "recv_pyobj", "import_module", "allow_pickle")
# torch's collectives for objects go through pickle, as torch.load does.
UNSAFE_CALLS = ("torch.load", "torch.save", "os.system", "os.popen")
EVERYBODY = ("tcp://*", "tcp://0.0.0.0", "tcp://[::]")
UNSAFE_ENDINGS = ("_object_list", "gather_object")


@cache
def modules() -> dict[str, tuple[Path, ast.Module]]:
    """Every module of the packages, by name."""
    found = {}
    for package in ("kdtp", "launcher", "reference"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path, ast.parse(path.read_text(), str(path))
    return found


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def imported(name: str, nodes: Iterator[ast.AST]) -> set[str]:
    """Full names of the modules that `nodes` of module `name` import, `from package import module` resolved."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: line {node.lineno}: a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in modules() else str(node.module))
    return found


@cache
def imports(name: str) -> frozenset[str]:
    """All that a module imports: at its top, in functions, and under TYPE_CHECKING."""
    return frozenset(imported(name, ast.walk(modules()[name][1])))


@cache
def loads(name: str) -> frozenset[str]:
    """Modules of ours that are loaded when `name` is: followed from import to import, packages' __init__ included."""
    reached, todo = set(), [name]
    while todo:
        module = todo.pop()
        if module in reached or module not in modules():
            continue
        reached.add(module)
        todo += [".".join(module.split(".")[: i + 1]) for i in range(module.count("."))]
        todo += imported(module, _top_level(modules()[module][1]))
    return frozenset(reached - {name})


def _top_level(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run on import: not those of functions, nor under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        checking = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not checking and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _top_level(child)


def rule(name: str) -> str:
    """The entry of ALLOWED that covers a module: the longest that it lies in, `kdtp` for the package itself only."""
    rules = [key for key in ALLOWED if within(name, (key,)) and (key != "kdtp" or name == "kdtp")]
    assert rules, f"{name}: a room that ALLOWED does not know"
    return max(rules, key=len)


def test_rooms_import_only_what_they_may() -> None:
    broken = []
    for name in modules():
        own = rule(name)
        legal = (*ALLOWED[own], *(() if own == "kdtp" else (own,)))
        ours = {other for other in imports(name) if within(other, OURS)}
        broken += [f"{name} imports {other}" for other in sorted(ours) if not within(other, legal)]
    assert not broken, "\n".join(broken)


def test_imports_are_seen_wherever_they_stand() -> None:
    source = """
if TYPE_CHECKING:
    from kdtp.model.shard import Shard
def f():
    from kdtp.engine import coordinator, rpc
    class C:
        import kdtp.spec.tree as tree
import numpy.linalg
"""
    everywhere = {"kdtp.model.shard", "kdtp.engine.coordinator", "kdtp.engine.rpc", "kdtp.spec.tree", "numpy.linalg"}
    assert imported("x", ast.walk(ast.parse(source))) == everywhere
    assert imported("x", _top_level(ast.parse(source))) == {"numpy.linalg"}
    assert {"kdtp.types", "kdtp"} <= loads("kdtp.config")


def test_roles_stay_apart_by_every_way() -> None:
    broken = [
        f"{name} loads {other}"
        for name in modules()
        for room, forbidden in APART.items()
        if within(name, (room,))
        for other in sorted(loads(name) | {o for o in imports(name) if within(o, OURS)})
        if within(other, forbidden)
    ]
    assert not broken, "\n".join(broken)


def test_third_parties() -> None:
    broken = []
    for name in modules():
        if (own := rule(name)) in THIRD_PARTY:
            others = {other.split(".")[0] for other in imports(name)} - set(sys.stdlib_module_names) - set(OURS)
            broken += [f"{name} imports {other}" for other in sorted(others - set(THIRD_PARTY[own]))]
        if own == "launcher":
            torch = {other for other in imports(name) if within(other, ("torch",))}
            broken += [f"{name} imports {o}" for o in sorted(torch) if not within(o, ("torch.distributed",))]
    assert not broken, "\n".join(broken)


def unsafe(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each thing that runs what it reads, or listens to everybody."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from ((node.lineno, name) for name in names if name.split(".")[0] in UNSAFE_MODULES)
            yield from ((node.lineno, name) for name in names if name in UNSAFE_METHODS)
        elif isinstance(node, ast.Attribute):
            full = ast.unparse(node)
            if full in UNSAFE_CALLS or node.attr in UNSAFE_METHODS or node.attr.endswith(UNSAFE_ENDINGS):
                yield node.lineno, full
        elif isinstance(node, ast.Name) and node.id in UNSAFE_NAMES:
            yield node.lineno, node.id
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "shell"):
            yield node.value.lineno, f"{node.arg}="
        elif isinstance(node, ast.Constant) and str(node.value).startswith(EVERYBODY):
            yield node.lineno, str(node.value)


def test_nothing_unsafe() -> None:
    files = [path for path, _ in modules().values()] + sorted((ROOT / "scripts").glob("*.py"))
    broken = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in files
        for line, what in unsafe(ast.parse(path.read_text(), str(path)))
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.distributed as d\nd.broadcast_object_list(x)",
        "socket.send_pyobj(x)",
        "torch.load(p)",
        "numpy.load(p, allow_pickle=True)",
        "eval('1')",
        "from importlib import import_module",
        "socket.bind('tcp://*:5555')",
        "subprocess.run(c, shell=True)",
    ],
)
def test_lint_sees_what_is_unsafe(source: str) -> None:
    assert list(unsafe(ast.parse(source)))


def test_lint_lets_the_rest_pass() -> None:
    harmless = "model.eval()\nre.compile(x)\nsocket.bind('tcp://127.0.0.1:0')\nimport json, struct\njson.load(f)"
    assert not list(unsafe(ast.parse(harmless)))


def test_files_are_short() -> None:
    paths = [path for path, _ in modules().values()]
    paths += sorted((ROOT / "scripts").glob("*.py")) + sorted((ROOT / "csrc").rglob("*.[ch]"))
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    most = {"csrc/params.h": 400}  # a table, one field a line
    assert not {name: count for name, count in lines.items() if count > most.get(name, 300)}


@pytest.mark.parametrize("command", [["--help"], ["--version"], ["doctor"], ["inspect", "tests/refs/model_tiny.kdtr"]])
def test_commands_that_answer_at_once_do_not_import_torch(command: list[str]) -> None:
    code = "import sys; sys.modules['torch'] = None; from kdtp.__main__ import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout, done.stderr  # importing it would be an ImportError


def test_modules_that_do_not_import_torch() -> None:
    names = "kdtp, kdtp.types, kdtp.proposals, kdtp.messages, kdtp.config, kdtp.log, kdtp.version, kdtp.engine.rpc"
    names += ", kdtp.model.weights.kdtr, kdtp.server.run, kdtp.cli.serve, kdtp.cli.bench"
    names += ", kdtp.engine.host, launcher.group"  # but for a rank or a network of its own; for several ranks
    code = f"import sys; sys.modules['torch'] = None; import {names}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
