"""One frozen dataclass holds every setting; the flags are generated from it."""

import dataclasses
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from pretraining import paper
from pretraining.errors import InputError


def _setting(default: Any, help_text: str, *, may_change: bool = False) -> Any:
    return dataclasses.field(
        default=default, metadata={"help": help_text, "may_change": may_change}
    )


DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Config:
    """Every setting of a run; `may_change` marks those that a resumed run may give anew."""

    data: str | None = _setting(None, "Text or .bin token shards; Python's own sources if not set.")
    cache_dir: str = _setting("~/.cache/symoptax", "Where tokenised text is kept.", may_change=True)
    out_dir: str = _setting("runs/pretrain", "The run folder, new or resumed.", may_change=True)
    model: str = _setting("qwen3", "qwen3, gemma3, olmoe or gpt_oss.")
    preset: str = _setting("small", "Size of the model: tiny, small, paper, or a published one.")
    init_from: str = _setting(
        "", "Folder with config.json and safetensors, as on the Hugging Face hub, to start from."
    )
    vocab_size: int = _setting(
        0, "Entries of the vocabulary, that of .bin shards; 0: the preset's."
    )
    tied: bool = _setting(False, "Use the embedding as the LM head too.")
    model_override: tuple[str, ...] = _setting(
        (), "size:value in place of the preset's, e.g. d_model:256, balance_coef:0; repeatable."
    )
    param_dtype: str = _setting("float32", "Of parameters and activations: float32 or bfloat16.")
    seq_len: int = _setting(256, "Tokens that the model reads per sequence.")
    batch_size: int = _setting(8, "Sequences per optimizer step.")
    accumulate: int = _setting(1, "Micro-batches that a batch is split into.")
    steps: int = _setting(300, "Optimizer steps of the whole schedule.")
    optimizer: str = _setting(
        "layerwise",
        "adamw, optax_muon, or a stack of updates by role: layerwise, muon, row_norm, right_polar, "
        "hybrid, row_norm_router, left_polar_router; paper_...: a run of the paper.",
    )
    learning_rate: float | None = _setting(None, "Peak rate; the optimizer's own if not set.")
    update: tuple[str, ...] = _setting((), "role:update, e.g. embedding:right_polar; repeatable.")
    lr_multiplier: tuple[str, ...] = _setting((), "role:factor, e.g. embedding:10; repeatable.")
    mu_dtype: str = _setting("", "Of momenta; that of the parameters if empty.")
    lazy: bool = _setting(True, "Stop rows of tokens and experts long without gradient.")
    strict: bool = _setting(True, "Refuse updates that break the symmetry of their role.")
    weight_decay: float = _setting(0.1, "Decoupled weight decay, multiplied by the rate.")
    warmup_steps: int = _setting(10, "Steps of linear warm-up.")
    decay_fraction: float = _setting(0.4, "Last part of the run, where the rate falls to 0.")
    clip_norm: float = _setting(1.0, "Global gradient norm to clip at; 0 does not clip.")
    mesh: str = _setting("", "Devices, e.g. fsdp:4,tensor:2; empty uses one.", may_change=True)
    seed: int = _setting(0, "Seed of the parameters and of the order of the data.")
    eval_every: int = _setting(50, "Steps between evaluations.", may_change=True)
    eval_batches: int = _setting(16, "Most batches per evaluation.", may_change=True)
    checkpoint_every: int = _setting(100, "Steps between checkpoints.", may_change=True)
    log_every: int = _setting(10, "Steps between printed lines.", may_change=True)
    monitor_every: int = _setting(0, "Steps between measurements; 0: never.")
    resume: bool = _setting(False, "Go on from the last checkpoint of out_dir.", may_change=True)
    stop_at_step: int = _setting(0, "Save and stop after this step; 0: never.", may_change=True)

    @property
    def model_name(self) -> str:
        changes = "".join(f", {entry.replace(':', ' ')}" for entry in self.model_override)
        if self.init_from:
            return f"{self.model} model from {self.init_from}{changes}"
        return f"{self.preset} {self.model} model{changes}"

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len


_DEFINE: dict[Any, Callable[..., Any]] = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    float | None: flags.DEFINE_float,
    str: flags.DEFINE_string,
    str | None: flags.DEFINE_string,
    tuple[str, ...]: flags.DEFINE_multi_string,
}


def define_flags() -> flags.FlagValues:
    """Define one flag per field of `Config`, with its default and its help."""
    values = flags.FlagValues()
    flags.DEFINE_bool("help", False, "Show this help.", short_name="h", flag_values=values)
    types = typing.get_type_hints(Config)
    for field in dataclasses.fields(Config):
        define = _DEFINE[types[field.name]]
        define(field.name, field.default, field.metadata["help"], flag_values=values)
    return values


