"""Pre-train a small Qwen3-style language model with an optimizer that knows each parameter's role.

    JAX_PLATFORMS=cpu python examples/pretrain.py

trains on the sources of the Python standard library, needs no network and takes a few minutes on
two cores. `--help` lists the settings; some to begin with:

    python examples/pretrain.py --optimizer=adamw --out_dir=runs/adamw
    python examples/pretrain.py --update=embedding:right_polar --lr_multiplier=embedding:2
    python examples/pretrain.py --data=texts/ --mesh=fsdp:4,tensor:2    # needs eight devices

SIGTERM or Ctrl-C ends the step, saves a checkpoint and exits with code 130; the same command with
`--resume` goes on from there, bit for bit. Wrong input exits with code 2 and one line.
"""

import sys
from collections.abc import Sequence

from rich.console import Console

from pretraining.config import define_flags, parse_flags
from pretraining.errors import InputError
from pretraining.run import INTERRUPTED, run


def main(argv: Sequence[str]) -> int:
    """Run what the flags say and return the exit code."""
    try:
        return run(parse_flags(define_flags(), argv), Console())
    except KeyboardInterrupt:  # Before training has begun there is nothing to save.
        return INTERRUPTED
    except InputError as error:
        print(f"pretrain: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv))
