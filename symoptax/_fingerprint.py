"""What a saved optimizer state has to fit: its buffers by name, to be saved beside it."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from symoptax._paths import in_print, named_leaves, suffixes


def fingerprint(tx: optax.GradientTransformation, params: Any) -> dict[str, str]:
    """Return name, dtype and shape of every buffer of `tx.init(params)`, to be saved as JSON.

    A checkpoint library restores buffers by name. When a rule has sent a parameter to another role,
    its momentum has another name, and Orbax leaves the new place empty without a word. Save the
    fingerprint beside the state, and call `check_fingerprint` before restoring.

    >>> fingerprint(optax.trace(0.9), {"w": jax.numpy.ones((4, 2))})
    {'trace/w': 'float32[4, 2]'}

    Args:
      tx: the transformation.
      params: arrays, or `jax.ShapeDtypeStruct`s.
    """
    leaves, _ = named_leaves(jax.eval_shape(tx.init, params))
    return {name: in_print(leaf) for name, leaf in leaves}


def check_fingerprint(
    saved: Mapping[str, str], tx: optax.GradientTransformation, params: Any
) -> None:
    """Raise for a saved state that does not fit the transformation.

    Args:
      saved: what `fingerprint` returned when the state was saved.
      tx: the transformation that is to go on.
      params: its parameters.

    Raises:
      ValueError: names each parameter whose buffers differ, with what was saved and what is needed.
        To go on all the same, restore with the transformation that saved, and move the buffers.
    """
    needed = fingerprint(tx, params)
    names = {name for name, _ in named_leaves(params)[0]}
    old, new = saved.items() - needed.items(), needed.items() - saved.items()
    if not old and not new:
        return
    changed: dict[str, tuple[list[str], list[str]]] = {}
    for place, buffers in enumerate((old, new)):
        for buffer, kind in sorted(buffers):
            param = next((suffix for suffix in suffixes(buffer) if suffix in names), buffer)
            where = buffer.removesuffix(param).strip("/")
            changed.setdefault(param, ([], []))[place].append(f"{where} {kind}".strip())
    lines = [
        f"  {param}: saved {', '.join(was) or 'nothing'}; needed {', '.join(now) or 'nothing'}"
        for param, (was, now) in sorted(changed.items())
    ]
    raise ValueError(
        f"The saved optimizer state does not fit: {len(changed)} parameters or counters have other "
        "buffers, because a rule or an option has changed. Take the rules and options that the "
        "state was saved with, or start anew.\n" + "\n".join(lines)
    )
