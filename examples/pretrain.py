"""Pre-train a small Qwen3-style language model with an optimizer that knows each parameter's role.

    JAX_PLATFORMS=cpu python examples/pretrain.py

trains on the sources of the Python standard library, needs no network and takes a few minutes on
two cores. `--help` lists the settings; some to begin with:

    python examples/pretrain.py --optimizer=adamw --out_dir=runs/adamw
    python examples/pretrain.py --update=embedding:right_polar --lr_multiplier=embedding:2
    python examples/pretrain.py --data=texts/ --mesh=fsdp:4,tensor:2    # needs eight devices
    python examples/pretrain.py --init_from=Qwen3-0.6B --data='shards/*.bin'    # published weights

SIGTERM or Ctrl-C ends the step, saves a checkpoint and exits with code 130; the same command with
`--resume` goes on from there, bit for bit. Wrong input exits with code 2 and one line.

Several processes train as one, each started with the same flags, `--distributed` among them, a
mesh of all their devices, and an `--out_dir` on a disk that they share. JAX finds the processes of
a TPU pod or of a Slurm job:

    gcloud compute tpus tpu-vm ssh NAME --worker=all --command="cd symoptax &&
        python examples/pretrain.py --distributed --mesh=fsdp:8 --out_dir=/shared/run"
    srun python examples/pretrain.py --distributed --mesh=fsdp:8 --out_dir=/shared/run

Others are told by the environment; this starts two on one machine, with four CPU devices each:

    export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4
    export JAX_COORDINATOR_ADDRESS=localhost:9876 JAX_NUM_PROCESSES=2
    JAX_PROCESS_ID=0 python examples/pretrain.py --distributed --mesh=fsdp:8 &
    JAX_PROCESS_ID=1 python examples/pretrain.py --distributed --mesh=fsdp:8; wait

A signal to one of them stops all after the same step. When one is killed, the others abort within
`--distributed_timeout` seconds, or little more; start all again with `--resume`. The number of
processes may change then.
"""

import sys
from collections.abc import Sequence

import jax
from rich.console import Console

from pretraining import processes
from pretraining.config import define_flags, parse_flags
from pretraining.errors import InputError
from pretraining.run import INTERRUPTED, run


def main(argv: Sequence[str]) -> int:
    """Run what the flags say and return the exit code."""
    values = define_flags()
    processes.define_flags(values)
    try:
        config = parse_flags(values, argv)
        if values.distributed:
            processes.join(values.distributed_timeout)
        return run(config, Console(quiet=jax.process_index() > 0))
    except KeyboardInterrupt:  # Before training has begun there is nothing to save.
        return INTERRUPTED
    except InputError as error:
        print(f"pretrain: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv))
