"""Where leaves lie on a mesh: from their types, or from what the user says."""

import contextlib
import contextvars
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from symoptax._mesh.placement import Layout
from symoptax._paths import named_leaves, suffixes
from symoptax._view import MatrixView


class Place(NamedTuple):
    """The mesh of an array, and how the array is spread over it."""

    mesh: AbstractMesh
    layout: Layout

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Name and size of the mesh axes that divide work and are not under manual control."""
        mesh = self.mesh
        return tuple(
            (name, size)
            for name, size, kind in zip(
                mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True
            )
            if kind != AxisType.Manual and size > 1
        )


class _Told(NamedTuple):
    """What `on_mesh` was told."""

    mesh: AbstractMesh | None = None
    shardings: Mapping[str, NamedSharding] = types.MappingProxyType({})


_NOTHING = _Told()
_told: contextvars.ContextVar[_Told] = contextvars.ContextVar("told", default=_NOTHING)


def on_mesh(tx: optax.GradientTransformation, mesh: Any) -> optax.GradientTransformationExtraArgs:
    """Tell a transformation on which mesh it runs, and best of all where the parameters lie.

    Without it the mesh is that of the arrays, or of `jax.set_mesh`. On Explicit mesh axes, and
    outside of `jax.jit`, arrays also say how they are spread; on Auto axes only XLA knows, and each
    stack goes through layouts that suit whatever it finds. With shardings the way is exact, and
    leaves of equal shape that lie alike travel together.

    >>> tx = on_mesh(optax.sgd(0.1), jax.make_mesh((1,), ("fsdp",)))

    Args:
      tx: the transformation.
      mesh: a mesh, or a tree of the parameters' shardings: the parameters themselves, their
        `jax.ShapeDtypeStruct`s, or `NamedSharding`s.

    Returns:
      The transformation, with the same state.

    Raises:
      ValueError: for shardings that are no `NamedSharding`s of one mesh.
    """
    told = _told_by(mesh)
    inner = optax.with_extra_args_support(tx)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        with _telling(told):
            return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


@contextlib.contextmanager
def _telling(told: _Told) -> Iterator[None]:
    token = _told.set(told)
    try:
        yield
    finally:
        _told.reset(token)


def _told_by(mesh: Any) -> _Told:
    if isinstance(mesh, Mesh | AbstractMesh):
        return _Told(mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh)
    leaves, _ = named_leaves(mesh)
    places = {name: getattr(leaf, "sharding", leaf) for name, leaf in leaves}
    if wrong := [name for name, place in places.items() if not isinstance(place, NamedSharding)]:
        raise ValueError(
            f"mesh: need a mesh, or a NamedSharding of every parameter; {', '.join(wrong[:3])} has "
            "none."
        )
    meshes = {place.mesh.abstract_mesh for place in places.values()}
    if len(meshes) != 1:
        raise ValueError(f"mesh: the parameters lie on {len(meshes)} meshes; need one.")
    return _Told(meshes.pop(), places)


def places(names: Sequence[str], leaves: Sequence[jax.Array]) -> list[Place | None]:
    """Return where each leaf lies, None where there is one device or each does its own."""
    return [_place(name, leaf) for name, leaf in zip(names, leaves, strict=True)]


def _place(name: str, leaf: jax.Array) -> Place | None:
    told, typed = _told.get(), jax.typeof(leaf).sharding
    mesh = typed.mesh
    if mesh.empty:
        mesh = told.mesh or jax.sharding.get_abstract_mesh()
    place = Place(mesh, (None,) * leaf.ndim)
    # Only the type of an array puts it on Explicit axes.
    if mesh.empty or not place.axes or (typed.mesh.empty and AxisType.Explicit in mesh.axis_types):
        return None
    sharding = next((told.shardings[s] for s in suffixes(name) if s in told.shardings), None)
    if AxisType.Explicit in mesh.axis_types:
        spec = typed.spec
    elif not isinstance(leaf, Tracer) and isinstance(leaf.sharding, NamedSharding):
        spec = leaf.sharding.spec
    elif sharding is not None:
        spec = sharding.spec
    else:
        return place
    return Place(mesh, _as_layout(spec, leaf.ndim))


def _as_layout(spec: PartitionSpec, ndim: int) -> Layout:
    """Return the mesh axes on each of `ndim` axes."""
    entries = [*spec, *[None] * (ndim - len(spec))]
    return tuple(
        None
        if names is PartitionSpec.UNCONSTRAINED
        else (names,)
        if isinstance(names, str)
        else tuple(names or ())
        for names in entries
    )


# Mesh axes that usually carry a batch axis of another name.
_USUAL = {"ep": "expert", "exp": "expert", "stage": "layer", "pp": "layer", "pipeline": "layer"}


def opened_place(place: Place, view: MatrixView) -> Place:
    """Return where the stacks of a leaf lie that opens by a view.

    Where nothing is known, a batch axis is taken to lie on the mesh axis of its own name.
    """
    layout = view.layout(place.layout)
    if None not in place.layout:
        return place._replace(layout=tuple(layout))
    for axis, name in enumerate(view.batch if view.names_every_axis else ()):
        layout[axis] = (
            tuple(
                mesh_axis
                for mesh_axis, _ in place.axes
                if _USUAL.get(mesh_axis, mesh_axis).rstrip("s") == name.rstrip("s")
            )
            or None
        )
    return place._replace(layout=tuple(layout))


def sums_sent(place: Place, shape: Sequence[int]) -> float:
    """Return the bytes that one device sends to sum the rows of a stack where it lies."""
    sizes = dict(place.axes)
    ways = [math.prod(sizes.get(name, 1) for name in names or ()) for names in place.layout]
    rows = math.prod(-(-size // way) for size, way in zip(shape[:-1], ways[:-1], strict=True))
    return 4.0 * rows * 2 * (ways[-1] - 1) / ways[-1]
