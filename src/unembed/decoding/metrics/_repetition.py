"""How much a text repeats itself: tokens that were there a little before, and n-grams that come again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from unembed.decoding.metrics._sequences import Sequences, grams, need_size, sequences_of


def rep_n(sequences: Sequences, n: int = 32, *, predictions: Sequences | None = None) -> float:
    """The share of tokens that are among the n tokens before them (rep/l of Welleck et al., 2019, arXiv:1908.04319).

    The paper looks whether the most probable token at each place is among the n before it: give those as
    `predictions`. Of a text that was decoded greedily they are its own tokens. All tokens of all sequences count
    alike. What later papers call rep-n, the share of n-grams that come again, is `seq_rep_n`.

    Args:
        sequences: Token ids or words; one sequence, or several.
        n: How far back.
        predictions: What the model held most probable at each place, given what is before it; the tokens when None.

    Raises:
        ValueError: If there is no token, or predictions and tokens are not equally many.
    """
    need_size("n", n)
    rows = sequences_of(sequences)
    said = rows if predictions is None else sequences_of(predictions)
    if [len(row) for row in said] != [len(row) for row in rows]:
        raise ValueError("`predictions` must hold one token for each of `sequences`.")
    count = sum(map(len, rows))
    if not count:
        raise ValueError("`sequences` must hold at least one token, got none.")
    return sum(near(row, n, own) for row, own in zip(rows, said, strict=True)) / count


def seq_rep_n(sequences: Sequences, n: int = 4) -> float:
    r"""$1 - |\text{distinct n-grams}| / |\text{n-grams}|$, the mean over sequences (Welleck et al., 2019).

    Sequences of fewer than n tokens have no n-gram and are left out.

    Args:
        sequences: Token ids or words; one sequence, or several.
        n: Length of the runs.

    Raises:
        ValueError: If no sequence has n tokens.
    """
    need_size("n", n)
    shares = [repeated(row, n) for row in sequences_of(sequences) if len(row) >= n]
    if not shares:
        raise ValueError(f"`sequences` must hold one of at least {n} tokens, got none.")
    return sum(shares) / len(shares)


def _near_reference(sequence: Sequence[Hashable], n: int, predictions: Sequence[Hashable]) -> int:
    """What `near` means."""
    return sum(one in sequence[max(0, place - n) : place] for place, one in enumerate(predictions))


def near(sequence: Sequence[Hashable], n: int, predictions: Sequence[Hashable]) -> int:
    """How many predictions are among the n tokens before their place; in time that does not grow with n."""
    last: dict[Hashable, int] = {}
    found = 0
    for place, (token, said) in enumerate(zip(sequence, predictions, strict=True)):
        found += place - last.get(said, -n - 1) <= n
        last[token] = place
    return found


def repeated(sequence: Sequence[Hashable], n: int) -> float:
    """The share of n-grams of one sequence, of n tokens at least, that came before in it."""
    return 1 - len(set(grams(sequence, n))) / (len(sequence) - n + 1)
