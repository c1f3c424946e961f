"""The pre-training example end to end: runs, resumes bit for bit, and refuses bad input."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_runs import SMALL, compile_once, logged_losses, saved_arrays, write_texts

import pretrain
from pretraining.checkpoint import Checkpoints
from pretraining.config import Config, define_flags, differences, from_json, parse_flags
from pretraining.errors import InputError
from pretraining.optimizers import make_schedule
from pretraining.progress import read_metrics
from pretraining.train import TrainState

SCRIPT = Path(pretrain.__file__)


@pytest.fixture(scope="module", autouse=True)
def little(tmp_path_factory):
    with compile_once(tmp_path_factory.mktemp("compiled")):
        yield


@pytest.fixture(scope="session")
def data_flags(tmp_path_factory):
    """Flags of a small text corpus and of a cache that all tests share."""
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder)
    return [f"--data={folder}", f"--cache_dir={tmp_path_factory.mktemp('cache')}"]


@pytest.fixture(scope="session")
def run(data_flags):
    """Run the example in this process and return its exit code."""

    def call(out_dir, *extra):
        return pretrain.main(["pretrain", f"--out_dir={out_dir}", *data_flags, *SMALL, *extra])

    return call


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """Return the folder of an unbroken run of eight steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(folder, "--eval_every=3") == 0
    return folder


