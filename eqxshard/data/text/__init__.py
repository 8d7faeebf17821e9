"""Text: tokenizers, token files, and sources of examples for language models.

May use `data`; needs the package `tokenizers` only for tokenizers of Hugging Face.
"""

from ._corpus import Corpus as Corpus
from ._corpus import open_corpus as open_corpus
from ._corpus import shakespeare as shakespeare
from ._examples import PackedDocuments as PackedDocuments
from ._examples import Windows as Windows
from ._prepare import prepare as prepare
from ._tokenizers import ByteTokenizer as ByteTokenizer
from ._tokenizers import CharTokenizer as CharTokenizer
from ._tokenizers import HFTokenizer as HFTokenizer
from ._tokenizers import Tokenizer as Tokenizer
from ._tokenizers import load_tokenizer as load_tokenizer
from ._tokens import TokenArray as TokenArray
from ._tokens import TokenFiles as TokenFiles
from ._tokens import Tokens as Tokens
