"""SmolLM2's tokenizer, built from the fields of its GGUF file: byte-level BPE whose digits stand one by one."""

from __future__ import annotations

from typing import Any

from nbverify.errors import NbverifyError

CONTROL = 3  # the kind of tokens such as <|im_end|>
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TEMPLATE = "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


class Tokenizer:
    """Text to token ids and back; ``end`` is the token that ends an answer."""

    def __init__(self, fields: dict[str, Any]):
        try:
            from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        except ImportError as error:
            raise NbverifyError("the package tokenizers is missing: pip install tokenizers") from error
        tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
        self._bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._bpe.decoder = decoders.ByteLevel()
        control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
        self._bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
        self.end: int = fields["tokenizer.ggml.eos_token_id"]

    def encode(self, text: str) -> list[int]:
        """The ids of a text as it stands."""
        return self._bpe.encode(text).ids

    def chat(self, prompt: str) -> list[int]:
        """The ids of a question, up to where the answer begins."""
        return self.encode(TEMPLATE.format(system=SYSTEM, prompt=prompt))

    def decode(self, tokens: list[int], *, special: bool = False) -> str:
        """The text of some ids, with or without <|im_end|> and its like."""
        return self._bpe.decode(tokens, skip_special_tokens=not special)
