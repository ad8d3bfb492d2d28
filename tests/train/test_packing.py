"""Documents, masks, samples, and the cache of tokens."""

import re
import threading
import zlib

import pytest
import torch

from partita.train import packing
from partita.train.data import IGNORE, BadData, open_dataset
from partita.train.packing import tokenise
from partita.train.sources import Reading, expand
from tests.train.texts import END, Bytes, maker


@pytest.fixture
def make(tmp_path):
    return maker(tmp_path)


def plain(dataset, sample):
    """(ids, targets, positions, documents) of a sample as lists."""
    rows = dataset.fixed([sample])
    return [a[0].tolist() for a in (rows.ids, rows.targets, rows.positions, rows.documents)]


def targets_as_text(dataset):
    """Every target in the order of the text, ``.`` where one does not count."""
    rows = dataset.fixed(range(len(dataset)))
    return "".join("." if t == IGNORE else "$" if t == END else chr(t) for t in rows.targets.flatten())


def test_documents_end_and_do_not_predict_one_another(make):
    dataset = make([{"text": "abc"}, {"text": "de"}], 6)
    ids, targets, positions, documents = plain(dataset, 0)
    assert ids == [97, 98, 99, END, 100, 101]
    assert targets == [98, 99, END, IGNORE, 101, END]
    assert positions == [0, 1, 2, 3, 0, 1]
    assert documents == [0, 0, 0, 0, 1, 1]
    assert len(dataset) == 1


def test_a_boundary_at_the_edge_of_a_sample(make):
    dataset = make([{"text": "abc"}, {"text": "defg"}], 4)
    assert len(dataset) == 2
    assert plain(dataset, 0) == [[97, 98, 99, END], [98, 99, END, IGNORE], [0, 1, 2, 3], [0, 0, 0, 0]]
    assert plain(dataset, 1) == [[100, 101, 102, 103], [101, 102, 103, END], [0, 1, 2, 3], [0, 0, 0, 0]]


def test_positions_restart_in_a_sample_that_starts_inside_a_document(make):
    dataset = make([{"text": "abcdefg"}, {"text": "hi"}], 5)
    assert plain(dataset, 1)[2:] == [[0, 1, 2, 0, 1], [0, 0, 0, 1, 1]]


def test_the_last_sample_is_padded_and_nothing_is_lost(make):
    dataset = make([{"text": "abcdefgh"}], 5)
    assert len(dataset) == 2
    assert plain(dataset, 1) == [
        [102, 103, 104, END, END],
        [103, 104, END, IGNORE, IGNORE],
        [0, 1, 2, 3, 4],
        [0, 0, 0, 0, 0],
    ]
    assert "nothing is dropped, the last sample ends in 2 padded positions" in dataset.describe()


@pytest.mark.parametrize("sequence", [1, 2, 3, 5, 7, 16])
def test_every_token_is_the_target_of_one_position(make, sequence):
    texts = ["abc", "d", "efghijk", "lm"]
    dataset = make([{"text": t} for t in texts], sequence)
    seen = targets_as_text(dataset).replace(".", "")
    assert seen == "".join(t[1:] + "$" for t in texts)


def test_a_batch_without_boundaries_needs_no_mask(make):
    dataset = make([{"text": "a" * 15}, {"text": "bcd" * 5}], 4, shuffle=False)
    whole = dataset.batch(0, [0, 1], 4)
    assert whole.documents is None and whole.positions.shape == (4,)
    mixed = make([{"text": "abcde"}, {"text": "bcd" * 5}], 4, shuffle=False, name="b.jsonl").batch(0, [0, 1], 4)
    assert mixed.documents.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert mixed.positions.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]
    assert mixed.ids.dtype == mixed.targets.dtype == mixed.positions.dtype == mixed.documents.dtype == torch.int64
    assert mixed.counted == 7


def test_prompts_do_not_count_and_ends_do(make):
    dataset = make([{"prompt": "ab", "completion": "cd"}, {"prompt": "ef", "completion": "g"}], 8)
    assert targets_as_text(dataset) == ".cd$..g$"


def test_ignored_characters_do_not_count(make):
    dataset = make([{"text": "abcdef", "ignore": [[1, 3], [5, 6]]}, {"text": "gh", "ignore": []}], 9)
    assert targets_as_text(dataset) == "..de...h$"


def test_only_the_assistant_counts(make):
    turns = [("system", "S"), ("user", "U"), ("assistant", "A"), ("user", "V"), ("assistant", "B")]
    dataset = make([{"messages": [{"role": r, "content": c} for r, c in turns]}], 100)
    counted = [part for part in targets_as_text(dataset).split(".") if part]
    assert counted == ["A<|im_end|>", "B<|im_end|>$"]
    text = Bytes().decode(plain(dataset, 0)[0])
    assert text.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|")


