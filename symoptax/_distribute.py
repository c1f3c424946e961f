"""Where a stack of matrices lives on a mesh while it is computed: every matrix on one device.

Newton-Schulz on a matrix that is spread over devices sends it around in every step. It is cheaper
to exchange the stack once, so that every device holds whole matrices, and to exchange the results
back: two all-to-alls for all matrices and all steps. A matrix without others beside it keeps its
long side spread and its Gram matrix on every device.

The exchange goes one mesh axis after another, in the order of the mesh, naming only the axes of the
stack that it moves; XLA knows the rest. One step over two mesh axes at once would make it gather
the whole stack.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

_ANY = PartitionSpec.UNCONSTRAINED

# Smaller matrices are computed sooner than sent.
_SMALLEST_SENT = 64

Stack = Float[Array, "*batch m n"]


def spread(update_map: Callable[[Stack], Stack], stack: Stack) -> Stack:
    """Apply a map to a stack whose matrices are spread over the mesh that its type carries.

    Only the mesh axes that the compiler places (Auto) are used; without a mesh, and inside of
    `shard_map`, the map is applied as it is.
    """
    mesh = jax.typeof(stack).sharding.mesh
    axes = [
        (name, size)
        for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
        if kind == AxisType.Auto and size > 1
    ]
    if not axes or min(stack.shape[-2:]) < _SMALLEST_SENT:
        return update_map(stack)

    def place(x: Stack, spec: PartitionSpec) -> Stack:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    *on_the_way, home = exchange(stack.shape, axes)
    for spec in on_the_way:
        stack = place(stack, spec)
    result = place(update_map(place(stack, home)), home)
    for spec in reversed(on_the_way):
        result = place(result, spec)
    return result


def placed_by_the_compiler(
    compute: Callable[[Sequence[Array]], list[Array]], leaves: Sequence[Array]
) -> list[Array]:
    """Compute leaves from leaves, equally sharded, with their Explicit mesh axes as Auto ones.

    `jax.make_mesh` makes Explicit axes, on which every product would need its layout spelled out.
    """
    shardings = [jax.typeof(leaf).sharding for leaf in leaves]
    if not any(AxisType.Explicit in sharding.mesh.axis_types for sharding in shardings):
        return compute(leaves)
    placed: Any = jax.sharding.auto_axes(compute, out_sharding=shardings)
    return placed(leaves)


def exchange(shape: Sequence[int], axes: Sequence[tuple[str, int]]) -> list[PartitionSpec]:
    """Return the layouts through which a stack goes to where it is computed, one per mesh axis.

    Every mesh axis takes the batch axis that it divides with the least padding, the largest of
    them; if the stack has fewer matrices than that, the longer side of the matrices.
    """
    *batch, m, n = shape
    left = list(batch)
    spec: list[list[str]] = [[] for _ in shape]
    layouts = []
    for name, size in axes:
        # Padding as a factor: 12 matrices on 8 devices are computed as 16.
        padding = [(-(-count // size) * size / count, -count) for count in left]
        place = min(range(len(left)), key=padding.__getitem__, default=None)
        if place is not None and left[place] >= size:
            left[place] = -(-left[place] // size)
        else:
            place = len(shape) - (2 if m >= n else 1)
        spec[place].append(name)
        layouts.append(PartitionSpec(*(tuple(names) if names else _ANY for names in spec)))
    home = PartitionSpec(*(tuple(names) if names else None for names in spec))
    return [*layouts[:-1], home]
