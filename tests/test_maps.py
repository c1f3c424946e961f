"""Every map against its float64 oracle, on every kind of matrix, and every wrapper of a map."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import symoptax

# Twelve steps take singular values down to 1e-4 of the largest to 1 within rounding: the slopes
# of the first seven rows multiply to 3000, the five Taylor steps converge quadratically or better.
STEPS = {"steps": 12}
DIRECT, GRAM, SVD = STEPS | {"method": "direct"}, STEPS | {"method": "gram"}, {"method": "svd"}


def _graded(build):
    """A map with a dual norm: (alpha, numerics) -> map."""
    return lambda alpha, options: symoptax.dual_norm_scaled(build(**options), alpha)


def _fixed(build):
    return lambda alpha, options: build()


def _hybrid(**fixed):
    takes_alpha = fixed["order"] == "row_then_polar"
    return lambda alpha, options: symoptax.hybrid_map(alpha * takes_alpha, **fixed, **options)


def _centered(builder):
    return lambda alpha, options: symoptax.centered(builder(alpha, options))


_RTP, _PTR = {"order": "row_then_polar"}, {"order": "polar_then_row"}
POLAR_THEN_ROW = functools.partial(oracle.hybrid, **_PTR)
CENTERED_POLAR_THEN_ROW = functools.partial(oracle.centered_hybrid, **_PTR)

# name: (builder of the map from alpha and numerics, oracle); the first table ignores alpha.
PLAIN = {
    "row_norm": (_fixed(symoptax.row_norm_map), oracle.row_norm),
    "column_norm": (_fixed(symoptax.column_norm_map), oracle.column_norm),
    "sign": (_fixed(symoptax.sign_map), np.sign),
    "center": (_fixed(symoptax.center_map), oracle.center),
    "centered_row_norm": (
        _centered(_fixed(symoptax.row_norm_map)),
        oracle.centered(oracle.row_norm),
    ),
    "polar_then_row_right": (_hybrid(**_PTR), POLAR_THEN_ROW),
    "polar_then_row_left": (_hybrid(**_PTR, side="left"), POLAR_THEN_ROW),
    "centered_polar_then_row": (_centered(_hybrid(**_PTR)), CENTERED_POLAR_THEN_ROW),
}
WITH_ALPHA = {
    "polar": (_graded(symoptax.polar_map), oracle.polar),
    "right_polar": (_graded(symoptax.right_polar_map), oracle.polar),
    "left_polar": (_graded(symoptax.left_polar_map), oracle.polar),
    "row_then_polar_right": (_hybrid(**_RTP), oracle.hybrid),
    "row_then_polar_left": (_hybrid(**_RTP, side="left"), oracle.hybrid),
    "centered_polar": (_centered(_graded(symoptax.polar_map)), oracle.centered(oracle.polar)),
    "centered_right_polar": (
        _centered(_graded(symoptax.right_polar_map)),
        oracle.centered(oracle.polar),
    ),
    "centered_left_polar": (
        _centered(_graded(symoptax.left_polar_map)),
        oracle.centered(oracle.polar),
    ),
    "centered_row_then_polar": (_centered(_hybrid(**_RTP)), oracle.centered_hybrid),
}
MAPS = PLAIN | WITH_ALPHA

# Condition 20 at most. Few shapes, so that few programs are compiled.
INPUTS = {
    "square": oracle.conditioned(20, 8, 8),
    "tall": oracle.conditioned(20, 12, 6, seed=1),
    "wide": oracle.conditioned(20, 6, 12, seed=2),
    "two batch axes": np.stack(
        [[oracle.conditioned(20, 12, 6, seed=10 * i + j) for j in range(3)] for i in range(2)]
    )
    * np.array([1e-9, 1.0, 1e6])[:, None, None],
    "rank deficient": oracle.with_spectrum([1, 0.5, 0.1], 12, 6, seed=3),
    "centered": oracle.center(oracle.conditioned(10, 12, 6, seed=4)),
    "repeated rows": np.repeat(oracle.conditioned(20, 6, 6, seed=5), 2, axis=0),
    "some rows zero": oracle.conditioned(20, 12, 6, seed=6) * (np.arange(12) % 3 > 0)[:, None],
    "zero": np.zeros((12, 6)),
}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", MAPS)
def test_map_equals_oracle(x64, name, kind):
    builder, expected = MAPS[name]
    d = INPUTS[kind]
    # Every alpha and every method once: the power does not know how the factor was computed.
    for alpha, options in ((0.0, DIRECT), (0.5, GRAM), (1.0, SVD)):
        update = builder(alpha, options)(jnp.asarray(d))
        want = expected(d, alpha) if name in WITH_ALPHA else expected(d)
        assert update.dtype == jnp.float64
        if kind == "zero":
            assert not np.any(update)
        # A few dozen float64 roundings, amplified by at most the slopes 3000 of the steps.
        scale = np.max(np.abs(want), axis=(-2, -1), keepdims=True)
        worst = np.max(np.abs(update - want) / np.where(scale, scale, 1))
        assert worst <= 1e-10, (alpha, options)


# The bare transformations: public name, arguments, the map that each must be.
TRANSFORMATIONS = [
    ("row_norm", {}, symoptax.row_norm_map()),
    ("column_norm", {}, symoptax.column_norm_map()),
    ("center", {}, symoptax.center_map()),
    ("polar", {"alpha": 1.0}, symoptax.dual_norm_scaled(symoptax.polar_map(), 1.0)),
    ("right_polar", {"steps": 3}, symoptax.right_polar_map(steps=3)),
    ("left_polar", {"alpha": 0.5}, symoptax.dual_norm_scaled(symoptax.left_polar_map(), 0.5)),
    ("hybrid", {"side": "left", "alpha": 1.0}, symoptax.hybrid_map(1.0, side="left")),
    ("hybrid", _PTR, symoptax.hybrid_map(order="polar_then_row")),
    ("centered_row_norm", {}, symoptax.centered(symoptax.row_norm_map())),
    ("centered_right_polar", {}, symoptax.centered(symoptax.right_polar_map())),
    ("centered_left_polar", {}, symoptax.centered(symoptax.left_polar_map())),
    ("centered_hybrid", {"steps": 4}, symoptax.centered(symoptax.hybrid_map(steps=4))),
]


@pytest.mark.parametrize(("name", "options", "update_map"), TRANSFORMATIONS)
def test_transformation_is_its_map(name, options, update_map):
    leaf = jnp.asarray(oracle.normal(3, 4, 6), jnp.float32)
    transformation = getattr(symoptax, name)(view="m layer n -> layer m n", **options)
    update, _ = transformation.update({"w": leaf}, transformation.init({"w": leaf}))
    want = update_map(leaf.transpose(1, 0, 2)).transpose(1, 0, 2)
    np.testing.assert_array_equal(update["w"], want)


def test_scaled_multiplies_by_a_function_of_the_shape():
    d = jnp.asarray(oracle.normal(6, 4), jnp.float32)
    plain = symoptax.right_polar_map()
    for rule, factor in {
        "rms": 0.2 * 6**0.5,
        "spectral": 1.5**0.5,
        "moonlight": 0.2 * 6**0.5,
        lambda m, n: m * n: 24,
    }.items():
        scaled = symoptax.scaled(plain, rule)(d)
        np.testing.assert_allclose(scaled, factor * plain(d), rtol=1e-6)
    # "rms" is what it says for every map that has a size of its own.
    for update_map in (plain, symoptax.row_norm_map(), symoptax.column_norm_map()):
        size = jnp.sqrt(jnp.mean(jnp.square(symoptax.scaled(update_map, "rms")(d))))
        assert size == pytest.approx(0.2, rel=1e-5)


@pytest.mark.parametrize("order", ["row_then_polar", "polar_then_row"])
@pytest.mark.parametrize("shape", [(12, 40), (40, 12)])
def test_the_side_of_a_hybrid_changes_what_it_costs_alone(x64, order, shape):
    d = jnp.asarray(np.random.default_rng(0).normal(size=shape)).at[3].set(0)
    auto, *sides = (symoptax.hybrid_map(order=order, side=s) for s in ("auto", "left", "right"))
    for one_sided in sides:
        np.testing.assert_allclose(one_sided(d), auto(d), atol=1e-11)
    assert np.all(auto(d)[3] == 0)
    cheapest = min(one_sided.work(*shape).multiplications for one_sided in sides)
    assert auto.work(*shape).multiplications == cheapest


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: symoptax.hybrid_map(order="polar_first"), "row_then_polar or polar_then_row"),
        (lambda: symoptax.hybrid_map(side="top"), "'left', 'right' or 'auto'"),
        (lambda: symoptax.hybrid_map(0.5, order="polar_then_row"), "alpha=0"),
        (lambda: symoptax.shape_scale("rmsnorm", None), "rms, spectral, moonlight"),
        (
            lambda: symoptax.scaled(symoptax.dual_norm_scaled(symoptax.polar_map(), 1.0), "rms"),
            "alpha=0",
        ),
    ],
)
def test_what_cannot_work_is_refused_when_built(untyped, build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("shape", [(8, 32), (64, 32), (128, 64)])
def test_centered_left_polar_survives_the_singular_gram_matrix(shape):
    """Forty normal matrices as one stack; the centered left Gram matrix is exactly singular."""
    d = oracle.normal(40, *shape).astype(np.float32)
    apply = jax.jit(symoptax.centered(symoptax.left_polar_map()))
    update = np.asarray(apply(d), np.float64)
    want = oracle.centered(oracle.polar)(d)
    # Eight steps are exact to 5e-6 in float32, whatever the null direction of the Gram matrix does.
    assert np.max(np.abs(update - want)) <= 1e-5
    assert np.max(np.abs(update.mean(axis=-2))) <= 1e-6
    order = np.random.default_rng(1).permutation(shape[0])
    assert np.max(np.abs(np.asarray(apply(d[:, order])) - update[:, order])) <= 1e-5


def test_rows_without_gradient_stay_zero_in_an_embedding():
    seen = np.random.default_rng(2).choice(1000, size=10, replace=False)
    d = np.zeros((1000, 64), np.float32)
    d[seen] = oracle.normal(10, 64)
    update = np.asarray(symoptax.right_polar_map()(jnp.asarray(d)))
    assert not np.any(np.delete(update, seen, axis=0))
    assert np.max(np.abs(update - oracle.polar(d))) <= 1e-5


@pytest.mark.parametrize(
    "name", ["center", "centered_row_norm", "centered_left_polar", "centered_row_then_polar"]
)
def test_equal_rows_are_zero_modulo_the_shift(name):
    """`U(D + 1 c^T) = U(D)` at D = 0: the last projection removes the normalised rounding."""
    d = np.tile(oracle.normal(8, 1, 6), (1, 64, 1)).astype(np.float32)
    assert np.max(np.abs(MAPS[name][0](0.0, {})(jnp.asarray(d)))) <= 1e-5
