"""Bad input: every one ends in one clear error, or in a result that is written down here.

Three tables: leaves that no transformation takes, by every transformation and every way in; wrong
options, views and rules; and what looks wrong and has a defined result.
"""

import functools
import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import symoptax
from symoptax import MatrixView, ParamRule
from symoptax._recipes import MAPS

# What a user sees, whose program does not check the annotations.
pytestmark = pytest.mark.usefixtures("untyped")

VIEW = "row col -> row col"
RULES = [ParamRule("w", "attention", VIEW), ParamRule("b", "other")]
USERS_MAP = symoptax.MatrixMap("negated", symoptax.row_norm_map().symmetry, (lambda d: -d,))

BARE = {
    factory.__name__: factory
    for factory in (
        symoptax.row_norm,
        symoptax.column_norm,
        symoptax.polar,
        symoptax.right_polar,
        symoptax.left_polar,
        symoptax.hybrid,
        symoptax.center,
        symoptax.centered_row_norm,
        symoptax.centered_right_polar,
        symoptax.centered_left_polar,
        symoptax.centered_hybrid,
    )
}
OPTIMIZERS = {
    factory.__name__: functools.partial(factory, 0.1)
    for factory in (
        symoptax.row_norm_m,
        symoptax.polar_grad_m,
        symoptax.right_polar_grad_m,
        symoptax.left_polar_grad_m,
        symoptax.hybrid_polar_grad_m,
        symoptax.muon,
        symoptax.scion,
        symoptax.ssd,
    )
}
OPTIMIZERS |= {
    f"scion {norm}": functools.partial(symoptax.scion, 0.1, norm=norm)
    for norm in ("embedding", "row", "sign")
}
OPTIMIZERS |= {
    "matrix_optimizer": functools.partial(symoptax.matrix_optimizer, 0.1, update_map=USERS_MAP),
    "muon moonlight, decay": functools.partial(
        symoptax.muon, 0.1, weight_decay=0.1, scale="moonlight"
    ),
    "rms, independent decay": functools.partial(
        symoptax.hybrid_polar_grad_m,
        0.1,
        weight_decay=0.1,
        alpha=0.0,
        scale="rms",
        independent_decay=True,
    ),
    "polar then row, centered": functools.partial(
        symoptax.hybrid_polar_grad_m, 0.1, alpha=0.0, order="polar_then_row", centered=True
    ),
    "svd": functools.partial(symoptax.polar_grad_m, 0.1, method="svd"),
    "qdwh": functools.partial(symoptax.polar_grad_m, 0.1, method="qdwh"),
}
EVERY = BARE | OPTIMIZERS


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


W = {"w": ones(2, 3)}


def layerwise(rules=RULES, **options):
    return symoptax.layerwise(0.1, rules, **options)


def routed(role, update, view):
    """Return the stack in which one leaf `w` has a role, an update and a view."""
    return layerwise([ParamRule("w", role, view)], updates={role: update}, strict=False)


def one_update(tx, updates, params=None):
    params = updates if params is None else params
    return tx.update(updates, tx.init(params), params)[0]


def refused(run, *parts, by="symoptax"):
    """Check that a call is refused with all the parts in the message, and by whom."""
    with pytest.raises((ValueError, TypeError)) as caught:
        run()
    frames = [pathlib.Path(str(entry.path)) for entry in caught.traceback]
    assert by in frames[-1].parts, f"{caught.value!r} comes from {frames[-1]}"
    message = str(caught.value)
    assert all(part in message for part in parts), message


# Leaves that are no stack of real matrices.

BAD_LEAVES = {
    "scalar": (jnp.float32(1), "()|[]"),
    "vector": (ones(3), "(3,)|[3]"),
    "int32": (ones(2, 3, dtype=jnp.int32), "int32[2, 3]"),
    "uint8": (ones(2, 3, dtype=jnp.uint8), "uint8[2, 3]"),
    "bool": (ones(2, 3, dtype=bool), "bool[2, 3]"),
    "complex64": (ones(2, 3, dtype=jnp.complex64), "complex64[2, 3]"),
    "float8": (ones(2, 3, dtype=jnp.float8_e4m3fn), "float8_e4m3fn[2, 3]"),
    "float0": (np.zeros((2, 3), jax.dtypes.float0), "[2, 3]"),
    "key": (jax.random.split(jax.random.key(0), (2, 3)), "key<fry>[2, 3]"),
    "objects": (np.full((2, 3), None), "object[2, 3]"),
    "numpy scalar": (np.float32(1), "()|[]"),
    "Python float": (1.0, "float|()|[]"),
    "string": ("abc", "str"),
    "object": (object(), "object"),
}
REFUSED_BY_JIT = ("float0", "objects", "string", "object")
MENDS = r"route it elsewhere|pass gradients of the parameters|narrow the rule"


