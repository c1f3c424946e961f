"""Rows without a gradient stand still: in the wrapper, in the stack, in any basis, on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import symoptax
from symoptax import ParamRule

GATE_UP = symoptax.MatrixView("expert d (neuron two) -> expert two neuron d", sizes={"two": 2})
RULES = [
    ParamRule("embedding", "embedding", "d vocab -> vocab d"),
    ParamRule("expert_in", "expert_in", GATE_UP),
    ParamRule("expert_down", "expert_down", "neuron expert d -> expert neuron d"),
    ParamRule("router", "router", "d expert -> expert d"),
    ParamRule("router_no_shift", "router_no_shift", "expert d -> expert d"),
    ParamRule("tied", "tied_embedding", "vocab d -> vocab d"),
    ParamRule("head", "lm_head", "d vocab -> vocab d"),
    ParamRule("mlp", "mlp_in", "d neuron -> neuron d"),
    ParamRule("bias", "other"),
]
SHAPES = {
    "embedding": (4, 6),
    "expert_in": (3, 4, 10),
    "expert_down": (5, 3, 4),
    "router": (4, 3),
    "router_no_shift": (3, 4),
    "tied": (6, 4),
    "head": (4, 6),
    "mlp": (4, 5),
    "bias": (4,),
}
# What no data has picked, in the leaf as stored: a token, a router's row, an expert.
UNPICKED = {
    "embedding": np.s_[:, 2],
    "expert_in": np.s_[1],
    "expert_down": np.s_[:, 1],
    "router": np.s_[:, 1],
    "router_no_shift": np.s_[1],
    "tied": np.s_[2],
    "head": np.s_[:, 2],
    "mlp": np.s_[:, 2],
    "bias": np.s_[2],
}
PICKED_BY_DATA = ["embedding", "expert_in", "expert_down", "router_no_shift"]


def gradients(seed, *, unpicked=()):
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    grads = {n: jax.random.normal(k, SHAPES[n]) for n, k in zip(sorted(SHAPES), keys, strict=True)}
    return {n: g.at[UNPICKED[n]].set(0) if n in unpicked else g for n, g in grads.items()}


def steps(tx, *grads):
    params = jax.tree.map(jnp.ones_like, grads[0])
    state, updates = tx.init(params), []
    for each in grads:
        update, state = tx.update(each, state, params)
        updates.append(update)
    return updates, state


def test_what_no_data_picks_any_more_takes_a_few_steps_and_stops():
    tx = symoptax.layerwise(0.1, RULES, beta=0.7)  # 1 / (1 - beta) is 3.3
    missing = gradients(1, unpicked=SHAPES)
    updates, _ = steps(tx, gradients(0), *[missing] * 5, gradients(2), missing)
    for name in SHAPES:
        moved = [bool(np.any(update[name][UNPICKED[name]])) for update in updates]
        if name in PICKED_BY_DATA:
            assert moved == [True] * 4 + [False] * 2 + [True] * 2, name
        else:
            assert all(moved) or name == "bias", name
        assert all(np.any(update[name]) for update in updates), name


def test_what_was_never_picked_never_moves():
    updates, _ = steps(symoptax.layerwise(0.1, RULES), *[gradients(0, unpicked=SHAPES)] * 3)
    for name in PICKED_BY_DATA:
        assert not any(np.any(update[name][UNPICKED[name]]) for update in updates)


def test_others_are_updated_as_if_the_still_rows_were_not_there():
    missing = [gradients(seed, unpicked=["embedding"]) for seed in range(4)]
    tx = symoptax.layerwise(0.1, RULES, beta=0.5)
    never, _ = steps(tx, *missing)
    once, _ = steps(tx, gradients(0), *missing[1:])
    np.testing.assert_allclose(once[-1]["embedding"], never[-1]["embedding"], atol=1e-6)


def test_without_missing_gradients_nothing_changes():
    grads = gradients(0), gradients(1)
    ours, _ = steps(symoptax.layerwise(0.1, RULES), *grads)
    plain, _ = steps(symoptax.layerwise(0.1, RULES, lazy=False), *grads)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(one, other)


def test_lazy_false_goes_on_with_full_steps():
    grads = [gradients(0), *[gradients(1, unpicked=["embedding"])] * 30]
    updates, _ = steps(symoptax.layerwise(0.1, RULES, lazy=False), *grads)
    sizes = [float(jnp.linalg.norm(update["embedding"][:, 2])) for update in updates]
    assert sizes[-1] > 0.5 * max(sizes)


def test_an_optimizer_of_the_papers_is_lazy_on_request():
    first = jax.random.normal(jax.random.key(0), (6, 4))
    for lazy in (False, True):
        tx = symoptax.row_norm_m(0.1, 0.5, lazy=lazy)
        updates, _ = steps(tx, first, *[first.at[2].set(0)] * 2)
        assert bool(np.any(updates[-1][2])) is not lazy


def test_the_counters_lie_beside_the_parameters_in_the_state():
    tx = symoptax.layerwise(0.1, RULES)
    _, state = steps(tx, gradients(0), gradients(1, unpicked=SHAPES))
    inner = state["updates"].inner_states
    table = inner["embedding"].inner_state["momentum"]
    assert table.mu["embedding"].shape == (4, 6)
    np.testing.assert_array_equal(table.unseen["embedding"], [[0, 0, 1, 0, 0, 0]])
    gate_up = inner["expert_in"].inner_state["momentum"].unseen["expert_in"]
    np.testing.assert_array_equal(gate_up[:, 0, 0], [0, 1, 0])
    assert gate_up.shape == (3, 1, 10)
    assert not hasattr(inner["mlp_in"].inner_state["momentum"], "unseen")


def test_it_refuses_a_view_that_packs_columns_with_rows():
    view = symoptax.MatrixView("(vocab d) -> vocab d", sizes={"d": 2})
    with pytest.raises(ValueError, match="packs columns"):
        symoptax.lazy_momentum(0.9, view).init(jnp.zeros(6))


def test_it_is_momentum_where_no_momentum_is_asked_for():
    grads = jnp.ones((2, 2))
    tx = symoptax.lazy_momentum(0.0)
    assert jax.tree.leaves(tx.init(grads)) == []


@pytest.mark.parametrize("update_map", [symoptax.row_norm_map, symoptax.right_polar_map])
def test_it_commutes_with_whatever_the_map_commutes_with(update_map, x64):
    key, still = jax.random.key(3), jnp.array([1, 4])
    first, second = jax.random.normal(key, (2, 7, 5))
    tx = optax.chain(symoptax.lazy_momentum(0.5), symoptax.matrixwise(update_map()))
    symmetry = symoptax.Symmetry(symoptax.Group.PERMUTATION, symoptax.Group.ORTHOGONAL)
    moved = symoptax.random_element(symmetry, (7, 5), key)
    grads = [first, *[second.at[still].set(0)] * 3]
    plain, _ = steps(tx, *grads)
    turned, _ = steps(tx, *map(moved.act, grads))
    np.testing.assert_allclose(turned, [moved.act(update) for update in plain], atol=1e-12)
    assert not np.any(plain[-1][still])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh_it_is_the_same_and_counters_are_spread_as_their_rows(kind):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    rules = [ParamRule("table", "embedding", "vocab d -> vocab d")]
    keys = jax.random.split(jax.random.key(0), 4)
    grads = [{"table": jax.random.normal(key, (16, 8))} for key in keys]
    grads[1:] = [{"table": g["table"].at[jnp.array([0, 5])].set(0)} for g in grads[1:]]
    tx = symoptax.layerwise(0.1, rules, beta=0.5)
    expected, _ = steps(tx, *grads)
    for spec, of_counters in ((P("a"), P("a")), (P(None, "a"), P()), (P("b", "a"), P("b"))):
        place = NamedSharding(mesh, spec)
        params = jax.device_put({"table": jnp.ones((16, 8))}, place)
        shardings = symoptax.state_shardings(tx, params)
        state = jax.jit(tx.init, out_shardings=shardings)(params)
        update = jax.jit(tx.update, out_shardings=({"table": place}, shardings))
        counters = state["updates"].inner_states["embedding"].inner_state["momentum"].unseen
        assert counters["table"].sharding.is_equivalent_to(NamedSharding(mesh, of_counters), 2)
        for each, wanted in zip(grads, expected, strict=True):
            got, state = update(jax.device_put(each, place), state, params)
            np.testing.assert_allclose(got["table"], wanted["table"], atol=1e-4)
