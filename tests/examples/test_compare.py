"""Comparisons: which runs they need, what they keep of them, what the tables say."""

import dataclasses
import math

import pytest
from tiny_runs import SMALL, compile_once, write_texts

import compare
from comparison import report
from comparison.results import Result, file_name, find
from comparison.sweep import Sweep, sweep
from pretraining.config import Config


def result(config, losses, steps=(10, 20, 30)):
    """Return the result of a run that never was."""
    figures = {"train_loss": 1.0, "tokens_per_second": 5.0, "baselines": {"unigram": 6.0}}
    curve = list(zip(steps, losses, strict=True))
    return Result(config, figures, curve, curve, [], {})


def best_at(best, asked):
    """Return a run that is the better the nearer its rate is to `best`, by factors."""

    def run_one(config):
        asked.append((config.learning_rate, config.seed))
        off = abs(math.log(config.learning_rate / best))
        return result(config, (9.0, 8.0, 5.0 + off + 0.01 * config.seed))

    return run_one


def test_every_rate_runs_with_the_first_seed_and_the_best_with_all():
    asked = []
    found = sweep(Config(), "muon", [1.0, 2.0, 4.0], [3, 5, 7], best_at(2.0, asked), extend=True)
    assert asked == [(1.0, 3), (2.0, 3), (4.0, 3), (2.0, 5), (2.0, 7)]
    assert (found.rate, found.at_an_end) == (2.0, False)
    assert [r.config.seed for r in found.best] == [3, 5, 7]
    assert {r.config.optimizer for r in found.best} == {"muon"}


@pytest.mark.parametrize(
    ("best", "tried"), [(16.0, [1, 2, 4, 8, 16, 32]), (0.5, [0.25, 0.5, 1, 2, 4])]
)
def test_a_sweep_goes_on_beyond_an_end_that_is_best(best, tried):
    asked = []
    found = sweep(Config(), "muon", [1.0, 2.0, 4.0], [0], best_at(best, asked), extend=True)
    assert sorted(found.by_rate) == tried
    assert found.rate == best
    assert not found.at_an_end


def test_a_sweep_says_when_it_stopped_at_an_end():
    found = sweep(Config(), "muon", [1.0, 2.0, 4.0], [0], best_at(9.0, []), extend=False)
    assert found.at_an_end
    _, rows = report.table({"muon": found})
    assert rows[0][2] == "4 (at an end)"


def sweep_of(name, curves):
    config = Config(optimizer=name, learning_rate=0.1, steps=30)
    best = [result(dataclasses.replace(config, seed=i), c) for i, c in enumerate(curves)]
    return Sweep(name, {0.1: best[0]}, best)


def test_the_table_has_means_standard_errors_and_steps_to_the_loss_of_adamw():
    sweeps = {
        "adamw": sweep_of("adamw", [(7.0, 6.0, 5.0), (7.0, 6.0, 5.2)]),  # 5.1 +- 0.1
        "muon": sweep_of("muon", [(5.6, 4.6, 4.0), (5.6, 4.6, 4.0)]),  # 5.1 is at step 15
        "layerwise": sweep_of("layerwise", [(7.0, 6.0, 5.5), (7.0, 6.0, 5.5)]),
    }
    header, rows = report.table(sweeps)
    by_name = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert list(by_name) == ["muon", "adamw", "layerwise"]
    assert by_name["adamw"]["validation loss"] == "5.100 ± 0.100"
    column = "steps to adamw's loss"
    assert [by_name[n][column] for n in by_name] == ["0.50", "1.00", "not reached"]
    assert by_name["adamw"]["behind the best"] == "1.100"
    # Seed by seed 1.0 and 1.2.
    assert by_name["muon"]["better than adamw by"] == "1.100 ± 0.100"
    assert by_name["layerwise"]["better than adamw by"] == "-0.400 ± 0.100"
    assert by_name["adamw"]["better than adamw by"] == ""
    _, runs = report.all_runs(sweeps)
    assert len(runs) == 6


def test_a_result_is_kept_under_its_settings(tmp_path):
    config = Config(optimizer="muon", learning_rate=0.5, seed=3, out_dir="here")
    saved = result(config, (3.0, 2.0, 1.23456789))
    saved.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [file_name(config)]
    # Where it ran, and how often it was saved, make no other run.
    found = find(dataclasses.replace(config, out_dir="there", checkpoint_every=7), tmp_path)
    assert found.val_loss == pytest.approx(1.23456789, rel=1e-5)
    assert found.config.optimizer == "muon"
    for change in ({"seed": 4}, {"steps": 7}, {"lr_multiplier": ("embedding:2",)}, {"tied": True}):
        assert find(dataclasses.replace(config, **change), tmp_path) is None
    # What the curve was measured on counts too.
    assert find(dataclasses.replace(config, eval_batches=3), tmp_path) is None


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    texts = tmp_path_factory.mktemp("texts")
    write_texts(texts)
    cache = tmp_path_factory.mktemp("cache")
    with compile_once(tmp_path_factory.mktemp("compiled")):
        yield ["compare", f"--data={texts}", f"--cache_dir={cache}", *SMALL, "--steps=3"]


def test_compare_runs_once_and_goes_on_from_what_there_is(flags, tmp_path, capsys):
    flags = [flag for flag in flags if "learning_rate" not in flag]
    flags += [f"--out_dir={tmp_path}", "--optimizers=adamw,row_norm", "--rate_factors=1"]
    assert compare.main(flags) == 0
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    results = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "results").iterdir()}
    assert len(results) == 2
    assert compare.main([*flags, "--seeds=0,1", "--nokeep_checkpoints"]) == 0
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "results").iterdir()}
    assert len(after) == 4
    assert results.items() <= after.items()
    assert "±" in (tmp_path / "comparison.md").read_text()
    kept = [path for path in tmp_path.glob("*seed*") if (path / "checkpoints").exists()]
    assert len(kept) == 2
    assert "row_norm" in capsys.readouterr().out


REFUSED = {
    "no optimizer": (["--optimizers="], "at least one"),
    "twice": (["--optimizers=adamw,adamw"], "one twice"),
    "unknown": (["--optimizers=sgd"], "choose from"),
    "two rates": (["--learning_rates=1e-3", "--learning_rate=1e-3"], "one of"),
    "nothing to extend": (["--extend"], "two rates"),
    "unfinished": (["--stop_at_step=2"], "finished runs"),
    "no number": (["--learning_rates=fast"], "fast"),
    "no seed": (["--seeds=a"], "seeds"),
}


@pytest.mark.parametrize(("given", "named"), REFUSED.values(), ids=REFUSED)
def test_compare_refuses_what_it_cannot_use(tmp_path, capsys, given, named):
    assert compare.main(["compare", f"--out_dir={tmp_path / 'runs'}", *given]) == 2
    message = capsys.readouterr().err
    assert named in message
    assert message.count("\n") == 1
    assert not (tmp_path / "runs").exists()
