"""The rule tables against the parameter trees of public libraries, true and mutated.

`data/param_trees.json` has 46 trees with the true role, rows, columns and batch axes of each leaf:
read from how each weight is used, and measured by permuting it in the real forward pass.
"""

import json
import pathlib

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import symoptax
from symoptax import ParamRule, RoutingError, routes
from symoptax.routes._auto import LIBRARIES

TREES = json.loads((pathlib.Path(__file__).parent / "data" / "param_trees.json").read_text())

# The vision tower of this tree was not run, only its shapes looked at, and contracts queries, keys
# and values over the head size. big_vision__vit has the same module, measured.
for leaf in TREES["gemma__gemma3_4b_like_vision"]["params"]:
    if leaf["path"].endswith(("query/kernel", "key/kernel", "value/kernel")):
        leaf["rows"], leaf["cols"] = [1, 2], [0]

ROLES = {
    "embedding": ("embedding",),
    "tied_embedding": ("tied_embedding",),
    "lm_head": ("lm_head",),
    "mlp_gate": ("mlp_in",),
    "mlp_up": ("mlp_in",),
    "mlp_gate_up": ("mlp_in",),
    "mlp_down": ("mlp_down",),
    "expert_gate": ("expert_in",),
    "expert_up": ("expert_in",),
    "expert_down": ("expert_down",),
    "router": ("router", "router_no_shift"),
}
LIBRARY = {
    "big_vision__paligemma_gemma2__scanned": "gemma",
    "big_vision": "big_vision",
    "easydel": "Hugging Face Flax",
    "flax_examples": "Flax's examples",
    "gemma": "gemma",
    "hf": "Hugging Face Flax",
    "jaxllm": "jax-llm-examples",
    "maxtext": "MaxText",
    "tunix": "Tunix",
}
every_tree = pytest.mark.parametrize("name", TREES)


def nested(leaves):
    """Return a tree of dictionaries from (path, leaf)."""
    tree = {}
    for path, leaf in leaves:
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def shapes_of(leaves):
    return nested((x["path"], jax.ShapeDtypeStruct(tuple(x["shape"]), jnp.float32)) for x in leaves)


def axes_of(leaf):
    """Return the stored axes of rows, columns and batch that a routed leaf has."""
    places = {name: leaf.view.locate(name, leaf.shape).axis for name in leaf.view.names}
    rows, cols = ({places[n] for n in side.split()} for side in (leaf.view.rows, leaf.view.cols))
    batch = {places[name] for name in leaf.view.batch} - rows - cols
    return sorted(rows), sorted(cols), sorted(batch)


def is_right(truth, leaf):
    """Judge a routed leaf by the truth: the group of its role, and for matrices their axes."""
    roles = ("attention",) if truth["role"].startswith("attn") else ROLES.get(truth["role"])
    if roles is None:
        return leaf.role == "other"
    if leaf.role not in roles:
        return False
    want = tuple(sorted(truth[part]) for part in ("rows", "cols", "batch"))
    return axes_of(leaf) == want


def wrong_leaves(leaves, params):
    """Return what `auto` says of a tree that is not the truth; an error is never wrong."""
    try:
        _, rules = routes.auto(params)
    except RoutingError:
        return None
    routed = {leaf.path: leaf for leaf in symoptax.route(params, rules).leaves}
    wrong = [
        f"{x['path']} {x['shape']}: {x['role']}, but {routed[x['path']].role} "
        f"{routed[x['path']].view}"
        for x in leaves
        if not is_right(x, routed[x["path"]])
    ]
    return wrong


@every_tree
def test_every_leaf_is_right(name):
    leaves = TREES[name]["params"]
    params = shapes_of(leaves)
    library, _ = routes.auto(params)
    assert library == LIBRARY.get(name, LIBRARY[name.split("__")[0]])
    assert wrong_leaves(leaves, params) == []


@every_tree
def test_tied_and_routers_are_as_the_models_use_them(name):
    tree = TREES[name]
    report = symoptax.routing_report(shapes_of(tree["params"]), "auto")
    if tree["tied"] is not None:
        assert f"; {'tied' if tree['tied'] else 'not tied'}" in str(report)
    routers = {row.role for row in report.rows if row.role.startswith("router")}
    if tree["router"]:
        shifted = "sigmoid" not in tree["router"]
        assert routers == {"router" if shifted else "router_no_shift"}


