"""Where the state of an optimizer lives: beside the parameters that it mirrors."""

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from symoptax._paths import named_leaves, suffixes


def state_shardings(tx: optax.GradientTransformation, params: Any, shardings: Any = None) -> Any:
    """Return the sharding of every leaf of `tx.init(params)`, for any Optax transformation.

    A leaf of the state that has the path and the shape of a parameter is placed as the parameter
    is, and so are the axes of one that has size 1 in place of others; the rest is replicated.
    `jax.jit(tx.init)(params)` alone would put every leaf on one device.

    >>> tx, params = optax.adam(0.1), {"w": jax.numpy.ones((4, 2))}
    >>> state = jax.jit(tx.init, out_shardings=state_shardings(tx, params))(params)

    Args:
      tx: the transformation.
      params: arrays, or `jax.ShapeDtypeStruct`s; boxed by Flax or not.
      shardings: where the parameters live, as a tree like `params` with or without boxes, such as
        `flax.linen.logical_to_mesh_sharding` returns; None takes it from the arrays.

    Raises:
      ValueError: for a parameter without a sharding.
    """
    leaves, _ = named_leaves(params)
    places = {name: getattr(leaf, "sharding", None) for name, leaf in leaves}
    if shardings is not None:
        places |= {name: place for name, place in named_leaves(shardings)[0] if name in places}
    if missing := [name for name, place in places.items() if place is None]:
        raise ValueError(
            f"No sharding of {', '.join(missing)}: pass arrays, jax.ShapeDtypeStruct(shape, "
            "dtype, sharding=...), or a tree of shardings."
        )
    shapes = {name: leaf.shape for name, leaf in leaves}
    everywhere = _replicated(list(places.values()))

    def place(name: str, leaf: Any) -> Sharding | None:
        mirrored = next((s for s in suffixes(name) if _is_part(leaf.shape, shapes.get(s))), None)
        return everywhere if mirrored is None else _of_part(places[mirrored], leaf.shape)

    state, structure = named_leaves(jax.eval_shape(tx.init, params))
    return structure.unflatten([place(name, leaf) for name, leaf in state])


def _is_part(shape: tuple[int, ...], whole: tuple[int, ...] | None) -> bool:
    """Tell whether axes are those of `whole`, or 1 in their place, not all of several."""
    if whole is None or len(shape) != len(whole) or (max(shape, default=0) == 1 < max(whole)):
        return False
    return all(size in (1, full) for size, full in zip(shape, whole, strict=True))


def _of_part(place: Any, shape: tuple[int, ...]) -> Any:
    """Leave axes of size 1 whole."""
    if not isinstance(place, NamedSharding):
        return place
    spec = [None if size == 1 else axes for size, axes in zip(shape, place.spec, strict=False)]
    return NamedSharding(place.mesh, PartitionSpec(*spec), memory_kind=place.memory_kind)


def _replicated(places: list[Any]) -> Sharding | None:
    """Return the sharding that keeps a copy on every device of the mesh, or on the one there is."""
    meshes = [place.mesh for place in places if isinstance(place, NamedSharding)]
    if meshes:
        return NamedSharding(meshes[0], PartitionSpec())
    return places[0] if places else None
