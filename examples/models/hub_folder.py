"""Folders as they lie on the Hugging Face hub: weights in safetensors files, and `config.json`."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models import mxfp4
from models.catalog import Architecture
from models.hub_config import config_from_hugging_face, config_to_hugging_face
from models.hugging_face import check_hub, from_hub, to_hub

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("BF16", "F16", "F32", "F64")
# A table that old versions of transformers saved, and that follows from the sizes.
_BUFFER = ".rotary_emb.inv_freq"


@dataclasses.dataclass(frozen=True)
class _Lazy:
    """An array that is read when NumPy asks for it."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read(), dtype)


def read_config(folder: Path) -> Any:
    """Return the sizes of the model in a folder: a `Qwen3Config`, `Gemma3Config` and so on.

    Raises:
      ValueError: where there is no `config.json`, or none of a model that is here.
    """
    return config_from_hugging_face(_read_json(folder / "config.json"))


def write_config(config: Any, folder: Path, **more: Any) -> None:
    """Write the `config.json` of these sizes."""
    content = json.dumps({**config_to_hugging_face(config), **more}, indent=2)
    (folder / "config.json").write_text(content + "\n")


def from_safetensors(
    architecture: Architecture,
    config: Any,
    folder: Path,
    *,
    dtype: Any = np.float32,
    shapes: Any = None,
) -> Any:
    """Return the parameters in a folder, read leaf by leaf; those in MXFP4 are dequantised.

    Args:
      architecture: of the model.
      config: its sizes.
      folder: with `model.safetensors`, or several such files and their index.
      dtype: of the parameters, whatever that in the files.
      shapes: the parameter tree with the sharding of each leaf; None is the default device.

    Raises:
      ValueError: for files that cannot be read, and for a weight that is missing, of another shape
        or left over.
    """
    tied = getattr(config, "tied", False)
    shapes = _shapes(architecture, config) if shapes is None else shapes
    return from_hub(architecture.weights, shapes, _weights(folder, dtype), tied=tied)


def check_safetensors(architecture: Architecture, config: Any, folder: Path) -> None:
    """Raise what `from_safetensors` would for names and shapes, without reading a weight."""
    tied = getattr(config, "tied", False)
    found = _weights(folder, np.float32)
    check_hub(architecture.weights, _shapes(architecture, config), found, tied=tied)


def to_safetensors(
    architecture: Architecture,
    config: Any,
    params: Any,
    folder: Path,
    *,
    dtype: Any = np.float32,
    max_bytes: float = 5e9,
) -> None:
    """Write parameters and sizes as a new folder, for `from_safetensors` and for transformers.

    Args:
      architecture: of the model.
      config: its sizes.
      params: pure parameters.
      folder: new, or empty.
      dtype: of the weights in the files.
      max_bytes: of the weights in a file; more than these are written as several with an index.

    Raises:
      ValueError: for a folder that is not empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder}: is not empty.")
    weights = to_hub(architecture.weights, params)
    dtype = np.dtype(dtype)
    sizes = {name: weight.size * dtype.itemsize for name, weight in weights.items()}
    parts = _parts(sizes, max_bytes)
    files = {}
    for number, names in enumerate(parts, 1):
        several = f"model-{number:05}-of-{len(parts):05}.safetensors"
        file = several if len(parts) > 1 else _ONE_FILE
        # They are written as they lie in memory.
        content = {name: np.ascontiguousarray(weights[name], dtype) for name in names}
        save_file(content, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    write_config(config, folder, torch_dtype=dtype.name)


def _shapes(architecture: Architecture, config: Any) -> Any:
    model = nnx.eval_shape(lambda: architecture.build(config, nnx.Rngs(0)))
    return nnx.as_pure(nnx.state(model, nnx.Param))


def _parts(sizes: Mapping[str, int], max_bytes: float) -> list[list[str]]:
    """Divide names in their order into parts as large as they may be; one may be too large."""
    parts, room = [], 0.0
    for name, size in sizes.items():
        if not parts or size > room:
            parts.append([])
            room = max_bytes
        parts[-1].append(name)
        room -= size
    return parts


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{path}: there is no such file.") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}).") from error


def _files(folder: Path) -> dict[str, set[str]]:
    """Return the files of a folder with the names that the index promises of each."""
    if (folder / _ONE_FILE).exists() or not (folder / _INDEX).exists():
        return {_ONE_FILE: set()}
    files = {}
    for name, file in _read_json(folder / _INDEX)["weight_map"].items():
        files.setdefault(file, set()).add(name)
    return files


def _weights(folder: Path, dtype: Any) -> dict[str, _Lazy]:
    """Return the weights of a folder by name, none of them read yet."""
    found, bytes_of = {}, {}
    for file, promised in _files(folder).items():
        try:
            handle = safe_open(folder / file, framework="np")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{folder / file}: cannot be read ({error}).") from error
        names = set(handle.keys())
        if lost := sorted(promised - names):
            raise ValueError(f"{folder / file}: has no {lost[0]}, against {_INDEX}.")
        for name in names:
            if name.endswith(_BUFFER):
                continue
            header = handle.get_slice(name)
            shape, kind = tuple(header.get_shape()), header.get_dtype()
            read = _reader(handle, name)
            if kind in _FLOATS:
                found[name] = _Lazy(shape, lambda read=read: read().astype(dtype, copy=False))
            elif kind == "U8" and name.endswith(("_blocks", "_scales")):
                bytes_of[name] = _Lazy(shape, read)
            else:
                raise ValueError(f"{folder / file}: {name} is of dtype {kind}; need a float.")
    return found | _dequantized(bytes_of, dtype)


def _reader(handle: Any, name: str) -> Callable[[], np.ndarray]:
    return lambda: handle.get_tensor(name)


def _dequantized(bytes_of: Mapping[str, _Lazy], dtype: Any) -> dict[str, _Lazy]:
    """Return the weights that blocks and scales stand for, under the names without `_blocks`."""
    found = {}
    for name in {name.rpartition("_")[0] for name in bytes_of}:
        pair = [bytes_of.get(f"{name}_{part}") for part in ("blocks", "scales")]
        if None in pair or pair[0].shape[:-1] != pair[1].shape:
            raise ValueError(f"{name}: need _blocks (..., 16) and _scales (...), both of bytes.")

        def read(blocks: _Lazy = pair[0], scales: _Lazy = pair[1]) -> np.ndarray:
            return mxfp4.dequantized(blocks.read(), scales.read()).astype(dtype, copy=False)

        found[name] = _Lazy(mxfp4.shape_of(pair[0].shape), read)
    return found
