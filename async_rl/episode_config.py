"""The table [inference.episodes]: attempts of several calls of the model, for tasks that have such."""

from __future__ import annotations

from async_rl.schema import Count, PositiveInt, Section


class EpisodesConfig(Section, frozen=True, kw_only=True):
    max_tokens: Count = 0
    """The most tokens of an attempt, all its segments together, with what the model did not write; the buffer keeps
    room for so many. An attempt that comes to it is cut. To be set for a task whose attempts have several turns: at
    least inference.max_context, and more where a chat template rewrites what was said (each time a segment begins)."""
    workers: PositiveInt = 1
    """Processes of a node in which environments run, many in each."""
