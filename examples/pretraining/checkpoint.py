"""Checkpoints that continue a run bit for bit, or say why they cannot."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from pretraining.config import Config, differences, from_json
from pretraining.errors import InputError
from pretraining.train import TrainState


class Checkpoints:
    """The checkpoints of one run: parameters, optimizer state, place in the data and config."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        handlers = {
            "params": ocp.StandardCheckpointHandler(),
            "opt_state": ocp.StandardCheckpointHandler(),
            "data": ocp.JsonCheckpointHandler(),
            "config": ocp.JsonCheckpointHandler(),
        }
        # Saved before the next step runs: on a CPU a background save may read donated buffers.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def latest(self) -> int | None:
        """Return the last step that was saved."""
        return self._manager.latest_step()

    def save(
        self, step: int, state: TrainState, data_state: dict[str, Any], config: Config
    ) -> None:
        """Save everything that the step after `step` depends on; a saved step is kept."""
        if step == self.latest():
            return
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            opt_state=ocp.args.StandardSave(state.opt_state),
            data=ocp.args.JsonSave(data_state),
            config=ocp.args.JsonSave(dataclasses.asdict(config)),
        )
        self._manager.save(step, args=items)

    def config(self, step: int) -> Config:
        """Return the config that `step` was saved with."""
        args = ocp.args.Composite(config=ocp.args.JsonRestore())
        return from_json(self._manager.restore(step, args=args).config)

    def restore(self, step: int, target: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Restore `step` into the shapes and shardings of `target`, and the place in the data."""
        saved = self._manager.item_metadata(step)
        for name in TrainState._fields:
            _check_same_leaves(name, getattr(saved, name), getattr(target, name))
        items = ocp.args.Composite(
            params=ocp.args.StandardRestore(target.params),
            opt_state=ocp.args.StandardRestore(target.opt_state),
            data=ocp.args.JsonRestore(),
        )
        restored = self._manager.restore(step, args=items)
        return TrainState(restored.params, restored.opt_state), restored.data

    def restore_params(self, step: int, target: Any) -> Any:
        """Restore the parameters of `step` alone, into the shapes and shardings of `target`."""
        _check_same_leaves("params", self._manager.item_metadata(step).params, target)
        items = ocp.args.Composite(params=ocp.args.StandardRestore(target))
        return self._manager.restore(step, args=items).params

    def close(self) -> None:
        """Release the manager's threads."""
        self._manager.close()


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
        for path, leaf in leaves
    }


def _check_same_leaves(name: str, saved: Any, target: Any) -> None:
    """Compare paths and shapes, since Orbax restores a leaf it cannot find as None in silence."""
    old, new = _shapes(saved), _shapes(target)
    wrong = sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))
    if wrong:
        path = wrong[0]
        raise InputError(
            f"the checkpoint's {name} does not fit this run in {len(wrong)} leaves, e.g. {path}: "
            f"saved {old.get(path, 'nothing')}, needed {new.get(path, 'nothing')}; "
            "was it saved with other routing rules?"
        )


def find_resume_step(config: Config) -> int | None:
    """Return the step to resume at, None for a new run; refuse what would mix two runs.

    Looks only, so that a refused run leaves its folder as it was.
    """
    out_dir = Path(config.out_dir)
    if out_dir.exists() and not out_dir.is_dir():
        raise InputError(f"--out_dir={out_dir}: is a file")
    if not config.resume:
        if out_dir.exists() and any(out_dir.iterdir()):
            raise InputError(f"--out_dir={out_dir}: is not empty; add --resume or name another")
        return None
    folder = out_dir / "checkpoints"
    if not folder.is_dir():
        raise InputError(f"--out_dir={out_dir}: no checkpoint to resume; start without --resume")
    return _checked_step(Checkpoints(folder), config)


def _checked_step(checkpoints: Checkpoints, config: Config) -> int:
    step = checkpoints.latest()
    if step is None:
        raise InputError(f"{checkpoints.folder}: holds no finished checkpoint; start a new run")
    if changed := differences(checkpoints.config(step), config):
        raise InputError(f"the checkpoint was saved with other settings: {', '.join(changed)}")
    checkpoints.close()
    return step