def test_a_run_from_flags_to_report(whole):
    report = (whole / "report.md").read_text()
    for text in ("unigram", "validation", "embedding", "times AdamW's", "loss.png"):
        assert text in report
    assert {path.name for path in whole.iterdir()} == {
        *("checkpoints", "config.json", "loss.png", "metrics.jsonl", "report.md", "summary.json"),
        "tensorboard",
    }
    assert [step for step, loss, _ in logged_losses(whole) if loss] == list(range(1, 9))
    # The last step is evaluated although 8 is no multiple of 3.
    assert [step for step, _, val_loss in logged_losses(whole) if val_loss] == [3, 6, 8]
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["state_bytes"] < summary["adamw_state_bytes"]


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("optax_muon", marks=pytest.mark.slow)])
def test_each_optimizer_lowers_the_loss(run, tmp_path, optimizer):
    assert run(tmp_path / "run", f"--optimizer={optimizer}") == 0
    losses = [loss for _, loss, _ in logged_losses(tmp_path / "run") if loss is not None]
    # The first loss is near log(vocabulary) = 5.7; the corpus has 11 words.
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(
    "model",
    ["olmoe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "gpt_oss"))],
)
def test_each_model_lowers_the_loss(run, tmp_path, model):
    assert run(tmp_path / "run", f"--model={model}") == 0
    losses = [loss for _, loss, _ in logged_losses(tmp_path / "run") if loss]
    assert losses[-1] < losses[0] - 0.15
    assert f"tiny {model} model" in (tmp_path / "run" / "report.md").read_text()


def test_sizes_and_dtypes_can_be_given(run, tmp_path):
    sizes = ["d_ff:96", "num_layers:1", "rope_base:1e4"]
    flags = [f"--model_override={size}" for size in sizes]
    dtypes = ["--param_dtype=bfloat16", "--mu_dtype=float32"]
    assert run(tmp_path / "run", *flags, *dtypes) == 0
    arrays = saved_arrays(tmp_path / "run", 8)
    params = {k: v for k, v in arrays.items() if k.startswith("params")}
    assert {array.dtype.name for array in params.values()} == {"bfloat16"}
    assert {array.dtype.name for k, array in arrays.items() if "mu" in k} == {"float32"}
    assert next(v.shape for k, v in params.items() if "gate_proj" in k) == (32, 96)
    assert not any("['layers']['1']" in path or "['layers'][1]" in path for path in params)
    losses = [loss for _, loss, _ in logged_losses(tmp_path / "run") if loss]
    assert losses[-1] < losses[0] - 0.2
    assert "d_ff 96, num_layers 1" in (tmp_path / "run" / "report.md").read_text()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["rope_theta"] == 1e4


def test_resuming_equals_the_unbroken_run_bit_for_bit(run, whole, tmp_path):
    halves = tmp_path / "halves"
    assert run(halves, "--eval_every=3", "--stop_at_step=3", "--checkpoint_every=2") == 0
    assert not (halves / "report.md").exists()
    # What a killed run leaves beyond its checkpoint: a whole line, and half a line.
    with (halves / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 99.0}\n{"step": 5, "lo')
    assert run(halves, "--eval_every=3", "--resume") == 0
    assert logged_losses(halves) == logged_losses(whole)
    expected, found = saved_arrays(whole, 8), saved_arrays(halves, 8)
    assert expected.keys() == found.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(array, found[path], err_msg=path)
    # The control: a step more or less is another state.
    assert any((array != saved_arrays(halves, 3)[path]).any() for path, array in expected.items())


def test_resume_names_what_differs(run, tmp_path, capsys):
    assert run(tmp_path / "run", "--stop_at_step=1") == 0
    before = sorted((tmp_path / "run").rglob("*"))
    assert run(tmp_path / "run", "--steps=9", "--seed=5", "--eval_every=1", "--resume") == 2
    message = capsys.readouterr().err
    assert "steps (was 8, now 9)" in message
    assert "seed (was 0, now 5)" in message
    assert "eval_every" not in message
    assert sorted((tmp_path / "run").rglob("*")) == before


@pytest.mark.parametrize("shardings", [False, True])
def test_changed_labels_are_refused_not_restored_as_none(tmp_path, shardings):
    params = {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}

    def state(labels):
        tx = optax.partition({"m": optax.trace(0.9), "s": optax.sgd(1.0)}, labels)
        return TrainState(params, tx.init(params))

    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, state({"a": "m", "b": "s"}), {}, Config())

    def abstract(leaf):
        place = leaf.sharding if shardings else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    same, changed = (
        jax.tree.map(abstract, state(labels))
        for labels in ({"a": "m", "b": "s"}, {"a": "m", "b": "m"})
    )
    with pytest.raises(InputError, match=r"opt_state.*1 leaves.*trace/b.*saved nothing"):
        checkpoints.restore(1, changed)
    restored, _ = checkpoints.restore(1, same)
    assert jax.tree.structure(restored) == jax.tree.structure(same)


BAD_INPUT = {
    "unknown flag": (["--lerning_rate=1"], "lerning_rate"),
    "no number": (["--steps=many"], "steps"),
    "out of range": (["--steps=0"], "--steps=0"),
    "nan": (["--weight_decay=nan"], "--weight_decay"),
    "stray argument": (["resume"], "'resume'"),
    "model": (["--model=gpt"], "qwen3, gemma3, olmoe, gpt_oss"),
    "preset": (["--preset=huge"], "tiny, small"),
    "a head of its own": (["--model=olmoe", "--tied"], "olmoe has a head of its own"),
    "size": (["--model_override=width:8"], "qwen3 has d_model, num_layers"),
    "size twice": (["--model_override=d_ff:8", "--model_override=d_ff:9"], "each size"),
    "kind of size": (["--model_override=d_model:8.5"], "must be of type int"),
    "dtype": (["--param_dtype=float16"], "float32, bfloat16"),
    "dtype of momenta": (["--mu_dtype=half"], "--mu_dtype=half"),
    "optimizer": (["--optimizer=sgd"], "layerwise, adamw"),
    "update syntax": (["--update=row_norm"], "role:value"),
    "update twice": (["--update=mlp_in:polar", "--update=mlp_in:adamw"], "once"),
    "update name": (["--update=embedding:rownorm"], "rownorm"),
    "role name": (["--update=embeding:row_norm"], "embeding"),
    "wrong symmetry": (["--update=attention:row_norm"], "--nostrict"),
    "idle role": (["--update=router:centered_row_norm"], "router; its roles are attention"),
    "negative multiplier": (["--lr_multiplier=embedding:-1"], "embedding:-1"),
    "multiplier": (["--lr_multiplier=embedding:ten"], "number"),
    "multiplier role": (["--lr_multiplier=embeding:10"], "embeding"),
    "no roles": (["--optimizer=adamw", "--update=embedding:row_norm"], "no roles"),
    "accumulate": (["--accumulate=3"], "--accumulate=3"),
    "mesh syntax": (["--mesh=4x2"], "fsdp:4,tensor:2"),
    "mesh size": (["--mesh=fsdp:4096"], "4096 devices"),
    "batch over mesh": (["--mesh=fsdp:2", "--batch_size=3"], "fsdp:2"),
    "data": (["--data=/no/such/folder"], "/no/such/folder"),
    "empty data": (["--data="], "leave the flag out"),
    "too little data": (["--seq_len=100000"], "too little"),
    "nothing to resume": (["--resume"], "without --resume"),
}


@pytest.mark.parametrize(("flags", "named"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_line_and_no_folder(run, tmp_path, capsys, flags, named):
    assert run(tmp_path / "run", *flags) == 2
    message = capsys.readouterr().err
    assert named in message
    assert message.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_used_folder_is_refused(run, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert run(tmp_path) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_mesh_gives_the_same_losses_and_can_be_left(run, whole, tmp_path):
    assert len(jax.devices()) == 8
    mesh = ["--mesh=fsdp:4,tensor:2", "--stop_at_step=4"]
    assert run(tmp_path / "run", "--eval_every=3", *mesh) == 0
    assert run(tmp_path / "run", "--eval_every=3", "--resume") == 0
    one, two = (
        [loss or val for _, loss, val in logged_losses(path)] for path in (whole, tmp_path / "run")
    )
    # Sums in another order, once per step, and updates that amplify them a little.
    np.testing.assert_allclose(one, two, rtol=3e-4)


def test_accumulation_changes_no_losses(run, tmp_path):
    for parts in (1, 4):
        flags = ["--optimizer=adamw", f"--accumulate={parts}", "--stop_at_step=4"]
        assert run(tmp_path / str(parts), *flags) == 0
    whole, parts = (
        [loss or val for _, loss, val in logged_losses(tmp_path / parts)] for parts in ("1", "4")
    )
    np.testing.assert_allclose(whole, parts, rtol=1e-4)


def test_the_schedule_warms_up_stays_and_falls_to_zero():
    config = Config(steps=100, warmup_steps=10, decay_fraction=0.4, learning_rate=2.0)
    rates = [float(make_schedule(config)(step)) for step in range(101)]
    np.testing.assert_allclose(rates[:10], [0.2 * step for step in range(1, 11)], rtol=1e-6)
    assert set(rates[10:61]) == {2.0}
    np.testing.assert_allclose(rates[80], 1.0, rtol=1e-6)
    assert rates[100] == 0.0


def test_config_from_flags_and_through_json():
    argv = ["pretrain", "--update=mlp_in:polar", "--update=lm_head:adamw", "--tied", "--steps=7"]
    config = parse_flags(define_flags(), argv)
    expected = Config(update=("mlp_in:polar", "lm_head:adamw"), tied=True, steps=7)
    assert config == expected
    assert from_json(json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert differences(config, dataclasses.replace(config, out_dir="x", resume=True)) == []
    with pytest.raises(InputError, match="depth"):
        from_json({"depth": 3})


def test_the_monitor_writes_beside_the_losses(run, whole, tmp_path):
    assert run(tmp_path / "run", "--eval_every=3", "--monitor_every=3") == 0
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    measured = [row["step"] for row in rows if "attention/spectral_norm" in row]
    assert measured == [3, 6]
    found = [row for row in logged_losses(tmp_path / "run") if row[1:] != (None, None)]
    # To rounding: another program may fuse its sums in another order.
    assert found == [
        (step, loss and pytest.approx(loss, rel=3e-4), val and pytest.approx(val, rel=3e-4))
        for step, loss, val in logged_losses(whole)
    ]


def test_an_update_that_breaks_a_symmetry_runs_when_asked(run, tmp_path):
    flags = ["--nostrict", "--update=lm_head:row_norm"]
    assert run(tmp_path / "run", *flags) == 0
    assert "row_norm" in (tmp_path / "run" / "report.md").read_text()


def test_sigterm_saves_and_the_run_can_go_on(run, data_flags, tmp_path):
    flags = [f"--out_dir={tmp_path / 'run'}", *data_flags, *SMALL, "--steps=5000"]
    command = [sys.executable, str(SCRIPT), *flags]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    for line in process.stdout:
        if line.startswith("step      3/"):
            process.send_signal(signal.SIGTERM)
            break
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    step = int(re.search(r"saved at step (\d+).*--resume", output)[1])
    assert (tmp_path / "run" / "checkpoints" / str(step)).is_dir()
    more = ["--steps=5000", "--resume", f"--stop_at_step={step + 1}"]
    assert run(tmp_path / "run", *more) == 0
    assert logged_losses(tmp_path / "run")[-1][0] == step + 1
