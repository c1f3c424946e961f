"""The example as two processes of four devices each: one run, whatever ends a process."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_runs import SMALL, compile_once, logged_losses, saved_arrays, write_texts

import pretrain

MESH = "--mesh=fsdp:4,tensor:2"
# A tenth of the usual rate: less of the rounding is amplified.
FLAGS = [*SMALL, "--learning_rate=1e-3", "--steps=4", "--eval_every=3", "--checkpoint_every=1"]
STEPS = 4
PATIENCE = 120  # Seconds for whatever should take a few; two cores may be shared.
LOST = 20  # Seconds after which a lost process ends the other one.


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    with compile_once(folder):
        yield folder


@pytest.fixture(scope="module")
def data_flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder)
    return [f"--data={folder}", f"--cache_dir={tmp_path_factory.mktemp('cache')}"]


@pytest.fixture(scope="module")
def one(compiled, data_flags):
    """Run the example in this process, which has eight devices; return its exit code."""
    assert len(jax.devices()) == 8

    def call(out_dir, *extra):
        return pretrain.main(["pretrain", f"--out_dir={out_dir}", *data_flags, *FLAGS, *extra])

    return call


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Process:
    """One of the two, with what it has written."""

    def __init__(self, index, port, log: Path, flags, compiled: Path):
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(index),
            "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4"),
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        self.log = log
        with log.open("w") as file:
            command = [sys.executable, pretrain.__file__, *flags]
            self.popen = subprocess.Popen(command, stdout=file, stderr=file, env=env)

    def wait_for(self, text):
        deadline = time.monotonic() + PATIENCE
        while text not in self.log.read_text():
            assert self.popen.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def end(self, within=PATIENCE):
        """Wait for its exit code; of one that hangs, show where."""
        try:
            return self.popen.wait(within)
        except subprocess.TimeoutExpired:
            self.popen.send_signal(signal.SIGABRT)
            self.popen.wait(PATIENCE)
            raise AssertionError(f"still there after {within} s:\n{self.log.read_text()}") from None


@pytest.fixture(scope="module")
def two(compiled, data_flags, tmp_path_factory):
    """Start the example as two processes, which do not outlive the block."""

    @contextlib.contextmanager
    def start(out_dir, *extra, each=((), ())):
        flags = [f"--out_dir={out_dir}", *data_flags, *FLAGS, "--distributed", *extra]
        flags.append(f"--distributed_timeout={LOST}")
        logs, port = tmp_path_factory.mktemp("logs"), _free_port()
        pair = []
        try:
            for index in range(2):
                log = logs / f"{index}.txt"
                pair.append(Process(index, port, log, [*flags, *each[index]], compiled))
            yield pair
        finally:
            for process in pair:
                process.popen.kill()
                process.popen.wait()

    return start


def finish(pair):
    codes = [process.end() for process in pair]
    assert codes == [0, 0], [process.log.read_text() for process in pair]


@pytest.fixture(scope="module")
def whole(two, tmp_path_factory):
    """Return the folder of an unbroken run of two processes."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with two(folder, MESH) as pair:
        finish(pair)
    return folder


def values(out_dir, last):
    return [loss or val for step, loss, val in logged_losses(out_dir) if step <= last]


def assert_equal_runs(expected, found, step):
    """The log has every step once, and the last checkpoint is the same bit for bit."""
    assert logged_losses(expected) == logged_losses(found)
    left, right = saved_arrays(expected, step), saved_arrays(found, step)
    assert left.keys() == right.keys()
    for path, array in left.items():
        np.testing.assert_array_equal(array, right[path], err_msg=path)


def test_two_processes_equal_one(one, whole, tmp_path):
    assert one(tmp_path / "run", MESH) == 0
    assert [step for step, loss, _ in logged_losses(whole) if loss] == [1, 2, 3, 4]
    # Sums in another order, once per step, and updates that amplify them a little.
    np.testing.assert_allclose(values(whole, STEPS), values(tmp_path / "run", STEPS), rtol=2e-5)
    np.testing.assert_allclose(values(whole, 1), values(tmp_path / "run", 1), rtol=5e-7)
    names = [{path.name for path in folder.iterdir()} for folder in (whole, tmp_path / "run")]
    assert names[0] == names[1]


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_unbroken(two, whole, tmp_path):
    folder = tmp_path / "run"
    with two(folder, MESH) as pair:
        pair[0].wait_for("step      2/")
        pair[0].popen.kill()
        assert pair[1].end(within=2 * LOST + 10) != 0
    assert not (folder / "report.md").exists()
    with two(folder, MESH, "--resume") as pair:
        finish(pair)
    assert_equal_runs(whole, folder, STEPS)


