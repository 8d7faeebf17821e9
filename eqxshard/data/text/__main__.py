"""`python -m eqxshard.data.text INPUT... --output DIR --tokenizer byte`: prepare text.

Encodes files of text into token files, in all cores; see [`eqxshard.data.text.prepare`][].
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
        epilog="If it is stopped, the same command goes on where it stopped.",
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="a file, .txt or .jsonl (the entry 'text' of each line), or a folder of them",
    )
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="the folder to write"
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="NAME",
        help="byte, char, or the tokenizer.json of a Hugging Face model",
    )
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=2**26,
        metavar="N",
        help="about how many tokens a file gets (default: 67,108,864)",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes (default: one for each core)"
    )
    options = parser.parse_args(args)
    try:
        tokens = prepare(**vars(options))
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here.", file=sys.stderr)
        return 130
    print(
        f"{options.output} has {len(tokens):,} tokens of {len(tokens.ends()):,} documents, "
        f"vocabulary {tokens.vocab:,}"
    )
    return 0


if __name__ == "__main__":
    with allow_closed_stdout():
        sys.exit(main())
