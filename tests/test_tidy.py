"""The tidy rules: which module may import which, what is never called, how long things may be, what must resolve."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("efs", "kvstore", "gdr", "tools")
"""From left to right: each imports from itself and from its left only."""
MAX_FUNCTION_LINES: Final = 70
MAX_FILE_LINES: Final = 600

ORDER: Final = {
    "efs": """
        errors limits types osio dirlock metrics clock checksum codec placement shape shard extent slab index stamps gc
        contract spans slotreads sharedslab iothread batch hotmap nodeguard allocator eviction nodedir tables writejob
        nodestate fill lookups nodereads placer nodewriter recovery verifier background collector debts burial node
        wire handshake messages endpoint stream scratch staging sparedir servedspare session server link remote cluster
        ownership clusterfile clustermap etcd spares
        hedge pinning
        target unitread early joining health ask examine fetch reader pieces survey quota writer pace listing sweep
        findings indexprobe nodeview tenantcount storeview warmth verdict payloadcheck stripecheck tablecheck fsck match
        memory stripe mend rebuild repair progress scrub tombstones purge exposition statuspage serving upkeep fs
        joined moving groups clusterfs replace culprit fsckrepair
    """,
    "kvstore": """
        config tenants tenancy buffers layout keys hit loopthread store localset benchwork bench benchwire benchserved
        connectors demo machine traces cachemodels replayplan replay cli
    """,
    "gdr": """
        errors limits formats device cuda pinned pages counters timeline swapin prefix pagedcache runner sequence
        writeback engine scheduler compare demo cli
    """,
}
"""Modules of a package, or whole subpackages: each imports, at module level, only what stands before it here.
Inside a subpackage there is no order, but no circle either."""

AWAITED: Final[dict[str, str]] = {}
"""Modules that nothing uses yet, and why they stand here all the same."""

OS_DATA_CALLS: Final = frozenset({
    "open", "fdopen", "read", "write", "pread", "preadv", "pwrite", "pwritev", "sendfile", "fsync", "fdatasync",
    "sync", "truncate", "ftruncate", "posix_fallocate", "rename", "replace", "unlink", "remove", "rmdir",
    "mkdir", "makedirs", "link", "symlink", "chmod", "fchmod",
})
TIME_CALLS: Final = frozenset({
    "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep",
})
BANNED_MODULES: Final = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"})
BANNED_NAMES: Final = frozenset({"common", "util", "utils", "helper", "helpers", "manager", "managers", "misc"})
HEAVY_MODULES: Final = frozenset({"torch", "transformers", "gguf", "vllm", "sglang", "lmcache"})
HEAVY_PLACES: Final = ("gdr", "kvstore.connectors", "kvstore.demo")
"""Where torch and the engines may be imported: storage nodes do not install them. The demo is an engine's place too."""


# -- What is looked at ---------------------------------------------------------------------------------------------


@cache
def sources(*folders: str) -> tuple[Path, ...]:
    return tuple(sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in sources(*PACKAGES)}


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def imports_of(path: Path, *, nested: bool) -> Iterator[tuple[str, ast.stmt]]:
    """Dotted names that a file imports; with `nested` also inside functions. A name from a package that is a module of
    ours is that module."""
    for node in ast.walk(tree_of(path)) if nested else module_level(tree_of(path).body):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(path, node)}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole if whole in modules() else str(node.module)), node


def module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from module_level(node.body)
            yield from module_level(node.orelse)
        elif isinstance(node, ast.Try):
            yield from module_level(node.body)


