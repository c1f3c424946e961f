"""Trajectories of the authors' PyTorch optimizers, stored, against ours and a float64 loop.

`parity.npz` holds for each case of `parity.json` the parameter W, six gradients G, and the
parameter after each step as the public PyTorch code computes it in float32 on a CPU.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import oracle
import symoptax

DATA = pathlib.Path(__file__).parent / "data"
SETTINGS = json.loads((DATA / "parity.json").read_text())


def _as_stored(update):
    return update


def _transposed(update):
    return lambda d: np.swapaxes(update(np.swapaxes(d, -1, -2)), -1, -2)


def _gpt_oss_pair(update):
    def on_leaf(leaf):
        e, d, r = leaf.shape[0], leaf.shape[1], leaf.shape[2] // 2
        pair = np.concatenate([leaf[..., 0::2], leaf[..., 1::2]], axis=1).swapaxes(1, 2)
        result = np.empty((e, d, 2 * r))
        gate, up = np.split(update(pair).swapaxes(1, 2), 2, axis=1)
        result[..., 0::2], result[..., 1::2] = gate, up
        return result

    return on_leaf


def _olmoe_pair(update):
    def on_leaf(leaf):
        pair = update(np.concatenate(np.split(leaf, 2, axis=1), axis=2))
        return np.concatenate(np.split(pair, 2, axis=2), axis=1)

    return on_leaf


# orientation: (our view, the same in NumPy). A pair is one row per neuron, its gate then its up.
ORIENTATIONS = {
    "row": (None, _as_stored),
    "col": ("n m -> m n", _transposed),
    "gpt_oss_gate_up_pair": (
        symoptax.MatrixView("e d (neuron gate_up) -> e neuron (gate_up d)", sizes={"gate_up": 2}),
        _gpt_oss_pair,
    ),
    "olmoe_gate_up_pair": (
        symoptax.MatrixView("e (gate_up neuron) d -> e neuron (gate_up d)", sizes={"gate_up": 2}),
        _olmoe_pair,
    ),
}

FACTORIES = {
    "row_norm": symoptax.row_norm_m,
    "right_polar": symoptax.right_polar_grad_m,
    "left_polar": symoptax.left_polar_grad_m,
    "hybrid": symoptax.hybrid_polar_grad_m,
}


def _oracle(case, settings):
    if case.startswith("row_norm"):
        update = oracle.row_norm
    elif case.startswith("hybrid"):
        alpha = settings.get("alpha", 0.0)
        update = lambda d: oracle.hybrid(d, alpha, settings["order"])  # noqa: E731
    else:
        update = lambda d: oracle.polar(d, settings["alpha"])  # noqa: E731
    update = oracle.centered(update) if settings.get("centered") else update
    return ORIENTATIONS[settings.get("orientation", "row")][1](update)


def _factory(case, settings, **numerics):
    options = {k: settings[k] for k in ("beta", "alpha", "weight_decay", "order") if k in settings}
    if settings.get("order") == "polar_then_row":
        options["alpha"] = 0.0  # the authors' alpha=1 does nothing in this order
    view = ORIENTATIONS[settings.get("orientation", "row")][0]
    numerics = {} if case.startswith("row_norm") else numerics
    centered = bool(settings.get("centered"))
    build = next(f for name, f in FACTORIES.items() if case.startswith(name))
    return build(settings["lr"], centered=centered, view=view, **options, **numerics)


def _run(optimizer, w, gradients):
    w = jnp.asarray(w)
    state, steps = optimizer.init(w), []
    for g in gradients:
        updates, state = optimizer.update(jnp.asarray(g, w.dtype), state, w)
        w = optax.apply_updates(w, updates)
        steps.append(np.asarray(w))
    return np.array(steps)


@pytest.fixture(scope="module")
def stored():
    with np.load(DATA / "parity.npz") as archive:
        return {name: archive[name] for name in archive}


@pytest.mark.parametrize("case", SETTINGS)
def test_float64_loop(x64, stored, case):
    """Ours in float64, with the exact polar factor, is the oracle's loop to rounding."""
    settings = SETTINGS[case]
    w, gradients = stored[f"{case}/W"].astype(np.float64), stored[f"{case}/G"]
    ours = _run(_factory(case, settings, method="svd"), w, gradients)
    decay = settings.get("weight_decay", 0.0)
    exact = oracle.trajectory(
        w,
        gradients,
        _oracle(case, settings),
        lr=settings["lr"],
        beta=settings["beta"],
        weight_decay=decay,
    )
    assert _norm(ours - exact).max() <= 1e-10 * _norm(exact - w).min()


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("case", SETTINGS)
def test_stored_trajectory(stored, case, precision):
    settings = SETTINGS[case]
    w, gradients, theirs = (stored[f"{case}/{part}"] for part in ("W", "G", "traj"))
    with jax.enable_x64(precision == "float64"):
        ours = _run(_factory(case, settings, steps=8), w.astype(precision), gradients)
    displacement = _norm(theirs - w.astype(np.float64))
    # The map in float32: row norms to a few roundings, the authors' iterative root to 1e-3.
    map_error = (1e-6 if case.startswith("row_norm") else 1e-3) * displacement
    # W itself: each float32 loop rounds it once per step, and once more for the decay, by at most
    # half an ulp per entry.
    loops = 2 if precision == "float32" else 1
    rounded = loops * (2 if "weight_decay" in settings else 1) * np.arange(1, len(theirs) + 1)
    weight_error = rounded * np.linalg.norm(np.spacing(np.abs(w)).ravel() / 2)
    assert np.all(_norm(ours.astype(np.float64) - theirs) <= map_error + weight_error)


def _norm(trajectory):
    """The Frobenius norm of each step."""
    return np.linalg.norm(trajectory.reshape(len(trajectory), -1).astype(np.float64), axis=-1)
