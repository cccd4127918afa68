"""The keys of [inference] that say how completions are scored."""

from __future__ import annotations

from async_rl.schema import PositiveFloat, PositiveInt, Section


class ScoringSettings(Section, frozen=True, kw_only=True):
    reward_workers: PositiveInt = 1
    """Processes in which a node scores; each is started when the others have no time. More let slow rewards overlap;
    rewards that wait for a service overlap in one (their `concurrency`)."""
    score_timeout: PositiveFloat = 10.0
    """Seconds that scoring one completion may take, and those that rewards with time-outs of their own need besides."""
    score_tries: PositiveInt = 3
    """How often scoring one completion may fail before the attempt is given up as env_failed."""