def test_a_conversation_that_ends_with_the_user_does_not_learn_to_end(make):
    dataset = make([{"messages": [{"role": "assistant", "content": "A"}, {"role": "user", "content": "U"}]}], 62)
    assert [part for part in targets_as_text(dataset).split(".") if part] == ["A<|im_end|>"]


def test_an_end_that_the_text_brings_is_not_doubled(make):
    class Ends(Bytes):
        def encode_batch(self, texts):
            return [[END if b == ord("$") else b for b in t.encode()] for t in texts]

    dataset = make([{"text": "ab$"}, {"text": "c"}], 4, tokenizer=Ends())
    assert dataset.tokens.ids.tolist() == [97, 98, END, 99, END]


def test_text_files_and_separators(tmp_path, make):
    assert make("ab\n\f\ncd\n", 4, "a.txt").tokens.starts.tolist() == [0]
    by_line = make("ab\n\f\ncd\n", 4, "a.txt", reading=Reading(separator="form-feed"))
    assert by_line.tokens.ids.tolist() == [97, 98, 10, END, 99, 100, 10, END]
    by_pattern = make("ab\n---\n---\ncd", 4, "b.txt", reading=Reading(separator=r"^---$\n"))
    assert by_pattern.tokens.ids.tolist() == [97, 98, 10, END, 99, 100, END]
    assert by_pattern.tokens.skipped == 1 and "1 empty document skipped" in by_pattern.describe()


def test_parquet_equals_jsonl(tmp_path, make):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    cases = {
        "text": [{"text": "abc"}, {"text": "dé"}, {"text": "fgh"}],
        "pairs": [{"prompt": "ab", "completion": "cd"}, {"prompt": "", "completion": "f"}],
        "turns": [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 2,
        "ranges": [{"text": "abcd", "ignore": [[0, 2]]}, {"text": "efg", "ignore": None}],
    }
    for name, records in cases.items():
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([{**r, "id": 7} for r in records]), path, row_group_size=1)
        lines = [{k: v for k, v in r.items() if v is not None} for r in records]
        expected = make(lines, 3, f"{name}.jsonl").tokens
        found = open_dataset(path, Bytes(), 3, cache=tmp_path / "cache").tokens
        assert found.ids.tolist() == expected.ids.tolist()
        assert found.starts.tolist() == expected.starts.tolist()
        assert (found.counts is None) == (expected.counts is None)
        assert found.counts is None or found.counts.tolist() == expected.counts.tolist()


