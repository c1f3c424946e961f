"""Where parameters, optimizer state and batches live on a mesh of devices."""

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pretraining.errors import InputError

AXES = ("fsdp", "tensor")


def _parse(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for entry in filter(None, text.split(",")):
        name, _, size = entry.partition(":")
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise InputError(f"--mesh={text}: write it as fsdp:4,tensor:2 or a part of that")
        sizes[name] = int(size)
    return sizes or {"fsdp": 1}


def make_mesh(text: str) -> Mesh:
    """Build the mesh that `text` describes; without one, a mesh of one device."""
    sizes = _parse(text)
    wanted, devices = math.prod(sizes.values()), jax.devices()
    if wanted > len(devices):
        raise InputError(f"--mesh={text}: needs {wanted} devices, but there are {len(devices)}")
    if jax.process_count() > 1 and wanted < len(devices):
        raise InputError(f"--mesh={text}: several processes must use all {len(devices)} devices")
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=devices[:wanted],
    )


def _param_sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Give each mesh axis the largest free axis that it divides; vectors are replicated."""
    spec: list[str | None] = [None] * len(shape)
    for name, size in mesh.shape.items() if len(shape) > 1 else ():
        free = [axis for axis, n in enumerate(shape) if spec[axis] is None and n % size == 0]
        if free:
            spec[max(free, key=lambda axis: shape[axis])] = name
    return NamedSharding(mesh, PartitionSpec(*spec))


def placed(mesh: Mesh, params: object, dtype: str | None = None) -> object:
    """Return the shapes of `params` (arrays or shapes), in `dtype`, each with its sharding."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, dtype or leaf.dtype, sharding=_param_sharding(mesh, leaf.shape)
        ),
        params,
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that keeps a copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, rows: int) -> NamedSharding:
    """Split a (micro-)batch of `rows` sequences over `fsdp`."""
    ways = mesh.shape.get("fsdp", 1)
    if rows % ways:
        raise InputError(f"a (micro-)batch of {rows} sequences cannot be split over fsdp:{ways}")
    return NamedSharding(mesh, PartitionSpec("fsdp" if "fsdp" in mesh.shape else None))


def batch_part(place: NamedSharding, rows: int) -> tuple[int, int]:
    """Return which part of a batch this process loads, and of how many.

    Processes that hold the same rows load the same part; where they overlap otherwise, all load
    the whole batch.
    """
    held: dict[int, set[int]] = {}
    for device, (index,) in place.devices_indices_map((rows,)).items():
        held.setdefault(device.process_index, set()).add(index.start or 0)
    parts = sorted({tuple(sorted(starts)) for starts in held.values()})
    if sum(map(len, parts)) > len(set().union(*parts)):
        return 0, 1
    return parts.index(tuple(sorted(held[jax.process_index()]))), len(parts)
