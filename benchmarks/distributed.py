"""What optimizers send between devices, counted in compiled programs; nothing is run.

    python benchmarks/distributed.py            # eight simulated CPU devices
    python benchmarks/distributed.py pod        # TPU v5e, ahead of time: pip install "jax[tpu]"

Writes its tables into README.md. The second one takes half an hour.
"""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=" + os.environ.get("DEVICES", "8")
# For libtpu without a TPU, and for more than one such process.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import symoptax
from run import write
from timing import table

MIB = 2**20


class Program(NamedTuple):
    """What a compiled program costs one device."""

    collectives: int
    sent: float
    flops: float
    memory: float

    def cells(self) -> list[str]:
        return [
            str(self.collectives),
            f"**{self.sent / MIB:,.{int(self.sent < 10 * MIB)}f}**",
            f"{self.flops / 1e9:,.0f}",
            f"{self.memory / MIB:.0f}",
        ]


def compiled(function: Callable[..., Any], out: Any, *args: Any, donated: tuple = ()) -> Program:
    """Compile for the devices of the arguments; exchanges below 1 kB are not counted."""
    step = jax.jit(function, out_shardings=out, donate_argnums=donated).lower(*args).compile()
    found = [c for c in symoptax.collectives(step) if c.sent >= 1000]
    memory: Any = step.memory_analysis()
    analysis: Any = step.cost_analysis()
    held = memory.peak_memory_in_bytes if donated else memory.temp_size_in_bytes
    return Program(len(found), sum(c.sent for c in found), analysis["flops"], held)


def on(mesh: Mesh, spec: P, *shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def mesh_of(devices: Any = None, **sizes: int) -> Mesh:
    devices = np.array(jax.devices() if devices is None else devices)
    axes = (AxisType.Auto,) * len(sizes)
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=axes)


# Stacks of matrices on eight devices: name, mesh, shape, layout, view, the least that can be sent.
FSDP, TENSOR = {"fsdp": 8}, {"fsdp": 4, "tensor": 2}
LAYERS, EXPERTS = "layer m n -> layer m n", "layer expert m n -> layer expert m n"
STACK = (16, 1024, 4096)
STACKS = [
    ("m over fsdp", FSDP, STACK, P(None, "fsdp"), LAYERS, 56),
    ("n over fsdp", FSDP, STACK, P(None, None, "fsdp"), LAYERS, 56),
    ("m over fsdp, n over tensor", TENSOR, STACK, P(None, "fsdp", "tensor"), LAYERS, 80),
    ("m over both", TENSOR, STACK, P(None, ("fsdp", "tensor")), LAYERS, 80),
    ("copies on data", {"data": 2, "fsdp": 4}, STACK, P(None, "fsdp"), LAYERS, 80),
    ("12 matrices", FSDP, (12, 1024, 4096), P(None, "fsdp"), LAYERS, 56),
    ("4 matrices", FSDP, (4, 1024, 4096), P(None, "fsdp"), LAYERS, 19),
    (
        *("experts over expert", {"expert": 2, "fsdp": 4}, (8, 4, 1024, 4096)),
        *(P(None, "expert", "fsdp"), EXPERTS, 104),
    ),
    ("layers in the middle", TENSOR, (1024, 16, 4096), P("fsdp", None, "tensor"), None, 80),
]
VOCABULARY = (131072, 4096)


def run() -> str:
    rows = []
    for name, sizes, shape, spec, view, least in STACKS:
        mesh = mesh_of(**sizes)
        x = on(mesh, spec, *shape)
        view = view or "m layer n -> layer m n"
        ours = symoptax.polar(view=view)
        rows.append([name, str(least), *_cells(ours, x), *_cells(_muon(view), x)])
    for name, spec, least in (
        ("vocabulary, rows over fsdp", P("fsdp"), "112"),
        ("vocabulary, columns over fsdp", P(None, "fsdp"), "448"),
    ):
        x = on(mesh_of(**FSDP), spec, *VOCABULARY)
        muon = _muon("vocab d -> vocab d")
        rows.append([name, least, *_cells(symoptax.hybrid(), x), *_cells(muon, x)])
    x = on(mesh_of(**FSDP), P("fsdp"), *VOCABULARY)
    rows.append(["row_norm, rows over fsdp", "0", *_cells(symoptax.row_norm(), x), *["-"] * 4])
    columns = ["collectives", "MiB", "GF", "MiB held"]
    return table(["stack", "best known MiB", *columns, *[f"optax: {c}" for c in columns]], rows)


def _cells(tx: optax.GradientTransformation, x: jax.ShapeDtypeStruct) -> list[str]:
    return compiled(lambda g: tx.update(g, tx.init(g))[0], x.sharding, x).cells()


def _muon(view: str) -> optax.GradientTransformation:
    left, right = (side.split() for side in view.split(" -> "))
    dims = optax.contrib.MuonDimensionNumbers(left.index(right[-1]), left.index(right[-2]))
    return optax.contrib.scale_by_muon(weight_dimension_numbers=dims)


# Whole models, as MaxText keeps their parameters: name -> the letters of its axes.
ATTENTION = {
    **{f"self_attention/{name}/kernel": "D L H k" for name in ("query",)},
    **{f"self_attention/{name}/kernel": "D L K k" for name in ("key", "value")},
    "self_attention/out/kernel": "H L k D",
    **{f"self_attention/{name}_norm/scale": "k L" for name in ("query", "key")},
    **{f"{name}_self_attention_layer_norm/scale": "D L" for name in ("pre", "post")},
}
DENSE = {**{f"mlp/wi_{i}/kernel": "D L F" for i in (0, 1)}, "mlp/wo/kernel": "F L D"}
MIXTURE = {
    **{f"moe_block/wi_{i}": "E L D F" for i in (0, 1)},
    "moe_block/wo": "E L F D",
    "moe_block/gate/kernel": "D L E",
}
ENDS = {"token_embedder/embedding": "V D", "decoder/decoder_norm/scale": "D"}
HEAD = {"decoder/logits_dense/kernel": "D V"}