def test_folders_globs_and_several_files(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/c.jsonl", "notes.csv"):
        (tmp_path / "in" / name).write_text('{"text": "x"}')
    names = [p.name for p in expand(tmp_path / "in")]
    assert names == ["a.txt", "b.txt", "c.jsonl"]
    assert [p.name for p in expand(str(tmp_path / "in" / "*.txt"))] == ["a.txt", "b.txt"]
    assert [p.name for p in expand([tmp_path / "in" / "b.txt", tmp_path / "in" / "a.txt"])] == ["b.txt", "a.txt"]


BAD_LINES = [
    ('{"text": "a"}\n{"text": ', r"data.jsonl line 2 is not JSON \(Expecting value at column 10\); a line must be one"),
    ("[" * 100_000, "line 1 is not JSON"),
    ('\n["a"]', r"line 2 is a list; a line must be one object with \"text\", \"prompt\" with \"completion\""),
    ('{"prompt": "a"}', 'line 1 has "prompt"; expected "text"'),
    ("{}", "line 1 has nothing; expected"),
    ('{"text": 3}', 'has a "text" of type int; it must be a string'),
    ('{"text": "a", "prompt": "b", "completion": "c"}', 'has "text" and "prompt", of which only one'),
    ('{"text": "\\ud800"}', "half a surrogate pair"),
    ('{"text": "ab", "ignore": [[1, 3]]}', r"has \[1, 3\] in \"ignore\"; .* within the 2 characters"),
    ('{"text": "abcd", "ignore": [[2, 3], [1, 2]]}', "not overlapping"),
    ('{"text": "abcd", "ignore": 3}', 'has 3 in "ignore"'),
    ('{"messages": []}', "no turns"),
    ('{"messages": [{"role": "user"}]}', 'message 1, is not an object with "role" and "content"'),
    ('{"messages": [{"role": "bot", "content": "a"}]}', "role 'bot'; expected one of system"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "no turn of the assistant"),
    ("\n \n", r"only blank lines \(3 bytes\)"),
    ("\0\0", "line 1 is binary"),
]


@pytest.mark.parametrize(("text", "message"), BAD_LINES)
def test_a_bad_line_is_named(make, text, message):
    with pytest.raises(BadData, match=message) as error:
        make(text, 1)
    assert "\n" not in str(error.value)


BAD_FILES = [
    ("a.txt", b"", r"a.txt is empty \(0 bytes\)"),
    ("a.jsonl", b"", r"a.jsonl is empty \(0 bytes\)"),
    ("a.txt", b" \n\t", r"only white space \(3 bytes\)"),
    ("a.txt", b"abc\0def", r"of 7 bytes, is binary \(a NUL byte at offset 3\)"),
    ("a.txt", b"abc\xffdef", r"not UTF-8 text \(byte 0xff at offset 3\)"),
    ("a.txt", "abc".encode("utf-16"), "UTF-16; convert"),
    ("a.csv", b"text\nabc", r"ends in .csv, which is not read; what works: .txt"),
    ("a.parquet", b"PAR1 and then nothing", "of 21 bytes, is not a whole Parquet file"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_a_bad_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadData, match=message) as error:
        open_dataset(tmp_path / name, Bytes(), 2, cache=tmp_path / "cache")
    assert name in str(error.value) and "\n" not in str(error.value)
    assert not list((tmp_path / "cache").glob("*")), "a build that failed left something behind"


def test_parquet_columns_and_values_are_checked(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def write(**columns):
        parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
        open_dataset(tmp_path / "a.parquet", Bytes(), 2, cache=tmp_path / "cache")

    with pytest.raises(BadData, match='by its columns, has "body", "id"; expected "text"'):
        write(body=["a"], id=[1])
    with pytest.raises(BadData, match='row 2 has a "text" of type NoneType'):
        write(text=["abc", None])
    with pytest.raises(BadData, match="holds no rows"):
        write(text=pyarrow.array([], pyarrow.string()))


def test_missing_files_are_named(tmp_path):
    for data, message in [
        (tmp_path / "none.txt", "there is no data file"),
        (str(tmp_path / "*.txt"), "no file matches"),
        (tmp_path, "holds no .txt"),
        ([], "no data file is named"),
    ]:
        with pytest.raises(BadData, match=message):
            expand(data)


def test_separators_are_checked():
    with pytest.raises(BadData, match="not a regular expression"):
        Reading(separator="(")
    with pytest.raises(BadData, match="matches the empty string"):
        Reading(separator="x*")


def test_a_text_shorter_than_one_sequence(make):
    with pytest.raises(
        BadData, match=r"data.txt \(5 bytes\) has 6 tokens, fewer than the 7 .* a sequence of 5 or less"
    ):
        make("abcde", 6, "data.txt")
    assert len(make("abcde", 5, "data.txt")) == 1


def test_text_in_which_nothing_counts(make):
    with pytest.raises(BadData, match="holds 3 tokens, none of which counts"):
        make([{"text": "ab", "ignore": [[0, 2]]}], 1)
    with pytest.raises(BadData, match="holds 0 tokens"):
        make([{"text": ""}], 1)


def test_tokens_that_the_model_lacks(make):
    assert make("abcde", 2, "data.txt", vocabulary=257)
    with pytest.raises(BadData, match="has token 256, and the model's vocabulary ends at 255"):
        make("abcde", 2, "data.txt", vocabulary=256)


def test_the_cache_is_used_and_keyed_by_all_that_matters(tmp_path):
    (tmp_path / "a.txt").write_text("abcdef")
    tokenizer, cache = Bytes(), tmp_path / "cache"

    def build(reading=None):
        before = tokenizer.calls
        ids = tokenise(expand(tmp_path / "a.txt"), tokenizer, reading, cache).ids.tolist()
        return tokenizer.calls - before, ids

    assert build() == (1, [97, 98, 99, 100, 101, 102, END])
    assert build()[0] == 0
    assert build(Reading(separator="c")) == (1, [97, 98, END, 100, 101, 102, END])
    tokenizer.fingerprint = "other"
    assert build()[0] == 1
    (tmp_path / "a.txt").write_text("abcdeg")  # as long as before, perhaps within the clock's grain
    assert build() == (1, [97, 98, 99, 100, 101, 103, END])
    assert sorted(p.suffix for p in cache.iterdir()) == [""] * 4


def test_large_files_are_known_by_path_size_and_time(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "HASHED_BYTES", 3)
    path = tmp_path / "a.txt"
    path.write_text("abcdef")
    first = packing._identity(path)
    assert first == [str(path.resolve()), 6, path.stat().st_mtime_ns]
    path.write_text("abcdefg")
    assert packing._identity(path) != first


def test_many_may_build_at_once(tmp_path):
    (tmp_path / "a.txt").write_text("abcdef" * 100)
    cache, together, found, faults = tmp_path / "cache", threading.Barrier(4), [], []

    class Slow(Bytes):
        def encode_batch(self, texts):
            together.wait(10)  # all four are in the middle of building
            return super().encode_batch(texts)

    def one():
        try:
            found.append(tokenise(expand(tmp_path / "a.txt"), Slow(), None, cache).ids.tolist())
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=one) for _ in range(4)]
    [t.start() for t in threads]
    [t.join(20) for t in threads]
    assert not faults and len(found) == 4 and all(f == found[0] for f in found)
    assert len(list(cache.iterdir())) == 1


def test_a_build_that_dies_leaves_nothing_that_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("abcdef")
    cache = tmp_path / "cache"

    class Dies(Bytes):
        def encode_batch(self, texts):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenise(expand(tmp_path / "a.txt"), Dies(), None, cache)
    assert not list(cache.iterdir())
    assert len(tokenise(expand(tmp_path / "a.txt"), Bytes(), None, cache)) == 7


def test_a_damaged_or_unwritable_cache_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("abcdef")
    paths, cache = expand(tmp_path / "a.txt"), tmp_path / "cache"
    tokenise(paths, Bytes(), None, cache)
    (folder,) = cache.iterdir()
    (folder / "ids.bin").write_bytes(b"1234")
    with pytest.raises(BadData, match="damaged; delete that folder"):
        tokenise(paths, Bytes(), None, cache)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadData, match="set XDG_CACHE_HOME"):
        tokenise(paths, Bytes(), None, tmp_path / "file")


