"""Which parameter is what: names, patterns, roles, and the refusals that keep them honest."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, struct

import symoptax
from small_models import RULES, NnxModel, grads_like, linen_params, nnx_model
from symoptax import MatrixView, ParamRule, Role

DENSE = "d out -> out d"


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def names(params):
    """Return the names that routing gives to the leaves of a tree."""
    return [leaf.path for leaf in symoptax.route(params, [ParamRule("**", "other")]).leaves]


def roles(params, rules, **options):
    routing = symoptax.route(params, rules, **options)
    return {leaf.path: str(leaf.role) for leaf in routing.leaves}


# Patterns.


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("**/gate", ["router/gate", "gate", "a/b/gate"], ["attn_gate", "gate_proj", "gate/w"]),
        ("**/*_proj/kernel", ["a/gate_proj/kernel"], ["gate_proj/x/kernel", "gate_proj/kernel/x"]),
        ("*/kernel", ["a/kernel"], ["kernel", "a/b/kernel"]),
        ("**/{q,k}_proj", ["q_proj", "a/k_proj"], ["v_proj", "{q,k}_proj", "qk_proj"]),
        ("layers/?/w", ["layers/0/w"], ["layers/10/w", "layers/w"]),
        ("layers/**/w", ["layers/w", "layers/0/w", "layers/0/1/w"], ["w", "layers_0/w"]),
        ("a.b/w+", ["a.b/w+"], ["aXb/w", "a.b/ww"]),
        ("**", ["a", "a/b"], []),
    ],
)
def test_patterns_match_whole_segments(pattern, matching, others):
    def tree(path):
        return {path: leaf(2)}

    rules = [ParamRule(pattern, "other")]
    for path in matching:
        assert roles(tree(path), rules) == {path: "other"}
    for path in others:
        with pytest.raises(ValueError, match="no rule matches"):
            roles(tree(path), rules)


@pytest.mark.parametrize("pattern", ["", "a//b", "a**/b", "{a,b", "a}/b"])
def test_patterns_that_do_not_parse_are_refused(pattern):
    with pytest.raises(ValueError, match="Pattern"):
        ParamRule(pattern, "other")


SIBLINGS = {
    "layers": {
        "attn_gate": leaf(2, 8, 4),
        "attn_gated_norm": {"w_up": leaf(2, 8, 3), "w_down": leaf(2, 3, 8)},
        "mlp_gated_norm": {"w_up": leaf(2, 8, 3), "w_down": leaf(2, 3, 8)},
        "attn": {"q_norm": {"scale": leaf(2, 8)}, "k_norm": {"scale": leaf(2, 8)}},
        "router": {"gate": leaf(2, 8, 4)},
        "mlp": {
            "gate_proj": leaf(2, 8, 12),
            "up_proj": leaf(2, 8, 12),
            "gate_up_proj": leaf(2, 8, 24),
        },
    },
    "logits_dense": {"kernel": leaf(8, 16)},
    "pos_embedding": leaf(5, 8),
    "embedding": leaf(16, 8),
}
LAYERED = "layer d out -> layer out d"
SIBLING_RULES = [
    ParamRule("**/attn_gate", "attention", LAYERED),
    ParamRule("**/{attn,mlp}_gated_norm/w_{up,down}", "attention", LAYERED),
    ParamRule("**/{q,k}_norm/scale", "other"),
    ParamRule("**/router/gate", "router", LAYERED),
    ParamRule("**/mlp/{gate,up}_proj", "mlp_in", LAYERED),
    ParamRule("**/gate_up_proj", "mlp_in", "layer d (branch out) -> layer branch out d"),
    ParamRule("logits_dense/kernel", "lm_head", DENSE),
    ParamRule("pos_embedding", "other"),
    ParamRule("embedding", "embedding", "vocab d -> vocab d"),
]


def test_names_that_contain_each_other_do_not_take_each_others_roles():
    fused = MatrixView("layer d (branch out) -> layer branch out d", sizes={"branch": 2})
    rules = [
        dataclasses.replace(rule, view=fused) if "gate_up" in rule.pattern else rule
        for rule in SIBLING_RULES
    ]
    routing = symoptax.route(SIBLINGS, rules)
    assert {leaf.path: str(leaf.role) for leaf in routing.leaves} == {
        "layers/attn_gate": "attention",
        "layers/attn_gated_norm/w_up": "attention",
        "layers/attn_gated_norm/w_down": "attention",
        "layers/mlp_gated_norm/w_up": "attention",
        "layers/mlp_gated_norm/w_down": "attention",
        "layers/attn/q_norm/scale": "other",
        "layers/attn/k_norm/scale": "other",
        "layers/router/gate": "router",
        "layers/mlp/gate_proj": "mlp_in",
        "layers/mlp/up_proj": "mlp_in",
        "layers/mlp/gate_up_proj": "mlp_in",
        "logits_dense/kernel": "lm_head",
        "pos_embedding": "other",
        "embedding": "embedding",
    }
    matrices = {leaf.path: leaf.matrices() for leaf in routing.leaves}
    assert matrices["layers/mlp/gate_up_proj"] == [(2, 2, 12, 8)]
    assert matrices["layers/attn/q_norm/scale"] == []  # (L, d) of a stack of scales is no matrix


# Names of all containers.


@dataclasses.dataclass
class Block:
    kernel: object
    bias: object


jax.tree_util.register_dataclass(Block, ["kernel", "bias"], [])


@struct.dataclass
class Attention:
    query: object
    key: object
    value: object


class Unkeyed:
    """A node of the kind that `register_pytree_node` makes: its children have no names."""

    def __init__(self, *children):
        self.children = children


jax.tree_util.register_pytree_node(
    Unkeyed, lambda node: (node.children, None), lambda _, children: Unkeyed(*children)
)

CONTAINERS = {
    "dict": ({"layers": {"kernel": leaf(2)}}, ["layers/kernel"]),
    "int keys": ({0: {1: leaf(2)}}, ["0/1"]),
    "list": ({"layers": [leaf(2), leaf(3)]}, ["layers/0", "layers/1"]),
    "tuple": ((leaf(2), {"w": leaf(3)}), ["0", "1/w"]),
    "haiku keys": ({"mlp/~/linear": {"w": leaf(2)}}, ["mlp/~/linear/w"]),
    "outer slashes": ({"/mlp/": {"w": leaf(2)}}, ["mlp/w"]),
    "dataclass": (Block(leaf(2), leaf(3)), ["kernel", "bias"]),
    "dataclass with a field called value": (
        {"attn": Attention(leaf(2), leaf(3), leaf(4))},
        ["attn/query", "attn/key", "attn/value"],
    ),
    "children without names": ({"block": Unkeyed(leaf(2), leaf(3))}, ["block/0", "block/1"]),
    "partitioned": (
        {"dense": {"kernel": nn.Partitioned(leaf(2, 3), ("a", None))}},
        ["dense/kernel"],
    ),
    "logically partitioned": (
        {"dense": {"kernel": nn.LogicallyPartitioned(leaf(2, 3), ("a", None))}},
        ["dense/kernel"],
    ),
    "None": ({"a": None, "b": leaf(2)}, ["b"]),
    "MaskedNode": ({"a": optax.MaskedNode(), "b": leaf(2)}, ["b"]),
    "a bare leaf": (leaf(2), [""]),
    "no leaf": ({}, []),
}


@pytest.mark.parametrize(("params", "expected"), CONTAINERS.values(), ids=CONTAINERS.keys())
def test_containers_leave_no_trace_in_names(params, expected):
    assert names(params) == expected


def test_nnx_states_have_the_names_of_their_modules_in_both_forms():
    model = nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)
    found = names(state)
    assert "layers/1/attn/q_proj/kernel" in found
    assert len(set(found)) == len(found) == len(jax.tree.leaves(state))
    assert names(nnx.as_pure(state)) == found  # what `nnx.Optimizer` hands to `update`
    assert roles(state, RULES) == roles(nnx.as_pure(state), RULES)


def test_routing_keeps_the_structure_of_the_tree():
    for params in (linen_params(), nnx.state(nnx_model(linen_params()), nnx.Param)):
        routing = symoptax.route(params, RULES)
        assert jax.tree.structure(routing.labels) == jax.tree.structure(params)
        assert jax.tree.leaves(routing.labels) == [str(leaf.role) for leaf in routing.leaves]


# What cannot be routed.


def test_everything_that_is_wrong_is_listed_at_once():
    params = {
        "unknown": {"w": leaf(5, 7)},
        "twice": leaf(2, 3),
        "misfit": leaf(2, 3, 4),
        "fine": leaf(2, 3),
    }
    rules = [
        ParamRule("{twice,fine}", "attention", DENSE),
        ParamRule("t*", "mlp_in", DENSE),
        ParamRule("misfit", "attention", DENSE),
    ]
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is what is tested
        symoptax.route(params, rules)
    lines = str(error.value).splitlines()[1:]
    by_leaf = {line.split()[0]: line for line in lines}
    assert set(by_leaf) == {"unknown/w", "twice", "misfit"}
    assert "(5, 7)" in by_leaf["unknown/w"]
    assert "ParamRule('unknown/w', role, view)" in by_leaf["unknown/w"]
    assert 'fallback="adamw"' in by_leaf["unknown/w"]
    assert "(2, 3)" in by_leaf["twice"]
    assert "'{twice,fine}', 't*'" in by_leaf["twice"]
    assert "narrow them to one" in by_leaf["twice"]
    assert "(2, 3, 4)" in by_leaf["misfit"]
    assert DENSE in by_leaf["misfit"]


@pytest.mark.parametrize(
    "use",
    [
        lambda params, rules: symoptax.layerwise(0.1, rules).init(params),
        lambda params, rules: jax.eval_shape(symoptax.layerwise(0.1, rules).init, params),
        lambda params, rules: symoptax.routing_report(params, rules),
        lambda params, rules: symoptax.label_fn(rules)(params),
        lambda params, rules: symoptax.view_fn(rules)(params),
    ],
)
def test_no_way_in_passes_over_an_unknown_leaf(use):
    params = {"w": jnp.ones((2, 3)), "stack": jnp.ones((2, 3, 4))}
    with pytest.raises(ValueError, match=r"stack \(2, 3, 4\): no rule matches"):
        use(params, [ParamRule("w", "attention", DENSE)])


def test_fallback_gives_to_adamw_what_no_rule_matches_and_nothing_else():
    params = {"w": leaf(2, 3), "rest": {"stack": leaf(2, 3, 4), "bias": leaf(3)}}
    rules = [ParamRule("w", "attention", DENSE)]
    assert roles(params, rules, fallback="adamw") == {
        "w": "attention",
        "rest/stack": "other",
        "rest/bias": "other",
    }
    twice = [*rules, ParamRule("**/w", "mlp_in", DENSE)]
    with pytest.raises(ValueError, match="matched by 2 rules"):
        roles(params, twice, fallback="adamw")
    misfit = [*rules, ParamRule("rest/stack", "mlp_in", DENSE)]
    with pytest.raises(ValueError, match="does not fit"):
        roles(params, misfit, fallback="adamw")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("w", "attn", DENSE), "none of embedding, tied_embedding"),
        (("w", "attention"), "needs a view"),
        (("w", "other", DENSE), "takes no view"),
        (("w", "attention", "... d out -> ... out d"), "name every axis"),
    ],
)
def test_rules_that_say_too_little_or_too_much_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ParamRule(*arguments)


def test_biases_and_convolutions_are_no_matrices_unless_a_rule_says_so():
    params = {
        "experts": {"gate": leaf(4, 8, 6), "gate_bias": leaf(4, 6)},
        "conv1d": {"kernel": leaf(4, 1, 5)},
    }
    experts = ParamRule("experts/gate", "expert_in", "expert d neuron -> expert neuron d")
    with pytest.raises(ValueError) as error:  # noqa: PT011
        symoptax.route(params, [experts])
    assert "experts/gate_bias (4, 6)" in str(error.value)
    assert "conv1d/kernel (4, 1, 5)" in str(error.value)
    report = symoptax.routing_report(params, [experts], fallback="adamw")
    assert {row.leaf: row.update for row in report.rows} == {
        "experts/gate": "hybrid",
        "experts/gate_bias": "adamw",
        "conv1d/kernel": "adamw",
    }
    # Routed by name a convolution is a matrix of its own making.
    conv = ParamRule("conv1d/kernel", "attention", "width one out -> out (width one)")
    routing = symoptax.route({"conv1d": params["conv1d"]}, [conv])
    assert routing.leaves[0].matrices() == [(5, 4)]


# Placeholders.


def test_optax_map_params_goes_through():
    tx, params = symoptax.layerwise(0.1, RULES), linen_params()
    state = tx.init(params)
    doubled = optax.tree.map_params(tx, lambda leaf: leaf + 1, state)
    marked = optax.tree.map_params(
        tx, lambda _: "parameter", state, transform_non_params=lambda _: "counter"
    )
    kinds = jax.tree.leaves(marked)
    assert kinds.count("parameter") == sum(x.ndim > 0 for x in jax.tree.leaves(state))
    assert set(kinds) == {"parameter", "counter"}
    for new, old in zip(jax.tree.leaves(doubled), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(new, old + (old.ndim > 0))


def test_placeholders_and_holes_do_not_disturb_the_rest():
    params = {"w": jnp.ones((2, 3)), "hole": None, "masked": optax.MaskedNode()}
    tx = symoptax.layerwise(0.1, [ParamRule("w", "attention", DENSE)])
    updates, state = tx.update(params, tx.init(params), params)
    assert updates["hole"] is None
    assert updates["masked"] == optax.MaskedNode()
    expected, _ = tx.update({"w": params["w"]}, tx.init({"w": params["w"]}), {"w": params["w"]})
    chex.assert_trees_all_equal(updates["w"], expected["w"])
    abstract = jax.eval_shape(tx.init, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, abstract)


# Batch axes are batch axes.

STACKS = {
    "(E, d, ff)": ("expert d neuron -> expert neuron d", (0,)),
    "(E, L, d, ff)": ("expert layer d neuron -> expert layer neuron d", (0, 1)),
    "(L, E, d, ff)": ("layer expert d neuron -> layer expert neuron d", (0, 1)),
    "(d, E, L, ff)": ("d expert layer neuron -> expert layer neuron d", (1, 2)),
}
UPDATES = ("polar", "row_norm", "right_polar", "hybrid")


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(("pattern", "batch"), STACKS.values(), ids=STACKS.keys())
def test_a_stack_of_experts_is_a_loop_over_experts(pattern, batch, update):
    shape = [6, 5, 4, 4] if batch == (1, 2) else [3, 2, 6, 4][-2 - len(batch) :]
    params = {"never_seen": jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)}
    tx = symoptax.layerwise(
        1.0, [ParamRule("*", "expert_in", pattern)], updates={"expert_in": update}
    )
    updates, _ = tx.update(params, tx.init(params), params)
    one = symoptax.layerwise(
        1.0, [ParamRule("*", "expert_in", "d neuron -> neuron d")], updates={"expert_in": update}
    )
    for index in np.ndindex(*[shape[axis] for axis in batch]):
        where = [slice(None)] * len(shape)
        for axis, position in zip(batch, index, strict=True):
            where[axis] = position
        expert = {"never_seen": params["never_seen"][tuple(where)]}
        expected, _ = one.update(expert, one.init(expert), expert)
        # The same arithmetic in another order of summation, which five steps amplify.
        np.testing.assert_allclose(
            updates["never_seen"][tuple(where)], expected["never_seen"], atol=3e-5
        )


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_scanned_layers_equal_unscanned_ones(axis):
    names = ["d", "out"]
    names.insert(axis, "layer")
    scanned = ParamRule("w", "mlp_in", f"{' '.join(names)} -> layer out d")
    layers = [
        {"w": jnp.asarray(np.random.default_rng(seed).normal(size=(4, 4)), jnp.float32)}
        for seed in range(4)
    ]
    params = {"w": jnp.stack([layer["w"] for layer in layers], axis)}
    tx = symoptax.layerwise(1.0, [scanned], weight_decay=0.1)
    updates, _ = tx.update(params, tx.init(params), params)
    unscanned = symoptax.layerwise(
        1.0, [ParamRule("*/w", "mlp_in", "d out -> out d")], weight_decay=0.1
    )
    expected, _ = unscanned.update(layers, unscanned.init(layers), layers)
    expected = jnp.stack([layer["w"] for layer in expected], axis)
    np.testing.assert_allclose(updates["w"], expected, atol=1e-5)


# Symmetry.

MATRIX_ROLES = [role for role in Role if role != Role.OTHER]
SQUARE = "row col -> row col"


def update_of(role, **options):
    """Return the update of a role on one matrix as an array function."""
    tx = symoptax.layerwise(1.0, [ParamRule("w", role, SQUARE)], **options)

    def update(d):
        return tx.update({"w": d}, tx.init({"w": d}), {"w": d})[0]["w"]

    return update


@pytest.mark.parametrize("role", MATRIX_ROLES)
def test_the_default_update_of_a_role_has_its_symmetry(role, x64):
    for shape in ((4, 6), (7, 3)):
        error = symoptax.equivariance_error(
            update_of(role), role.symmetry, shape, jax.random.key(0), jnp.float64
        )
        # float64 rounding of 1e-16, amplified by the slope of the polar polynomials, at most 1e4.
        assert error < 1e-10


@pytest.mark.parametrize("role", MATRIX_ROLES)
def test_the_sign_has_the_symmetry_of_no_role(role, x64):
    update = update_of(role, updates={role: "sign"})
    error = symoptax.equivariance_error(
        update, role.symmetry, (4, 6), jax.random.key(0), jnp.float64
    )
    assert error > 0.1


REFUSED = {
    "row_norm on attention": ("attention", "row_norm", "P(rows) x O(cols)", "O(rows) x O(cols)"),
    "uncentered on a softmax router": (
        "router",
        "left_polar",
        "O(rows) x O(cols)",
        "P(rows) x O(cols) / shift",
    ),
    "uncentered on an untied head": (
        "lm_head",
        "row_norm",
        "P(rows) x O(cols)",
        "P(rows) x O(cols) / shift",
    ),
    "centered on a tied embedding": (
        "tied_embedding",
        "centered_row_norm",
        "P(rows) x O(cols) / shift",
        "P(rows) x O(cols)",
    ),
    "centered on a sigmoid router": (
        "router_no_shift",
        "centered_left_polar",
        "P(rows) x O(cols) / shift",
        "P(rows) x O(cols)",
    ),
    "columns on neurons": ("mlp_in", "column_norm", "O(rows) x P(cols)", "P(rows) x O(cols)"),
}


@pytest.mark.parametrize(
    ("role", "update", "offered", "needed"), REFUSED.values(), ids=REFUSED.keys()
)
def test_a_map_that_breaks_the_symmetry_is_refused(role, update, offered, needed):
    rules = [ParamRule("w", role, SQUARE)]
    for build in (
        lambda **options: symoptax.layerwise(0.1, rules, updates={role: update}, **options),
        lambda **options: symoptax.routing_report(
            {"w": leaf(4, 6)}, rules, updates={role: update}, **options
        ),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            build()
        message = str(error.value)
        assert f"respects {offered}, but" in message
        assert f"role {role!r} have the symmetry {needed}" in message
        assert "strict=False" in message
        fitting = message.split("Maps that fit: ")[1].split(". ")[0].split(", ")
        assert fitting
        for name in fitting:
            symoptax.layerwise(0.1, rules, updates={role: name})
        build(strict=False)
    params = {"w": jnp.ones((4, 6))}
    tx = symoptax.layerwise(0.1, rules, updates={role: update}, strict=False)
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["w"].shape == (4, 6)


@pytest.mark.parametrize("baseline", ["adamw", "frozen", "sign"])
@pytest.mark.parametrize("role", MATRIX_ROLES)
def test_baselines_are_allowed_everywhere_by_name(role, baseline):
    symoptax.layerwise(0.1, [ParamRule("w", role, SQUARE)], updates={role: baseline})


def test_the_role_without_matrices_takes_no_map():
    with pytest.raises(ValueError, match="without a matrix view"):
        symoptax.layerwise(0.1, RULES, updates={"other": "row_norm"})


def test_unknown_names_are_refused_with_the_known_ones():
    for options in ({"updates": {"attn": "polar"}}, {"lr_multipliers": {"attn": 2.0}}):
        with pytest.raises(ValueError, match=r"unknown roles \['attn'\]; choose from embedding"):
            symoptax.layerwise(0.1, RULES, **options)
    with pytest.raises(ValueError, match=r"unknown roles \['attn'\]"):
        symoptax.layerwise(0.1, RULES, weight_decay={"attn": 0.1})
    with pytest.raises(
        ValueError, match="'muon' for role 'mlp_in' is unknown; choose from row_norm"
    ):
        symoptax.layerwise(0.1, RULES, updates={"mlp_in": "muon"})


def test_a_leaf_without_a_view_is_named_when_a_map_reaches_it():
    params = grads_like({"w": jnp.ones((2, 3)), "bias": jnp.ones(3)})
    rules = [ParamRule("w", "attention", DENSE), ParamRule("bias", "other")]
    tx = symoptax.row_norm_m(0.1, view=symoptax.view_fn(rules))
    with pytest.raises(ValueError, match="bias"):
        tx.update(params, tx.init(params), params)
