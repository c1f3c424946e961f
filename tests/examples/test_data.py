"""The data side of the pre-training example: corpus, tokenizer, shards, loader, baselines."""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pretraining import dataset, shards, tokenizer
from pretraining.baselines import baselines
from pretraining.corpus import read_documents
from pretraining.dataset import prepare
from pretraining.errors import InputError
from pretraining.loader import make_loader, validation_batches
from pretraining.shards import check_vocabulary, open_shard, write_shard

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "café", "日本", "🙂"]


def prose(seed: int, words: int = 300) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words)) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "text"
    (root / "sub").mkdir(parents=True)
    for index in range(30):
        name = f"sub/{index}.md" if index % 2 else f"{index}.txt"
        (root / name).write_text(f"document {index} " + prose(index), encoding="utf-8")
    return root


def make_shard(path: Path, count: int, first: int = 0, width: int = 2) -> shards.Shard:
    tokens = np.arange(first, first + count, dtype=np.uint32)
    return write_shard(path, [tokens[:7], tokens[7:]], delimiter=0, bytes_per_token=width)


def one_line(error: pytest.ExceptionInfo[InputError]) -> str:
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


# Shards


@pytest.mark.parametrize(("width", "largest"), [(2, 2**16 - 1), (4, 2**20)])
def test_shard_round_trip(tmp_path: Path, width: int, largest: int) -> None:
    tokens = np.array([1, 0, largest, 5], np.uint32)
    path = tmp_path / "deep" / "a.bin"
    write_shard(path, iter([tokens[:1], tokens[1:]]), delimiter=9, bytes_per_token=width, prepend=1)
    shard = open_shard(path)
    np.testing.assert_array_equal(shard.tokens, tokens)
    assert shard.tokens.dtype.itemsize == width
    assert (shard.delimiter, shard.prepend, shard.append) == (9, 1, 1)
    assert os.listdir(path.parent) == ["a.bin"]


