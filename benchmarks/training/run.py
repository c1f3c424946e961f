"""Do the training runs that `results` lacks, and write the tables of README.md.

    export JAX_PLATFORMS=cpu PYTHONPATH=examples:benchmarks
    python benchmarks/training/run.py [NAME ...]

Names are those of `EXPERIMENTS`, all of them if none is given. What is in `results` is not run
again; `rare_tokens` and `cost` are measured every time.
"""

import functools
import sys

import arms
import cost
import precision
import rare_tokens
import rates
import routers
from runs import HERE, MODELS

EXPERIMENTS = {
    **{model: functools.partial(arms.run, model) for model in MODELS},
    "signs": arms.signs,
    "transfer": rates.transfer,
    "adamw_rate": rates.of_adamw,
    "multipliers": rates.multipliers,
    "baselines": rates.baselines,
    "rare_tokens": rare_tokens.run,
    "routers": routers.run,
    "precision": precision.run,
    "cost": cost.run,
}


def write(name: str, result: str) -> None:
    """Print a table, and put it between its marks in README.md."""
    print(f"\n{name}\n{result}", flush=True)
    readme = HERE / "README.md"
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, rest = readme.read_text().split(start)
    readme.write_text(f"{before}{start}\n{result}\n{end}{rest.split(end)[1]}")


def main(names: list[str]) -> None:
    """Run the named experiments, or all of them."""
    for name in names or EXPERIMENTS:
        write(name, EXPERIMENTS[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
