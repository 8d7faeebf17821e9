"""Folders of prepared text."""

import json

import numpy as np


def write_prepared(folder, tokens, ends, **record):
    """A folder whose parts need not fit each other."""
    folder.mkdir()
    np.array(tokens, np.uint8).tofile(folder / "tokens.bin")
    np.array(ends, np.uint64).tofile(folder / "ends.bin")
    content = {"vocab_size": 9, "tokens": len(tokens), "documents": len(ends)} | record
    (folder / "prepared.json").write_text(json.dumps(content))
    return folder
