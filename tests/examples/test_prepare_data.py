"""Corpora to token shards: the right tokens, the same bytes after any stop, wrong input refused."""

import gzip
import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

import prepare_data
from pretraining.dataset import prepare
from pretraining.preparation import Progress, Settings, estimate, open_source, write_shards
from pretraining.shards import open_shard

END = "<|endoftext|>"
SIZES = ["--shard_tokens=3000", "--val_tokens=1000"]


def make_documents():
    rng = np.random.default_rng(0)
    words = [f"w{index}" for index in range(500)] + [END]
    documents = [" ".join(rng.choice(words, rng.integers(1, 400))) for _ in range(120)]
    return [*documents[:50], "", *documents[50:]]


DOCUMENTS = make_documents()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Write the documents in order to files of several kinds; return their folder."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, part in (("a", DOCUMENTS[:60]), ("c", DOCUMENTS[100:])):
        table = pa.table({"text": part, "id": range(len(part))})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=16)
    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in DOCUMENTS[60:100])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Save a tokenizer that, as those of many models do, would add and cut if it was let."""
    words = {f"w{index}": index for index in range(500)}
    made = Tokenizer(WordLevel(words | {"?": 500}, unk_token="?"))
    made.pre_tokenizer = WhitespaceSplit()
    made.add_special_tokens([END, "<bos>"])
    made.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 502)])
    made.enable_truncation(7)
    made.enable_padding(length=9)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture
def call(corpus, tokenizer):
    """Run the script in this process and return its exit code."""

    def run(out_dir, *extra):
        flags = [f"--data={corpus}", f"--tokenizer={tokenizer}", f"--out_dir={out_dir}", *SIZES]
        return prepare_data.main(["prepare_data", *flags, *extra])

    return run


def tokens_of(text):
    # A text that spells the end of a document is a text.
    return [int(word[1:]) if word != END else 500 for word in text.split()]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}


@pytest.mark.parametrize("start", [[], ["--start=<bos>"]], ids=["end", "start and end"])
def test_shards_hold_the_documents_in_order_and_end_where_one_ends(call, tmp_path, start):
    assert call(tmp_path / "shards", *start) == 0
    shards = [open_shard(path) for path in sorted((tmp_path / "shards").glob("*.bin"))]
    names = [shard.path.name for shard in shards]
    assert names == [
        *(f"train_{index:05}.bin" for index in range(len(shards) - 1)),
        "val_00000.bin",
    ]
    train, val = shards[:-1], shards[-1]
    first = [502] if start else []
    expected = [first + tokens_of(text) + [501] for text in DOCUMENTS if text]
    np.testing.assert_array_equal(
        np.concatenate([val.tokens, *(shard.tokens for shard in train)]), np.concatenate(expected)
    )
    longest = max(map(len, expected))
    assert 1000 <= len(val) < 1000 + longest
    assert all(3000 <= len(shard) < 3000 + longest for shard in train[:-1])
    for shard in shards:
        assert shard.tokens[-1] == 501
        assert shard.tokens.dtype == np.uint16
        assert (shard.delimiter, shard.prepend, shard.append) == (501, len(first), 1)
    # What training makes of them.
    data = prepare(f"{tmp_path}/shards/*.bin", vocab_size=503, cache_dir=tmp_path)
    assert (data.train_tokens, data.val_tokens) == (sum(map(len, train)), len(val))


@pytest.mark.parametrize("after", range(0, 24_000, 3_001))
def test_a_stop_changes_no_byte(corpus, tokenizer, tmp_path, after):
    source = open_source(Settings(str(corpus), str(tokenizer), shard_tokens=3000, val_tokens=1000))
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    write_shards(source, whole, Progress.find(source, whole), lambda _: None)
    done = 0

    def stop(tokens):
        nonlocal done
        done += tokens
        if done > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(source, halves, Progress.find(source, halves), stop)
    kept = contents(halves)
    (halves / ".train_00009.bin.0123").write_bytes(b"what a killed process leaves")
    write_shards(source, halves, Progress.find(source, halves), lambda _: None)
    assert contents(halves) == contents(whole)
    assert all(contents(whole)[name] == content for name, content in kept.items())
    assert {path.name for path in halves.iterdir()} == {*contents(whole), "preparation.json"}


def test_a_kill_and_other_threads_change_no_byte(corpus, tokenizer, tmp_path):
    # Long enough to be killed midway.
    for index in range(6):
        text = "\n".join(json.dumps({"text": text}) for text in 40 * DOCUMENTS)
        (tmp_path / f"{index}.jsonl").write_text(text)
    flags = [f"--data={tmp_path}/*.jsonl", f"--tokenizer={tokenizer}", "--val_tokens=1000"]
    script = [sys.executable, prepare_data.__file__, *flags, "--shard_tokens=200000"]

    def start(name, workers):
        return subprocess.Popen([*script, f"--out_dir={tmp_path / name}", f"--workers={workers}"])

    assert start("whole", 1).wait(120) == 0
    killed = start("killed", 2)
    while not (tmp_path / "killed" / "train_00003.bin").exists():
        assert killed.poll() is None, "it ended before it could be killed"
        time.sleep(0.002)
    killed.kill()
    killed.wait(30)
    assert len(contents(tmp_path / "killed")) < len(contents(tmp_path / "whole"))
    assert start("killed", 2).wait(120) == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_finished_work_is_not_repeated(call, tmp_path, capsys):
    assert call(tmp_path / "shards") == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "shards").glob("*.bin")}
    assert call(tmp_path / "shards") == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert "for validation. Train with --data=" in capsys.readouterr().out


def test_it_stops_after_the_most_tokens(call, tmp_path):
    assert call(tmp_path / "shards", "--max_tokens=8000") == 0
    counts = [len(open_shard(path)) for path in (tmp_path / "shards").glob("*.bin")]
    assert 8000 <= sum(counts) < 8400


def test_an_estimate_comes_first_and_writes_nothing(call, tmp_path, capsys):
    assert call(tmp_path / "shards", "--estimate_only") == 0
    assert "3 files: about" in capsys.readouterr().out
    assert not (tmp_path / "shards").exists()


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "txt"])
def test_estimates_are_near(tokenizer, tmp_path, kind):
    texts, path = 20 * DOCUMENTS, tmp_path / f"0.{kind}"
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    match kind:
        case "parquet":
            pq.write_table(pa.table({"text": texts}), path)
        case "txt":
            path.write_text("\n".join(texts))
        case "jsonl":
            path.write_text(lines)
        case _:
            path.write_bytes(gzip.compress(lines.encode(), 1))
    for index in range(1, 12):  # More files than are sampled, each longer than its sample.
        shutil.copy(path, tmp_path / f"{index}.{kind}")
    expected = 12 * sum(len(tokens_of(text)) + (kind != "txt") for text in texts)
    source = open_source(Settings(f"{tmp_path}/*.{kind}", str(tokenizer)))
    found = estimate(source)
    assert found.tokens == pytest.approx(expected, rel=0.1)
    assert found.bytes == 2 * found.tokens
    assert found.seconds > 0


def test_large_vocabularies_take_four_bytes(tmp_path):
    words = {f"w{index}": index for index in range(70_000)} | {END: 70_000}
    made = Tokenizer(WordLevel(words, unk_token=END))
    made.pre_tokenizer = WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    lines = [json.dumps({"body": f"w{index} w69999"}) for index in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    flags = [f"--data={tmp_path}/a.jsonl", f"--tokenizer={tmp_path}", "--column=body"]
    flags += ["--val_tokens=60", f"--out_dir={tmp_path}/shards"]
    assert prepare_data.main(["prepare_data", *flags]) == 0
    shard = open_shard(tmp_path / "shards" / "train_00000.bin")
    assert shard.tokens.dtype == np.uint32
    assert shard.tokens[:3].tolist() == [20, 69_999, 70_000]


BAD_INPUT = {
    "no data": (["--data="], "--data: is missing"),
    "no such data": (["--data=/no/such"], "/no/such"),
    "no tokenizer": (["--tokenizer=/no/such"], "/no/such"),
    "broken tokenizer": ([f"--tokenizer={__file__}"], "tokenizer.json"),
    "end": (["--end=</s>"], "--end=</s>"),
    "start": (["--start=<s>"], "--start=<s>"),
    "column": (["--column=content"], 'no "content" column (columns: text, id)'),
    "nothing to train on": (["--max_tokens=1000"], "--max_tokens=1000"),
    "all for validation": (["--val_tokens=1000000"], "--val_tokens=1000000"),
    "too large a shard": (["--shard_tokens=2000000000"], "--shard_tokens=2000000000"),
    "no number": (["--shard_tokens=0"], "shard_tokens"),
    "stray argument": (["shards"], "'shards'"),
}


@pytest.mark.parametrize(("flags", "named"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_wrong_input_is_one_line(call, tmp_path, capsys, flags, named):
    assert call(tmp_path / "shards", *flags) == 2
    message = capsys.readouterr().err
    assert named in message
    assert message.count("\n") == 1
    assert not contents(tmp_path / "shards") or "val_tokens" in flags[0]


def test_another_corpus_does_not_go_on_in_the_same_folder(call, corpus, tmp_path, capsys):
    assert call(tmp_path / "shards") == 0
    assert call(tmp_path / "shards", f"--data={corpus}/a.parquet") == 2
    assert "was begun with another data" in capsys.readouterr().err
    assert call(tmp_path / "shards", "--shard_tokens=2000") == 2
    assert "was begun with another shard_tokens" in capsys.readouterr().err


def test_a_used_folder_is_refused(call, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert call(tmp_path) == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.fixture(autouse=True)
def environment():
    """Undo what the script sets for the tokenizer's threads."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS"):
            patch.setenv(name, os.environ.get(name, ""))
        yield
