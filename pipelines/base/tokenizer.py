"""The default tokenizer: whole words of the problem families, single digits, ASCII characters, bytes for the rest.

A Unigram model in which every piece costs the same, so a text is cut into as few tokens as possible. Bytes make any
text survive encoding and decoding unchanged.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipelines.errors import failures_said_as

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
THINK, THINK_END = "<think>", "</think>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_PIECE_SCORE = -1.0
_BYTE_SCORE = -1000.0  # so that a text which spells out `<0x41>` is not read as that byte
_CONTROL = (PAD, END, USER, ASSISTANT, THINK, THINK_END)


def pieces(lexicon: tuple[str, ...]) -> list[str]:
    """Words and characters of the vocabulary in order of their ids, after the control tokens and before the bytes."""
    for piece in lexicon:
        if len(piece) > 1 and any(character.isdigit() for character in piece):
            raise ValueError(f"the lexicon piece {piece!r} contains a digit; digits are tokens of their own")
    characters = string.digits + string.ascii_letters + string.punctuation + " \n\t"
    return list(dict.fromkeys([*characters, *lexicon]))


def build_tokenizer(lexicon: tuple[str, ...], max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer with every piece of `lexicon` as one token; the same for the same arguments."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = [(token, 0.0) for token in _CONTROL]
    vocabulary += [(piece, _PIECE_SCORE) for piece in pieces(lexicon)]
    vocabulary += [(f"<0x{byte:02X}>", _BYTE_SCORE) for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _CONTROL[:4]])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _CONTROL[4:]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def encode_prompts(tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt as the user turn of a chat, ready for the answer; without a template, as plain text.

    Raises UserError when the chat template fails.
    """
    if tokenizer.chat_template is None:
        return [list(ids) for ids in tokenizer(list(prompts))["input_ids"]]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    with failures_said_as(f"the chat template of {tokenizer.name_or_path} fails on a question"):
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
