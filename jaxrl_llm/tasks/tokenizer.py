"""A character tokenizer for the embedded tasks, with the few calls of a transformers tokenizer that the package uses.

Written here because a task without downloads needs one, and no library ships a vocabulary this small.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class CharTokenizer:
    """One id per character, after padding, begin and end.

    Attributes:
      alphabet: the characters, each once.
    """

    alphabet: str
    pad_token_id: int = 0
    bos_token_id: int = 1
    eos_token_id: int = 2

    @property
    def vocab_size(self) -> int:
        """Characters and the three special ids."""
        return len(self.alphabet) + 3

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, behind the begin id unless told otherwise.

        Raises:
          ValueError: a character that is not in the alphabet; names it.
        """
        for character in text:
            if character not in self.alphabet:
                raise ValueError(f"character {character!r} of {text!r} is not in the alphabet {self.alphabet!r}")
        ids = [self.alphabet.index(character) + 3 for character in text]
        return [self.bos_token_id, *ids] if add_special_tokens else ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; special ids are left out, or shown as <pad>, <bos>, <eos>, <id>."""
        names = {self.pad_token_id: "<pad>", self.bos_token_id: "<bos>", self.eos_token_id: "<eos>"}

        def show(i: int) -> str:
            if 3 <= i < self.vocab_size:
                return self.alphabet[i - 3]
            return "" if skip_special_tokens else names.get(i, f"<{i}>")

        return "".join(show(int(i)) for i in ids)

    def to_transformers(self) -> Any:
        """The same tokenizer for transformers, to go with an exported model."""
        import tokenizers
        import transformers

        special = ("<pad>", "<bos>", "<eos>")
        ids = dict(zip(special, (self.pad_token_id, self.bos_token_id, self.eos_token_id), strict=True))
        vocabulary = ids | {character: i + 3 for i, character in enumerate(self.alphabet)}
        fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
        fast.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
        fast.decoder = tokenizers.decoders.Fuse()
        fast.post_processor = tokenizers.processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", self.bos_token_id)]
        )
        names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
        return transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **names)