def fused_leaves():
    return [
        pytest.param(name, leaf, id=f"{name}-{leaf['path'].replace('/', '.')}")
        for name, tree in TREES.items()
        for leaf in {
            x["path"].rsplit("/", 2)[-2:][0] + x["role"]: x
            for x in tree["params"]
            if "fused" in x and x["role"] != "bias"
        }.values()
    ]


@pytest.mark.parametrize(("name", "truth"), fused_leaves())
def test_parts_of_fused_leaves_are_matrices_of_their_own(name, truth):
    params = shapes_of(TREES[name]["params"])
    routed = symoptax.route(params, routes.auto(params)[1])
    (leaf,) = (leaf for leaf in routed.leaves if leaf.path == truth["path"])
    value = np.random.default_rng(0).normal(size=truth["shape"])
    fused = truth["fused"]
    if fused["kind"] == "stack":
        parts = [np.take(value, [i], axis=fused["axis"]) for i in range(len(fused["parts"]))]
    else:
        parts = np.split(value, np.cumsum(fused["sizes"])[:-1], axis=fused["axis"])
    batch = [axis for axis in truth["batch"] if axis != fused["axis"]]
    want = []
    for part in parts:
        stacked = [fused["axis"]] if fused["kind"] == "stack" else []
        order = [*batch, *stacked, *truth["rows"], *truth["cols"]]
        rows = int(np.prod([part.shape[axis] for axis in truth["rows"]]))
        lead = int(np.prod([part.shape[axis] for axis in (*batch, *stacked)]))
        want += list(part.transpose(order).reshape(lead, rows, -1))
    got = [
        m
        for stack in leaf.view.open(jnp.asarray(value))
        for m in np.asarray(stack).reshape(-1, *stack.shape[-2:])
    ]
    assert sorted(m.tobytes() for m in got) == sorted(
        m.astype(got[0].dtype).tobytes() for m in want
    )


def box(params, wrap):
    return jax.tree.map(wrap, params)


SAME = {
    "below params": lambda params: {"params": params},
    "below model and params": lambda params: {"model": {"params": params}},
    "frozen": flax.core.freeze,
    "partitioned": lambda params: box(params, lambda x: nn.Partitioned(x, (None,) * x.ndim)),
    "nnx": lambda params: nnx.State(box(params, nnx.Param)),
    "reordered": lambda params: dict(reversed(params.items())),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME.keys())
@every_tree
def test_containers_and_nesting_change_nothing_or_raise(name, change):
    tree = change(shapes_of(TREES[name]["params"]))
    try:
        _, rules = routes.auto(tree)
    except RoutingError:
        # Only a library whose names begin at the root may not know them below another.
        assert name.startswith("jaxllm")
        return
    found = {leaf.path: leaf for leaf in symoptax.route(tree, rules).leaves}
    prefix = {"below params": "params/", "below model and params": "model/params/"}
    start = next((p for k, p in prefix.items() if SAME[k] is change), "")
    for leaf in TREES[name]["params"]:
        assert is_right(leaf, found[start + leaf["path"]]), leaf["path"]


def mutated(leaf, shape, moved=lambda axis: axis, extra=()):
    parts = {p: [moved(axis) for axis in leaf[p]] for p in ("rows", "cols", "batch")}
    parts["batch"] += extra
    return {**leaf, **parts, "shape": shape}


def with_layers(leaves, place):
    """Insert a layer axis into every leaf."""
    result = []
    for leaf in leaves:
        at = min(place, len(leaf["shape"])) if place >= 0 else len(leaf["shape"])
        shape = [*leaf["shape"][:at], 7, *leaf["shape"][at:]]
        result.append(mutated(leaf, shape, lambda axis, at=at: axis + (axis >= at), [at]))
    return result


def with_one_size(leaves, size):
    """Give features, neurons, tokens and experts one size."""
    letters = set("DFVEISWf")
    return [
        {
            **leaf,
            "shape": [
                size if axis in letters else old
                for axis, old in zip(leaf["axes"].split(), leaf["shape"], strict=True)
            ],
        }
        for leaf in leaves
    ]


