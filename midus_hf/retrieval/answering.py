"""Prompts in, answers out: a path is found for each prompt, its blocks are fetched, and the model generates with them."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from midus_hf.retrieval.bank_tree import check_tree
from midus_hf.retrieval.memory_retriever import MemoryRetriever


class FetchingPipeline:
    """As `transformers.pipeline("text-generation")`, for a model whose texts fetch blocks.

    Args:
        model: That `from_pretrained` loaded from its folder, with its bank.
        tokenizer: Of the model; a tokenizer without a padding token pads with its end of a text.
        retriever: Finds paths, by the tree that the bank was trained with.

    Raises:
        ValueError: If the model fetches no blocks, or by a tree of another shape.
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
        """Answer prompts, batch by batch: while one generates, threads read the blocks of the next.

        Args:
            prompts: One, or several. A blank prompt, as one that is near no topic, is answered with the generic memory; the model
                goes on from the token that begins a text.
            blocked: Nodes whose blocks are never fetched, as in `ClusterTree.paths`. Default: none.
            return_full_text: Whether the text begins with the prompt. Default: true.
            batch_size: Prompts of a batch. Default: all in one.
            generation: What `generate` takes, such as `max_new_tokens`.

        Returns:
            For each prompt `{"generated_text", "memory_ids", "seconds", "tiers"}`: its path; how long it took to `retrieve` the
            paths of all prompts, and for its batch to `fetch` and to `generate`; and what the fetch of its batch found in each tier
            of the bank, `{"hits", "misses", "ahead", "read_bytes", "held_bytes"}` as in `TierStatistics`.

        Raises:
            ValueError: If `blocked` leaves no path, or batches have no prompts.
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
            batch, following = (slice(start, start + size) for start in (len(answers), len(answers) + size))
            answers += self._answers(
                texts[batch], paths[batch], paths[following], retrieving, return_full_text, generation
            )
        return answers

    def _answers(
        self,
        texts: list[str],
        paths: torch.Tensor,
        following: torch.Tensor,
        retrieving: float,
        return_full_text: bool,
        generation: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """The answers of one batch.

        Args:
            texts: B prompts.
            paths: `[B, p]`, theirs.
            following: `[C, p]`, those of the next batch, which may have none.
            retrieving: Seconds that finding paths took.
            return_full_text: As for a call.
            generation: As for a call.
        """
        model: Any = self.model
        before = model.banks.statistics()
        started = time.perf_counter()
        blocks = model.fetch_memory(paths)
        fetched = time.perf_counter()
        found = {tier: asdict(counts.since(before[tier])) for tier, counts in model.banks.statistics().items()}
        if len(following):
            model.prefetch_memory(following)
        encoded = self._encoded(texts)
        with torch.no_grad():
            tokens = model.generate(**encoded, memory_ids=paths, pad_token_id=self._pad_token_id, **generation)
        finished = time.perf_counter()
        del blocks  # which the bank had ready for every token
        seconds = {"retrieve": retrieving, "fetch": fetched - started, "generate": finished - fetched}
        continuations = self.tokenizer.batch_decode(
            tokens[:: len(tokens) // len(texts), encoded["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return [
            {
                "generated_text": (text if return_full_text else "") + continuation,
                "memory_ids": path,
                "seconds": seconds,
                "tiers": found,
            }
            for text, continuation, path in zip(texts, continuations, paths.tolist(), strict=True)
        ]

    @property
    def _pad_token_id(self) -> int | None:
        pad = self.tokenizer.pad_token_id
        return self.tokenizer.eos_token_id if pad is None else pad

    @property
    def _first_token(self) -> list[int]:
        """What the model goes on from where a prompt has no token."""
        begin, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if begin is None and end is None:
            raise ValueError(
                "a prompt has no token, and the tokenizer has neither a first token nor a last one; expected a prompt to go on from. "
                "Leave the prompt out."
            )
        return [end if begin is None else begin]

    def _encoded(self, texts: list[str]) -> dict[str, torch.Tensor]:
        """Tokens and their mask, padded on the left, where generation does not begin."""
        rows = [self.tokenizer(text).input_ids or self._first_token for text in texts]
        longest = max(map(len, rows))
        padding = self._pad_token_id or 0
        tokens = torch.tensor([[padding] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        return {"input_ids": tokens.to(self.model.device), "attention_mask": mask.to(self.model.device)}
