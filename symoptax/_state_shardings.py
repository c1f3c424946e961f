"""Where the state of an optimizer lives: beside the parameters that it mirrors."""

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from symoptax._paths import named_leaves, suffixes


def state_shardings(tx: optax.GradientTransformation, params: Any, shardings: Any = None) -> Any:
    """Return the sharding of every leaf of `tx.init(params)`, for any Optax transformation.

    A leaf of the state that has the path and the shape of a parameter is placed as the parameter
    is; counters, and what has another shape, are replicated. `jax.jit(tx.init)(params)` alone would
    put every leaf on one device.

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
        mirrored = next((s for s in suffixes(name) if shapes.get(s) == leaf.shape), None)
        return everywhere if mirrored is None else places[mirrored]

    state, structure = named_leaves(jax.eval_shape(tx.init, params))
    return structure.unflatten([place(name, leaf) for name, leaf in state])


def _replicated(places: list[Any]) -> Sharding | None:
    """Return the sharding that keeps a copy on every device of the mesh, or on the one there is."""
    meshes = [place.mesh for place in places if isinstance(place, NamedSharding)]
    if meshes:
        return NamedSharding(meshes[0], PartitionSpec())
    return places[0] if places else None
