"""`MatrixView` against explicit NumPy slicing and transposing, and everything that it refuses."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symoptax import MatrixView

V = MatrixView


def _t(leaf):
    return leaf.swapaxes(-1, -2)


# what: (view, shape of the leaf, the leaf as stacks by hand)
TABLE = {
    "as stored": (V("vocab d -> vocab d"), (5, 3), lambda x: [x]),
    "flax kernel": (V("d out -> out d"), (3, 5), lambda x: [x.T]),
    "layer in the middle": (
        V("d layer vocab -> layer vocab d"),
        (4, 2, 10),
        lambda x: [np.stack([x[:, i].T for i in range(2)])],
    ),
    "layer last": (
        V("d out layer -> layer out d"),
        (3, 5, 2),
        lambda x: [np.stack([x[..., i].T for i in range(2)])],
    ),
    "layer first": (V("layer d out -> layer out d"), (2, 3, 5), lambda x: [_t(x)]),
    "per head": (
        V("d (head k) -> head k d", sizes={"head": 2}),
        (5, 6),
        lambda x: [np.stack([x[:, :3].T, x[:, 3:].T])],
    ),
    "whole, heads as rows": (V("d head k -> (head k) d"), (5, 2, 3), lambda x: [x.reshape(5, 6).T]),
    "per head, stored apart": (
        V("d head k -> head k d"),
        (5, 2, 3),
        lambda x: [np.stack([x[:, 0].T, x[:, 1].T])],
    ),
    "output projection per head": (
        V("(head k) d -> head d k", sizes={"k": 3}),
        (6, 5),
        lambda x: [np.stack([x[:3].T, x[3:].T])],
    ),
    "equal sizes everywhere": (
        V("d head k -> head k d"),
        (4, 4, 4),
        lambda x: [x.transpose(1, 2, 0)],
    ),
    "d equals heads times k": (
        V("d (head k) -> head k d", sizes={"head": 2}),
        (6, 6),
        lambda x: [np.stack([x[:, :3].T, x[:, 3:].T])],
    ),
    "pair, concatenated": (
        V("d (pair neuron) -> pair neuron d", sizes={"pair": 2}),
        (3, 8),
        lambda x: [np.stack([x[:, :4].T, x[:, 4:].T])],
    ),
    "pair, interleaved": (
        V("d (neuron pair) -> pair neuron d", sizes={"pair": 2}),
        (3, 8),
        lambda x: [np.stack([x[:, 0::2].T, x[:, 1::2].T])],
    ),
    "pair, one row per neuron": (
        V("d (neuron pair) -> neuron (pair d)", sizes={"pair": 2}),
        (3, 8),
        lambda x: [np.concatenate([x[:, 0::2].T, x[:, 1::2].T], axis=1)],
    ),
    "queries, keys and values": (
        V("d (head k) -> (head k) d", sizes={"k": 3}, sections={"head": (4, 2, 2)}),
        (5, 24),
        lambda x: [x[:, :12].T, x[:, 12:18].T, x[:, 18:].T],
    ),
    "queries, keys and values per head": (
        V("layer d (head k) -> layer head k d", sizes={"k": 3}, sections={"head": (2, 1, 1)}),
        (2, 5, 12),
        lambda x: [
            _t(x[:, :, a:b].reshape(2, 5, -1, 3).swapaxes(1, 2))
            for a, b in [(0, 6), (6, 9), (9, 12)]
        ],
    ),
    "gate and up as sections": (
        V("e d ff -> e ff d", sections={"ff": (4, 4)}),
        (2, 3, 8),
        lambda x: [_t(x[..., :4]), _t(x[..., 4:])],
    ),
    "sections of a batch axis": (
        V("e d ff -> e ff d", sections={"e": (1, 3)}),
        (4, 3, 2),
        lambda x: [_t(x[:1]), _t(x[1:])],
    ),
    "convolution": (
        V("h w i o -> o (h w i)"),
        (2, 3, 4, 5),
        lambda x: [x.reshape(24, 5).T],
    ),
    "expert and layer": (
        V("e layer d ff -> layer e ff d"),
        (2, 3, 4, 5),
        lambda x: [np.stack([np.stack([x[e, i].T for e in range(2)]) for i in range(3)])],
    ),
    "any batch axes, none": (V("... i o -> ... o i"), (3, 5), lambda x: [x.T]),
    "any batch axes, two": (V("... i o -> ... o i"), (2, 3, 4, 5), lambda x: [_t(x)]),
}


@pytest.mark.parametrize("what", TABLE)
def test_open_and_close(what):
    view, shape, by_hand = TABLE[what]
    leaf = np.arange(np.prod(shape)).reshape(shape)
    stacks = view.open(jnp.asarray(leaf))
    wanted = by_hand(leaf)
    assert len(stacks) == len(wanted)
    for stack, want in zip(stacks, wanted, strict=True):
        np.testing.assert_array_equal(stack, want)
    assert view.shapes(shape) == [want.shape for want in wanted]
    np.testing.assert_array_equal(view.close(stacks, shape), leaf)


def test_views_know_whether_they_transpose():
    assert not V("... row col -> ... row col").transposes
    assert not V("expert (a b) d -> expert a b d", sizes={"a": 2}).transposes
    assert not V("(head k) d -> head (k d)", sizes={"k": 2}).transposes
    assert V("d out -> out d").transposes
    assert V("... input output -> ... output input").transposes
    assert V("d (head k) -> head k d", sizes={"k": 2}).transposes


def test_names_of_rows_and_columns():
    view = V("d (neuron pair) layer -> layer neuron (pair d)", sizes={"pair": 2})
    assert (view.rows, view.cols) == ("neuron", "pair d")
    assert view.names_every_axis
    assert not V("... i o -> ... o i").names_every_axis


BAD_PATTERNS = [
    ("d out", {}, "stored axes -> batch rows cols"),
    ("d out -> out", {}, "name the same axes"),
    ("d d -> d d", {}, "each once"),
    ("d out -> out d d", {}, "each once"),
    ("d -> d", {}, "row and a column axis"),
    ("d out -> (out d)", {}, "row and a column axis"),
    ("... d -> ... d", {}, "row and a column axis"),
    ("a b c d -> (a b) c d", {}, "batch axes must stay apart"),
    ("i ... o -> ... i o", {}, "'...' must stand first"),
    ("... i o -> i ... o", {}, "row and a column axis"),
    ("... a i o -> a ... i o", {}, "'...' must stand first"),
    ("(d out -> out d", {}, "not closed"),
    ("d) out -> out d", {}, "cannot read '\\)'"),
    ("() d out -> out d", {}, "cannot read '\\)'"),
    ("((d k)) out -> out d k", {}, "cannot read '\\('"),
    ("d*out -> out d", {}, "cannot read '\\*'"),
    ("d 3 -> 3 d", {}, "cannot read '3'"),
    ("d out -> out d", {"sizes": {"head": 2}}, "unknown axes \\['head'\\]"),
    ("d out -> out d", {"sections": {"head": (1, 2)}}, "cut one named axis"),
    ("d out -> out d", {"sections": {"d": (1, 2), "out": (1, 2)}}, "cut one named axis"),
    ("... i o -> ... o i", {"sections": {"...": (1, 2)}}, "cut one named axis"),
]


@pytest.mark.parametrize(("pattern", "options", "message"), BAD_PATTERNS)
def test_patterns_that_do_not_parse(pattern, options, message):
    with pytest.raises(ValueError, match=message):
        V(pattern, **options)


MISFITS = [
    (V("d out -> out d"), (2, 3, 4), "names 2 axes; the leaf has shape \\(2, 3, 4\\)"),
    (V("layer d out -> layer out d"), (3, 4), "names 3 axes"),
    (V("... i o -> ... o i"), (3,), "axes; the leaf has shape \\(3,\\)"),
    (V("... layer i o -> ... layer o i"), (3,), "axes; the leaf has shape \\(3,\\)"),
    (V("d (head k) -> head k d", sizes={"head": 4}), (5, 6), "does not fit 6"),
    (V("d (head k) -> head k d", sizes={"head": 4, "k": 2}), (5, 16), "does not fit 16"),
    (V("d out -> out d", sizes={"d": 4}), (5, 6), "does not fit 5"),
    (V("d (head k) -> head k d"), (5, 6), "sizes for all but one of \\['head', 'k'\\]"),
    (V("d out -> out d", sections={"out": (4, 4)}), (5, 6), "add up to 8, but .* has 6"),
]


@pytest.mark.parametrize(("view", "shape", "message"), MISFITS)
def test_leaves_that_do_not_fit(view, shape, message):
    with pytest.raises(ValueError, match=message):
        view.shapes(shape)
    with pytest.raises(ValueError, match=message):
        view.open(jnp.zeros(shape))
    with pytest.raises(ValueError, match=message):
        view.close([jnp.zeros((2, 2))], shape)


@st.composite
def views_and_leaves(draw):
    """A random grouping of up to six named axes on either side, with a leaf that fits."""
    names = list("abcdef"[: draw(st.integers(2, 6))])
    sizes = {name: draw(st.integers(1, 3)) for name in names}
    stored = draw(st.permutations(names))
    cuts = [i for i in range(1, len(names)) if draw(st.booleans())]
    left = [tuple(group) for group in _split(stored, cuts)]
    formed = draw(st.permutations(names))
    batch = draw(st.integers(0, len(names) - 2))
    cut = draw(st.integers(batch + 1, len(names) - 1))
    right = [*((name,) for name in formed[:batch]), formed[batch:cut], formed[cut:]]
    section = draw(st.sampled_from(names))
    cut = draw(st.integers(0, sizes[section] - 1))
    sections = {section: (cut, sizes[section] - cut)} if cut else {}
    left_text, right_text = (
        " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in side)
        for side in (left, right)
    )
    return f"{left_text} -> {right_text}", stored, left, right, sizes, sections


def _split(names, cuts):
    return [names[a:b] for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True)]


@settings(deadline=None, max_examples=25)  # each compiles for shapes of its own
@given(views_and_leaves())
def test_any_grouping(case):
    """Entries are followed by name: each axis of the unpacked leaf goes where its name goes."""
    pattern, stored, left, right, sizes, sections = case
    view = V(pattern, sizes=sizes, sections=sections)
    full = [sizes[name] for name in stored]
    unpacked = np.arange(np.prod(full)).reshape(full)
    shape = tuple(int(np.prod([sizes[name] for name in group])) for group in left)
    stacks = view.open(jnp.asarray(unpacked.reshape(shape)))
    begin = 0
    name, lengths = next(iter(sections.items()), (stored[0], (full[0],)))
    for length, stack in zip(lengths, stacks, strict=True):
        part = np.take(unpacked, range(begin, begin + length), axis=stored.index(name))
        begin += length
        formed = np.einsum(
            part, [ord(n) - 97 for n in stored], [ord(n) - 97 for g in right for n in g]
        )
        now = sizes | {name: length}
        want = formed.reshape([int(np.prod([now[n] for n in group])) for group in right])
        np.testing.assert_array_equal(stack, want)
    assert view.shapes(shape) == [stack.shape for stack in stacks]
    np.testing.assert_array_equal(view.close(stacks, shape), unpacked.reshape(shape))
