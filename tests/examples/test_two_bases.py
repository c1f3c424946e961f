"""Whole runs in two bases that mean the same: images of each other, or not, as the theory says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import symmetry

TURNED = ("values turned", "queries and keys turned", "residual stream turned")


def attention(query, key, value, *, is_causal):
    """JAX's own takes its softmax in float32, whatever the dtype."""
    assert is_causal
    shared = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, shared, axis=2) for x in (key, value))
    logits = jnp.einsum("bthk,bshk->bhts", query, key) / np.sqrt(query.shape[-1])
    length = query.shape[1]
    seen = np.tril(np.ones((1, 1, length, length), bool))
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights, value)


@pytest.mark.parametrize("steps", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_runs_in_two_bases_are_images_of_each_other(x64, monkeypatch, steps):
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    result = symmetry.distances(jnp.float64, ["layerwise", "adamw"], steps)
    assert set(result) == set(symmetry.MOVES)
    for move, lines in result.items():
        assert max(lines["layerwise"]) <= 1e-9, move  # 3e-12 is seen after 20
        if move in TURNED:
            assert min(lines["adamw"]) > 1e-2, move
        else:
            assert max(lines["adamw"]) <= 1e-9, move


@pytest.mark.slow
def test_in_float32_they_are_so_to_rounding():
    # Relative to the way travelled, after steps whose smallest directions have converged.
    for move, lines in symmetry.distances(names=["layerwise, 8 steps"]).items():
        assert max(lines["layerwise, 8 steps"]) <= 1e-4, move  # 4e-5 is seen


def test_moves_do_not_change_the_loss():
    for name, case in symmetry.CASES.items():
        trainer = symmetry.Trainer(case, symmetry.optimizers(case.rules)["adamw"], jnp.float32)
        graphdef = symmetry.nnx.split(case.model())[0]
        loss = jax.jit(lambda p, t, g=graphdef: symmetry.loss_fn(g, p, t))
        (tokens,) = symmetry.batches(1)
        expected = float(loss(trainer.start, tokens))
        for move_name, move in symmetry.MOVES.items():
            moved = trainer.moved(trainer.start, move)
            there = float(loss(moved, move.tokens(tokens)))
            assert there == pytest.approx(expected, rel=2e-6), (name, move_name)
            # ... and they move something, where the model has it.
            changed = [
                np.any(a != b)
                for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(trainer.start), strict=True)
            ]
            assert any(changed) == (name == "olmoe" or move_name not in symmetry.OF_OLMOE)
