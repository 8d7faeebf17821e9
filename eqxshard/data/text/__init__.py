"""Text: tokenizers, token files, and sources of examples for language models.

May use `data`; needs the package `tokenizers` only for tokenizers of Hugging Face.
"""

from ._corpus import Corpus as Corpus
from ._corpus import open_corpus as open_corpus
from ._packing import PackedDocuments as PackedDocuments
from ._prepare import prepare as prepare
from ._shakespeare import shakespeare as shakespeare
from ._token_files import TokenFiles as TokenFiles
from ._tokenizers import ByteTokenizer as ByteTokenizer
from ._tokenizers import CharTokenizer as CharTokenizer
from ._tokenizers import HFTokenizer as HFTokenizer
from ._tokenizers import Tokenizer as Tokenizer
from ._tokenizers import load_tokenizer as load_tokenizer
from ._tokens import TokenArray as TokenArray
from ._tokens import TokenRange as TokenRange
from ._tokens import Tokens as Tokens
from ._windows import Windows as Windows
