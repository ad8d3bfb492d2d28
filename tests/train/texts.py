"""A tokenizer of bytes, and datasets of records, for the tests of data."""

import json

from partita.train.data import open_dataset

END = 256


class Bytes:
    """Bytes as tokens, 256 as the end of text; counts how often it is asked."""

    eos = END
    fingerprint = "bytes"

    def __init__(self):
        self.calls = 0

    def encode_batch(self, texts):
        self.calls += 1
        return [list(t.encode()) for t in texts]

    def decode(self, ids):
        return "".join("$" if i == END else chr(i) for i in ids)


def maker(folder):
    """``make(records, sequence, ...)``: a dataset of records written below ``folder``."""

    def make(records, sequence, name="data.jsonl", tokenizer=None, **options):
        path = folder / name
        path.write_text(records if isinstance(records, str) else "".join(json.dumps(r) + "\n" for r in records))
        return open_dataset(path, tokenizer or Bytes(), sequence, cache=folder / "cache", **options)

    return make
