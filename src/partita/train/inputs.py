"""From options to what ranks run on: weights, tokenizer, samples.  Files are prepared by rank 0 first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from partita.facts.errors import BadInput
from partita.facts.find import find_model
from partita.facts.model import Model
from partita.train.options import BYTES, SYNTHETIC, Options, Weights

if TYPE_CHECKING:
    from torch import Tensor

    from partita.model.tokenizer import Tokenizer
    from partita.train.data import Dataset, HeldOut

PACKAGED = ("smollm2-135m", "smollm2-135m-instruct")
Values = Callable[[Iterable[tuple[str, "Tensor"]]], None]


@dataclass(frozen=True)
class Samples:
    """What is trained on, what is held out (None: nothing), how ids become text, and a sentence about it.

    ``key`` tells data apart without their paths.
    """

    training: Dataset
    held_out: HeldOut | None
    decode: Callable[[list[int]], str]
    says: str
    key: str


def find(name: str, from_scratch: bool, download: bool) -> tuple[Model, Weights]:
    """The model and where its weights are; raises BadInput where they are nowhere and were not renounced."""
    found = find_model(name, download=download, weights=not from_scratch)
    packaged = found.model.name.rpartition("/")[2].lower() in PACKAGED
    has_weights = found.folder is not None and any(found.folder.glob("*.safetensors"))
    if has_weights or (from_scratch and found.folder is not None):
        return found.model, Weights(str(found.folder), load=not from_scratch)
    if packaged or from_scratch:
        return found.model, Weights(packaged=packaged, load=not from_scratch)
    where = f"{found.folder} has no *.safetensors" if found.folder else f"no weights of {found.model.name} are here"
    raise BadInput(
        f"{where}; --from-scratch trains from initial values, a folder with weights works, and --download fetches "
        "those of a hub id"
    )


def folder_of(weights: Weights) -> Path | None:
    """The model's folder, converted from the package first where it comes from there."""
    if weights.packaged:
        from partita.model import smollm2

        return smollm2.folder()
    return Path(weights.folder) if weights.folder else None


def values(options: Options) -> Values:
    """What fills named parameters, or the shards of them that lie here, in place."""
    from partita.model import hf, init

    folder = folder_of(options.weights) if options.weights.load else None
    if folder is None:
        return lambda named: init.fill(named, options.model, options.seed)
    return lambda named: hf.load(named, options.model, folder)


def tokenizer_of(options: Options) -> Tokenizer:
    """The tokenizer that was named, or the one beside the weights; the byte tokenizer only by name."""
    from partita.model.tokenizer import ByteTokenizer, load_tokenizer

    named = options.text.tokenizer
    if named == BYTES:
        return ByteTokenizer()
    folder = named or folder_of(options.weights)
    if folder is None:
        raise BadInput(
            f"text for {options.model.name} needs a tokenizer and none stands beside it; --tokenizer FOLDER (with a "
            "tokenizer.json) works, and --tokenizer bytes for tiny models"
        )
    return load_tokenizer(folder)


def samples(options: Options) -> Samples:
    """The samples; raises BadData for files that cannot be used, BadInput for a missing tokenizer."""
    from partita.train.data import PackedDataset, SyntheticDataset, open_dataset

    model, sequence, evaluation = options.model, options.work.sequence, options.evaluation
    if not options.text.files:
        if evaluation.files:
            raise BadInput("--eval-data goes with --data FILE; random tokens hold out random tokens")
        made = SyntheticDataset(model.vocab, sequence, options.seed)
        held = made.held_out(min(evaluation.samples, 8)) if evaluation.every else None
        return Samples(
            made, held, lambda ids: " " + " ".join(map(str, ids)), "random tokens; counts are uneven", SYNTHETIC
        )
    tokenizer = tokenizer_of(options)
    cache = Path(options.text.cache) if options.text.cache else None

    def opened(files: tuple[str, ...]) -> PackedDataset:
        return open_dataset(
            list(files),
            tokenizer,
            sequence,
            seed=options.seed,
            shuffle=options.text.shuffle,
            reading=options.text.reading,
            cache=cache,
            vocabulary=model.vocab,
        )

    data = opened(options.text.files)
    held = None
    if evaluation.every and evaluation.files:
        held = opened(evaluation.files).held_out()
    elif evaluation.every:
        data, held = data.split(evaluation.fraction)
    tokens = data.tokens
    key = f"{len(tokens)} tokens in {len(tokens.starts)} documents by {tokenizer.fingerprint}, {data.samples} samples"
    return Samples(data, held, tokenizer.decode, data.describe(), key)