@functools.cache
def built():
    return {name: build() for name, build in (EVERY | {"layerwise": layerwise}).items()}


def partitioned(tx):
    """Return a transformation beside another one, as in a `partition` by hand."""
    return optax.partition({"matrix": tx, "other": optax.sgd(0.1)}, {"w": "matrix", "b": "other"})


WAYS = {
    "init": lambda tx, bad: tx.init({"w": bad}),
    "init in jit": lambda tx, bad: jax.jit(tx.init)({"w": bad}),
    "update": lambda tx, bad: tx.update({"w": bad}, tx.init(W), W),
    "update in jit": lambda tx, bad: jax.jit(tx.update)({"w": bad}, tx.init(W), W),
    "partition": lambda tx, bad: partitioned(tx).init({"w": bad, "b": ones(3)}),
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [(k, w) for k in BAD_LEAVES for w in WAYS if not ("jit" in w and k in REFUSED_BY_JIT)],
)
def test_a_leaf_that_is_no_stack_of_matrices_is_named(kind, way):
    leaf, shown = BAD_LEAVES[kind]
    for name, tx in built().items():
        with pytest.raises(ValueError, match=MENDS) as caught:
            WAYS[way](tx, leaf)
        message = str(caught.value)
        assert re.search(r"^(  )?w\b", message, re.MULTILINE), (name, message)
        assert any(part in message for part in shown.split("|")), (name, message)


def test_momentum_by_itself_takes_leaves_of_any_shape_and_no_other_numbers():
    tx = symoptax.momentum(0.5)
    for shape in ((), (3,), (2, 3, 4, 5)):
        assert np.all(one_update(tx, {"w": ones(*shape)})["w"] == 0.5)
    for kind in ("int32", "bool", "complex64", "float8", "float0", "key", "string", "Python float"):
        leaf, shown = BAD_LEAVES[kind]
        refused(lambda leaf=leaf: tx.init({"w": leaf}), "w: ", shown.split("|")[0], "cast it")


# Updates that are not those of the tree that `init` has seen.

OTHER_TREES = {
    "other shape": ({"w": ones(3, 2)}, "w: ", "float32[3, 2]", "float32[2, 3]", "pass gradients"),
    # These would broadcast.
    "shorter": ({"w": ones(1, 3)}, "w: ", "float32[1, 3]", "float32[2, 3]", "pass gradients"),
    "more axes": ({"w": ones(2, 2, 3)}, "w: ", "[2, 2, 3]", "float32[2, 3]", "pass gradients"),
    "missing": ({}, "only one has w float32[2, 3]", "`init`"),
    "None": ({"w": None}, "only one has w float32[2, 3]", "`init`"),
    "masked": ({"w": optax.MaskedNode()}, "only one has w float32[2, 3]", "`init`"),
    "one more": ({**W, "x": ones(3, 4)}, "only one has x float32[3, 4]", "`init`"),
    "a list": ([ones(2, 3)], "only one has 0 float32[2, 3], w float32[2, 3]", "`init`"),
    "deeper": ({"w": {"k": ones(2, 3)}}, "only one has w float32[2, 3], w/k", "`init`"),
}


@pytest.mark.parametrize("kind", OTHER_TREES)
def test_updates_of_another_tree_are_refused(kind):
    updates, *parts = OTHER_TREES[kind]
    for build in [lambda: symoptax.momentum(), *OPTIMIZERS.values()]:
        tx = build()
        if jax.tree.leaves(tx.init(W)):
            refused(lambda tx=tx: tx.update(updates, tx.init(W), W), *parts)
    if kind in ("other shape", "shorter"):
        refused(lambda: layerwise().update(updates, layerwise().init(W), W), *parts)


STATES = {
    "lost": symoptax.MomentumState({"w": None}),
    "empty": symoptax.MomentumState({}),
    "None": None,
    "of beta = 0": symoptax.momentum(0.0).init(W),
    "other shape": symoptax.MomentumState({"w": ones(3, 2)}),
    "no array": symoptax.MomentumState({"w": 0.0}),
}


@pytest.mark.parametrize("kind", STATES)
def test_a_state_without_the_momentum_is_refused(kind):
    tx = symoptax.momentum()
    refused(lambda: tx.update(W, STATES[kind], W), "w", "init")
    state = {**symoptax.muon(0.1).init(W), "momentum": STATES[kind]}
    refused(lambda: symoptax.muon(0.1).update(W, state, W), "w", "init")


# Options, views and rules: what is called, and what the error says.


def polar(**options):
    return lambda: symoptax.polar(**options)


def row_norm_m(learning_rate=0.1, **options):
    return lambda: symoptax.row_norm_m(learning_rate, **options)


def stack(*arguments, **options):
    return lambda: layerwise(*arguments, **options)


