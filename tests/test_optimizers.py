"""What single optimizers compute, and what they refuse."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import symoptax

PARAMS = {"kernel": jnp.full((4, 8), 7.0)}
GRADS = {"kernel": jax.random.normal(jax.random.key(0), (4, 8))}


def one_step(tx, params=PARAMS):
    updates, _ = tx.update(GRADS, tx.init(params), params)
    return optax.apply_updates(params, updates)["kernel"]


@pytest.mark.parametrize(
    ("norm", "size"),
    [
        # A Flax kernel of fan in 4 and fan out 8; sizes are of the norm that the ball is of.
        ("spectral", lambda u: jnp.linalg.norm(u, 2) / (8 / 4) ** 0.5),
        ("embedding", lambda u: jnp.sqrt(jnp.mean(u**2, axis=1)).max()),
        ("row", lambda u: jnp.linalg.norm(u, axis=0).max() * 4**0.5),
        ("sign", lambda u: jnp.abs(u).max() * 4),
    ],
)
def test_scion_steps_to_the_border_of_its_ball(norm, size):
    moved = one_step(symoptax.scion(0.01, radius=50.0, norm=norm, method="svd"))
    np.testing.assert_allclose(size((PARAMS["kernel"] - moved) / 0.01), 50.0, rtol=1e-3)
    inside = one_step(symoptax.scion(0.01, radius=50.0, norm=norm, method="svd", constrained=True))
    np.testing.assert_allclose(inside, moved - 0.01 * PARAMS["kernel"], rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": "rms"},
        {"norm": "cube"},
        {"constrained": True, "weight_decay": 0.1},
        {"constrained": True, "independent_decay": True},
        {"constrained": True, "cautious": True},
    ],
    ids=str,
)
def test_scion_refuses_what_its_norm_or_its_constraint_decides(options, untyped):
    with pytest.raises(ValueError, match=r"scale|norm|constrained"):
        symoptax.scion(0.1, **options)


@pytest.mark.parametrize("beta", [-0.1, 1.0, 95])
def test_a_momentum_that_would_not_train_is_refused(beta):
    with pytest.raises(ValueError, match="decay rate"):
        symoptax.muon(0.1, beta)


def test_a_momentum_in_float16_is_refused():
    with pytest.raises(ValueError, match="bfloat16"):
        symoptax.row_norm_m(0.1, mu_dtype=jnp.float16)


def test_without_momentum_there_is_no_state():
    for tx in (symoptax.row_norm_m(0.1, 0), symoptax.row_norm_m(0.1, 0.0), symoptax.ssd(0.1)):
        assert jax.tree.leaves(tx.init(PARAMS)) == []


def test_a_map_takes_one_scale_and_layerwise_keeps_it():
    own = symoptax.scaled(symoptax.polar_map(), lambda m, n: 3.0)
    with pytest.raises(ValueError, match="scale already"):
        symoptax.scaled(own, "rms")
    rules = [symoptax.ParamRule("kernel", "attention", "d out -> out d")]
    stack = symoptax.layerwise(0.1, rules, updates={"attention": own})
    by_hand = symoptax.matrix_optimizer(0.1, update_map=own, view="d out -> out d")
    chex.assert_trees_all_close(one_step(stack), one_step(by_hand), rtol=1e-6)
    report = symoptax.routing_report(PARAMS, rules, updates={"attention": own})
    assert report.rows[0].scale == "3"


def test_the_dual_norm_belongs_to_a_single_step():
    for several in (symoptax.hybrid_map(), symoptax.centered(symoptax.polar_map())):
        with pytest.raises(ValueError, match="several stages"):
            symoptax.dual_norm_scaled(several, 1.0)


def test_help_lists_what_the_signature_leaves_out():
    assert "steps, method, coefficients" in symoptax.right_polar_grad_m.__doc__
    assert "update_map, nesterov" in symoptax.matrix_optimizer.__doc__


def test_the_report_shows_a_transformation_its_leaf_in_its_tree():
    params = {"a": {"kernel": jnp.ones((4, 8))}, "b": jnp.ones(3)}
    rules = [
        symoptax.ParamRule("a/kernel", "attention", "d out -> out d"),
        symoptax.ParamRule("b", "other"),
    ]
    own = optax.chain(symoptax.momentum(0.9), symoptax.polar(view=symoptax.view_fn(rules)))
    report = symoptax.routing_report(params, rules, updates={"attention": own})
    assert [row.state_bytes for row in report.rows] == [4 * 32, 2 * 4 * 3]
