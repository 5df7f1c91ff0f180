"""Text on one side, token ids on the other: the tokenizer, chat templates, the incremental
detokenizer, stop strings and content rules. The engine knows ids only; nothing here knows of the
engine.
"""

from octavo.text.chat import ChatPrompt, encode_chat, encode_prompt, render_chat
from octavo.text.content_rules import ContentChecker, ContentRules, read_content_rules
from octavo.text.detokenizer import Detokenizer
from octavo.text.loader import load_tokenizer
from octavo.text.stops import StopChecker
from octavo.text.tokenizer import Tokenizer

__all__ = [
    "ChatPrompt",
    "ContentChecker",
    "ContentRules",
    "Detokenizer",
    "StopChecker",
    "Tokenizer",
    "encode_chat",
    "encode_prompt",
    "load_tokenizer",
    "read_content_rules",
    "render_chat",
]
