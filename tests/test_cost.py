"""What a polar factor is said to cost, and how its steps are grouped."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import pytest

from symoptax import BFLOAT16, BFLOAT16_X3, FLOAT32, TABLES, Numerics, cost, polar_factor
from symoptax._coefficients import coefficient_rows
from symoptax._cost import _slope_limit, gram_sizes, segments, small_products

DEFAULT = "minimax_9_5_l7e-4"
# Refused with products coarser than float32.
SHARP = (DEFAULT, "minimax_9_l3e-3", "cans_cubic_l1e-3")
NUMERICS = [FLOAT32, BFLOAT16, BFLOAT16_X3, Numerics(storage=jnp.bfloat16)]


@pytest.mark.parametrize(
    ("shape", "options", "parts", "long", "small"),
    [
        # Default: one row of degree 9 (two products) and four of degree 5 (one each).
        ((64, 64), {}, (1, 1, 1, 1, 1), 10, 6),
        ((64, 256), {"method": "direct"}, (1, 1, 1, 1, 1), 10, 6),
        ((64, 256), {}, (5,), 2, 6 + 3 * 4),
        ((256, 64), {}, (5,), 2, 6 + 3 * 4),
        ((7, 3, 64, 256), {}, (5,), 2, 6 + 3 * 4),
        ((64, 256), {"steps": 1}, (1,), 2, 2),
        ((64, 256), {"steps": 3, "method": "gram"}, (3,), 2, 4 + 3 * 2),
        ((64, 256), {"coefficients": "muon_quintic"}, (5,), 2, 5 + 3 * 4),
        ((64, 64), {"coefficients": "muon_quintic"}, (1, 1, 1, 1, 1), 10, 5),
        # Degree 9 throughout, two small products a row.
        ((64, 64), {"coefficients": "minimax_9_l3e-3", "steps": 3}, (1, 1, 1), 6, 6),
        ((64, 256), {"coefficients": "minimax_9_l3e-3", "steps": 3}, (3,), 2, 6 + 3 * 2),
        # Rows of your own of degree 7 take as many as of degree 9.
        ((64, 64), {"coefficients": [(1.0, 1.0, 1.0, 1.0)], "steps": 2}, (1, 1), 4, 4),
    ],
)
def test_products_counted_by_hand(shape, options, parts, long, small):
    price = cost(shape, **options)
    assert price.segments == parts
    assert price.method == ("direct" if set(parts) == {1} else "gram")
    assert (price.long_products, price.small_products) == (long, small)
    *stack, m, n = shape
    k, length = min(m, n), max(m, n)
    one = long * k * k * length + small * k**3
    assert price.multiplications == math.prod(stack) * one


def test_the_long_side_may_be_chosen():
    # A Gram matrix of 256 columns is dearer than one of 64 rows.
    assert cost((64, 256), side="right").multiplications > cost((64, 256)).multiplications
    assert cost((64, 256), side="right") == cost((256, 64), side="left")
    assert cost((64, 256), side="left") == cost((64, 256)) == cost((256, 64))
    # A product of 256 x 256 matrices costs four of 256 x 64 here, so every step is direct.
    assert cost((64, 256), side="right").method == "direct"


def test_three_rows_of_degree_9_take_fewer_products_than_five_of_muon():
    for shape in ((256, 256), (256, 1024)):
        nine = cost(shape, steps=3, coefficients="minimax_9_l3e-3")
        five = cost(shape, steps=5, coefficients="muon_quintic")
        assert nine.multiplications < five.multiplications


def test_bytes():
    # One segment of one step: three factors of two long products, and R, R^2, R^4 at 64 x 64, each
    # product with two reads and a write, and one pass over three matrices.
    k, length = 64, 256
    entries = 3 * k * length + 2 * k * k + 3 * k * k * (2 + 1)
    assert cost((k, length), steps=1).small_products == 2
    assert cost((k, length), steps=1).bytes == 4 * entries
    assert cost((5, k, length), steps=1).bytes == 5 * 4 * entries
    assert cost((k, length), steps=1, dtype=jnp.bfloat16).bytes == 4 * entries
    assert cost((k, length), steps=1, dtype=jnp.float64).bytes == 8 * entries
    halved = Numerics(storage=jnp.bfloat16)
    # Another table, of degree 5 from the start.
    assert cost((k, length), steps=1, numerics=halved).bytes == 2 * (entries - 3 * k * k)


def test_costs_are_printed():
    text = str(cost((4, 512, 1536)))
    assert text.startswith("gram, steps 5: 2 long and 18 small products, 12.9 G multiplications, ")
    assert text.endswith(" MiB moved")
    assert str(cost((64, 64))).startswith("direct, steps 1+1+1+1+1: 10 long and 6 small products")


@pytest.mark.parametrize(
    ("table", "method", "steps"),
    [
        *itertools.product(
            (DEFAULT, "minimax_9_l3e-3", "cans_cubic_l1e-3", "muon_quintic"),
            ("direct", "gram"),
            (5,),
        ),
        (DEFAULT, "gram", 8),
        ("polar_express_l1e-3_s1.01", "auto", 8),
    ],
)
def test_xla_counts_the_same_operations(table, method, steps):
    options = {"method": method, "steps": steps, "coefficients": table}
    for shape in ((256, 1024), (768, 256)):
        polar = jax.jit(functools.partial(polar_factor, **options))
        program = polar.lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile()
        # Elementwise passes take about one operation in k.
        flops = program.cost_analysis()["flops"]
        assert 1 <= flops / (2 * cost(shape, **options).multiplications) <= 1.05


@pytest.mark.parametrize("table", TABLES)
def test_auto_is_never_dearer(table):
    shapes = ((1, 1), (1, 64), (48, 48), (48, 60), (48, 96), (48, 3072), (1024, 1024), (4096, 1024))
    usable = [FLOAT32] if table in SHARP else NUMERICS
    for shape, steps, numerics in itertools.product(shapes, range(1, 13), usable):
        options = {"steps": steps, "coefficients": table, "numerics": numerics}
        price = cost(shape, **options)
        for method in ("direct", "gram"):
            other = cost(shape, method=method, **options)
            assert price.multiplications <= other.multiplications


def splits(rows):
    """Return all ways of cutting a sequence of rows into consecutive segments."""
    for cuts in itertools.product((False, True), repeat=len(rows) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(rows)]
        yield tuple(rows[i:j] for i, j in itertools.pairwise(edges))


@pytest.mark.parametrize("table", TABLES)
def test_segments_are_the_best_of_all_splits(table):
    for (k, length), steps, numerics in itertools.product(
        ((48, 48), (48, 100), (2048, 8192)), (1, 2, 5, 8), NUMERICS
    ):
        rows = coefficient_rows(table, steps)
        epsilon = numerics.epsilon(jnp.float32)
        limit = _slope_limit(rows, epsilon, k)
        allowed = [
            split
            for split in splits(rows)
            if all(len(part) == 1 or math.prod(row[0] for row in part) <= limit for part in split)
        ]

        def price(split, k=k, length=length):
            return 2 * len(split) * k * k * length + k**3 * sum(map(small_products, split))

        found = {
            method: segments(rows, k, length, method, epsilon)
            for method in ("direct", "gram", "auto")
        }
        assert all(sum(split, ()) == rows for split in found.values())
        assert found["direct"] == tuple((row,) for row in rows)
        assert found["gram"] in allowed
        assert len(found["gram"]) == min(map(len, allowed))
        assert found["auto"] in allowed
        assert price(found["auto"]) == min(map(price, allowed))


def test_segments_become_shorter_as_rounding_grows():
    rows = coefficient_rows(DEFAULT, 8)
    longest = [
        max(math.prod(row[0] for row in part) for part in segments(rows, 64, 4096, "gram", eps))
        for eps in (2.0**-52, 2.0**-23, 2.0**-16, 2.0**-7)
    ]
    # Eight steps converge, so what is tolerated is 256 eps and slopes of 40, whatever eps is, until
    # in bfloat16 that is more than what five steps leave.
    assert longest == sorted(longest, reverse=True)
    assert longest[0] == longest[1] <= 40
    five = coefficient_rows(DEFAULT, 5)
    assert len(segments(five, 64, 4096, "gram", 2.0**-23)) == 1
    assert len(segments(five, 64, 4096, "gram", 2.0**-7)) >= 4
    # The larger the Gram matrix, the larger its rounding error.
    sizes = [_slope_limit(rows, 2.0**-23, k) for k in (1, 1024, 4096, 16384)]
    assert sizes[0] == sizes[1] > sizes[2] > sizes[3]


def test_sizes_of_gram_matrices():
    assert gram_sizes(3, 5, "auto") == gram_sizes(3, 5, "left") == (3, 5)
    assert gram_sizes(5, 3, "auto") == gram_sizes(5, 3, "right") == (3, 5)
    assert gram_sizes(3, 5, "right") == (5, 3)
    assert gram_sizes(4, 4, "auto") == (4, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "svd"}, "no fixed number of products"),
        ({"method": "qdwh"}, "no fixed number of products"),
        ({"method": "eigh"}, "auto, direct, gram, svd or qdwh"),
        ({"side": "top"}, "'left', 'right' or 'auto'"),
        ({"steps": 0}, "steps=0"),
        ({"coefficients": "polar_express"}, "polar_express_l1e-3_s1.01"),
    ],
)
def test_unknown_options_are_refused(untyped, options, message):
    with pytest.raises(ValueError, match=message):
        cost((3, 4), **options)
