"""The floor plan of the package, the list of public names, and what may be imported."""

import ast
import pathlib

import pytest

import symoptax

PACKAGE = pathlib.Path(symoptax.__file__).parent
REPOSITORY = PACKAGE.parent

# A file imports only from floors above it in this list, which is printed in CONTRIBUTING.md too.
FLOORS = [
    ["_version", "_mesh", "_symmetry", "_view", "_paths", "_hyperparams", "_unit", "_minimax"],
    [
        "_coefficients",
        "_numerics",
        "_each_matrix",
        "_equivariance",
        "_fingerprint",
        "_state_shardings",
        "_mesh.collectives",
    ],
    ["_cost", "_routing", "_scaling", "_momentum", "_weight_decay"],
    ["_newton_schulz", "_monitor", "_map", "_lazy_momentum", "_mesh.placement", "routes._tree"],
    [
        *("_row_norm", "_polar", "_centering", "_mesh.layouts", "_mesh.record"),
        *(f"routes.{name}" for name in ("big_vision", "by_name", "hugging_face", "maxtext")),
        "routes.examples",
        "routes.jax_llm_examples",
    ],
    ["_hybrid", "_row_mask", "_mesh.exchange", "_mesh.plan", "routes.gemma"],
    ["_grouping", "_recipes", "routes.flax_examples", "routes.tunix"],
    ["_matrixwise", "routes._auto"],
    ["_transforms", "_optimizers", "_layerwise", "_report", "routes"],
    ["_audit", "_audit.families", "_audit.probe", "_audit.report"],
    ["_audit.permutations", "_audit.rotation", "_audit.shift", "_audit.sides"],
    ["_audit.audit", "report"],
    ["__init__"],
]
FLOOR_OF = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}


def module_of(path: pathlib.Path) -> str:
    """Return the name of a module below the package; a folder's is that of the folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def imported_modules(path: pathlib.Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


def test_every_file_stands_on_one_floor():
    assert sorted(FLOOR_OF) == sorted(map(module_of, PACKAGE.rglob("*.py")))


@pytest.mark.parametrize("module", sorted(FLOOR_OF))
def test_imports_point_down(module):
    (path,) = (path for path in PACKAGE.rglob("*.py") if module_of(path) == module)
    own = {n.removeprefix("symoptax.") for n in imported_modules(path) if "symoptax." in n}
    for name in own & FLOOR_OF.keys() - {"routes"}:  # that folder names all of its files
        assert FLOOR_OF[name] < FLOOR_OF[module], name


def test_only_public_interfaces_of_other_libraries():
    for folder in ("symoptax", "examples", "tests"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            for name in imported_modules(path):
                private = [part for part in name.split(".")[1:] if part.startswith("_")]
                assert not private or name.startswith("symoptax."), f"{path.name} imports {name}"


def test_public_names_have_docstrings_and_no_second_path():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = [alias.asname or alias.name for node in imports for alias in node.names]
    assert len(tree.body) == len(imports) + 1  # the docstring; nothing is defined there
    assert len(names) == len(set(names)) > 40
    for name in names:
        value = getattr(symoptax, name)
        assert value.__doc__ or name == "TABLES", name
        assert name.isupper() or name == value.__name__.rpartition(".")[2], name


def test_floor_plan_is_printed_in_contributing():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    for floor, modules in enumerate(FLOORS[:-1]):
        line = next(x for x in text.splitlines() if x.startswith(f"| {floor} |"))
        for module in modules:
            if module in ("_version", "_audit", "_mesh", "routes"):
                continue
            file = module.replace(".", "/")
            assert f"`{file}.py`" in line, (floor, module)
