"""Limits of a request's content. The server bounds bodies before it reads them."""

from hotcold.engine.request import MAX_LOGPROBS
from hotcold.engine.text import MAX_STOP_LENGTH, MAX_STOPS
from hotcold.values import LARGEST

__all__ = ["LARGEST", "MAX_LOGPROBS", "MAX_STOPS", "MAX_STOP_LENGTH"]

MAX_CHOICES = 16  #: ``n``
MAX_JOBS = 64  #: texts of one request: prompts times ``n``
MAX_INPUTS = 2048  #: texts to make vectors of
MAX_BIAS = 1024  #: entries of ``logit_bias``
MAX_MESSAGES = 4096
MAX_PARTS = 256  #: parts of one message
MAX_CALLS = 128  #: calls in one message of the assistant
MAX_NAME = 128  #: characters of a function's name, Anthropic's limit
MAX_TEMPLATE_KWARGS = 32
MAX_EXTRA = 256  #: texts of other files in a request of ``/infill``
MAX_DEPTH = 64  #: nested lists and objects
MAX_GRAMMAR = 64 << 10  #: characters of a grammar or an expression
MAX_SEED = (1 << 64) - 1
