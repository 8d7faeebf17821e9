"""`python -m eqxshard.data.text INPUT... --output DIR --tokenizer byte`: prepare text.

Encodes files of text into token files; see [`eqxshard.data.text.prepare`][].
"""

import sys
from collections.abc import Sequence

from ..._parser import Parser, allow_closed_stdout
from ._prepare import prepare


def main(args: Sequence[str] | None = None) -> int:
    """The command."""
    parser = Parser(
        prog="python -m eqxshard.data.text",
        description="Encode files of text into token files, for training.",
    )
    inputs = "files, .txt or .jsonl (the entry 'text' of each line), or folders of them"
    tokenizer = "byte, char, or the tokenizer.json of a Hugging Face model"
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=inputs)
    parser.add_argument("--output", required=True, help="the folder to write")
    parser.add_argument("--tokenizer", required=True, help=tokenizer)
    try:
        tokens = prepare(**vars(parser.parse_args(args)))
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{tokens.path} has {len(tokens):,} tokens of {len(tokens.ends()):,} "
        f"documents, vocabulary {tokens.vocab_size:,}"
    )
    return 0


if __name__ == "__main__":
    with allow_closed_stdout():
        sys.exit(main())
