"""Which group acts on the rows and columns of a parameter block, and its random elements."""

import dataclasses
import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class Group(enum.IntEnum):
    """A group of m x m matrices acting on one side of a block; a smaller value is a subgroup."""

    TRIVIAL = 0
    PERMUTATION = 1
    ORTHOGONAL = 2

    @property
    def letter(self) -> str:
        """The symbol of the group in print: 1, P or O."""
        return "1PO"[self]


@dataclasses.dataclass(frozen=True)
class Symmetry:
    """The group `rows x cols` acting on a matrix block by `D -> L D R`, and the shared shift.

    `shift=True` adds the translations `W -> W + 1 c^T` of all rows by one vector. A gradient does
    not see them, so a map that respects them ignores the mean row of its input and returns rows
    that sum to zero.

    >>> print(Symmetry(Group.PERMUTATION, Group.ORTHOGONAL, shift=True))
    P(rows) x O(cols) / shift
    """

    rows: Group
    cols: Group
    shift: bool = False

    def __le__(self, other: "Symmetry") -> bool:
        """Return whether every element of this group belongs to `other` too."""
        return (
            self.rows <= other.rows and self.cols <= other.cols and (other.shift or not self.shift)
        )

    def is_respected_by(self, symmetry_of_map: "Symmetry") -> bool:
        """Return whether a map with that symmetry may update a block on which this group acts.

        The map has to commute with at least this group. The shift has to agree in both directions:
        where it acts, an uncentered map moves along a direction that the loss does not see; where
        it does not act, a centered map never trains the mean row.
        """
        return self <= symmetry_of_map and self.shift == symmetry_of_map.shift

    def describe(self, rows: str = "rows", cols: str = "cols") -> str:
        """Return the group in print, with the axes named: `P(vocab) x O(d) / shift`."""
        groups = f"{self.rows.letter}({rows}) x {self.cols.letter}({cols})"
        return f"{groups} / shift" if self.shift else groups

    def __str__(self) -> str:
        return self.describe()


class GroupElement(NamedTuple):
    """One element of a `Symmetry`: `D -> left @ D @ right`, and a vector added to every row."""

    left: Float[Array, "m m"]
    right: Float[Array, "n n"]
    shift: Float[Array, " n"]

    def act(self, d: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        """Return `left @ D @ right` with the shift added to every row."""
        turned = jnp.einsum("ij,...jk,kl->...il", self.left, d, self.right, precision="highest")
        return turned + jnp.broadcast_to(self.shift, d.shape)


def random_element(
    symmetry: Symmetry, shape: tuple[int, int], key: jax.Array, dtype: DTypeLike | None = None
) -> GroupElement:
    """Draw a random element of `symmetry` for blocks of `shape` = (m, n)."""
    left_key, right_key, shift_key = jax.random.split(key, 3)
    m, n = shape
    shift = jax.random.normal(shift_key, (n,), dtype) if symmetry.shift else jnp.zeros(n, dtype)
    return GroupElement(
        _random_matrix(symmetry.rows, m, left_key, dtype),
        _random_matrix(symmetry.cols, n, right_key, dtype),
        shift,
    )


def _random_matrix(
    group: Group, size: int, key: jax.Array, dtype: DTypeLike | None
) -> Float[Array, "k k"]:
    match group:
        case Group.TRIVIAL:
            return jnp.eye(size, dtype=dtype)
        case Group.PERMUTATION:
            return jnp.eye(size, dtype=dtype)[jax.random.permutation(key, size)]
        case Group.ORTHOGONAL:
            return jax.random.orthogonal(key, size, dtype=dtype)
