"""An answer's text taken apart: reasoning, content and tool calls.

Every parser takes text as it comes and gives out pieces at once, holding back only what may yet
turn out to be a marker. The whole answer is parsed by the same code, so streamed pieces join to
what is sent at once. What turns out not to be a call is content, as it was written.
"""

from octavo.server.parsers.choose import AnswerParser, ParserChoice, call_parser, choose_parsers
from octavo.server.parsers.pieces import Arguments, CallStart, Content, Parser, Piece, Reasoning

__all__ = [
    "AnswerParser",
    "Arguments",
    "CallStart",
    "Content",
    "Parser",
    "ParserChoice",
    "Piece",
    "Reasoning",
    "call_parser",
    "choose_parsers",
]
