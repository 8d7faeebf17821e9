"""Encode text into token files, with the tokenizer.json of a Hugging Face model."""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import tyro
from tokenizers import Tokenizer

import eqxshard

#: The names that published tokenizers have for the token between documents.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


@dataclass(frozen=True)
class Args:
    """Encode text into a folder of token files, for --data of gpt.py."""

    inputs: tyro.conf.Positional[tuple[Path, ...]]
    """Text files, or .jsonl files with a document in the entry "text" of each line."""
    tokenizer: Path
    """The tokenizer.json of a Hugging Face model."""
    output: Path = Path("prepared")
    """The folder to write."""


def read(path):
    """The documents of a file."""
    place = str(path)
    try:
        with path.open("rb") as file:
            # Read as bytes, because text mode would change the ends of lines.
            if path.suffix.lower() != ".jsonl":
                yield file.read().decode("utf-8-sig")
                return
            for number, line in enumerate(file, 1):
                place = f"line {number} of {path}"
                line = line.decode("utf-8-sig")
                if line.strip():
                    text = json.loads(line)["text"]
                    text.encode()  # Fails if it is not text.
                    yield text
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise eqxshard.UsageError(
            f"{place} is not a document in UTF-8 ({type(error).__name__}: {error}); "
            "leave it out, or correct it."
        ) from None


def main(args: Args) -> str:
    for path in (args.tokenizer, *args.inputs):
        if not path.is_file():
            raise eqxshard.UsageError(f"there is no file {path}; give one that exists.")
    if os.path.lexists(args.output):
        raise eqxshard.UsageError(
            f"there is a {args.output}; delete it, or give another --output."
        )
    output = args.output.absolute()
    # Work in a folder on the same disk as the output.
    existing = next(path for path in output.parents if path.exists())
    if not existing.is_dir():
        raise eqxshard.UsageError(f"{existing} is not a folder; give another --output.")
    try:
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
    except Exception as error:  # The package raises no narrower class.
        raise eqxshard.UsageError(
            f"{args.tokenizer} is not a Hugging Face tokenizer ({error}); give another "
            "--tokenizer."
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "</s>" in a document is plain text.
    ids = tokenizer.get_vocab()
    vocab_size = 1 + max(ids.values())  # The ids may have gaps.
    end = [ids[name] for name in ENDS if name in ids][:1]
    documents = chain.from_iterable(map(read, args.inputs))
    dtype = np.min_scalar_type(vocab_size - 1)
    lengths = []
    with tempfile.TemporaryDirectory(prefix="preparing-", dir=existing) as name:
        folder = Path(name, "prepared")
        folder.mkdir()
        with (folder / "tokens.bin").open("wb") as file:
            # All cores encode some documents at once.
            while some := list(islice(documents, 64)):
                for encoding in tokenizer.encode_batch_fast(some, add_special_tokens=False):
                    if encoding.ids:
                        tokens = np.array(encoding.ids + end, dtype)
                        file.write(tokens.tobytes())
                        lengths.append(len(tokens))
        if not lengths:
            raise eqxshard.UsageError("there is no text in the inputs; give others.")
        np.cumsum(lengths, dtype=np.uint64).tofile(folder / "ends.bin")
        shutil.copy(args.tokenizer, folder / "tokenizer.json")
        sizes = {"tokens": sum(lengths), "documents": len(lengths)}
        sizes["vocab_size"] = vocab_size
        (folder / "prepared.json").write_text(json.dumps(sizes))
        # Renamed last, so that a failure leaves nothing behind.
        output.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(output)
    return f"{args.output}: {sum(lengths):,} tokens of {len(lengths):,} documents"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