def parse_flags(values: flags.FlagValues, argv: Sequence[str]) -> Config:
    """Parse `argv` (program name first) and validate what it says."""
    try:
        rest = values(argv)
    except flags.Error as error:
        raise InputError(str(error)) from error
    if values.help:
        print(f"{sys.modules['__main__'].__doc__ or ''}\n{values.get_help()}")
        raise SystemExit(0)
    if len(rest) > 1:
        raise InputError(f"unexpected argument {rest[1]!r}: settings are given as --name=value")
    settings = {field.name: values[field.name].value for field in dataclasses.fields(Config)}
    if values.preset == "paper" and values.model in paper.MODELS:
        theirs = paper.settings(values.model).items()
        settings |= {name: value for name, value in theirs if not values[name].present}
    config = from_json(settings)
    config = dataclasses.replace(config, out_dir=str(Path(config.out_dir).expanduser()))
    validate(config)
    return config


def from_json(settings: Mapping[str, Any]) -> Config:
    """Rebuild the config that `dataclasses.asdict` made, before or after a trip through JSON."""
    known = {field.name for field in dataclasses.fields(Config)}
    if unknown := sorted(set(settings) - known):
        raise InputError(f"unknown settings {unknown}: written by another version of this example")
    return Config(**{name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()})


def differences(old: Config, new: Config) -> list[str]:
    """Name each setting that differs and that would change the numbers of a resumed run."""
    fixed = [f.name for f in dataclasses.fields(Config) if not f.metadata["may_change"]]
    pairs = [(name, getattr(old, name), getattr(new, name)) for name in fixed]
    return [f"{name} (was {a!r}, now {b!r})" for name, a, b in pairs if a != b]


def split_entries(name: str, entries: Sequence[str], key: str = "role") -> dict[str, str]:
    """Split the `key:value` entries of the repeatable flag `name`."""
    pairs = [entry.partition(":") for entry in entries]
    for entry, (left, _, value) in zip(entries, pairs, strict=True):
        if not left or not value:
            raise InputError(f"--{name}={entry}: write it as {key}:value")
    lefts = [left for left, _, _ in pairs]
    if len(set(lefts)) < len(lefts):
        raise InputError(f"--{name}: each {key} at most once, but got {', '.join(entries)}")
    return {left: value for left, _, value in pairs}


def multipliers(config: Config) -> dict[str, float]:
    """Return the learning-rate factor of each role in `config.lr_multiplier`."""
    found = split_entries("lr_multiplier", config.lr_multiplier)
    try:
        factors = {role: float(value) for role, value in found.items()}
    except ValueError as error:
        raise InputError(f"--lr_multiplier: a factor must be a number ({error})") from error
    for role, factor in factors.items():
        if not 0 <= factor < float("inf"):
            raise InputError(f"--lr_multiplier={role}:{factor}: must be finite and at least 0")
    return factors


def _at_least(config: Config, low: float, names: str) -> None:
    for name in names.split():
        value = getattr(config, name)
        if value is not None and not low <= value < float("inf"):
            raise InputError(f"--{name}={value}: must be a number of at least {low}")


def validate(config: Config) -> None:
    """Raise `InputError` for what can be seen to be wrong from the settings alone."""
    if config.data == "":
        raise InputError("--data= is empty: give a path, or leave the flag out")
    _at_least(config, 1, "seq_len batch_size accumulate steps eval_every eval_batches")
    _at_least(config, 1, "checkpoint_every log_every")
    _at_least(config, 0, "vocab_size weight_decay warmup_steps clip_norm seed stop_at_step")
    _at_least(config, 1e-12, "learning_rate")
    if not 0 <= config.decay_fraction <= 1:
        raise InputError(f"--decay_fraction={config.decay_fraction}: must lie between 0 and 1")
    if config.stop_at_step > config.steps:
        raise InputError(f"--stop_at_step={config.stop_at_step}: beyond --steps={config.steps}")
    if config.batch_size % config.accumulate:
        raise InputError(f"--accumulate={config.accumulate}: must divide --batch_size")
    for name in ("preset", "vocab_size", "tied") if config.init_from else ():
        if getattr(config, name) != getattr(Config(), name):
            raise InputError(f"--{name}: leave it out, --init_from has its own in config.json")
    for name, others in (("param_dtype", ()), ("mu_dtype", ("",))):
        if getattr(config, name) not in (*DTYPES, *others):
            raise InputError(f"--{name}={getattr(config, name)}: choose from {', '.join(DTYPES)}")
    split_entries("update", config.update)
    multipliers(config)
