"""The public conformance suite for output heads: one law, one loss, and what training and decoding need of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Importing a module registers its checks; they run in this order.
# isort: off
from unembed.testing import _checks_law, _checks_gradient, _checks_targets, _checks_scores  # noqa: F401
from unembed.testing import _checks_loss, _checks_decode, _checks_state, _checks_precision, _checks_transform  # noqa: F401

# isort: on
from unembed.testing._case import Case, FailedError, Inputs, NotApplicableError, brief
from unembed.testing._registry import CHECKS, Check, Outcome

_STREAM = 0x5EED  # added to seeds: a head made under seed 0 must not be drawn again, equal, by seed 0 of a check


class HeadError(AssertionError):
    """A head failed checks; `outcomes` holds those of all checks."""

    def __init__(self, head: nn.Module, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        failed = [one for one in outcomes if one.status == "failed"]
        lines = [f"{type(head).__name__} failed {len(failed)} of {len(outcomes)} checks."]
        for one in failed:
            lines += [f"  {one.name}: {one.message}", f"    ({one.meaning})"]
        super().__init__("\n".join(lines))


def check_head(
    head: nn.Module,
    *,
    hidden_shape: tuple[int, ...] | None = None,
    inputs: Inputs | None = None,
    only: Collection[str] | None = None,
    skip: Collection[str] | Mapping[str, str] = (),
    compile: bool | str = False,
    seed: int = 0,
    raises: bool = True,
) -> list[Outcome]:
    """Run a head through every check that applies to it.

    The head needs `in_features`, `out_features` and `forward`. A check of another name (`log_prob`, `nll`, `topk`,
    `sample`, `cost`, ...) is not applicable where the head has none. Checks run on copies in evaluation mode whose
    parameters have been moved a little; give a small instance, such as `Head(8, 13)`: it takes about a second.

    A check compares with what earlier ones have established, so when one fails those that build on it are
    not applicable, and the failures listed are the causes.

    A head can help with attributes of its own: `example_hidden(tokens_shape)` gives random hidden states where a
    token's is no vector of `in_features` numbers, and raises NotImplementedError for a shape of tokens it has no use
    for; `example_targets(hidden)` and `definition_nll(hidden, targets)` where the loss is not `-log_prob[target]`;
    `not_applicable`, a dictionary from a check's name to the reason why the head does not promise it.

    Args:
        head: The head; it is not changed.
        hidden_shape: Shape of the hidden state of one token; `(in_features,)` when None.
        inputs: `(tokens_shape, dtype) -> hidden`, random, in the place of `hidden_shape` and `example_hidden`.
        only: Names of the checks to run; all when None. `CHECKS` lists them.
        skip: Names of checks to leave out, or a dictionary from name to reason.
        compile: Whether to run the checks under torch.compile too, or the backend to run them with (tens of seconds
            with Inductor; jaxtyping's run-time checks must be off).
        seed: Of everything random; the global generator is left as it was.
        raises: Whether to raise when a check failed; the outcomes are returned otherwise.

    Returns:
        The outcome of each check, in order.

    Raises:
        HeadError: An AssertionError that lists all failures.
        ValueError: If a name in `only` or `skip` is no check, or the head cannot be checked at all.
    """
    chosen = _chosen(only, skip)
    for name in ("in_features", "out_features"):
        if not isinstance(getattr(head, name, None), int):
            raise ValueError(f"`head` must have an integer `{name}`; {type(head).__name__} has none.")
    if any(parameter.is_meta for parameter in head.parameters()):
        raise ValueError("`head` is on the meta device, where it has no values to check.")
    reasons: dict[str, str] = {**_promised_not(head)}
    reasons |= skip if isinstance(skip, Mapping) else dict.fromkeys(skip, "skipped by the caller")
    outcomes: dict[str, Outcome] = {}
    with torch.random.fork_rng():
        case = Case(head, inputs or _inputs(head, hidden_shape), _STREAM + seed)
        case.backend = compile if isinstance(compile, str) else "inductor"
        for one in chosen:
            blocked = [name for name in one.after if name in outcomes and outcomes[name].status == "failed"]
            if one.name in reasons:
                outcomes[one.name] = Outcome(one.name, one.meaning, "not applicable", reasons[one.name])
            elif blocked:
                reason = f"builds on `{blocked[0]}`, which failed"
                outcomes[one.name] = Outcome(one.name, one.meaning, "not applicable", reason)
            elif one.compiles and not compile:
                outcomes[one.name] = Outcome(one.name, one.meaning, "not applicable", "runs with compile=True")
            else:
                torch.manual_seed(_STREAM + seed)
                outcomes[one.name] = _run(one, case)
    results = list(outcomes.values())
    if raises and any(one.status == "failed" for one in results):
        raise HeadError(head, results)
    return results


def _promised_not(head: Any) -> Mapping[str, str]:
    return getattr(head, "not_applicable", {})


def _run(one: Check, case: Case) -> Outcome:
    try:
        one.function(case)
    except NotApplicableError as reason:
        return Outcome(one.name, one.meaning, "not applicable", str(reason))
    except FailedError as failure:
        return Outcome(one.name, one.meaning, "failed", str(failure))
    except Exception as error:
        # A head may raise anything, and the other checks are still worth running.
        return Outcome(one.name, one.meaning, "failed", f"raised {type(error).__name__}: {brief(error)}")
    return Outcome(one.name, one.meaning, "passed")


def _chosen(only: Collection[str] | None, skip: Collection[str]) -> list[Check]:
    if isinstance(only, str) or isinstance(skip, str):
        raise ValueError("`only` and `skip` take a collection of names, not one string.")
    unknown = sorted({*(only or ()), *skip} - set(CHECKS))
    if unknown:
        raise ValueError(f"There is no check {unknown[0]!r}; there are {', '.join(CHECKS)}.")
    return [one for one in CHECKS.values() if only is None or one.name in only]


def _inputs(head: Any, hidden_shape: tuple[int, ...] | None) -> Inputs:
    """Normal with deviation 2, so that scores spread over a few nats; drawn in float64, whatever the dtype."""
    if hidden_shape is None and hasattr(head, "example_hidden"):
        return lambda shape, dtype: head.example_hidden(shape).to(dtype)
    last = (head.in_features,) if hidden_shape is None else tuple(hidden_shape)

    def normal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return (2 * torch.randn(*shape, *last, dtype=torch.float64)).to(dtype)

    return normal
