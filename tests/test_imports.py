"""The rules of the source tree that no linter knows.  Each check is also run on a snippet that breaks it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "src" / "foredraft"

# A module imports only from rows before its own.  A package is one row; within it modules may import each other, but not in a ring.
ORDER = (
    "errors",
    "structured",
    "params",
    "types",
    "config",
    "outputs",
    "array_file",
    "architecture",
    "weights",
    "metrics",
    "sampling",
    "grammar",
    "verify",
    "cost",
    "planner",
    "replay",
    "acceptance",
    "records",
    "ledger",
    "step_plan",
    "controller",
    "memory",
    "kv_cache",
    "states",
    "ops",
    "model",
    "torch_model",
    "native",
    "loader",
    "dims",
    "hardware",
    "forecast",
    "request_log",
    "vllm_config",
    "plan_options",
    "plan_setting",
    "target",
    "calibration",
    "drafters",
    "capacity",
    "draft_parts",
    "scheduler",
    "engine",
    "llm",
    "machine",
    "workloads",
    "plan_measure",
    "plan",
    "lanes",
    "synthetic",
    "rehearsal",
    "trial",
    "journal",
    "bench_options",
    "bench_figures",
    "bench_table",
    "bench",
    "passes",
    "report",
    "bench_report",
    "train",
    "claims",
    "experiments",
    "terminal",
    "plan_table",
    "cli_options",
    "cli_plan",
    "cli_bench",
    "cli_train",
    "cli_models",
    "chat",
    "demo",
    "server",
    "cli_serve",
    "testing",
    "cli",
    "__main__",
)

MUTABLE_TYPES = {
    "list",
    "dict",
    "set",
    "bytearray",
    "deque",
    "defaultdict",
    "Counter",
    "OrderedDict",
    "WeakKeyDictionary",
    "WeakValueDictionary",
}
MUTATORS = {
    "append",
    "extend",
    "insert",
    "add",
    "update",
    "setdefault",
    "pop",
    "popitem",
    "remove",
    "discard",
    "clear",
    "appendleft",
}
# What may be named of a random module: types and bit generators, which hold a state of their own.
NUMPY_RANDOM_TYPES = {"Generator", "BitGenerator", "SeedSequence", "Philox", "PCG64"}
TORCH_GLOBAL_RANDOM = {
    "manual_seed",
    "seed",
    "initial_seed",
    "set_rng_state",
    "get_rng_state",
    "random",
    "cuda.manual_seed",
    "cuda.manual_seed_all",
}
TORCH_DRAWS = {"rand", "randn", "randint", "randperm", "multinomial", "normal", "bernoulli", "poisson"}
TENSOR_DRAWS = {
    "multinomial",
    "bernoulli",
    "uniform_",
    "normal_",
    "exponential_",
    "random_",
    "bernoulli_",
    "cauchy_",
    "geometric_",
    "log_normal_",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = sorted(PACKAGE.rglob("*.py"))
MODULES = {module_name(path): path for path in PATHS}
each_module = pytest.mark.parametrize("name", sorted(MODULES))


def parse(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"), filename=str(MODULES[name]))


# ---------------------------------------------------------------------------------------------------------------- imports


def imported_modules(tree: ast.Module, name: str, is_package: bool, known: set[str]) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of own modules, wherever it stands; ``foredraft.NAME`` for a name of the root."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".")
                keep = len(parents) - node.level + is_package
                base = ".".join([*parents[:keep], *([node.module] if node.module else [])])
            members = [f"{base}.{alias.name}" for alias in node.names]
            targets = [member if member in known or base == "foredraft" else base for member in members]
        elif is_dynamic_import(node):
            assert isinstance(node, ast.Call)
            targets = [
                argument.value
                for argument in node.args[:1]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            ]
        else:
            continue
        yield from ((node.lineno, target) for target in targets if target.split(".")[0] == "foredraft")


def is_dynamic_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}


def upward_imports(tree: ast.Module, name: str, is_package: bool = False, known: set[str] | None = None) -> list[str]:
    row = name.split(".")[1]
    assert row in ORDER, f"{name} has no row: give {row!r} its place in ORDER"
    found = []
    for line, target in imported_modules(tree, name, is_package, set(MODULES) if known is None else known):
        # The version imports nothing, and neither does the compiled module.
        if target in ("foredraft.__version__", "foredraft._native"):
            continue
        target_row = target.partition(".")[2].partition(".")[0]
        if target_row not in ORDER:
            found.append(f"{name}:{line} imports {target}, which is in no row of ORDER")
        elif ORDER.index(target_row) > ORDER.index(row) or (target_row == row and target == name):
            found.append(f"{name}:{line} imports {target}, which does not come before {row}")
    return found


def ring(graph: dict[str, set[str]]) -> list[str]:
    """One ring of modules that import each other, or an empty list."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        for target in sorted(graph.get(name, ())):
            if found := visit(target, [*trail, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


# The root is left out: it re-exports lazily, and may name every module.
@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"foredraft"}))
def test_a_module_imports_only_from_rows_before_its_own(name: str) -> None:
    assert upward_imports(parse(name), name, MODULES[name].name == "__init__.py") == []