def view(pattern, shape=None, **options):
    """Return a call that builds a view and, with a shape, applies it."""
    built = (lambda: MatrixView(pattern, **options)) if shape is None else None
    return built or (lambda: MatrixView(pattern, **options).shapes(shape))


def through_tree(leaf_view, *shape):
    return lambda: symoptax.polar(view=leaf_view).init({"a": {"w": ones(*shape)}})


def through_rules(leaf_view, *shape):
    return lambda: layerwise([ParamRule("a/w", "lm_head", leaf_view)]).init(
        {"a": {"w": ones(*shape)}}
    )


NUMBER = "need a number"
PACKED = "(a b) c -> a b c"
ONE_BOOLEAN = "one boolean per row"
OPTIONS = {
    # Numbers.
    "learning rate None": (row_norm_m(None), "learning_rate=None", NUMBER, "schedule"),
    "learning rate a string": (row_norm_m("0.1"), "learning_rate='0.1'", NUMBER),
    "learning rate complex": (row_norm_m(1j), "learning_rate=1j", NUMBER),
    "stack with rate None": (lambda: symoptax.layerwise(None, RULES), "learning_rate=None", NUMBER),
    "injected rate a string": (
        lambda: optax.inject_hyperparams(symoptax.muon)("a").init(W),
        "learning_rate='a'",
        NUMBER,
    ),
    "beta 1": (row_norm_m(beta=1.0), "beta=1.0", "at least 0, below 1"),
    "beta negative": (row_norm_m(beta=-0.1), "beta=-0.1", "at least 0, below 1"),
    "beta NaN": (row_norm_m(beta=float("nan")), "beta=nan", "at least 0, below 1"),
    "beta a string": (row_norm_m(beta="0.9"), "beta='0.9'", NUMBER),
    "beta None": (row_norm_m(beta=None), "beta=None", NUMBER),
    "stack with beta 2": (stack(beta=2), "beta=2", "at least 0, below 1"),
    "b1 a string": (stack(b1="0.9"), "b1='0.9'", NUMBER),
    "eps None": (stack(eps=None), "eps=None", NUMBER),
    "decay a string": (row_norm_m(weight_decay="0.1"), "weight_decay='0.1'", NUMBER),
    "decay None": (row_norm_m(weight_decay=None), "weight_decay=None", NUMBER),
    "independent decay a string": (
        row_norm_m(weight_decay="0.1", independent_decay=True),
        "weight_decay='0.1'",
        NUMBER,
    ),
    "decay by itself None": (
        lambda: symoptax.add_weight_decay(None),
        "weight_decay=None",
        NUMBER,
    ),
    "radius None": (lambda: symoptax.scion(0.1, radius=None), "radius=None", NUMBER),
    "alpha a string": (polar(alpha="1"), "alpha='1'", NUMBER),
    "alpha None": (polar(alpha=None), "alpha=None", NUMBER),
    "alpha negative": (polar(alpha=-0.5), "alpha=-0.5", "at least 0"),
    "alpha NaN": (polar(alpha=float("nan")), "alpha=nan", "at least 0"),
    "alpha with unit rows": (
        lambda: symoptax.hybrid(1.0, order="polar_then_row"),
        "alpha=1.0",
        "pass alpha=0",
    ),
    # The numerics of a polar step.
    "steps 0": (polar(steps=0), "steps=0", "whole numbers, at least 1"),
    "steps negative": (polar(steps=-1), "steps=-1", "whole numbers, at least 1"),
    "steps a fraction": (polar(steps=2.5), "steps=2.5", "whole numbers, at least 1"),
    "steps a string": (polar(steps="5"), "steps='5'", "whole numbers, at least 1"),
    "steps None in hybrid": (lambda: symoptax.hybrid(steps=None), "steps=None", "whole numbers"),
    "unknown table": (polar(coefficients="quintic"), "'quintic'", "choose from", "muon_quintic"),
    "table a number": (polar(coefficients=5), "coefficients=5", "choose from", "pass rows"),
    "table empty": (polar(coefficients=[]), "0 coefficient rows", "at least 1"),
    "row too short": (polar(coefficients=[(1.0,)]), "two to five entries", "(1.0,)"),
    "row for a table": (polar(coefficients=[1.5, -0.5]), "two to five entries", "1.5"),
    "numerics a string": (polar(numerics="bfloat16"), "numerics='bfloat16'", "symoptax.BFLOAT16"),
    "numerics a dtype": (
        lambda: symoptax.muon(0.1, numerics=jnp.bfloat16),
        "numerics=",
        "symoptax.BFLOAT16",
    ),
    "numerics of a root": (
        lambda: symoptax.inverse_sqrt(jnp.eye(2), numerics=None),
        "numerics=None",
        "symoptax.BFLOAT16",
    ),
    "products of integers": (lambda: symoptax.Numerics(products="int8"), "int8", "floating dtype"),
    "precision a string": (
        lambda: symoptax.Numerics(precision="high"),
        "precision='high'",
        "jax.lax.Precision",
    ),
    "unknown method": (polar(method="SVD"), "method='SVD'", "choose auto, direct, gram, svd"),
    # Names.
    "unknown order": (lambda: symoptax.hybrid(order="rows"), "order='rows'", "row_then_polar"),
    "unknown side": (
        lambda: symoptax.hybrid(side="top"),
        "side='top'",
        "'left', 'right' or 'auto'",
    ),
    "unknown norm": (lambda: symoptax.scion(0.1, norm="rows"), "norm='rows'", "choose from"),
    "unknown scale": (row_norm_m(scale="RMS"), "scale='RMS'", "rms, spectral, moonlight"),
    "scale a number": (stack(scale=0.2), "scale=0.2", "or a function"),
    "rms of what follows the gradient": (
        lambda: symoptax.polar_grad_m(0.1, scale="rms"),
        "scale='rms'",
        "alpha=0",
    ),
    "a scale beside the norm": (
        lambda: symoptax.scion(0.1, scale="rms"),
        "scale does not apply",
        "radius",
    ),
    "mu_dtype float16": (row_norm_m(mu_dtype="float16"), "mu_dtype=float16", "use bfloat16"),
    "mu_dtype float8": (row_norm_m(mu_dtype=jnp.float8_e4m3fn), "float8_e4m3fn", "use bfloat16"),
    "mu_dtype an integer": (row_norm_m(mu_dtype=jnp.int32), "int32", "no floating dtype"),
    "mu_dtype unknown": (row_norm_m(mu_dtype="bf16"), "mu_dtype='bf16'", "no floating dtype"),
    "stack with integer mu_dtype": (
        lambda: layerwise(mu_dtype="int32"),
        "mu_dtype='int32'",
        "no floating dtype",
    ),
    # Maps.
    "a name for a map": (
        lambda: symoptax.matrix_optimizer(0.1, update_map="polar"),
        "update_map='polar'",
        "polar_map()",
    ),
    "a name for a scaled map": (
        lambda: symoptax.matrix_optimizer(0.1, update_map="polar", scale="rms"),
        "update_map='polar'",
        "polar_map()",
    ),
    "a function for a map": (lambda: symoptax.matrixwise(lambda d: d), "update_map=", "MatrixMap"),
    "a map that drops an axis": (
        lambda: one_update(
            symoptax.matrixwise(
                symoptax.MatrixMap("mean", USERS_MAP.symmetry, (lambda d: d.mean(-1),))
            ),
            W,
        ),
        "'mean' makes [2] of [2, 3]",
        "keep the shape",
    ),
    "a map on a vector": (lambda: symoptax.row_norm_map()(ones(3)), "float32[3]", "[..., m, n]"),
    "a map on integers": (lambda: symoptax.sign_map()(ones(2, 3, dtype=int)), "int32[2, 3]"),
    "a map on complex numbers": (
        lambda: symoptax.center_map()(ones(2, 3, dtype=jnp.complex64)),
        "complex64[2, 3]",
    ),
    "a row mask too long": (
        lambda: symoptax.row_masked(symoptax.polar_map(), np.ones(3, bool))(ones(2, 3)),
        "bool[3]",
        "[2, 3]",
        ONE_BOOLEAN,
    ),
    "a row mask of indices": (
        lambda: symoptax.row_masked(symoptax.polar_map(), np.array([0, 1]))(ones(2, 3)),
        "int64[2]",
        ONE_BOOLEAN,
    ),
    # Views that do not parse.
    "view None": (view(None), "View None", "needs the form"),
    "no arrow": (view("a b"), "'a b'", "needs the form 'stored axes -> batch rows cols'"),
    "two arrows": (view("a b -> a b -> b a"), "cannot read '-'"),
    "a name twice": (view("a a -> a a"), "same axes, each once"),
    "no columns": (view("a -> a"), "end with a row and a column axis"),
    "size of an unknown axis": (view(PACKED, sizes={"z": 2}), "sizes name unknown axes ['z']"),
    "size 0": (view(PACKED, sizes={"a": 0}), "whole numbers above 0"),
    "size negative": (view(PACKED, sizes={"a": -2}), "whole numbers above 0"),
    "size a fraction": (view(PACKED, sizes={"a": 2.0}), "whole numbers above 0"),
    "size a string": (view(PACKED, sizes={"a": "2"}), "whole numbers above 0"),
    "section negative": (view(VIEW, sections={"row": (-1, 3)}), "whole numbers above 0"),
    "section a number": (view(VIEW, sections={"row": 2}), "sections must cut one named axis"),
    "sections of two axes": (
        view(VIEW, sections={"row": (2,), "col": (3,)}),
        "sections must cut one named axis",
    ),
    "rows and sections": (
        view(VIEW, valid_rows=1, sections={"row": (1, 1)}),
        "valid_rows and sections do not go together",
    ),
    "rows a boolean": (view(VIEW, valid_rows=True), "valid_rows=True", ONE_BOOLEAN),
    "rows a fraction": (view(VIEW, valid_rows=1.0), "valid_rows=1.0", ONE_BOOLEAN),
    "rows as indices": (view(VIEW, valid_rows=[0, 1]), "valid_rows=[0, 1]", ONE_BOOLEAN),
    "rows empty": (view(VIEW, valid_rows=[]), "valid_rows=[]", ONE_BOOLEAN),
    "rows of a matrix": (view(VIEW, valid_rows=np.ones((2, 3), bool)), ONE_BOOLEAN),
    "view a number": (lambda: symoptax.polar(view=3), "view=3", "need a MatrixView"),
    "view a dictionary": (lambda: symoptax.polar(view={"w": VIEW}), "view={", "need a MatrixView"),
    # Views that do not fit: by hand and by rules.
    "too few axes": (through_tree(VIEW, 2, 3, 4), "a/w", "(2, 3, 4)", "names its axes"),
    "too many axes": (through_tree("a b c -> a b c", 2, 3), "a/w", "(2, 3)", "names its axes"),
    "too few axes in a rule": (through_rules(VIEW, 2, 3, 4), "a/w (2, 3, 4)", "narrow the rule"),
    "a size that does not divide": (
        through_rules(MatrixView("row (a col) -> (row a) col", sizes={"a": 2}), 2, 3),
        "a/w (2, 3)",
        "does not fit 3",
        "narrow the rule",
    ),
    "two unknown sizes": (
        through_rules("row (a col) -> (row a) col", 2, 3),
        "a/w (2, 3)",
        "give sizes for all but one of ['a', 'col']",
    ),
    "sections that do not add up": (
        through_rules(MatrixView(VIEW, sections={"row": (1, 2)}), 2, 3),
        "a/w (2, 3)",
        "add up to 3, but",
        "narrow the rule",
    ),
    "more rows than there are": (
        through_rules(MatrixView(VIEW, valid_rows=9), 2, 3),
        "a/w (2, 3)",
        "valid_rows=9 of 2 rows",
        "from 1 to 2",
    ),
    "no rows": (
        through_tree(MatrixView(VIEW, valid_rows=0), 2, 3),
        "a/w",
        "[2, 3]",
        "valid_rows=0 of 2 rows",
        "from 1 to 2",
    ),
    "all rows False": (
        through_tree(MatrixView(VIEW, valid_rows=[False] * 2), 2, 3),
        "a/w",
        "2 booleans, 0 of them True",
        "not all False",
    ),
    "booleans of another length": (
        through_tree(MatrixView(VIEW, valid_rows=[True] * 5), 2, 3),
        "a/w",
        "5 booleans",
        "or 2 booleans",
    ),
    "no view for a leaf": (
        lambda: symoptax.polar(view=lambda params: {"w": None}).init(W),
        "w float32[2, 3]: has no view",
        "partition or a mask",
    ),
    "a view function without the leaf": (
        lambda: symoptax.polar(view=lambda params: {}).init(W),
        "What `view` returned",
        "w float32[2, 3]",
    ),
    "a view function that returns one view": (
        lambda: symoptax.polar(view=lambda params: MatrixView(VIEW)).init(W),
        "What `view` returned",
        "w float32[2, 3]",
    ),
    # Rules.
    "role misspelt": (lambda: ParamRule("w", "atention", VIEW), "'atention'", "attention, mlp_in"),
    "role None": (lambda: ParamRule("w", None, VIEW), "None", "is none of embedding"),
    "other with a view": (lambda: ParamRule("w", "other", VIEW), "takes no view"),
    "matrices without a view": (lambda: ParamRule("w", "mlp_in"), "needs a view, such as"),
    "view of a rule a number": (lambda: ParamRule("w", "mlp_in", 3), "view=3", "MatrixView"),
    "view of a rule with dots": (
        lambda: ParamRule("w", "mlp_in", "... a b -> ... a b"),
        "name every axis",
    ),
    "two views of as many axes": (lambda: ParamRule("w", "mlp_in", [VIEW, VIEW]), "equally many"),
    "pattern empty": (lambda: ParamRule("", "other"), "a segment is empty"),
    "brace open": (lambda: ParamRule("a{b", "other"), "a brace is not closed"),
    "rules None": (lambda: layerwise(None).init(W), "rules=None", "need a list of ParamRule"),
    "rules of tuples": (stack([("w", "mlp_in", VIEW)]), "need a list of ParamRule"),
    "one rule": (lambda: symoptax.route(W, RULES[0]), "rules=ParamRule", "need a list of"),
    "unknown name for rules": (lambda: stack("automatic")().init(W), "rules='automatic'", "'auto'"),
    "no rule": (
        lambda: layerwise([]).init(W),
        "w (2, 3): no rule matches",
        "add ParamRule('w', role, view)",
    ),
    "a rule that matches no leaf": (
        lambda: layerwise([ParamRule("ww", "mlp_in", VIEW)]).init(W),
        "w (2, 3): no rule matches",
        "add ParamRule('w', role, view)",
    ),
    "two rules": (
        lambda: layerwise([*RULES, ParamRule("*", "mlp_in", VIEW)]).init(W),
        "w (2, 3): matched by 2 rules ('w', '*')",
        "narrow them to one",
    ),
    "unknown fallback": (
        lambda: symoptax.route(W, RULES, fallback="sgd"),
        "fallback='sgd'",
        "choose 'adamw' or None",
    ),
    # What a role gets.
    "update of an unknown role": (stack(updates={"attn": "polar"}), "['attn']", "choose from"),
    "unknown update": (stack(updates={"attention": "polr"}), "'polr'", "choose from row_norm"),
    "update None": (stack(updates={"attention": None}), "None", "choose from row_norm"),
    "update a factory": (stack(updates={"attention": symoptax.polar}), "pass a MatrixMap or a"),
    "update for all": (stack(updates="polar"), "updates='polar'", "a mapping from roles"),
    "map for other": (stack(updates={"other": "polar"}), "without a matrix view", "use 'adamw'"),
    "map that breaks the symmetry": (
        stack(updates={"lm_head": "polar"}),
        "must be centered",
        "centered_hybrid",
    ),
    "multiplier of an unknown role": (stack(lr_multipliers={"attn": 2.0}), "['attn']", "choose"),
    "multiplier a string": (
        stack(lr_multipliers={"attention": "2"}),
        "lr_multipliers['attention']='2'",
        NUMBER,
    ),
    "multiplier for all": (stack(lr_multipliers=2.0), "lr_multipliers=2.0", "mapping from roles"),
    "decay of an unknown role": (stack(weight_decay={"attn": 0.1}), "['attn']", "choose from"),
    "decay of a role None": (
        stack(weight_decay={"attention": None}),
        "weight_decay['attention']=None",
        NUMBER,
    ),
    "decay of a transformation": (
        stack(weight_decay={"attention": 0.1}, updates={"attention": optax.scale_by_adam()}),
        "weight_decay for ['attention']",
        "bring their own",
    ),
    "decay beside a constraint": (
        lambda: symoptax.scion(0.1, weight_decay=0.1, constrained=True),
        "drop weight_decay",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_option_is_refused_with_the_mend(name):
    run, *parts = OPTIONS[name]
    refused(run, *parts)


# What optax itself says: decay without parameters, and masks that are no tree of the parameters.

DECAYS = {
    "row_norm_m": lambda **options: symoptax.row_norm_m(0.1, weight_decay=0.1, **options),
    "cautious": lambda **options: symoptax.add_weight_decay(0.1, cautious=True, **options),
    "layerwise": lambda **options: layerwise(weight_decay=0.1, **options),
}


@pytest.mark.parametrize("name", DECAYS)
def test_decay_is_refused_in_the_words_of_optax(name):
    tx = DECAYS[name]()
    refused(lambda: tx.update(W, tx.init(W), None), "`params`", by="optax")
    for mask in ({"v": True}, {"w": True, "v": True}, [True], lambda params: None):
        theirs, ours = optax.add_decayed_weights(0.1, mask), DECAYS[name](mask=mask)
        with pytest.raises(ValueError, match="pytree structure error"):
            theirs.init(W)
        with pytest.raises(ValueError, match="pytree structure error"):
            ours.init(W)


# Defined results.

EMPTY = [(0, 3), (3, 0), (0, 0), (0, 2, 3), (2, 0, 3), (2, 3, 0)]


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_a_leaf_without_entries_has_an_update_without_entries(shape):
    named = "batch row col -> batch row col" if len(shape) == 3 else VIEW
    stacks = {update: lambda update=update: routed("attention", update, named) for update in MAPS}
    for name, build in (EVERY | stacks).items():
        tx = build()
        params = {"w": jnp.zeros(shape)}
        state = tx.init(params)
        with jax.debug_nans(True):
            updates, after = tx.update(params, state, params)
        chex.assert_trees_all_equal(updates, params, custom_message=name)
        chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    for kernel in (symoptax.polar_factor, symoptax.inverse_sqrt)[: 2 if shape == (0, 0) else 1]:
        assert kernel(jnp.zeros(shape)).shape == shape


def test_leaves_without_entries_are_reported():
    params = {"w": ones(0, 3), "v": ones(3, 0)}
    rules = [ParamRule("*", "embedding", VIEW)]
    for scale in ("rms", "spectral", "moonlight"):
        report = symoptax.routing_report(params, rules, scale=scale)
        assert [(row.matrices, row.scale, row.state_bytes) for row in report.rows] == [
            ("3 x 0", "", 3 * 4),  # a counter per row
            ("0 x 3", "", 0),
        ]


BAD_NUMBERS = {"NaN": np.nan, "infinity": np.inf, "minus infinity": -np.inf}


@pytest.mark.parametrize("bad", BAD_NUMBERS)
def test_a_bad_number_stays_in_its_matrix(bad):
    """In one gradient, without `apply_if_finite`: this step, and the next one without it."""
    tree = {"stack": normal(3, 4, 5), "bad": normal(2, 3, seed=1), "alike": normal(2, 3, seed=2)}
    spoiled = {
        "stack": tree["stack"].at[1, 2, 3].set(BAD_NUMBERS[bad]),
        "bad": tree["bad"].at[0, 1].set(BAD_NUMBERS[bad]),
        "alike": tree["alike"],
    }
    rules = [
        ParamRule("stack", "router", "batch row col -> batch row col"),
        ParamRule("{bad,alike}", "mlp_in", VIEW),
    ]
    for name, build in (EVERY | {"layerwise": lambda: layerwise(rules)}).items():
        tx = build()
        state = expected_state = tx.init(tree)
        for updates in (spoiled, tree):
            expected, expected_state = tx.update(tree, expected_state, tree)
            result, state = tx.update(updates, state, tree)
            chex.assert_trees_all_equal(
                good(result), good(expected), custom_message=f"updates of {name}"
            )
            # Nor is it hidden: it shows for as long as it is in the momentum. (The sign of infinity
            # is 1.)
            if (updates is spoiled or jax.tree.leaves(state)) and (
                bad == "NaN" or "sign" not in name
            ):
                assert not np.all(np.isfinite(result["stack"][1])), name
                assert not np.all(np.isfinite(result["bad"])), name
        chex.assert_trees_all_equal(good(state), good(expected_state))


def good(tree):
    """Return a tree without the matrices that have the bad numbers."""

    def select(path, leaf):
        names = [getattr(key, "key", None) for key in path]
        return None if "bad" in names else leaf[::2] if "stack" in names else leaf

    return jax.tree_util.tree_map_with_path(select, tree)


SAFE = {
    "row_norm_m": lambda: symoptax.row_norm_m(0.1, weight_decay=0.1),
    "muon": lambda: symoptax.muon(optax.linear_schedule(0.1, 0.2, 3)),
    "layerwise": lambda: layerwise(weight_decay=0.1),
}


@pytest.mark.parametrize("bad", BAD_NUMBERS)
@pytest.mark.parametrize("name", SAFE)
def test_apply_if_finite_loses_nothing(name, bad):
    """Good, bad, good: as if there had been no bad step, in parameters and in state."""
    tx = optax.apply_if_finite(SAFE[name](), max_consecutive_errors=3)
    start = {"w": normal(3, 2), "b": normal(4, 3)}
    spoiled = {**start, "w": start["w"].at[0, 1].set(BAD_NUMBERS[bad])}

    def run(steps):
        params, state = start, tx.init(start)
        for grads in steps:
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    if name == "layerwise":
        start["b"], spoiled["b"] = start["b"][0], spoiled["b"][0]
    with jax.disable_jit():  # else its `lax.cond` compiles both branches at every call
        params, state = run([start, spoiled, start])
        expected, expected_state = run([start, start])
    chex.assert_trees_all_equal(params, expected)
    chex.assert_trees_all_equal(state.inner_state, expected_state.inner_state)
    assert state.total_notfinite == 1


@pytest.mark.parametrize("bad", BAD_NUMBERS)
def test_rows_that_do_not_exist_change_nothing(bad):
    """Whatever stands in masked rows: zero updates there, and the others' to the bit."""
    rows = jnp.array([True, True, False, True])
    clean = {"w": normal(4, 3) * rows[:, None]}
    spoiled = {"w": jnp.where(rows[:, None], clean["w"], BAD_NUMBERS[bad])}
    masked = MatrixView(VIEW, valid_rows=rows)
    stacks = {
        update: lambda update=update, view=None: routed("lm_head", update, view) for update in MAPS
    }
    for name, build in (EVERY | stacks).items():
        tx = build(view=masked)
        state = expected_state = tx.init(clean)
        for _ in range(2):
            expected, expected_state = tx.update(clean, expected_state, clean)
            result, state = tx.update(spoiled, state, clean)
            chex.assert_trees_all_equal(result, expected, custom_message=name)
            assert not np.any(result["w"][2])


def test_holes_pass_through():
    for name, build in EVERY.items():
        tx = build()
        expected = one_update(tx, W)["w"]
        result = one_update(tx, {**W, "none": None, "masked": optax.MaskedNode()})
        assert result["none"] is None, name
        assert result["masked"] == optax.MaskedNode()
        np.testing.assert_array_equal(result["w"], expected)
        assert one_update(tx, {}) == {}


def test_numpy_arrays_are_arrays():
    """In float64 too, which JAX would warn about: it is float32 unless x64 is enabled."""
    matrix = normal(2, 3)
    for name, build in EVERY.items():
        expected = one_update(build(), {"w": matrix})
        for dtype in (np.float32, np.float64):
            leaf = np.asarray(matrix, dtype)
            result = one_update(build(), {"w": leaf}, {"w": matrix})
            chex.assert_trees_all_equal(result, expected, custom_message=name)
            chex.assert_trees_all_equal_dtypes(result, expected)


def test_every_axis_before_the_last_two_is_a_batch_axis_by_default():
    leaf = normal(3, 1, 4, 5)
    for name, build in BARE.items():
        result = one_update(build(), {"w": leaf})["w"]
        flat = one_update(build(), {"w": leaf.reshape(3, 4, 5)})["w"]
        np.testing.assert_array_equal(result, flat.reshape(leaf.shape), err_msg=name)


def test_the_update_has_the_dtype_of_the_gradient_and_the_state_that_of_the_parameter():
    for dtype in (jnp.float16, jnp.bfloat16):
        for name, build in OPTIMIZERS.items():
            if "decay" in name:  # optax adds `weight_decay * P` in the wider dtype
                continue
            tx = build()
            updates, state = tx.update({"w": ones(2, 3, dtype=dtype)}, tx.init(W), W)
            assert updates["w"].dtype == dtype, name
            assert np.all(np.isfinite(updates["w"]))
            chex.assert_trees_all_equal_dtypes(state, tx.init(W))


def test_without_momentum_only_the_gradient_counts():
    tx = symoptax.ssd(0.1)
    updates, _ = tx.update({"w": ones(3, 2)}, tx.init(W), None)
    chex.assert_trees_all_equal(updates, one_update(tx, {"w": ones(3, 2)}))


def test_leaves_of_the_role_other_are_those_of_adamw():
    """Whatever optax makes of them: integers, complex numbers, Python floats."""
    adamw = optax.adamw(0.1, b1=0.9, b2=0.95, weight_decay=0.0)
    for leaf in (ones(3, dtype=jnp.int32), ones(3, dtype=jnp.complex64), 1.0, ones(0, 3)):
        params = {"b": leaf}
        chex.assert_trees_all_close(one_update(layerwise(), params), one_update(adamw, params))


def test_rules_that_match_nothing_are_reported():
    rules = [*RULES, ParamRule("ww", "mlp_in", VIEW)]
    report = symoptax.routing_report(W, rules)
    assert report.unused_rules == ("b", "ww")
    assert "rule 'ww' matches no leaf" in str(report)
    expected = one_update(layerwise(), W)
    chex.assert_trees_all_equal(one_update(layerwise(rules), W), expected)


def test_two_leaves_of_one_name_are_two_leaves():
    """A key with a slash beside a nested one: the rule of that name is for both."""
    params = {"a/b": normal(2, 3), "a": {"b": normal(4, 3, seed=1)}}
    rules = [ParamRule("a/b", "attention", VIEW)]
    updates = one_update(layerwise(rules), params)
    for leaf, update in ((params["a/b"], updates["a/b"]), (params["a"]["b"], updates["a"]["b"])):
        alone = one_update(layerwise([ParamRule("w", "attention", VIEW)]), {"w": leaf})["w"]
        np.testing.assert_allclose(update, alone, atol=1e-6)
    rows = symoptax.routing_report(params, rules).rows
    assert sorted((row.leaf, row.shape) for row in rows) == [("a/b", (2, 3)), ("a/b", (4, 3))]


def test_numbers_of_numpy_are_numbers():
    build = symoptax.hybrid_polar_grad_m
    tx = build(np.float32(0.1), np.float64(0.9), np.float32(0.1), steps=np.int64(5))
    expected = one_update(build(0.1, 0.9, 0.1, steps=5), W)
    chex.assert_trees_all_close(one_update(tx, W), expected, atol=1e-6)
    masked = MatrixView(VIEW, valid_rows=np.int64(1), sizes={"row": np.int64(2)})
    assert masked == MatrixView(VIEW, valid_rows=1, sizes={"row": 2})


def test_patterns_in_a_tree_of_views_are_views():
    by_pattern = symoptax.polar(view=lambda params: {"w": "row col -> col row"})
    expected = one_update(symoptax.polar(view="row col -> col row"), {"w": normal(2, 3)})
    chex.assert_trees_all_equal(one_update(by_pattern, {"w": normal(2, 3)}), expected)


def test_the_list_is_long():
    tables = (BAD_LEAVES, OTHER_TREES, STATES, OPTIONS, EMPTY, BAD_NUMBERS)
    assert sum(map(len, tables)) >= 60
