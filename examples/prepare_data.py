"""Tokenise a corpus to token shards with a model's own tokenizer, for `pretrain.py --data`.

    python examples/prepare_data.py --data='fineweb-edu/*.parquet' --tokenizer=Qwen3-0.6B
        --out_dir=shards

takes text, `.jsonl`, `.jsonl.gz` and `.parquet` files, such as those of FineWeb-Edu on the Hugging
Face hub, and the `tokenizer.json` of a model there. It says first what to expect (`--estimate_only`
stops after that), uses all cores, and goes on where it was stopped when it is called again: every
shard appears whole or not at all, and has the same bytes however often it was stopped and however
many cores there are. The first documents make the validation shard. Wrong input exits with code 2.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from pretraining.errors import InputError
from pretraining.preparation import Progress, Settings, Source, estimate, open_source, write_shards

INTERRUPTED = 130


def _define_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_bool("help", False, "Show this help.", short_name="h", flag_values=values)
    for name, default, text in (
        ("data", None, "File, folder or glob of text, .jsonl, .jsonl.gz or .parquet files."),
        ("tokenizer", None, "A tokenizer.json, or the folder that holds it."),
        ("out_dir", "shards", "Folder of the shards, new or to go on in."),
        ("column", "text", "Column, or field of JSON lines, that holds the text."),
        ("start", "", "Token before each document, e.g. <bos> for Gemma; none if empty."),
        ("end", "", "Token after each document; found in the tokenizer if empty."),
    ):
        flags.DEFINE_string(name, default, text, flag_values=values)
    for name, default, least, text in (
        ("shard_tokens", Settings.shard_tokens, 1, "Tokens of a shard."),
        ("val_tokens", Settings.val_tokens, 1, "Tokens held out for validation."),
        ("max_tokens", 0, 0, "Stop after so many tokens; 0 takes all."),
        ("workers", 0, 0, "Threads; 0: one per core."),
    ):
        flags.DEFINE_integer(name, default, text, lower_bound=least, flag_values=values)
    flags.DEFINE_bool("estimate_only", False, "Say what to expect and stop.", flag_values=values)
    return values


def _settings(values: flags.FlagValues) -> Settings:
    for name in ("data", "tokenizer"):
        if not values[name].value:
            raise InputError(f"--{name}: is missing")
    if 0 < values.max_tokens <= values.val_tokens:
        raise InputError(
            f"--max_tokens={values.max_tokens}: leaves nothing to train on beside --val_tokens="
            f"{values.val_tokens}"
        )
    names = [field.name for field in dataclasses.fields(Settings)]
    return Settings(**{name: values[name].value for name in names})


def _show(source: Source, console: Console) -> float:
    """Print what to expect; return the number of tokens."""
    expected = estimate(source)
    console.print(
        f"{expected.files:,} files: about {expected.tokens:,.0f} tokens, "
        f"{expected.bytes / 1e9:,.3f} GB of shards, {expected.seconds / 60:,.1f} minutes",
        highlight=False,
    )
    return expected.tokens


def _write(source: Source, folder: Path, expected: float, console: Console) -> None:
    progress = Progress.find(source, folder)
    columns = (TextColumn("tokens"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("", total=round(expected), completed=progress.tokens)
        write_shards(source, folder, progress, lambda tokens: bar.advance(task, tokens))
        bar.update(task, total=progress.tokens, completed=progress.tokens)
    held_out, *trained = (tokens for _, tokens in progress.shards)
    console.print(
        f"{folder}: {sum(trained):,} tokens in {len(trained)} shards, and {held_out:,} for "
        f"validation. Train with --data='{folder}/*.bin' and a --vocab_size of at least "
        f"{source.vocab_size}.",
        highlight=False,
        soft_wrap=True,
    )


def main(argv: Sequence[str]) -> int:
    """Prepare what the flags say and return the exit code."""
    values = _define_flags()
    try:
        rest = values(argv)
        if values.help:
            print(f"{__doc__}\n{values.get_help()}")
            return 0
        if len(rest) > 1:
            raise InputError(f"unexpected argument {rest[1]!r}: settings are given as --name=value")
        # Read once, by the first text that is tokenised.
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        os.environ["RAYON_NUM_THREADS"] = str(values.workers or os.cpu_count())
        console, folder = Console(), Path(values.out_dir).expanduser()
        source = open_source(_settings(values))
        Progress.find(source, folder)  # Raises before the sample is tokenised.
        expected = _show(source, console)
        if not values.estimate_only:
            _write(source, folder, expected, console)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (flags.Error, InputError) as error:
        print(f"prepare_data: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"prepare_data: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
