"""Conversations -> token ids and the assistant turn that each token belongs to.

The tokenizer's own chat template renders a conversation, so training sees what serving sends. The assistant's tokens
are found by the template's `{% generation %}` marks if it has them, and otherwise by rendering the conversation up to
each assistant turn (`_incremental_spans`). The header that opens a turn is never supervised; the token that ends it
always is. A line with `answer_ids` is trained on these ids, each after the prompt that it answered.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_spec.config import UserError
from megatron_spec.data.conversations import Conversation, is_trained
from megatron_spec.data.masking import masked
from megatron_spec.data.offsets import TokenOffsets, TokenPlaces, byte_lengths
from megatron_spec.data.recorded import check_tokenizer, in_turns, indices_of, placed
from megatron_spec.data.template import PLACEHOLDER, ChatTemplate
from megatron_spec.data.tokenizer import BatchTokenizer, beyond_vocabulary, special_ids, vocabulary_hash

Array = NDArray[Any]
LONGEST_PREFIX = 32
"""Most characters of a prefix that the prompt opens the answer with, such as <think> or empty reasoning."""
MOST_CHARACTERS = 2**30
"""Limit on a conversation's characters times its answers: everything before each answer is rendered for it."""


@dataclass(frozen=True)
class Sample:
    """One tokenised conversation, or a part of it.

    Attributes:
        tokens: int64 [N].
        turns: int32 [N], 0 where not supervised, n on the tokens of the n-th assistant turn (its end token included)
            unless that answer is not trained on.
        where: 'FILE line N', for messages.
        shortened: number of answers whose beginning the chat template left out.
        prompted_differently: number of answers that do not begin like the template's generation prompt (<think>, ...).
        rejected: int64 [M] ascending indices of tokens that the base put in place of a rejected draft token.
    """

    tokens: Tensor
    turns: Tensor
    where: str = field(default="", compare=False)
    shortened: int = field(default=0, compare=False)
    prompted_differently: int = field(default=0, compare=False)
    rejected: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64), compare=False)

    def __len__(self) -> int:
        return int(self.tokens.numel())