class Model(NamedTuple):
    """A model by its sizes, and the meshes on which it is compiled."""

    sizes: dict[str, int]
    layer: dict[str, str]
    ends: dict[str, str]
    meshes: dict[str, dict[str, int]]

    def params(self, mesh: Mesh) -> dict[str, Any]:
        """Return the tree: embedding dimension over fsdp, heads, neurons, tokens over tensor."""
        over = {"D": "fsdp", "E": "expert", **dict.fromkeys("HKFV", "tensor")}
        names = {f"decoder/layers/{name}": axes for name, axes in self.layer.items()} | self.ends
        result: dict[str, Any] = {}
        for name, letters in names.items():
            axes = letters.split()
            shape = [self.sizes[axis] for axis in axes]
            spec = [over[a] if len(axes) > 1 and over.get(a) in mesh.shape else None for a in axes]
            *folders, leaf = name.split("/")
            node = result
            for folder in folders:
                node = node.setdefault(folder, {})
            node[leaf] = on(mesh, P(*spec), *shape)
        return result


MODELS = {
    "Qwen3-0.6B": Model(
        {"L": 28, "D": 1024, "H": 16, "K": 8, "k": 128, "F": 3072, "V": 151936},
        ATTENTION | DENSE,
        ENDS,
        {"v5e:4x4": {"fsdp": 8, "tensor": 2}, "v5e:16x16": {"fsdp": 64, "tensor": 4}},
    ),
    "OLMoE-1B-7B": Model(
        {"L": 16, "D": 2048, "H": 16, "K": 16, "k": 128, "F": 1024, "V": 50304, "E": 64},
        ATTENTION | MIXTURE,
        ENDS | HEAD,
        {"v5e:4x4": {"fsdp": 4, "expert": 4}, "v5e:16x16": {"fsdp": 16, "expert": 16}},
    ),
    "470 M, 24 layers": Model(
        {"L": 24, "D": 1024, "H": 8, "K": 8, "k": 128, "F": 4096, "V": 32768},
        {n: a for n, a in (ATTENTION | DENSE).items() if "norm" not in n},
        {n: a for n, a in (ENDS | HEAD).items() if "norm" not in n},
        {"v5e:4x4": {"fsdp": 8, "tensor": 2}},
    ),
}
ROW_NORM_ENDS = {
    **dict.fromkeys(("embedding", "tied_embedding", "lm_head_no_shift"), "row_norm"),
    **{"mlp_in": "polar", "mlp_down": "polar", "expert_in": "polar", "expert_down": "polar"},
    "lm_head": "centered_row_norm",
}


def optimizers(params: Any) -> Iterator[tuple[str, optax.GradientTransformation]]:
    rules = symoptax.routes.maxtext.rules
    options: dict[str, Any] = {"rules": rules, "mu_dtype": jnp.bfloat16, "mesh": params}
    yield "AdamW", optax.adamw(1e-3, mu_dtype=jnp.bfloat16)
    yield (
        "layerwise, row norms at the ends",
        symoptax.layerwise(1e-3, updates=ROW_NORM_ENDS, **options),
    )
    yield "layerwise", symoptax.layerwise(1e-3, **options)
    yield "optax.contrib.muon", optax_muon_of(params)


def optax_muon_of(params: Any) -> optax.GradientTransformation:
    """Return optax's Muon on what is neither an end nor a vector, AdamW on the rest."""
    routing = symoptax.route(params, symoptax.routes.maxtext.rules(params))
    ends = ("embedding", "tied_embedding", "lm_head", "lm_head_no_shift", "other")

    def dimensions(leaf: Any) -> Any:
        if leaf.role in ends:
            return None
        stored = leaf.view.pattern.split(" -> ")[0].split()
        rows, cols = (
            tuple(stored.index(name) for name in side.split())
            for side in (leaf.view.rows, leaf.view.cols)
        )
        return optax.contrib.MuonDimensionNumbers(cols, rows)

    numbers = routing.structure.unflatten([dimensions(leaf) for leaf in routing.leaves])
    return optax.contrib.muon(1e-3, mu_dtype=jnp.bfloat16, muon_weight_dimension_numbers=numbers)


def run_pod(only: str = "") -> str:
    rows = []
    for model_name, model in MODELS.items():
        for topology, sizes in model.meshes.items():
            devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
            params = model.params(mesh_of(devices, **sizes))
            for name, tx in optimizers(params):
                label = f"{model_name}, {topology}, {name}"
                if only not in label:
                    continue
                program = compiled_step(tx, params)
                spread = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
                rows.append([model_name, f"{topology} ({spread})", name, *program.cells()])
                print(rows[-1], flush=True)
    heads = ["model", "chips", "optimizer", "collectives", "MiB", "GF", "peak MiB"]
    return table(heads, rows)


def compiled_step(tx: optax.GradientTransformation, params: Any) -> Program:
    """Compile one update from bfloat16 gradients, with parameters and state given away."""
    state = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        jax.eval_shape(tx.init, params),
        symoptax.state_shardings(tx, params),
    )
    grads = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding), params
    )

    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    out = jax.tree.map(lambda x: x.sharding, (params, state))
    return compiled(step, out, grads, state, params, donated=(1, 2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["pod"]:
        write("pod", run_pod(*sys.argv[2:]))
    else:
        write("distributed", run())