# Seen early, the signal comes before the first step, which is step 3.
@pytest.mark.slow
@pytest.mark.parametrize("seen", ["step      3/", "data:"])
def test_a_signal_stops_both_and_either_number_goes_on(one, two, tmp_path, seen):
    folder = tmp_path / "run"
    flags = ["--mesh=fsdp:8", "--steps=5000", "--checkpoint_every=5000"]
    assert one(folder, *flags, "--stop_at_step=2") == 0
    with two(folder, *flags, "--resume") as pair:
        pair[0].wait_for(seen)
        pair[1].popen.send_signal(signal.SIGTERM)
        assert [process.end() for process in pair] == [130, 130]
        assert "stopped and saved at step" in pair[0].log.read_text()
        assert "step" not in pair[1].log.read_text()
    last = max(int(path.name) for path in (folder / "checkpoints").iterdir())
    assert last >= 3
    assert one(folder, *flags, "--resume", f"--stop_at_step={last + 1}") == 0
    assert one(tmp_path / "unbroken", *flags, f"--stop_at_step={last + 1}") == 0
    np.testing.assert_allclose(
        values(folder, last + 1), values(tmp_path / "unbroken", last + 1), rtol=1e-4
    )
    assert [step for step, loss, _ in logged_losses(folder) if loss] == list(range(1, last + 2))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["--mesh=fsdp:8", "--mesh=tensor:2,fsdp:4"])
def test_other_meshes_equal_one_process_too(one, two, tmp_path, mesh):
    # On the second mesh both processes load every row.
    with two(tmp_path / "two", mesh) as pair:
        finish(pair)
    assert one(tmp_path / "one", mesh) == 0
    np.testing.assert_allclose(
        values(tmp_path / "two", STEPS), values(tmp_path / "one", STEPS), rtol=2e-5
    )


@pytest.mark.slow
def test_wrong_input_ends_both_processes_and_leaves_nothing(two, tmp_path):
    with two(tmp_path / "run", "--mesh=fsdp:4") as pair:
        assert [process.end() for process in pair] == [2, 2]
        assert all("must use all 8 devices" in process.log.read_text() for process in pair)
    with two(tmp_path / "run", MESH, each=(["--seed=1"], ["--seed=2"])) as pair:
        assert [process.end() for process in pair] == [2, 2]
        assert all("has other flags" in process.log.read_text() for process in pair)
    with two(tmp_path / "run", MESH, each=([], ["--data=/no/such/folder"])) as pair:
        assert [process.end() for process in pair] == [2, 2]
        assert "another process failed" in pair[0].log.read_text()
        assert "/no/such/folder" in pair[1].log.read_text()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_twenty_kills_change_nothing(one, two, tmp_path):
    flags, steps = [MESH, "--steps=40"], 40
    with two(tmp_path / "whole", *flags) as pair:
        finish(pair)
    rng, folder, resume, kills = np.random.default_rng(0), tmp_path / "run", [], 0
    while kills < 20:
        with two(folder, *flags, *resume) as pair:
            victim, other = rng.permutation(pair)
            if kills % 5:  # Every fifth is killed while it starts, the others train or save.
                pair[0].wait_for("data:")
            with contextlib.suppress(subprocess.TimeoutExpired):
                victim.popen.wait(rng.uniform(0, 10))
            victim.popen.kill()
            finished = other.end(within=2 * LOST + 10) == 0
        if finished:
            assert_equal_runs(tmp_path / "whole", folder, steps)
            shutil.rmtree(folder)
        elif folder.exists() and not any(x.name.isdecimal() for x in folder.glob("checkpoints/*")):
            assert one(folder, *flags, "--resume") == 2
            shutil.rmtree(folder)
        kills += not finished
        resume = ["--resume"] if folder.exists() else []
    with two(folder, *flags, *resume) as pair:
        finish(pair)
    assert_equal_runs(tmp_path / "whole", folder, steps)
