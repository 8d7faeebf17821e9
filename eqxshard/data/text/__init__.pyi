from ._bytes import ByteTokenizer as ByteTokenizer
from ._corpus import Corpus as Corpus
from ._corpus import open_corpus as open_corpus
from ._corpus import shakespeare as shakespeare
from ._tokens import TokenArray as TokenArray
from ._tokens import TokenFiles as TokenFiles
from ._tokens import Tokens as Tokens
from ._windows import Windows as Windows
