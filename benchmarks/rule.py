"""Whether `method="auto"` picks the faster of "direct" and "gram" over a grid of shapes."""

import functools

import jax

from symoptax import cost, polar_factor
from timing import paired

WIDTHS = (64, 128, 256, 512)
RATIOS = (1, 2, 3, 4, 8, 16)
# Two methods within this of each other are equally right.
TIE = 1.05


def run() -> str:
    right, lines = 0, []
    for k in WIDTHS:
        for ratio in RATIOS:
            x = jax.random.normal(jax.random.key(0), (k, ratio * k))
            methods = ("direct", "gram")
            times = paired(
                {m: functools.partial(polar_factor, x, method=m) for m in methods}, rounds=9
            )
            chosen = cost(x.shape).method
            other = methods[chosen == "direct"]
            good = times[chosen].seconds <= TIE * times[other].seconds
            right += good
            if not good:
                lines.append(f"{k} x {ratio * k} ({times['gram'].ratio:.2f} by gram)")
    total = len(WIDTHS) * len(RATIOS)
    wrong = f" Wrong: {', '.join(lines)}." if lines else ""
    return f"Right on **{right} of {total}** shapes.{wrong}"