def test_no_package_has_a_ring_of_imports() -> None:
    graph = {
        name: {target for _, target in imported_modules(parse(name), name, MODULES[name].name == "__init__.py", set(MODULES))}
        for name in MODULES
        if name != "foredraft"
    }
    assert ring(graph) == []


@pytest.mark.parametrize(
    "source",
    [
        "import foredraft.engine",
        "from foredraft.engine import Engine",
        "from foredraft import engine",
        "from foredraft import LLM",
        "from ..engine import Engine",
        "from .. import engine",
        "def late():\n    from foredraft.engine import Engine",
        "if TYPE_CHECKING:\n    from foredraft.engine import Engine",
        "importlib.import_module('foredraft.engine')",
        "import foredraft.no_such_row",
        "import foredraft",
    ],
)
def test_the_check_sees_an_upward_import_in_every_form(source: str) -> None:
    known = {"foredraft", "foredraft.engine", "foredraft.drafters.ngram"}
    assert upward_imports(ast.parse(source), "foredraft.drafters.ngram", known=known)


@pytest.mark.parametrize(
    "source",
    ["from foredraft.types import Draft", "from foredraft import types", "from . import base", "from foredraft import __version__"],
)
def test_the_check_allows_a_downward_import(source: str) -> None:
    known = {"foredraft", "foredraft.types", "foredraft.drafters.base"}
    assert upward_imports(ast.parse(source), "foredraft.drafters.ngram", known=known) == []


