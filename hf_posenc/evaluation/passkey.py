"""Can a model find again what stood somewhere in a long text? A key is hidden at some depth, and asked for at the end.

Greedy decoding gives the key back exactly if each of its tokens is the first choice behind those before it, so that
one forward over text and key answers for it. Small models fail that; whether they prefer the key to another one, and
its rank, show what they have of it.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import torch

from .crew import Crew
from .estimates import share
from .halt import Halt
from .results import DepthResult, PasskeyResult
from .scoring import predictions, rows_at_once
from .settings import Settings
from .subject import Subject

LEAD, CLOSE = " The secret number is", "."
NUMBERS, TOKENS = "numbers", "tokens"
TOKENS_OF_A_KEY = 4


@dataclasses.dataclass(frozen=True)
class Trial:
    """A row of tokens that ends in the key."""

    ids: list[int]
    key: list[int]
    other: list[int]
    """Another key, which is not in the text."""

    @property
    def parting(self) -> int:
        """The first place at which the two keys differ."""
        return next(n for n, (mine, its) in enumerate(zip(self.key, self.other, strict=False)) if mine != its)


@dataclasses.dataclass(frozen=True)
class Haystack:
    """Makes trials from a text, for any tokenizer or none."""

    stream: torch.Tensor
    before: list[int]
    lead: list[int]
    close: list[int]
    kind: str
    tokenizer: Any
    digits: int

    @classmethod
    def of(cls, subject: Subject, digits: int) -> Haystack:
        """Keys are numbers, or a few tokens of the text where the tokenizer does not tell numbers apart."""
        tokenizer = subject.tokenizer
        before = list(subject.frame.before)
        lead, close = ([], []) if tokenizer is None else (_encoded(tokenizer, text) for text in (LEAD, CLOSE))
        if not lead:  # there is none, or it knows nothing of such words
            lead = subject.stream[: len(LEAD.split())].tolist()
            return cls(subject.stream, before, lead, lead[:1], TOKENS, None, digits)
        tried = [_encoded(tokenizer, f" {number}") for number in range(10 ** (digits - 1), 10 ** (digits - 1) + 20)]
        unknown = any(tokenizer.unk_token_id in ids for ids in tried if tokenizer.unk_token_id is not None)
        told_apart = len({tuple(ids) for ids in tried}) == len(tried)
        kind = NUMBERS if told_apart and not unknown else TOKENS
        return cls(subject.stream, before, lead, close, kind, tokenizer, digits)

    def trial(self, length: int, depth: float, seed: str) -> Trial:
        dice = random.Random(seed)
        key = self._key(dice)
        other = next(found for found in iter(lambda: self._key(dice), None) if _part(key, found))
        needle = [*self.lead, *key, *self.close]
        room = length - len(self.before) - len(needle) - len(self.lead) - len(key)
        if room < 0:
            raise Halt(f"{length} tokens have no room for a key and the question: {length - room} do")
        places = (torch.arange(room) + dice.randrange(len(self.stream))) % len(self.stream)
        filler = self.stream[places].tolist()
        at = round(depth * room)
        return Trial([*self.before, *filler[:at], *needle, *filler[at:], *self.lead, *key], key, other)

    def _key(self, dice: random.Random) -> list[int]:
        if self.kind == NUMBERS:
            return _encoded(self.tokenizer, f" {dice.randrange(10 ** (self.digits - 1), 10**self.digits)}")
        return [int(self.stream[dice.randrange(len(self.stream))]) for _ in range(TOKENS_OF_A_KEY)]


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _part(key: list[int], other: list[int]) -> bool:
    return any(mine != its for mine, its in zip(key, other, strict=False))


@dataclasses.dataclass(frozen=True)
class Outcome:
    found: bool
    preferred: float
    """1 or 0; a half where both are as likely, which is not rare in bfloat16."""
    log_ranks: float
    log_probabilities: float
    tokens: int


def measure_passkey(subject: Subject, length: int, settings: Settings, crew: Crew) -> PasskeyResult:
    if not subject.causal:
        raise Halt("a passkey is asked of causal models: this one does not write")
    if len(subject.stream.unique()) < 2:
        raise Halt("the text is one token over and over: there is no key to tell from another")
    hay = Haystack.of(subject, settings.digits)
    cells = [(depth, trial) for depth in settings.depths for trial in range(settings.trials)]
    saying = f"{subject.name}, passkey in {length} tokens"

    def work() -> list[tuple[int, Outcome]]:
        done: list[tuple[int, Outcome]] = []
        for numbers in crew.batches(len(cells), rows_at_once(settings.batch_tokens, length), saying):
            seeds = [f"{settings.seed} {length} {cells[number]}" for number in numbers]
            trials = [hay.trial(length, cells[n][0], seed) for n, seed in zip(numbers, seeds, strict=True)]
            done += zip(numbers, outcomes(subject, trials), strict=True)
        return done

    found = crew.collect(work)
    per_depth = [found[start : start + settings.trials] for start in range(0, len(found), settings.trials)]
    depths = zip(settings.depths, per_depth, strict=True)
    cells_of = tuple(_at_depth(depth, outcomes, settings.confidence) for depth, outcomes in depths)
    return PasskeyResult(subject.name, length, depths=cells_of, keys=hay.kind)


def outcomes(subject: Subject, trials: list[Trial]) -> list[Outcome]:
    """All trials in one forward: their rows are of one length."""
    ids_BN = torch.tensor([trial.ids for trial in trials], device=subject.device)
    sizes = torch.tensor([len(trial.key) for trial in trials], device=subject.device)
    wanted_BN = torch.arange(ids_BN.shape[1], device=subject.device) >= ids_BN.shape[1] - sizes[:, None]
    keys_P = ids_BN[wanted_BN]
    others = [token for trial in trials for token in _stretched(trial.other, len(trial.key))]
    others_P = torch.tensor(others, device=subject.device)
    own, rival, rank, right = [], [], [], []
    done = 0
    for part_PV in predictions(subject.model, ids_BN, wanted_BN, causal=True):
        keys, its = (tokens[done : done + len(part_PV), None] for tokens in (keys_P, others_P))
        mine = part_PV.gather(-1, keys)
        own += mine[:, 0].tolist()
        rival += part_PV.gather(-1, its)[:, 0].tolist()
        # Among equals the middle: a model that tells nothing apart has the rank of chance, not the first.
        rank += ((part_PV > mine).sum(-1) + ((part_PV == mine).sum(-1) + 1) / 2).tolist()
        right += (part_PV.argmax(-1) == keys[:, 0]).tolist()
        done += len(part_PV)
    results, at = [], 0
    for trial in trials:
        size = len(trial.key)
        here = slice(at, at + size)
        fork = at + trial.parting
        log_ranks = sum(math.log(one) for one in rank[here])
        preferred = 0.5 if own[fork] == rival[fork] else float(own[fork] > rival[fork])
        results.append(Outcome(all(right[here]), preferred, log_ranks, sum(own[here]), size))
        at += size
    return results


def _stretched(ids: list[int], size: int) -> list[int]:
    """To the length of the key: what is behind the first difference is not looked at."""
    return [*ids, *ids[-1:] * size][:size]


def _at_depth(depth: float, found: list[Outcome], confidence: float) -> DepthResult:
    tokens = sum(one.tokens for one in found)
    return DepthResult(
        depth=depth,
        trials=len(found),
        accuracy=share(sum(one.found for one in found), len(found), confidence),
        preference=share(sum(one.preferred for one in found), len(found), confidence),
        rank=math.exp(sum(one.log_ranks for one in found) / tokens),
        log_probability=sum(one.log_probabilities for one in found) / tokens,
    )