def with_swap(leaves, seed):
    """Store one matrix with two of its axes exchanged."""
    rng = np.random.default_rng(seed)
    matrices = [
        i for i, leaf in enumerate(leaves) if leaf["role"] in ROLES or "attn" in leaf["role"]
    ]
    chosen = rng.choice(matrices)
    leaf = leaves[chosen]
    a, b = rng.choice(len(leaf["shape"]), 2, replace=False)
    if leaf["shape"][a] == leaf["shape"][b]:  # then the tree is the same
        return leaves
    order = list(range(len(leaf["shape"])))
    order[a], order[b] = order[b], order[a]
    back = {old: new for new, old in enumerate(order)}
    swapped = mutated(leaf, [leaf["shape"][axis] for axis in order], lambda axis: back[axis])
    return [*leaves[:chosen], swapped, *leaves[chosen + 1 :]]


def with_expert_axis(leaves, seed):
    """Insert an axis of four into one matrix."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice([i for i, leaf in enumerate(leaves) if leaf["role"] in ROLES])
    at = int(rng.integers(len(leaves[chosen]["shape"]) + 1))
    shape = list(leaves[chosen]["shape"])
    shape.insert(at, 4)
    changed = mutated(leaves[chosen], shape, lambda axis: axis + (axis >= at), [at])
    return [*leaves[:chosen], changed, *leaves[chosen + 1 :]]


def with_new_name(leaves, seed):
    rng = np.random.default_rng(seed)
    chosen = int(rng.integers(len(leaves)))
    renamed = {**leaves[chosen], "path": leaves[chosen]["path"] + "_new"}
    return [*leaves[:chosen], renamed, *leaves[chosen + 1 :]]


MUTATIONS = {
    **{f"layers-{place}": (with_layers, place) for place in (0, 1, -1)},
    "one-size": (with_one_size, 24),
    "swap": (with_swap, 0),
    "expert": (with_expert_axis, 0),
    "rename": (with_new_name, 0),
}
MORE_MUTATIONS = {
    "layers-2": (with_layers, 2),
    "one-size-96": (with_one_size, 96),
    **{f"swap-{seed}": (with_swap, seed) for seed in (1, 2, 3)},
    **{f"expert-{seed}": (with_expert_axis, seed) for seed in (1, 2)},
    "rename-1": (with_new_name, 1),
}


def check_mutations(name, mutations):
    for kind, (mutate, argument) in mutations.items():
        leaves = mutate(TREES[name]["params"], argument)
        wrong = wrong_leaves(leaves, shapes_of(leaves))
        assert not wrong, (kind, wrong)
        if kind.startswith("rename"):
            assert wrong is None, kind


@every_tree
def test_mutated_trees_are_right_or_refused(name):
    check_mutations(name, MUTATIONS)


@pytest.mark.slow
@every_tree
def test_more_mutated_trees_are_right_or_refused(name):
    check_mutations(name, MORE_MUTATIONS)


def test_there_are_enough_mutated_trees():
    assert len(TREES) * (len(MUTATIONS) + len(SAME)) >= 500


def test_t5_of_hugging_face():
    attention = {k: {"kernel": jnp.zeros((12, 16))} for k in "qkv"} | {
        "o": {"kernel": jnp.zeros((16, 12))}
    }
    norm = {"layer_norm": {"weight": jnp.ones(12)}}
    mlp = {"wi_0": {"kernel": jnp.zeros((12, 20))}, "wi_1": {"kernel": jnp.zeros((12, 20))}}
    mlp["wo"] = {"kernel": jnp.zeros((20, 12))}
    positions = {"relative_attention_bias": {"embedding": jnp.zeros((32, 2))}}
    encoder = {
        "0": {"SelfAttention": attention | positions, **norm},
        "1": {"DenseReluDense": mlp, **norm},
    }
    decoder = {
        "0": {"SelfAttention": attention, **norm},
        "1": {"EncDecAttention": attention, **norm},
        "2": {"DenseReluDense": mlp, **norm},
    }
    params = {
        "shared": {"embedding": jnp.zeros((50, 12))},
        "encoder": {
            "block": {"0": {"layer": encoder}},
            "final_layer_norm": {"weight": jnp.ones(12)},
        },
        "decoder": {
            "block": {"0": {"layer": decoder}},
            "final_layer_norm": {"weight": jnp.ones(12)},
        },
    }
    library, rules = routes.auto(params)
    assert library == "Hugging Face Flax"
    leaves = {leaf.path: leaf for leaf in symoptax.route(params, rules).leaves}
    assert leaves["shared/embedding"].role == "tied_embedding"
    query = leaves["decoder/block/0/layer/1/EncDecAttention/q/kernel"]
    assert (query.role, query.matrices()) == ("attention", [(16, 12)])
    down = leaves["decoder/block/0/layer/2/DenseReluDense/wo/kernel"]
    assert (down.role, down.matrices()) == ("mlp_down", [(20, 12)])


def tree_named(name):
    return shapes_of(TREES[name]["params"])


def test_an_unknown_tree_raises_with_rules_to_begin_with():
    params = {
        "tok_embed": jnp.zeros((50, 12)),
        "blocks": [
            {"wq": jnp.zeros((12, 16)), "mix": jnp.zeros((3, 4, 5)), "ln": {"scale": jnp.ones(12)}}
        ],
        "lm_head": {"kernel": jnp.zeros((12, 50))},
    }
    with pytest.raises(RoutingError, match=r"No table .* fits") as error:
        routes.auto(params)
    assert "blocks/*/ln/scale" not in str(error.value)  # certain, so it needs no rule
    for line in (
        'ParamRule("tok_embed", "embedding", "vocab d -> vocab d"),  # (50, 12)',
        'ParamRule("blocks/*/wq", "attention", "d out -> out d"),  # (12, 16)',
        'ParamRule("blocks/*/mix", "?", "a b c -> ?"),  # (3, 4, 5)',
        'ParamRule("lm_head/kernel", "lm_head", "d vocab -> vocab d"),  # (12, 50)',
    ):
        assert line in str(error.value)
    # What is suggested are rules, where there is something to suggest.
    lines = [line for line in routes.suggestions(params) if "?" not in line]
    rules = [eval(line.split(",  #")[0], {"ParamRule": ParamRule}) for line in lines]
    del params["blocks"][0]["mix"]
    assert len(symoptax.route(params, rules).leaves) == 4


def test_what_cannot_be_told_is_refused_with_the_reason():
    leaves = TREES["gemma__gemma2_2b_like"]["params"]
    with pytest.raises(RoutingError, match=r"gating_einsum .* look alike"):
        routes.auto(shapes_of(with_one_size(leaves, 24)))
    scanned = TREES["maxtext__qwen3_dense__scanned"]["params"]
    as_many = [
        {
            **x,
            "shape": [
                22 if letter == "L" else s
                for letter, s in zip(x["axes"].split(), x["shape"], strict=True)
            ],
        }
        for x in scanned
    ]
    with pytest.raises(RoutingError, match="layers are as many as features"):
        routes.auto(shapes_of(as_many))
    with pytest.raises(RoutingError, match=r"axis 'd' would have several sizes"):
        routes.auto(shapes_of(with_swap(scanned, 0)))
    without_out = tree_named("maxtext__mistral_fused")
    del without_out["decoder"]["layers_0"]["self_attention"]["out"]
    with pytest.raises(RoutingError, match="qkv_proj"):
        routes.auto(without_out)


def test_a_masked_tree_is_refused():
    params = tree_named("tunix__qwen3_8b_like")
    params["lm_head"]["w"] = optax.MaskedNode()
    with pytest.raises(RoutingError, match="masked"):
        routes.auto(params)


def test_capped_heads_are_not_centered():
    params = tree_named("maxtext__llama2_7b_like")
    plain, capped = (
        {
            str(leaf.role)
            for leaf in symoptax.route(params, routes.auto(params, softcap=s)[1]).leaves
        }
        for s in (False, True)
    )
    assert "lm_head" in plain
    assert "lm_head_no_shift" in capped - plain


def test_layerwise_finds_the_rules_of_the_tree():
    shapes = tree_named("tunix__qwen3_0p6b_like_tied")
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)
    given = symoptax.layerwise(0.1, routes.tunix.rules(params))
    found = symoptax.layerwise(0.1, "auto")
    (want, _), (got, state) = (tx.update(params, tx.init(params), params) for tx in (given, found))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert jax.tree.structure(state) == jax.tree.structure(given.init(params))
    by_function = symoptax.layerwise(0.1, routes.tunix.rules)
    assert jax.eval_shape(by_function.init, params) == jax.eval_shape(given.init, params)


def test_rules_must_be_a_list_a_function_or_auto(untyped):
    with pytest.raises(ValueError, match="'auto'"):
        symoptax.layerwise(0.1, "automatic").init({"w": jnp.zeros((2, 2))})


def test_heads_apart():
    params = tree_named("maxtext__mistral_fused__scanned")
    rules = symoptax.apart(routes.auto(params)[1])
    matrices = {
        leaf.path.split("/", 2)[-1]: leaf.matrices()
        for leaf in symoptax.route(params, rules).leaves
    }
    # Layers and heads are batch axes: the output, and queries, keys and values side by side.
    assert matrices["self_attention/out/kernel"] == [(5, 6, 22, 8)]
    assert matrices["self_attention/qkv_proj/kernel"] == [(5, 6, 8, 22)] * 3
    assert matrices["mlp/wo/kernel"] == [(5, 37, 22)]


def test_masks_for_weight_decay():
    params = tree_named("hf__gpt2")
    rules = routes.auto(params)[1]
    every = symoptax.mask_fn(rules)(params)["transformer"]
    assert every["h"]["0"]["mlp"]["c_fc"] == {"kernel": True, "bias": False}
    assert every["wte"]["embedding"]
    assert not every["wpe"]["embedding"]
    attention = symoptax.mask_fn(rules, "attention")(params)["transformer"]
    assert attention["h"]["0"]["attn"]["c_attn"]["kernel"]
    assert not attention["h"]["0"]["mlp"]["c_fc"]["kernel"]


def test_every_table_has_a_docstring_that_says_where_it_was_read():
    for rules in LIBRARIES.values():
        module = __import__(rules.__module__, fromlist=["rules"])
        assert "Read from" in module.__doc__


def unknown_model(d=12, ff=20, transposed=(), **more):
    """Return a tree of no library, with some kernels stored (out, in)."""

    def kernel(name, rows, cols):
        return {"kernel": jnp.zeros((cols, rows) if name in transposed else (rows, cols))}

    mlp = {name: kernel(name, d, ff) for name in ("gate_proj", "up_proj")}
    mlp["down_proj"] = kernel("down_proj", ff, d)
    block = {
        "norm": {"scale": jnp.ones(d)},
        "mixer": {"q_proj": kernel("q_proj", d, 16), "o_proj": kernel("o_proj", 16, d)},
        "mlp": mlp,
        "router": kernel("router", d, 5),
    }
    return {"embed": {"embedding": jnp.zeros((50, d))}, "blocks": {"0": block}} | more


@pytest.mark.parametrize("transposed", [(), ("up_proj", "o_proj", "router")])
def test_any_other_tree_gets_what_name_and_shape_make_certain(transposed):
    params = unknown_model(transposed=transposed, lm_head={"kernel": jnp.zeros((12, 50))})
    library, rules = routes.auto(params)
    assert library == "symoptax.routes.by_name"
    leaves = {leaf.path: leaf for leaf in symoptax.route(params, rules).leaves}
    found = {
        path.split("/")[-2]: (str(leaf.role), *leaf.matrices())
        for path, leaf in leaves.items()
        if leaf.view
    }
    assert found == {
        "embed": ("embedding", (50, 12)),
        "lm_head": ("lm_head", (50, 12)),
        "gate_proj": ("mlp_in", (20, 12)),
        "up_proj": ("mlp_in", (20, 12)),
        "down_proj": ("mlp_down", (20, 12)),
        "q_proj": ("attention", (16, 12)),
        "o_proj": ("attention", (12, 16)),
        "router": ("router_no_shift", (5, 12)),
    }
    places = {
        path.split("/")[-2]: leaf.view.locate("d", leaf.shape).axis
        for path, leaf in leaves.items()
        if leaf.view
    }
    assert places["up_proj"] == ("up_proj" in transposed)
    without = symoptax.route(unknown_model(), routes.auto(unknown_model())[1]).leaves
    assert "tied_embedding" in {str(leaf.role) for leaf in without}


@pytest.mark.parametrize(
    "params",
    [
        unknown_model(ff=12),  # which axis is d?
        unknown_model(d=16),
        unknown_model(d=50),
        unknown_model(lm_head={"kernel": jnp.zeros((12, 49))}),
        unknown_model(wte={"embedding": jnp.zeros((50, 12))}),
        unknown_model(mystery=jnp.zeros((12, 20))),
    ],
    ids=["d=ff", "d=heads", "d=vocab", "another head", "two tables", "unknown name"],
)
def test_what_is_not_certain_raises(params):
    with pytest.raises(RoutingError, match="ParamRule"):
        routes.auto(params)
