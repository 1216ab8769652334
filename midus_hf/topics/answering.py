"""From prompts to answers: find a path for each prompt, fetch the blocks on the path, and generate with them."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from midus_hf.topics.memory_retriever import MemoryRetriever
from midus_hf.topics.tree import check_tree


class FetchingPipeline:
    """Counterpart of `transformers.pipeline("text-generation")` for models whose texts fetch blocks.

    Args:
        model: Model that `from_pretrained` loaded from its folder, with its bank.
        tokenizer: Tokenizer of the model. If it has no padding token, its end-of-text token pads.
        retriever: Retriever with the tree that the bank was trained with.

    Raises:
        ValueError: If the model fetches no blocks, or the retriever's tree does not fit the bank.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, retriever: MemoryRetriever):
        layouts = getattr(getattr(model, "banks", None), "layouts", {})
        if not layouts:
            raise ValueError(
                f"this {model.config.model_type} model fetches no blocks; expected one with a bank. Use transformers.pipeline."
            )
        check_tree(retriever.tree, model)
        self.model, self.tokenizer, self.retriever = model, tokenizer, retriever

    def __call__(
        self,
        prompts: str | Sequence[str],
        *,
        blocked: Sequence[tuple[int, int]] = (),
        return_full_text: bool = True,
        batch_size: int | None = None,
        **generation: Any,
    ) -> list[dict[str, Any]]:
        """Return answers to prompts, batch by batch.

        Args:
            prompts: One prompt, or several. A blank prompt, or one that is near no topic, is answered with the generic
                memory. A prompt without any token starts from the token that begins a text.
            blocked: Nodes whose blocks are never fetched, as in `ClusterTree.paths`. Default: none.
            return_full_text: Whether the text begins with the prompt. Default: true.
            batch_size: Prompts per batch. Default: all prompts in one batch.
            generation: Arguments of `generate`, such as `max_new_tokens`.

        Returns:
            For each prompt `{"generated_text", "memory_ids", "seconds"}`. `memory_ids` is the path. `seconds`
            has the time to `retrieve` the paths of all prompts, and to `fetch` and `generate` for the prompt's batch.

        Raises:
            ValueError: If `blocked` leaves no path, or `batch_size` is less than 1.
            BankError: If blocks of a batch cannot be read.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        size = len(texts) if batch_size is None else batch_size
        if size < 1 and texts:
            raise ValueError(f"batch_size is {batch_size}; expected 1 or more, or None for one batch of all prompts.")
        started = time.perf_counter()
        paths = self.retriever.paths(texts, blocked)
        retrieving = time.perf_counter() - started
        answers: list[dict[str, Any]] = []
        while len(answers) < len(texts):
            batch = slice(len(answers), len(answers) + size)
            answers += self._answers(texts[batch], paths[batch], retrieving, return_full_text, generation)
        return answers

    def _answers(
        self,
        texts: list[str],
        paths: torch.Tensor,
        retrieving: float,
        return_full_text: bool,
        generation: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """Return the answers to one batch.

        Args:
            texts: The prompts; B of them.
            paths: Paths of the prompts, `[B, p]`.
            retrieving: Seconds that retrieving the paths took.
        """
        model: Any = self.model
        started = time.perf_counter()
        blocks = model.fetch_memory(paths)
        fetched = time.perf_counter()
        encoded = self._encoded(texts)
        with torch.no_grad():
            tokens = model.generate(**encoded, memory_ids=paths, pad_token_id=self._pad_token_id, **generation)
        finished = time.perf_counter()
        del blocks  # kept until here, so that the bank had them ready for every token
        seconds = {"retrieve": retrieving, "fetch": fetched - started, "generate": finished - fetched}
        continuations = self.tokenizer.batch_decode(
            tokens[:: len(tokens) // len(texts), encoded["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return [
            {
                "generated_text": (text if return_full_text else "") + continuation,
                "memory_ids": path,
                "seconds": seconds,
            }
            for text, continuation, path in zip(texts, continuations, paths.tolist(), strict=True)
        ]

    @property
    def _pad_token_id(self) -> int | None:
        pad = self.tokenizer.pad_token_id
        return self.tokenizer.eos_token_id if pad is None else pad

    @property
    def _first_token(self) -> list[int]:
        """Token that generation starts from if a prompt has no token."""
        begin, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if begin is None and end is None:
            raise ValueError(
                "a prompt has no token, and the tokenizer has neither a first token nor a last one; expected a prompt to go on from. "
                "Leave the prompt out."
            )
        return [end if begin is None else begin]

    def _encoded(self, texts: list[str]) -> dict[str, torch.Tensor]:
        """Return tokens and attention mask, padded on the left, since generation continues on the right."""
        rows = [self.tokenizer(text).input_ids or self._first_token for text in texts]
        longest = max(map(len, rows))
        padding = self._pad_token_id or 0
        tokens = torch.tensor([[padding] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        return {"input_ids": tokens.to(self.model.device), "attention_mask": mask.to(self.model.device)}
