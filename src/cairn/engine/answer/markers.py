"""
The markers with which a model separates its thoughts, its tool calls and its words.

mlx-lm knows them for each family, as properties of its tokenizer wrapper. Here they become a table
of states and of the texts that lead from one state to another. The states have mlx-lm's names,
because a family may add more of them. Text in any state other than these three is not shown to
clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from cairn.engine.answer.tool_calls import Parser
    from cairn.engine.contract import ModelTokenizer

SAYING, THINKING, CALLING = "normal", "reasoning", "tool"


@attrs.frozen
class Edge:
    """
    A marker, and the state after it.

    Attributes:
        shown: whether the marker itself is shown as text.
        opens: whether it counts only before any words, like the one that opens thoughts.
    """

    marker: str
    to: str
    shown: bool = False
    opens: bool = False


@attrs.frozen(kw_only=True)
class Markers:
    """
    What mlx-lm knows of a model's answers. By default nothing: then an answer is all text.

    Attributes:
        thinking: the markers around thoughts.
        calling: the markers around calls; the second is empty if a call ends with the answer.
        parse: reads the text between the markers of a call.
        dropped: texts of the format that are not shown.
        edges: further markers, by the state that they end.
        first: the state in which an answer begins, if the format has its own.
        format: the format of calls, by mlx-lm's name for its parser.
    """

    thinking: tuple[str, str] | None = None
    calling: tuple[str, str] | None = None
    parse: Parser | None = attrs.field(default=None, repr=False)
    dropped: tuple[str, ...] = ()
    edges: Mapping[str, tuple[tuple[str, str], ...]] = attrs.field(factory=dict)
    first: str | None = None
    format: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The markers of thoughts and calls."""
        return tuple(text for text in (*(self.thinking or ()), *(self.calling or ())) if text)

    @property
    def all_texts(self) -> tuple[str, ...]:
        """All texts that divide an answer, each once: markers and what is dropped."""
        further = (text for edges in self.edges.values() for text, _ in edges)
        return tuple(sorted({*self.texts, *self.dropped, *further} - {""}))

    @property
    def form_of_calls(self) -> tuple[str, ...] | None:
        """
        The format of calls and the markers around them; empty without calls. None if answers have
        other states than these three, whose text may not be shown.
        """
        if self.edges or self.first is not None:
            return None
        if self.calling is None or self.parse is None:
            return ()
        return (self.format or "", *self.calling)

    def begins(self, prompt: str) -> str:
        """
        The state in which the answer to a rendered prompt begins.

        Only the end of the prompt counts: templates open thoughts there, and a marker further up
        may be quoted text.
        """
        if self.first is not None:
            return self.first
        if self.thinking is not None and prompt.rstrip().endswith(self.thinking[0]):
            return THINKING
        return SAYING

    def may_think(self, prompt: str) -> bool:
        """
        Whether thoughts may open the answer to a rendered prompt. To turn thinking off, templates
        end a prompt with empty thoughts.
        """
        return self.thinking is not None and not prompt.rstrip().endswith(self.thinking[1])

    def continues(self, words: str) -> str:
        """
        The state in which an answer continues words of its own. A client may have begun it with the
        marker of thoughts.
        """
        if self.thinking is None:
            return SAYING
        opens, closes = self.thinking
        return THINKING if words.rfind(opens) > words.rfind(closes) else SAYING

    def table(self, *, calls: bool) -> dict[str, tuple[Edge, ...]]:
        """
        The markers that end each state.

        Args:
            calls: whether there are tools; without them the marker of a call is text.
        """
        calls = calls and self.calling is not None and self.parse is not None
        found: dict[str, list[Edge]] = {SAYING: [], THINKING: [], CALLING: []}
        for state, edges in self.edges.items():
            for marker, to in edges:
                is_text = to == CALLING and not calls
                edge = Edge(marker, SAYING, shown=True) if is_text else Edge(marker, to)
                found.setdefault(state, []).append(edge)
        if self.thinking is not None:
            found[SAYING].append(Edge(self.thinking[0], THINKING, opens=True))
            found[THINKING].append(Edge(self.thinking[1], SAYING))
        if self.calling is not None and calls:
            start, end = self.calling
            if not any(to == CALLING for edges in self.edges.values() for _, to in edges):
                found[SAYING].append(Edge(start, CALLING))
            # A call in mid-thought ends the thoughts.
            found[THINKING].append(Edge(start, CALLING))
            found[CALLING].append(Edge(end, SAYING))
        found[SAYING] += [Edge(text, SAYING) for text in self.dropped]
        return {
            state: tuple(edge for edge in edges if edge.marker) for state, edges in found.items()
        }


PLAIN = Markers()


def markers_of(tokenizer: ModelTokenizer) -> Markers:
    """The markers that mlx-lm's tokenizer wrapper knows of. Older versions know fewer kinds."""
    thinking = calling = None
    if tokenizer.has_thinking:
        thinking = (tokenizer.think_start, tokenizer.think_end)
    if tokenizer.has_tool_calling:
        calling = (tokenizer.tool_call_start, tokenizer.tool_call_end)
    edges = getattr(tokenizer, "response_transitions", {})
    parser = tokenizer.tool_parser
    return Markers(
        thinking=thinking,
        calling=calling,
        parse=parser,
        dropped=tuple(getattr(tokenizer, "structural_markers", ())),
        edges={state: tuple((text, to) for text, to in known) for state, known in edges.items()},
        first=getattr(tokenizer, "response_initial_state", None),
        format=getattr(parser, "__module__", "").rpartition(".")[2] or None,
    )
