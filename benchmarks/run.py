"""Run the benchmarks and write their tables into README.md: `python benchmarks/run.py`."""

import pathlib
import sys

import jax

import equivariance
import kernels
import limits
import monitor
import rule
import step
import tables

BENCHMARKS = {
    "kernels": kernels.run,
    "rule": rule.run,
    "step": step.run,
    "compile": step.run_compile,
    "limits": limits.run,
    "monitor": monitor.run,
    "tables": tables.run,
    "equivariance": equivariance.run,
}


def main(names: list[str]) -> None:
    """Run the named benchmarks, or all of them."""
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    for name in names or BENCHMARKS:
        write(name, BENCHMARKS[name]())


def write(name: str, result: str) -> None:
    """Print a table, and put it between its marks in README.md."""
    print(f"\n{name}\n{result}", flush=True)
    readme = pathlib.Path(__file__).parent / "README.md"
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, rest = readme.read_text().split(start)
    readme.write_text(f"{before}{start}\n{result}\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    main(sys.argv[1:])