def calls_in(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Calls by plain or dotted name."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.func.id, node
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                yield f"{node.func.value.id}.{node.func.attr}", node


@cache
def text_files() -> tuple[Path, ...]:
    """Everything that is or would be committed and is text."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, check=True, timeout=60,
        ).stdout.decode().split("\0")
        candidates = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        hidden = re.compile(r"/(\.git|\.venv[^/]*|__pycache__|\.[a-z]+_cache|\.hypothesis|[^/]*\.egg-info|build|dist)/")
        candidates = [path for path in ROOT.rglob("*") if not hidden.search(f"{path}/")]
    return tuple(path for path in candidates if path.is_file() and b"\0" not in path.read_bytes()[:4096])


def test_there_is_something_to_look_at() -> None:
    assert len(modules()) > 50
    assert {"efs.codec", "kvstore.keys"} <= modules().keys()
    assert ROOT / "pyproject.toml" in text_files()
    assert len(sources("tests")) > 20


# -- Direction -------------------------------------------------------------------------------------------------------


def test_a_package_imports_only_from_its_left() -> None:
    wrong = []
    for path in sources(*PACKAGES):
        own = PACKAGES.index(path.relative_to(ROOT).parts[0])
        for name, node in imports_of(path, nested=True):
            top = name.split(".")[0]
            if top == "tests" or (top in PACKAGES and PACKAGES.index(top) > own):
                wrong.append(f"{place(path, node)} imports {name}")
            if top == "tools" and path.relative_to(ROOT).parts[0] != "tools":
                wrong.append(f"{place(path, node)} imports {name}")
    assert wrong == []


@pytest.mark.parametrize("package", ORDER)
def test_a_module_imports_only_what_stands_above_it(package: str) -> None:
    rank = {name: position for position, name in enumerate(ORDER[package].split())}
    wrong = []
    for name, path in modules().items():
        if name == package or not name.startswith(f"{package}."):
            continue
        unit = name.split(".")[1]
        assert unit in rank, f"{name} has no place in the order of {package}: add it where its imports allow"
        for imported, node in imports_of(path, nested=False):
            other = imported.split(".")
            if other[0] == package and len(other) > 1 and other[1] != unit and rank[other[1]] > rank[unit]:
                wrong.append(f"{place(path, node)} imports {imported}")
    assert wrong == []


@pytest.mark.parametrize("package", ORDER)
def test_the_order_names_only_modules_that_exist(package: str) -> None:
    names = ORDER[package].split()
    assert len(set(names)) == len(names)
    assert [name for name in names if f"{package}.{name}" not in modules()] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        name: {other for other, _ in imports_of(path, nested=False) if other in modules() and other != name}
        for name, path in modules().items()
    }
    settled: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"circle: {' -> '.join((*trail[trail.index(name):], name))}"
        if name not in settled:
            for other in sorted(graph[name]):
                visit(other, (*trail, name))
            settled.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_only_the_engines_side_imports_torch_and_engines() -> None:
    wrong = [
        f"{place(path, node)} imports {name}"
        for module, path in modules().items()
        for name, node in imports_of(path, nested=True)
        if name.split(".")[0] in HEAVY_MODULES and not f"{module}.".startswith(tuple(f"{ok}." for ok in HEAVY_PLACES))
        and not module.startswith("tools")
    ]
    assert wrong == []


def test_the_store_and_its_command_line_run_without_torch_and_without_prometheus() -> None:
    program = (
        "import sys, kvstore, kvstore.cli, efs.fs;"
        "print(sorted({'torch', 'transformers', 'gguf', 'prometheus_client', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_module_is_used() -> None:
    """By an import, by `python -m` from another module, or as an entry point."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entry_points = [project["scripts"], *project["entry-points"].values()]
    used = {str(target).split(":")[0] for group in entry_points for target in group.values()}
    for path in sources(*PACKAGES):
        own = module_name(path)
        used |= {name for name, _ in imports_of(path, nested=True) if name != own}
        used |= {
            node.value
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in modules()
            and node.value != own
        }
    unused = {
        name for name, path in modules().items()
        if name not in used and path.name != "__init__.py" and not name.startswith("tools.")
    }
    assert unused == set(AWAITED)


def test_every_module_of_test_support_is_used() -> None:
    used = {
        name if alias is None else f"{name}.{alias}"
        for path in sources("tests")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name, alias in (
            [(alias.name, None) for alias in node.names]
            if isinstance(node, ast.Import)
            else [(str(node.module), None), *((str(node.module), alias.name) for alias in node.names)]
        )
    }
    text = "\n".join(path.read_text() for path in sources("tests"))
    support = {module_name(path) for path in sources("tests/support") if path.name != "__init__.py"}
    assert {name for name in support - used if f'"{name}"' not in text} == set()


# -- Calls -----------------------------------------------------------------------------------------------------------


def test_banned_calls_and_modules() -> None:
    wrong = []
    for path in sources(*PACKAGES, "tests"):
        for name, call in calls_in(path):
            # A test may run an example of the documents.
            if name == "hash" or (name in ("eval", "exec") and not path.is_relative_to(ROOT / "tests")):
                wrong.append(f"{place(path, call)} calls {name}()")
        for name, node in imports_of(path, nested=True):
            if name.split(".")[0] in BANNED_MODULES:
                wrong.append(f"{place(path, node)} imports {name}")
    assert wrong == []


def test_no_bare_except_and_no_swallowed_exception() -> None:
    wrong = []
    for path in sources(*PACKAGES):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            silent = all(
                isinstance(step, ast.Pass | ast.Continue)
                or (isinstance(step, ast.Return) and (step.value is None or isinstance(step.value, ast.Constant)))
                for step in node.body
            )
            if node.type is None or (broad and silent):
                wrong.append(place(path, node))
    assert wrong == []


def test_only_osio_calls_the_system_for_data() -> None:
    wrong = [
        f"{place(path, node)} calls {name}()"
        for path in sources("efs") if path.name != "osio.py"
        for name, node in calls_in(path)
        if name == "open" or (name.startswith("os.") and name[3:] in OS_DATA_CALLS)
    ]
    assert wrong == []


def test_only_the_clock_calls_time() -> None:
    wrong = [
        f"{place(path, node)} calls {name}()"
        for path in sources("efs") if path.name != "clock.py"
        for name, node in calls_in(path)
        if name.startswith("time.") and name[5:] in TIME_CALLS
    ]
    assert wrong == []


def test_chance_comes_from_a_generator_that_was_passed_in() -> None:
    wrong = [
        f"{place(path, node)} calls {name}()"
        for path in sources("efs")
        for name, node in calls_in(path)
        if name.startswith("random.") and name not in ("random.Random", "random.SystemRandom")
    ]
    assert wrong == []


def test_libraries_do_not_print() -> None:
    wrong = [
        place(path, node)
        for path in sources("efs", "kvstore", "gdr")
        if not path.is_relative_to(ROOT / "kvstore" / "cli") and not path.is_relative_to(ROOT / "kvstore" / "demo")
        for name, node in calls_in(path)
        if name == "print"
    ]
    assert wrong == []


# -- Sizes and names -------------------------------------------------------------------------------------------------


def test_functions_are_short() -> None:
    wrong = [
        f"{place(path, node)} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in sources(*PACKAGES, "tests")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert wrong == []


def test_files_are_short() -> None:
    lengths = {path: path.read_text().count("\n") for path in sources(*PACKAGES, "tests")}
    assert {str(path): length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_file_has_a_name_that_says_nothing() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources(*PACKAGES, "tests")
        for word in path.relative_to(ROOT).with_suffix("").parts
        if BANNED_NAMES & set(word.split("_"))
    ]
    assert wrong == []


def test_every_module_says_what_it_is() -> None:
    bare = [
        str(path.relative_to(ROOT))
        for path in sources(*PACKAGES, "tests")
        if path.read_text().strip() and ast.get_docstring(tree_of(path)) is None
    ]
    assert bare == []


def test_every_folder_of_tests_is_a_package() -> None:
    folders = {path.parent for path in sources("tests")}
    assert {str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()} == set()


# -- Texts -----------------------------------------------------------------------------------------------------------


def heading_anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ +(.*?) *#*$", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_in_documents_resolve() -> None:
    documents = [path for path in text_files() if path.suffix == ".md"]
    assert documents
    wrong = []
    for path in documents:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
        for target in re.findall(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = unquote(target).partition("#")
            file = (path.parent / name).resolve() if name else path
            if not file.is_relative_to(ROOT) or not file.exists():
                wrong.append(f"{path.relative_to(ROOT)}: {target} does not exist")
            elif anchor and file.suffix == ".md" and anchor not in heading_anchors(file.read_text()):
                wrong.append(f"{path.relative_to(ROOT)}: {target} has no such heading")
    assert wrong == []


def test_files_and_tests_that_documents_name_exist() -> None:
    named = re.compile(r"`((?:efs|kvstore|gdr|tools|tests|docs)/[\w./-]+\.\w+)(?:::(\w+))?`")
    wrong = []
    defined = set(re.findall(r"def (test_\w+)\(", "\n".join(file.read_text() for file in ROOT.glob("tests/**/*.py"))))
    for path in (path for path in text_files() if path.suffix == ".md"):
        for name, test in named.findall(path.read_text()):
            if not (ROOT / name).is_file():
                wrong.append(f"{path.relative_to(ROOT)}: {name} does not exist")
            elif test and not re.search(rf"\b(def|class) {test}\b", (ROOT / name).read_text()):
                wrong.append(f"{path.relative_to(ROOT)}: {name} has no {test}")
        wrong += [f"{path.relative_to(ROOT)}: there is no {test}"
                  for test in re.findall(r"`(test_\w+)`", path.read_text()) if test not in defined]
    assert wrong == []


def test_no_file_names_a_machines_folders_or_package_registries() -> None:
    # Written in parts, so that this file does not find itself.
    folders = "|".join(("wor" + "k", "roo" + "t", "hom" + "e", "User" + "s", "opt/pyp" + "i", "opt/whee" + "ls"))
    pattern = re.compile(rf"(?<![\w.~}}-])/({folders})/|\b(pyp" + r"i\.org|pythonhoste" + r"d\.org)")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in text_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert wrong == []