def test_the_cache_lies_where_xdg_says(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert packing.default_cache() == tmp_path / "x" / "partita" / "tokens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert packing.default_cache() == tmp_path / ".cache" / "partita" / "tokens"


class Words(Bytes):
    """A token a word, space or run of line ends; ``prefix`` puts one before every text, as some tokenizers do."""

    def __init__(self, prefix=False):
        super().__init__()
        self.prefix, self.longest = prefix, 0

    def encode_batch(self, texts):
        self.longest = max(self.longest, *map(len, texts))
        found = [["prefix"] * self.prefix + re.findall(r"\w+|\n+| ", t) for t in texts]
        return [[zlib.crc32(word.encode()) >> 2 for word in words] for words in found]


def test_a_long_text_is_tokenised_in_pieces_to_the_same_tokens(tmp_path, monkeypatch):
    text = "".join(f"word{i % 37} and more" + "\n" * (1 + i % 3 % 2) for i in range(400))
    (tmp_path / "a.txt").write_text(text)
    whole = tokenise(expand(tmp_path / "a.txt"), Words(), None, tmp_path / "whole").ids.tolist()
    monkeypatch.setattr(packing, "PIECE", 1000)
    monkeypatch.setattr(packing, "CHARACTERS_AT_ONCE", 3000)
    tokenizer = Words()
    assert tokenise(expand(tmp_path / "a.txt"), tokenizer, None, tmp_path / "cut").ids.tolist() == whole
    assert tokenizer.longest <= 1500
    parts = packing.pieces(text, Words())
    assert len(parts) > 5 and "".join(parts) == text


def test_a_text_stays_whole_where_pieces_would_change_its_tokens(monkeypatch):
    monkeypatch.setattr(packing, "PIECE", 1000)
    text = "some words\n" * 400
    assert packing.pieces(text, Words(prefix=True)) == [text]
    assert packing.pieces("x" * 4000, Words()) == ["x" * 4000]


@pytest.mark.parametrize("end", ["\n", "\n\n", " \n\n", " ", "\r\n"])
def test_pieces_of_a_real_kind_of_tokenizer(monkeypatch, end):
    """GPT-2's way to split: a run of white space leaves its last character to what follows, unless nothing follows."""
    split = re.compile(r" ?[^\W\d]+| ?\d+| ?[^\s\w]+|\s+(?!\S)|\s+")

    class Gpt2(Bytes):
        def encode_batch(self, texts):
            return [[zlib.crc32(p.encode()) for p in split.findall(t)] for t in texts]

    monkeypatch.setattr(packing, "PIECE", 1000)
    text = "".join(f"line {i}, of words.{end}" for i in range(300))
    parts = packing.pieces(text, Gpt2())
    assert len(parts) > 3 and "".join(parts) == text
    (whole,) = Gpt2().encode_batch([text])
    assert [i for ids in Gpt2().encode_batch(parts) for i in ids] == whole
