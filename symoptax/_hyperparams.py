"""What `optax.inject_hyperparams` may see: the numbers that can change while training."""

import functools
import inspect
import numbers
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, get_args

import jax
import numpy as np
from jax.core import Tracer

P = ParamSpec("P")
T = TypeVar("T")


def injectable(*names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Hide all parameters but `names` from `optax.inject_hyperparams`.

    It reads a factory's signature, turns every int into a traced array and calls every callable as
    a schedule, so `steps=5`, views and masks would have to be listed in `static_args` each time.
    The factory is called as ever; only the signature shows `**static` in place of the rest, which
    `inject_hyperparams` then collects, leaves alone and hands back as one dictionary.

    >>> @injectable("learning_rate")
    ... def factory(learning_rate, *, steps=5):
    ...     return learning_rate, steps
    >>> str(inspect.signature(factory)), factory(0.1, steps=3)
    ('(learning_rate, **static)', (0.1, 3))
    """

    def decorate(factory: Callable[P, T]) -> Callable[P, T]:
        parameters = inspect.signature(factory).parameters

        @functools.wraps(factory)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            handed_back = kwargs.pop("static", {})
            return factory(*args, **kwargs, **handed_back)  # pyright: ignore

        wrapper.__doc__ = (
            f"{inspect.getdoc(factory)}\n\nKeyword options: {_hidden(factory, names)}."
        )
        shown = [parameters[name] for name in names]
        static = inspect.Parameter("static", inspect.Parameter.VAR_KEYWORD)
        wrapper.__signature__ = inspect.Signature([*shown, static])  # pyright: ignore
        return wrapper

    return decorate


def _hidden(factory: Callable[..., Any], names: Sequence[str]) -> str:
    """List the parameters that the shown signature leaves out, with those of a `**` TypedDict."""
    hidden: list[str] = []
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.kind == inspect.Parameter.VAR_KEYWORD:
            hidden += get_args(parameter.annotation)[0].__annotations__
        elif name not in names:
            hidden.append(name)
    return ", ".join(hidden) or "none"


def check_numbers(**values: Any) -> None:
    """Raise TypeError for a hyperparameter that is no number; a learning rate may be a schedule."""
    for name, value in values.items():
        schedule = name == "learning_rate" and callable(value)
        if not schedule and not isinstance(value, numbers.Real | np.ndarray | jax.Array):
            need = "a number or a schedule" if name == "learning_rate" else "a number"
            raise TypeError(f"{name}={value!r}: need {need}.")


def surely_zero(value: Any) -> bool:
    """Return whether a hyperparameter is the Python number 0.

    An array never is, whatever its value: the structure of a state may hang on the answer, and
    under `optax.inject_hyperparams` the same hyperparameter is concrete in `init` and traced later.
    """
    return isinstance(value, int | float) and value == 0


def surely_nonzero(value: Any) -> bool:
    """Return whether a hyperparameter is known not to be 0; a traced one never is."""
    return not isinstance(value, Tracer) and bool(value != 0)
