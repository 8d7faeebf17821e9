"""Encode text into token files, with the tokenizer.json of a Hugging Face model."""

import json
import shutil
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import tyro
from tokenizers import Tokenizer

import eqxshard

#: What published tokenizers call the token between documents.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


@dataclass(frozen=True)
class Args:
    """Encode text into token files, of which gpt.py takes the folder as --data."""

    inputs: tyro.conf.Positional[tuple[Path, ...]]
    """Files: .jsonl, with a document in the entry "text" of each line, or one of text."""
    tokenizer: Path
    """The tokenizer.json of a Hugging Face model."""
    output: Path = Path("prepared")
    """The folder to write."""


def read(path):
    """The documents of a file."""
    with path.open(encoding="utf-8") as file:
        if path.suffix == ".jsonl":
            yield from (json.loads(line)["text"] for line in file)
        else:
            yield file.read()


def main(args: Args) -> str:
    for path in (args.tokenizer, *args.inputs):
        if not path.is_file():
            raise eqxshard.UsageError(f"there is no file {path}; give one that exists.")
    if args.output.exists():
        raise eqxshard.UsageError(
            f"there is a {args.output}; delete it, or give another --output."
        )
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # What looks like a special token is text.
    ids = tokenizer.get_vocab()
    vocab_size = 1 + max(ids.values())  # There may be gaps.
    end = [ids[name] for name in ENDS if name in ids][:1]
    args.output.mkdir(parents=True)
    documents = chain.from_iterable(map(read, args.inputs))
    dtype = np.min_scalar_type(vocab_size - 1)
    lengths = []
    with (args.output / "tokens.bin").open("wb") as file:
        # All cores encode some documents at once.
        while some := list(islice(documents, 64)):
            for encoding in tokenizer.encode_batch_fast(some, add_special_tokens=False):
                if encoding.ids:
                    tokens = np.array(encoding.ids + end, dtype)
                    file.write(tokens.tobytes())
                    lengths.append(len(tokens))
    np.cumsum(lengths, dtype=np.uint64).tofile(args.output / "ends.bin")
    shutil.copy(args.tokenizer, args.output / "tokenizer.json")
    # Last: a folder without it is not prepared.
    sizes = {"tokens": sum(lengths), "documents": len(lengths), "vocab_size": vocab_size}
    (args.output / "prepared.json").write_text(json.dumps(sizes))
    return f"{args.output}: {sum(lengths):,} tokens of {len(lengths):,} documents"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
