"""Where hypotheses of a search end by a stop string, and who is told of those that were found."""

from __future__ import annotations

from dataclasses import replace

from unembed.decoding._hypotheses import Node
from unembed.decoding._plan import Plan
from unembed.decoding._strategy import Written
from unembed.decoding._text import TextStream
from unembed.decoding._writer import Writer, stream_of


class Endings:
    """The texts of the sequences of a search.

    Args:
        plan: Stop strings, tokenizer and `on_token`.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def read(self, row: int, node: Node) -> Node:
        """A hypothesis of a prompt with its text, which goes on from that of its parent."""
        if not self._plan.stop:
            return node
        return replace(node, text=self.after(row, None if node.parent is None else node.parent.text, node.token))

    def after(self, row: int, text: TextStream | None, token: int) -> TextStream:
        """The text of a sequence of a prompt and one more token; None is that of the prompt."""
        stream = stream_of(self._plan, row) if text is None else text.copy()
        stream.push(token)
        return stream

    def tell(self, found: list[list[Written]]) -> None:
        """Add the texts of all sequences, and tell the best one of each prompt: nothing was certain before."""
        if self._plan.tokenizer is None and self._plan.on_token is None:
            return
        for rank in range(max(map(len, found))):
            writer = Writer(self._plan if rank == 0 else replace(self._plan, on_token=None))
            for row, sequences in enumerate(found):
                if rank < len(sequences):
                    self._replay(writer, row, sequences[rank])

    def _replay(self, writer: Writer, row: int, one: Written) -> None:
        for token, log_prob, drawn in zip(one.tokens, one.log_probs, one.drawn_log_probs, strict=True):
            writer.put(row, token, log_prob, drawn)
        if one.finish == "dead end":
            writer.dead_end(row)
        one.text = writer.rows[row].text