def test_shard_bytes_follow_the_layout(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_shard(path, [np.array([258, 3], np.uint32)], delimiter=3)
    raw = path.read_bytes()
    header = np.frombuffer(raw[:1024], "<i4")
    assert header[:7].tolist() == [20260317, 2, 2, 2, 3, 0, 1]
    assert not header[7:].any()
    assert raw[1024:] == bytes([2, 1, 3, 0])


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    make_shard(tmp_path / "a.bin", 20)
    before = (tmp_path / "a.bin").read_bytes()
    with pytest.raises(ValueError, match="do not fit"):
        write_shard(tmp_path / "a.bin", [np.array([2**16])], delimiter=0)
    with pytest.raises(InputError, match="no tokens"):
        write_shard(tmp_path / "b.bin", [], delimiter=0)
    assert os.listdir(tmp_path) == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == before


@pytest.mark.parametrize(
    ("entry", "value", "told"),
    [
        (0, 20240520, "20240520, not 20260317"),
        (1, 1, "version is 1, not 2"),
        (3, 3, "3 bytes per token"),
        (2, 0, "counts 0 tokens"),
        (2, -5, "counts -5 tokens"),
        (2, 21, "cut short: 1064 bytes, but its header needs 1066"),
        (2, 19, "too long: 1064 bytes, but its header needs 1062"),
    ],
)
def test_bad_shard_header(tmp_path: Path, entry: int, value: int, told: str) -> None:
    path = tmp_path / "bad.bin"
    make_shard(path, 20)
    header = np.fromfile(path, "<i4", 256)
    header[entry] = value
    path.write_bytes(header.tobytes() + path.read_bytes()[1024:])
    with pytest.raises(InputError) as error:
        open_shard(path)
    assert str(path) in one_line(error)
    assert told in one_line(error)


@pytest.mark.parametrize("size", [0, 100])
def test_shard_without_whole_header(tmp_path: Path, size: int) -> None:
    path = tmp_path / "bad.bin"
    path.write_bytes(bytes(size))
    with pytest.raises(InputError, match=f"bad.bin: .*{size} bytes.*1024"):
        open_shard(path)


def test_missing_shard(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.bin"):
        open_shard(tmp_path / "none.bin")


def test_vocabulary_is_checked_in_every_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_SCAN_TOKENS", 8)
    shard = make_shard(tmp_path / "a.bin", 30)
    check_vocabulary(shard, 30)
    with pytest.raises(InputError, match=r"a.bin: token id 21 at position 21 .* 21;"):
        check_vocabulary(shard, 21)


# Corpus


def test_split_by_file_is_disjoint_stable_and_whole(folder: Path) -> None:
    documents = read_documents(str(folder))
    train, validation = set(documents.train_files), set(documents.validation_files)
    assert not train & validation
    assert len(train | validation) == 30
    held = sum(path.stat().st_size for path in validation)
    assert 0.05 <= held / sum(path.stat().st_size for path in train | validation) <= 0.1
    assert read_documents(str(folder)) == documents
    texts = [*documents.train(), *documents.validation()]
    assert sorted(texts) == sorted(path.read_text(encoding="utf-8") for path in documents.files)


def test_split_depends_on_relative_path_only(folder: Path) -> None:
    before = read_documents(str(folder)).validation_files
    moved = folder.rename(folder.with_name("moved"))
    after = read_documents(str(moved)).validation_files
    assert [p.relative_to(moved) for p in after] == [p.relative_to(folder) for p in before]


def test_two_files_give_the_smaller_to_validation(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("long " * 9)
    (tmp_path / "b.txt").write_text("short " * 3)
    documents = read_documents(str(tmp_path))
    assert [path.name for path in documents.validation_files] == ["b.txt"]
    assert [path.name for path in documents.train_files] == ["a.txt"]


def test_unreadable_and_hidden_files_are_left_out(folder: Path) -> None:
    (folder / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (folder / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (folder / "empty.txt").touch()
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("text")
    assert len(read_documents(str(folder)).files) == 30


def test_glob_selects_files(folder: Path) -> None:
    assert len(read_documents(f"{folder}/*.txt").files) == 15
    assert len(read_documents(f"{folder}/**/*.*").files) == 30


def test_long_text_is_cut_at_line_ends_without_loss(folder: Path) -> None:
    text = "0123456789 line\r\n" * 70_000
    (folder / "long.txt").write_text(text, newline="")
    pieces = [piece for piece in read_documents(str(folder)).train() if piece[:5] == "01234"]
    assert len(pieces) == 2
    assert "".join(pieces) == text
    assert pieces[0].endswith("\r\n")


def test_default_corpus_is_the_standard_library() -> None:
    documents = read_documents(None)
    sizes = {path: path.stat().st_size for path in documents.files}
    assert {path.suffix for path in sizes} == {".py"}
    assert not any({"site-packages", "test"} & set(path.parts) for path in sizes)
    assert 7e6 < sum(sizes.values()) < 20e6
    assert "argparse.py" in {path.name for path in sizes}
    assert documents.files == tuple(sorted(documents.files))


def write_rows(path: Path, texts: list[str]) -> None:
    lines = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"id": [1] * len(texts), "text": texts}), path, row_group_size=7)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_one_row_file_is_split_by_row(tmp_path: Path, name: str) -> None:
    texts = [f"row {index} 日本" for index in range(400)]
    write_rows(tmp_path / name, texts)
    documents = read_documents(str(tmp_path / name))
    train, validation = list(documents.train()), list(documents.validation())
    assert sorted(train + validation) == sorted(texts)
    assert 8 <= len(validation) <= 40
    assert list(documents.validation()) == validation


def test_two_rows_are_enough(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", ["one", "two"])
    documents = read_documents(str(tmp_path / "a.jsonl"))
    assert (list(documents.train()), list(documents.validation())) == (["one"], ["two"])


def test_row_files_are_split_by_file(tmp_path: Path) -> None:
    for index in range(4):
        write_rows(tmp_path / f"{index}.parquet", [f"{index} {row}" for row in range(9)])
    documents = read_documents(str(tmp_path))
    assert not set(documents.train_files) & set(documents.validation_files)
    assert len(list(documents.train())) + len(list(documents.validation())) == 36


def test_half_a_surrogate_pair_is_readable(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n\n{"text": "c"}\n')
    documents = read_documents(str(tmp_path / "a.jsonl"))
    assert [*documents.train(), *documents.validation()] == ["a?b", "c"]


# Tokenizer


def test_tokenizer_cache_is_hit_and_keyed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    documents = read_documents(str(folder))
    trained = tokenizer.load_or_train(documents, 300, cache)
    assert [path.suffix for path in cache.iterdir()] == [".json"]
    runs = []
    real = tokenizer.train
    monkeypatch.setattr(tokenizer, "train", lambda *args: runs.append(args) or real(*args))
    assert tokenizer.load_or_train(documents, 300, cache).to_str() == trained.to_str()
    assert not runs
    tokenizer.load_or_train(documents, 301, cache)
    assert len(runs) == 1
    documents.train_files[0].write_text("another text")
    tokenizer.load_or_train(documents, 300, cache)
    assert len(runs) == 2


def test_broken_tokenizer_cache_is_trained_again(folder: Path, tmp_path: Path) -> None:
    documents = read_documents(str(folder))
    trained = tokenizer.load_or_train(documents, 300, tmp_path / "cache")
    next((tmp_path / "cache").iterdir()).write_text("{")
    again = tokenizer.load_or_train(documents, 300, tmp_path / "cache")
    assert again.to_str() == trained.to_str()


@pytest.mark.parametrize("cached", [False, True])
def test_tokens_decode_to_the_text(folder: Path, tmp_path: Path, cached: bool) -> None:
    documents = read_documents(str(folder))
    for _ in range(1 + cached):
        trained = tokenizer.load_or_train(documents, 400, tmp_path / "cache")
    texts = [prose(99), "\tdef f():\r\n  pass\x00", "spelled <|endoftext|> out", "🙂é"]
    delimiter = trained.token_to_id("<|endoftext|>")
    spellings = tokenizer.token_bytes(trained)
    for text, tokens in zip(texts, tokenizer.encode(trained, texts), strict=True):
        assert tokens[-1] == delimiter
        assert delimiter not in tokens[:-1]
        assert trained.decode(tokens.tolist()) == text
        assert b"".join(spellings[token] for token in tokens) == text.encode()


# Loader


@pytest.fixture
def two_shards(tmp_path: Path) -> list[shards.Shard]:
    # Windows of 8: (88 - 1) // 8 = 10 and (50 - 1) // 8 = 6; token values are global positions.
    first = make_shard(tmp_path / "a.bin", 88)
    return [first, make_shard(tmp_path / "b.bin", 50, first=1000, width=4)]


def take(loader: object, count: int) -> np.ndarray:
    return np.stack([next(loader) for _ in range(count)])


def test_windows_never_cross_shards(two_shards: list[shards.Shard]) -> None:
    loader = make_loader(two_shards, batch_size=4, seq_len=8, seed=0)
    assert loader.batches_per_epoch == 4
    epoch = take(loader, 4)
    assert epoch.shape == (4, 4, 9)
    assert epoch.dtype == np.int32
    assert (np.diff(epoch) == 1).all()
    starts = [*range(0, 80, 8), *range(1000, 1048, 8)]
    assert sorted(epoch[..., 0].ravel()) == starts


def test_loader_is_deterministic_and_shuffles_each_epoch(two_shards: list[shards.Shard]) -> None:
    def stream(seed: int) -> np.ndarray:
        return take(make_loader(two_shards, batch_size=4, seq_len=8, seed=seed), 8)

    np.testing.assert_array_equal(stream(0), stream(0))
    first, second = stream(0)[:4], stream(0)[4:]
    assert (first != second).any()
    assert sorted(first[..., 0].ravel()) == sorted(second[..., 0].ravel())
    # The next seed must not be the same stream one epoch later.
    assert (stream(1)[:4] != first).any()
    assert (stream(1)[:4] != second).any()
    assert (np.diff(first[..., 0].ravel()) < 0).any()


def test_remainder_is_dropped_per_epoch(two_shards: list[shards.Shard]) -> None:
    loader = make_loader(two_shards, batch_size=5, seq_len=8, seed=0)
    assert loader.batches_per_epoch == 3
    for _ in range(3):
        starts = take(loader, 3)[..., 0].ravel()
        assert len(set(starts)) == 15


@pytest.mark.parametrize("done", [0, 1, 3, 4, 6])
def test_resume_continues_bit_for_bit(two_shards: list[shards.Shard], done: int) -> None:
    settings = {"batch_size": 4, "seq_len": 8, "seed": 3}
    loader = make_loader(two_shards, **settings)
    for _ in range(done):
        next(loader)
    state = json.loads(json.dumps(loader.get_state()))
    expected = take(loader, 10)
    fresh = make_loader(two_shards, **settings)
    next(fresh)
    fresh.set_state(state)
    np.testing.assert_array_equal(take(fresh, 10), expected)
    loader.set_state(state)
    np.testing.assert_array_equal(take(loader, 10), expected)


@pytest.mark.parametrize("change", [{"seed": 4}, {"batch_size": 2}, {"seq_len": 4}])
def test_state_of_another_stream_is_refused(two_shards: list, change: dict) -> None:
    settings = {"batch_size": 4, "seq_len": 8, "seed": 3}
    state = make_loader(two_shards, **settings).get_state()
    with pytest.raises(InputError, match=next(iter(change))):
        make_loader(two_shards, **{**settings, **change}).set_state(state)
    with pytest.raises(InputError, match="tokens"):
        make_loader(two_shards[:1], **settings).set_state(state)


def test_processes_interleave_into_the_whole_batch(two_shards: list[shards.Shard]) -> None:
    settings = {"batch_size": 6, "seq_len": 8, "seed": 1}
    whole = take(make_loader(two_shards, **settings), 7)
    for index in range(2):
        loader = make_loader(two_shards, **settings, process_index=index, process_count=2)
        np.testing.assert_array_equal(take(loader, 7), whole[:, index::2])
    held = np.stack(list(validation_batches(two_shards, 6, 8)))
    for index in range(3):
        part = validation_batches(two_shards, 6, 8, process_index=index, process_count=3)
        np.testing.assert_array_equal(np.stack(list(part)), held[:, index::3])


def test_one_batch_is_enough(two_shards: list[shards.Shard]) -> None:
    loader = make_loader(two_shards, batch_size=16, seq_len=8, seed=0)
    assert take(loader, 3).shape == (3, 16, 9)


def test_validation_batches_are_fixed_and_sequential(two_shards: list[shards.Shard]) -> None:
    first = list(validation_batches(two_shards, 4, 8, 3))
    assert len(first) == 3
    starts = [*range(0, 80, 8), 1000, 1008]
    assert np.stack(first)[..., 0].ravel().tolist() == starts
    assert first[0].dtype == np.int32
    np.testing.assert_array_equal(first, list(validation_batches(two_shards, 4, 8, 3)))
    assert len(list(validation_batches(two_shards, 5, 8))) == 3


def test_loader_refuses_bad_settings(two_shards: list[shards.Shard]) -> None:
    with pytest.raises(InputError, match=r"training text: 16 windows of 8 tokens.*needs 17"):
        make_loader(two_shards, batch_size=17, seq_len=8, seed=0)
    with pytest.raises(InputError, match="validation text: 0 windows of 500"):
        validation_batches(two_shards, 1, 500, 1)
    with pytest.raises(InputError, match=r"batch size 4 .* 3 processes"):
        make_loader(two_shards, batch_size=4, seq_len=8, seed=0, process_count=3)
    with pytest.raises(InputError, match="seed -1"):
        make_loader(two_shards, batch_size=4, seq_len=8, seed=-1)
    with pytest.raises(InputError, match="sequence length 0"):
        validation_batches(two_shards, 4, 0, 1)


# The whole preparation


def test_prepare_text(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    data = prepare(str(folder), vocab_size=300, cache_dir=cache)
    documents = read_documents(str(folder))
    splits = [
        (data.train_shards[0], list(documents.train())),
        (data.val_shards[0], list(documents.validation())),
    ]
    for shard, texts in splits:
        assert data.tokenizer.decode(shard.tokens.tolist()) == "".join(texts)
        assert np.count_nonzero(shard.tokens == shard.delimiter) == len(texts)
        assert shard.tokens[-1] == shard.delimiter == 0
    assert data.vocab_size == data.tokenizer.get_vocab_size() == 300
    monkeypatch.setattr(dataset, "write_shard", None)
    again = prepare(str(folder), vocab_size=300, cache_dir=cache)
    np.testing.assert_array_equal(again.train_shards[0].tokens, data.train_shards[0].tokens)
    assert again.baselines == data.baselines


def test_damaged_cache_is_written_again(folder: Path, tmp_path: Path) -> None:
    data = prepare(str(folder), vocab_size=300, cache_dir=tmp_path / "cache")
    path, tokens = data.val_shards[0].path, np.array(data.val_shards[0].tokens)
    path.write_bytes(path.read_bytes()[:-2])
    again = prepare(str(folder), vocab_size=300, cache_dir=tmp_path / "cache")
    np.testing.assert_array_equal(again.val_shards[0].tokens, tokens)


def test_prepare_shards(tmp_path: Path) -> None:
    for name in ("b.bin", "a.bin", "c.bin"):
        make_shard(tmp_path / name, 20)
    data = prepare(str(tmp_path), vocab_size=20, cache_dir=tmp_path)
    assert [shard.path.name for shard in data.train_shards] == ["a.bin", "b.bin"]
    assert [shard.path.name for shard in data.val_shards] == ["c.bin"]
    assert (data.tokenizer, data.train_tokens, data.val_tokens) == (None, 40, 20)
    make_shard(tmp_path / "a_val_0.bin", 20)
    data = prepare(f"{tmp_path}/*.bin", vocab_size=20, cache_dir=tmp_path)
    assert [shard.path.name for shard in data.val_shards] == ["a_val_0.bin"]
    assert data.baselines.byte_unigram is None
    with pytest.raises(InputError, match=r"a.bin: token id 19 at position 19"):
        prepare(str(tmp_path), vocab_size=19, cache_dir=tmp_path)


def test_unigram_baseline_by_hand(tmp_path: Path) -> None:
    train = write_shard(tmp_path / "t.bin", [np.array([0, 0, 1])], delimiter=0)
    val = write_shard(tmp_path / "v.bin", [np.array([0, 2])], delimiter=0)
    scores = baselines([train], [val], 4)
    assert scores.unigram == pytest.approx(-(math.log(3 / 7) + math.log(1 / 7)) / 2)
    assert scores.uniform == pytest.approx(math.log(4))


def test_byte_baseline_is_that_of_the_text(folder: Path, tmp_path: Path) -> None:
    data = prepare(str(folder), vocab_size=300, cache_dir=tmp_path / "cache")
    raw = "".join(read_documents(str(folder)).validation()).encode()
    _, counts = np.unique(np.frombuffer(raw, np.uint8), return_counts=True)
    entropy = -np.sum(counts / len(raw) * np.log(counts / len(raw)))
    assert data.baselines.bytes_per_token == pytest.approx(len(raw) / data.val_tokens)
    expected = entropy * len(raw) / data.val_tokens
    assert data.baselines.byte_unigram == pytest.approx(expected)


def corrupt_parquet(path: Path) -> None:
    write_rows(path, ["a", "b"])
    path.write_bytes(b"PAR1" + path.read_bytes()[4:-9] + b"garbage!PAR1"[-9:])


BAD_DATA = {
    "missing": (lambda p: None, "no/such", "no such file or folder"),
    "no match": (lambda p: None, "*.txt", "matches no file"),
    "empty folder": (lambda p: (p / "e").mkdir(), "e", "holds no files"),
    "one text file": (lambda p: (p / "a.txt").write_text("a"), "a.txt", "only one readable"),
    "binary only": (lambda p: (p / "a").write_bytes(b"\0"), "", "none of its 1 files"),
    "no text field": (
        lambda p: (p / "a.jsonl").write_text('{"text": "x"}\n{"txt": 1}\n'),
        "a.jsonl",
        'a.jsonl:2: no "text"',
    ),
    "not an object": (lambda p: (p / "a.jsonl").write_text("[1]\n"), "a.jsonl", "a.jsonl:1: no"),
    "text not string": (lambda p: (p / "a.jsonl").write_text('{"text": 1}'), "", "a.jsonl:1: no"),
    "bad JSON": (
        lambda p: (p / "a.jsonl").write_text('{"text": "x"}\n{"text": \n'),
        "a.jsonl",
        "a.jsonl:2: not valid JSON",
    ),
    "one row": (lambda p: write_rows(p / "a.jsonl", ["x"]), "a.jsonl", "no validation text"),
    "not gzip": (lambda p: (p / "a.jsonl.gz").write_text("x"), "", "a.jsonl.gz: cannot be read"),
    "cut gzip": (
        lambda p: (p / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n')[:-9]),
        "",
        "a.jsonl.gz: cannot be read",
    ),
    "no text column": (
        lambda p: pq.write_table(pa.table({"body": ["x"]}), p / "a.parquet"),
        "",
        'a.parquet: no "text" column (columns: body)',
    ),
    "text is a number": (
        lambda p: pq.write_table(pa.table({"text": [1]}), p / "a.parquet"),
        "",
        'a.parquet: column "text" is int64',
    ),
    "bad Parquet": (lambda p: corrupt_parquet(p / "a.parquet"), "", "not readable as Parquet"),
    "mixed": (
        lambda p: (make_shard(p / "a.bin", 9), (p / "b.txt").write_text("b")),
        "",
        "1 .bin shards are mixed with 1 other",
    ),
    "one shard": (lambda p: make_shard(p / "a.bin", 9), "a.bin", "none is left for training"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_is_one_clear_line(tmp_path: Path, case: str) -> None:
    make, name, told = BAD_DATA[case]
    make(tmp_path)
    with pytest.raises(InputError) as error:
        prepare(str(tmp_path / name), vocab_size=300, cache_dir=tmp_path / ".cache")
    message = one_line(error)
    assert str(tmp_path) in message
    assert told in message
    assert ";" in message


def test_small_vocabulary_and_bad_cache_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"vocab_size=256: .* at least 257"):
        prepare(str(folder), vocab_size=256, cache_dir=tmp_path / "cache")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file: cannot prepare the data"):
        prepare(str(folder), vocab_size=300, cache_dir=tmp_path / "file")


def test_error_message_stays_on_one_line() -> None:
    assert str(InputError("a\nb")) == "a b"
