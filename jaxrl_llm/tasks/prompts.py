"""From an example's prompt to token ids: chat template, one begin token, and nothing cut."""

from typing import Any

from jaxrl_llm.tasks.base import Example

# Llama 3.x's template tells the model the date: that of today unless one is given, and a run that is resumed tomorrow would
# see other prompts. This one is the template's own where it has no clock.
DATE = "26 Jul 2024"


def encode(tokenizer: Any, example: Example, *, answered: bool = False) -> list[int]:
    """Token ids of an example's prompt, with exactly one begin token where the tokenizer uses one.

    Args:
      tokenizer: a transformers tokenizer, or one with the same `encode` (and `apply_chat_template` for messages).
      example: its prompt is text or messages; messages get the opening of the assistant's turn appended.
      answered: the messages end with the assistant's answer already, and nothing is appended.

    Raises:
      ValueError: messages, and a tokenizer without a chat template.
    """
    if isinstance(example.prompt, str):
        ids = list(tokenizer.encode(example.prompt))
    else:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"prompt {example.id!r} is a conversation and the tokenizer has no chat template; set the task's chat field"
                " to False for plain text, or use a tokenizer of a chat model"
            )
        messages = [dict(message) for message in example.prompt]
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=not answered, tokenize=False, date_string=DATE
        )
        # Most templates write the begin token themselves.
        ids = list(tokenizer.encode(text, add_special_tokens=False))
    return _one_begin(ids, tokenizer)


def _one_begin(ids: list[int], tokenizer: Any) -> list[int]:
    begin = getattr(tokenizer, "bos_token_id", None)
    # A tokenizer may name a begin token that its model was never trained with (Qwen's): then encoding adds none.
    if begin is None or begin not in list(tokenizer.encode(""))[:1]:
        return ids
    rest = 0
    while rest < len(ids) and ids[rest] == begin:
        rest += 1
    return [begin, *ids[rest:]]