class ChatEncoder:
    """Converts conversations to samples with one tokenizer.

    Args:
        tokenizer: a fast Hugging Face tokenizer with a chat template.
        stop_token_ids: ids that end a turn (generation_config.json), besides the tokenizer's special tokens.
        template_kwargs: see `ChatTemplate`.
        vocab_size: vocabulary of the base; prompts with ids outside it are refused. None: not checked.
        threads: tokenise several texts on so many threads; Python runs on while they do.

    Raises UserError when the tokenizer has no chat template or no offsets.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_token_ids: Collection[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        vocab_size: int | None = None,
        threads: int = 1,
    ) -> None:
        self.template = ChatTemplate(tokenizer, template_kwargs)
        if not getattr(tokenizer, "is_fast", False):
            raise UserError("the tokenizer reports no character offsets: a tokenizer.json (fast tokenizer) is needed")
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._tokenise = BatchTokenizer(tokenizer, threads)
        self.uses_marks = self.template.has_generation_marks
        eos = tokenizer.eos_token_id
        self._stop_ids = set(stop_token_ids) | (set() if eos is None else {eos})
        self._end_ids = self._stop_ids | special_ids(tokenizer)
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        self._byte_lengths_V = byte_lengths(tokenizer)
        self._is_end_V = np.zeros(max(len(tokenizer), *self._end_ids, 0) + 1, dtype=bool)
        self._is_end_V[sorted(self._end_ids)] = True

    @functools.cached_property
    def vocabulary_hash(self) -> str:
        """See `data.tokenizer.vocabulary_hash`."""
        return vocabulary_hash(self.tokenizer)

    def encode(self, conversation: Conversation) -> Sample:
        """The one sample of a conversation. Raises UserError when the template refuses it or the mask makes no sense.

        With answer_ids a conversation may give several: see `encode_all`.
        """
        [sample] = self.encode_all([conversation])[0]
        return sample

    def encode_all(
        self, conversations: Sequence[Conversation], prompts: Sequence[Sequence[str]] | None = None
    ) -> list[list[Sample]]:
        """The samples of each conversation; faster than `encode`, because the tokenizer sees all texts at once.

        One sample, or with answer_ids one for each prompt that does not continue the previous prompt and answer: a
        template may cut the reasoning of earlier answers, so the base never saw it in later prompts.

        `prompts` are the texts of the prompts of the last answers of each conversation: they are not rendered again.
        """
        for conversation in conversations:
            _check_work(conversation)
        known = [()] * len(conversations) if prompts is None else prompts
        plain = [(c, k) for c, k in zip(conversations, known, strict=True) if c.answer_ids is None]
        if self.uses_marks:
            found = [self._marked(c) for c, _ in plain]
        else:
            texts = [str(self.template.render(c)) for c, _ in plain]
            found = [
                self._incremental(c, text, ids, k)
                for (c, k), text, ids in zip(plain, texts, self._tokenise(texts), strict=True)
            ]
        samples = iter(found)
        return [
            [masked(c, _with_rejected(c, next(samples), self))] if c.answer_ids is None else self._from_ids(c)
            for c in conversations
        ]

    def _from_ids(self, conversation: Conversation) -> list[Sample]:
        """Samples of a conversation with answer_ids: each answer after the prompt that the base answered."""
        answers = conversation.answer_ids
        assert answers is not None
        check_tokenizer(conversation, self.vocabulary_hash)
        numbers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        parts: list[tuple[list[int], list[int], list[int]]] = []
        for i, ids, rejected in zip(numbers, answers.turns, indices_of(conversation), strict=True):
            if ids is None:
                continue
            [(_, prompt)] = self._prompts([(conversation, i)])
            if not parts or prompt[: len(parts[-1][0])] != parts[-1][0]:
                parts.append(([], [], []))
            tokens, turns, places = parts[-1]
            turn = max(turns, default=0) + 1 if is_trained(conversation.messages[i]) else 0
            turns += [0] * (len(prompt) - len(tokens)) + [turn] * len(ids)
            places += placed(conversation, rejected, range(len(prompt), len(prompt) + len(ids)))
            tokens[:] = prompt + ids
        found = [_part(conversation, *part) for part in parts if any(part[1])]
        if not found:
            raise UserError(f"{conversation.where}: answer_ids has no answer that is trained on: remove the line")
        return found

    def prompts(self, conversations: Sequence[Conversation]) -> list[tuple[str, list[int]]]:
        """Text and token ids of each conversation to be answered, including the assistant's header.

        Raises UserError for an id outside the base's vocabulary.
        """
        found = self._prompts([(c, len(c.messages)) for c in conversations])
        for conversation, (_, ids) in zip(conversations, found, strict=True):
            self._check_ids(conversation.where, ids)
        return found

    def _check_ids(self, where: str, ids: list[int]) -> None:
        if self.vocab_size is not None and ids and max(ids) >= self.vocab_size:
            raise beyond_vocabulary(where, max(ids), self.vocab_size, self.tokenizer)

    def _prompts(self, wanted: Sequence[tuple[Conversation, int]]) -> list[tuple[str, list[int]]]:
        """The prompts of the first messages of each conversation."""
        texts = [str(self.template.render(c, c.messages[:n], add_generation_prompt=True)) for c, n in wanted]
        return list(zip(texts, self._tokenise(texts), strict=True))

    def question_ids(self) -> list[int]:
        """Token ids that the template writes before the text of the first user message.

        Raises UserError when it writes none, or an id outside the base's vocabulary.
        """
        asked = Conversation([{"role": "user", "content": PLACEHOLDER}], "a question")
        text = str(self.template.render(asked)).split(PLACEHOLDER)[0].rstrip(" ")
        [ids] = self._tokenise([text])
        if not ids:
            raise UserError(
                "the chat template writes nothing before a user's text, so a base has nothing to continue as the user: "
                "give --data instead of --synthesize"
            )
        self._check_ids("the header of a user's turn", ids)
        return ids

    def _marked(self, conversation: Conversation) -> Sample:
        encoded = self.template.render(conversation, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids = list(encoded["input_ids"])
        turns = _turns_of_marks(ids, list(encoded["assistant_masks"]), self._end_ids)
        answers = [message for message in conversation.messages if message["role"] == "assistant"]
        return _sample(conversation, np.array(ids), turns, _shortened(self.tokenizer, ids, turns, answers))

    def _incremental(self, conversation: Conversation, text: str, ids: list[int], prompts: Sequence[str]) -> Sample:
        ids_N = np.array(ids, dtype=np.int64)
        places: TokenPlaces | TokenOffsets | None = None
        if self._byte_lengths_V is not None:
            places = TokenPlaces(text, ids_N, self._byte_lengths_V)
        if places is None or not places.fits:
            places = TokenOffsets(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False))
        special = self._is_end_V[ids_N].nonzero()[0].tolist()
        ends = [(places.character_end(i), int(ids_N[i])) for i in special]
        turns_N = np.zeros(len(ids_N), dtype=np.int32)
        spans, prompted_differently = self._incremental_spans(conversation, text, ends, prompts)
        answers = [message for message in conversation.messages if message["role"] == "assistant"]
        for turn, (begin, end) in enumerate(spans, start=1):
            first, after = places.tokens_of(begin, end)
            turns_N[first:after] = turn
        # The answer may begin with the prefix that the prompt ends with, which is not supervised.
        begun = [(max(0, begin - LONGEST_PREFIX), end) for begin, end in spans]
        held = [_holds(text[begin:end], answer) for (begin, end), answer in zip(begun, answers, strict=True)]
        return _sample(conversation, ids_N, turns_N, held.count(False), prompted_differently)

    def _incremental_spans(
        self, conversation: Conversation, text: str, ends: list[tuple[int, int]], prompts: Sequence[str]
    ) -> tuple[list[tuple[int, int]], int]:
        """(character span of each assistant turn in `text`, number of answers that begin unlike their prompt's end).

        `text` is the rendering of the complete conversation; `ends` are the (end, id) of its special tokens; `prompts`
        are the renderings of everything before each of the last turns, as far as they are known.

        A turn begins where the rendering of everything before it (with the generation prompt) ends, and ends with the
        first special token after its content.
        """
        messages = conversation.messages
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        begins, spans, otherwise = [], [], 0
        known = dict(zip(reversed(turns), reversed(prompts), strict=False))
        for i in turns:
            before = known[i] if i in known else _before(self.template, conversation, i)
            begins.append(_shared(before, text))
            otherwise += i > 0 and begins[-1] < len(before.rstrip())
        for i, begin, bound in zip(turns, begins, [*begins[1:], len(text)], strict=True):
            begin, end = _span(self, conversation, i, text, (begin, bound), ends)
            end = _end_without_token(self.template, conversation, i, text) if end is None else end
            if not begin < end <= bound:
                raise UserError(
                    f"{conversation.where}, message {i}: cannot find this assistant turn in the rendered conversation "
                    "(the chat template rewrites earlier turns): use a template with {% generation %} marks"
                )
            spans.append((begin, end))
        return spans, otherwise


def _span(
    encoder: ChatEncoder, conversation: Conversation, i: int, text: str, within: tuple[int, int],
    ends: list[tuple[int, int]],
) -> tuple[int, int | None]:  # fmt: skip
    """(first character of assistant message i, end of its closing special token or None)."""
    messages, (begin, bound) = conversation.messages, within
    # Tool calls follow the content of their turn, with special tokens of their own.
    content = "" if messages[i].get("tool_calls") else messages[i]["content"].strip()
    # The reasoning of the last turn may contain the text of its answer.
    find = text.rfind if i == len(messages) - 1 else text.find
    at = find(content, begin, bound) if content else -1
    if at < 0:  # the template rewrote the content (removed its reasoning, added tool calls)
        after = ends[bisect_right(ends, begin, key=lambda e: e[0]) :]
        return begin, next((end for end, token in after if end <= bound and token in encoder._stop_ids), None)
    first = bisect_right(ends, begin, key=lambda e: e[0])
    # A template that ignores add_generation_prompt leaves the header here: it is not the assistant's text.
    if not encoder.template.opens_answers and first < len(ends) and ends[first][0] <= at:
        begin = at
    answer_end = at + len(content)
    after_content = bisect_right(ends, answer_end, key=lambda e: e[0])
    found, token = ends[after_content] if after_content < len(ends) else (bound + 1, 0)
    if found > bound:
        return begin, None
    if text[answer_end:found].strip() != encoder.tokenizer.convert_ids_to_tokens(token):  # of the next user's text?
        alone = _end_without_token(encoder.template, conversation, i, text)
        found = alone if answer_end < alone < found else found
    return begin, found


def _end_without_token(template: ChatTemplate, conversation: Conversation, i: int, text: str) -> int:
    after = template.render(conversation, conversation.messages[: i + 1])
    return len(text[: _shared(after, text)].rstrip())


def _before(template: ChatTemplate, conversation: Conversation, i: int) -> str:
    """Rendering of everything before the text of message i."""
    if i > 0:
        return str(template.render(conversation, conversation.messages[:i], add_generation_prompt=True))
    # Without messages a template adds no default system prompt, so look at what comes before a first answer.
    first = {"role": "assistant", "content": PLACEHOLDER}
    return str(template.render(conversation, [first])).rsplit(PLACEHOLDER, 1)[0]


def _check_work(conversation: Conversation) -> None:
    """Raise UserError if rendering everything before each answer is too much work."""
    answers = sum(message["role"] == "assistant" for message in conversation.messages)
    characters = sum(len(message["content"] or "") for message in conversation.messages)
    if answers * characters > MOST_CHARACTERS:
        raise UserError(
            f"{conversation.where}: {answers} answers in {characters / 1e6:.1f} million characters: everything before "
            f"each is rendered again, at most {MOST_CHARACTERS // 10**6} million characters in total; split it into "
            "several conversations"
        )


def _sample(
    conversation: Conversation, ids_N: Array, turns_N: Array, shortened: int = 0, prompted_differently: int = 0
) -> Sample:
    supervised = int(np.count_nonzero(turns_N))
    if supervised == 0:
        raise UserError(f"{conversation.where}: the chat template marks no token as the assistant's")
    if supervised == len(turns_N):
        raise UserError(f"{conversation.where}: every token counts as the assistant's: the chat template is wrong")
    tokens, turns = torch.from_numpy(ids_N), torch.from_numpy(turns_N)
    return Sample(tokens, turns, conversation.where, shortened, prompted_differently)


def _part(conversation: Conversation, ids: list[int], turns: list[int], rejected: list[int]) -> Sample:
    sample = _sample(conversation, np.array(ids), np.array(turns, dtype=np.int32))
    return replace(sample, rejected=_indices(rejected))


def _with_rejected(conversation: Conversation, sample: Sample, encoder: ChatEncoder) -> Sample:
    """The sample of a conversation's text, with its rejections."""
    if conversation.rejected is None:
        return sample
    check_tokenizer(conversation, encoder.vocabulary_hash)
    return replace(sample, rejected=_indices(in_turns(conversation, sample.turns.numpy())))


def _indices(found: list[int]) -> Tensor:
    return torch.tensor(found, dtype=torch.int64)


def _turns_of_marks(ids: list[int], mask: list[int], end_ids: Collection[int]) -> Array:
    """int32 [N]: the turn of each token, given the tokens that the template marks."""
    turns, turn = np.zeros(len(ids), dtype=np.int32), 0
    for i, token in enumerate(ids):
        if mask[i]:
            turn += 0 if i and mask[i - 1] else 1
            turns[i] = turn
        elif i and mask[i - 1] and ids[i - 1] not in end_ids and token in end_ids:
            turns[i] = turn  # the marks enclose only the content: supervise the end token as well
    return turns


def _shortened(tokenizer: Any, ids: list[int], turns: Array, answers: list[dict[str, Any]]) -> int:
    """Number of answers that their turns do not hold; 0 if there are not as many turns as answers."""
    if turns.max(initial=0) != len(answers):
        return 0
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    edges = np.searchsorted(np.maximum.accumulate(turns), np.arange(1, len(answers) + 2)).tolist()
    count = 0
    for answer, begin, end in zip(answers, edges[:-1], edges[1:], strict=True):
        written = [token for token, n in zip(ids[begin:end], turns[begin:end], strict=True) if n]
        count += not _holds(tokenizer.decode(written, **options), answer)
    return count


def _holds(text: str, answer: dict[str, Any]) -> bool:
    """True if the supervised text of an answer contains its reasoning and its content, up to surrounding space."""
    return all(answer.get(key, "").strip() in text for key in ("reasoning_content", "content"))


def _shared(one: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    if other.startswith(one):
        return len(one)
    known, differ = 0, min(len(one), len(other)) + 1
    while differ - known > 1:
        middle = (known + differ) // 2
        if one[known:middle] == other[known:middle]:
            known = middle
        else:
            differ = middle
    return known