def test_the_check_sees_a_ring() -> None:
    assert ring({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert ring({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def loaded_by(statement: str) -> set[str]:
    """Top-level names of the modules that are not Python's own and that ``statement`` loads in a fresh interpreter."""
    code = f"import json, sys; before = set(sys.modules); {statement}; print(json.dumps(sorted(set(sys.modules) - before)))"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    return {name.split(".")[0] for name in json.loads(output)} - set(sys.stdlib_module_names)


def test_importing_the_package_loads_nothing_else() -> None:
    assert loaded_by("import foredraft") == {"foredraft"}


@pytest.mark.skipif("foredraft.cli" not in MODULES, reason="there is no command line yet")
def test_importing_the_command_line_does_not_load_the_engine() -> None:
    assert loaded_by("import foredraft.cli") & {"torch", "transformers", "huggingface_hub", "gguf"} == set()


# ------------------------------------------------------------------------------------------------------------- docstrings


def is_pure_package(tree: ast.Module) -> bool:
    """Whether an ``__init__`` holds nothing but a docstring and names that it passes on."""

    def passes_on(node: ast.stmt) -> bool:
        if isinstance(node, ast.If):
            return all(passes_on(child) for child in node.body + node.orelse)
        if isinstance(node, ast.FunctionDef):
            return node.name in {"__getattr__", "__dir__"}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            return all(isinstance(t, ast.Name) and is_constant(t.id) for t in assigned_to(node))
        return isinstance(node, ast.Import | ast.ImportFrom | ast.Expr)

    return all(passes_on(node) for node in tree.body)


@each_module
def test_a_module_says_what_it_owns_and_what_it_does_not_know(name: str) -> None:
    tree = parse(name)
    docstring = " ".join((ast.get_docstring(tree) or "").split())
    assert docstring, f"{name} has no docstring"
    if MODULES[name].name == "__init__.py" and is_pure_package(tree):
        return
    assert "Owns:" in docstring, f"the docstring of {name} lacks 'Owns:'"
    assert "Does not know:" in docstring, f"the docstring of {name} lacks 'Does not know:'"


# ------------------------------------------------------------------------------------------------------------------ sizes


def run_sizes(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "scripts" / "sizes.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_no_file_or_function_is_beyond_the_hard_limit() -> None:
    result = run_sizes()
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("num_lines", "says", "status"), [(80, "  long: 80", 0), (81, "too long: 81", 1), (60, "1 files, 60 lines", 0)]
)
def test_the_size_check_sees_a_long_function(tmp_path: Path, num_lines: int, says: str, status: int) -> None:
    (tmp_path / "long.py").write_text("def long():\n" + "    pass\n" * (num_lines - 1))
    result = run_sizes(str(tmp_path))
    assert says in result.stdout
    assert result.returncode == status


@pytest.mark.parametrize(
    ("num_lines", "says", "status"), [(400, "1 files, 400 lines", 0), (500, "  long: 500", 0), (501, "too long: 501", 1)]
)
def test_the_size_check_sees_a_long_file(tmp_path: Path, num_lines: int, says: str, status: int) -> None:
    (tmp_path / "long.cpp").write_text("int x;\n" * num_lines)
    result = run_sizes(str(tmp_path))
    assert says in result.stdout
    assert result.returncode == status


# ------------------------------------------------------------------------------------------------------------- randomness


def import_aliases(tree: ast.Module) -> dict[str, str]:
    """Local name -> full dotted name, for everything that the module imports."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            aliases.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return aliases


def dotted(node: ast.AST, aliases: dict[str, str]) -> str:
    """Full name of ``a.b.c`` where ``a`` is an imported name, else an empty string."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    root = aliases.get(node.id, "") if isinstance(node, ast.Name) else ""
    return ".".join([root, *reversed(parts)]) if root else ""


def is_shared_random_name(full: str) -> bool:
    if full.startswith("random."):
        return full != "random.Random"
    if full.startswith("numpy.random."):
        return full.split(".")[2] not in NUMPY_RANDOM_TYPES | {"default_rng"}
    return full.startswith("torch.") and any(full == f"torch.{n}" or full.startswith(f"torch.{n}.") for n in TORCH_GLOBAL_RANDOM)


def is_unkeyed_draw(node: ast.Call, full: str) -> bool:
    """Whether a call draws from shared or unseeded randomness because it was given no generator or seed."""
    if full in {"random.Random", "numpy.random.default_rng"}:
        return not node.args and not node.keywords
    is_draw = full in {f"torch.{name}" for name in TORCH_DRAWS}
    if not full and isinstance(node.func, ast.Attribute):
        receiver = ast.unparse(node.func.value)
        is_draw = node.func.attr in TENSOR_DRAWS and not receiver.endswith(("rng", "generator"))
    return is_draw and not any(keyword.arg == "generator" for keyword in node.keywords)


def global_randomness(tree: ast.Module) -> list[str]:
    aliases = import_aliases(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and is_shared_random_name(full := dotted(node, aliases)):
            found.append(f"line {node.lineno}: {full}")
        if isinstance(node, ast.Call) and is_unkeyed_draw(node, dotted(node.func, aliases)):
            found.append(f"line {node.lineno}: {ast.unparse(node)} without a seed or generator")
    return found


@each_module
def test_no_module_draws_from_a_global_generator(name: str) -> None:
    assert global_randomness(parse(name)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import random\nrandom.random()",
        "import random as r\nr.shuffle(x)",
        "from random import choice\nchoice(x)",
        "import random\nrandom.Random()",
        "import numpy as np\nnp.random.rand(3)",
        "import numpy as np\nnp.random.seed(1)",
        "from numpy.random import default_rng\ndefault_rng()",
        "import torch\ntorch.manual_seed(0)",
        "import torch\ntorch.random.fork_rng()",
        "import torch\ntorch.cuda.manual_seed_all(0)",
        "import torch\ntorch.multinomial(probs, 1)",
        "def f(x):\n    x.exponential_()",
    ],
)
def test_the_check_sees_global_randomness(source: str) -> None:
    assert global_randomness(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "import random\nrandom.Random(7)",
        "import numpy as np\ndef f(rng: np.random.Generator): return rng.random()",
        "import numpy as np\nnp.random.default_rng(seed)",
        "import torch\ntorch.rand(3, generator=g)",
        "def f(rng): return rng.multinomial(3, [0.5, 0.5])",
        "def f(random): return random.draw",
    ],
)
def test_the_check_allows_keyed_randomness(source: str) -> None:
    assert global_randomness(ast.parse(source)) == []


# ---------------------------------------------------------------------------------------------------------------- globals


def is_constant(name: str) -> bool:
    return name.isupper() or (name.startswith("__") and name.endswith("__"))


def assigned_to(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def is_mutable(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).partition("[")[0].split(".")[-1] in MUTABLE_TYPES
    return isinstance(node, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def top_level(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run at import, also under ``if``, ``try``, ``with`` and loops, but not in functions and classes."""
    for node in statements:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                yield from top_level(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from top_level(handler.body)


def container_changed(node: ast.AST) -> str:
    """Name of the variable whose content ``node`` changes, or an empty string."""
    owner: ast.AST | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        owner = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        owner = node.func.value
    return owner.id if isinstance(owner, ast.Name) else ""


def mutable_globals(tree: ast.Module) -> list[str]:
    found = []
    for node in top_level(tree.body):
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_mutable(node.value):
            is_final = isinstance(node, ast.AnnAssign) and "Final" in ast.unparse(node.annotation)
            names = [ast.unparse(target) for target in assigned_to(node)]
            found += [f"line {node.lineno}: {name} is a mutable global" for name in names if not is_final and not is_constant(name)]
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Global):
            found.append(f"line {inner.lineno}: global {', '.join(inner.names)}")
        elif (name := container_changed(inner)).isupper() and len(name) > 1:
            found.append(f"line {getattr(inner, 'lineno', 0)}: changes the constant {name}")
    return found


@each_module
def test_no_module_holds_mutable_global_state(name: str) -> None:
    assert mutable_globals(parse(name)) == []


@pytest.mark.parametrize(
    "source",
    [
        "cache = {}",
        "cache = dict[int, str]()",
        "_seen: set[int] = set()",
        "try:\n    names = []\nexcept ImportError:\n    names = None",
        "table = collections.defaultdict(list)",
        "squares = [x * x for x in range(3)]",
        "def f():\n    global counter\n    counter = 1",
        "NAMES = []\ndef f():\n    NAMES.append(1)",
        "NAMES = {}\ndef f():\n    NAMES['a'] = 1",
    ],
)
def test_the_check_sees_mutable_global_state(source: str) -> None:
    assert mutable_globals(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "NAMES = {'a': 1}",
        "_NAMES = ['a']",
        "__all__ = ['a']",
        "names: Final = ['a']",
        "names = ('a',)",
        "Alias = dict[str, int]",
        "def f():\n    names = []\n    names.append(1)",
    ],
)
def test_the_check_allows_constants_and_locals(source: str) -> None:
    assert mutable_globals(ast.parse(source)) == []
