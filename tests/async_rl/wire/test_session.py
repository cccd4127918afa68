"""The session's rules, under every order of loss, repetition, reordering and reconnection that hypothesis finds."""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.wire.session import REPORT_MESSAGES, REPORT_SECONDS, Report, Session, Verdict

ROOM = 150  # bytes in one frame


class Wire(NamedTuple):
    """An envelope under way: seq 0 carries only the report."""

    seq: int
    size: int
    payload: int
    report: Report


class End:
    """One end of a link: a session, what its caller sent, and what was delivered to it."""

    def __init__(self, window: int) -> None:
        self.session: Session[int] = Session(window)
        self.sent: list[int] = []
        self.delivered: list[int] = []
        self.undelivered_sizes: list[int] = []  # delivered to this side's queue, not consumed yet
        self.outbox: list[Wire] = []  # under way to the other end
        self.overdrawn = 0

    def say(self, size: int) -> None:
        self.sent.append(len(self.sent))
        self.session.enqueue(self.sent[-1], size)

    def pump(self, peer: End) -> None:
        while taken := self.session.take(ROOM):
            granted = peer.session._reported.limit
            for message in taken:
                assert message.offset < granted, "sent beyond what the receiver has granted"
                self.outbox.append(Wire(message.seq, message.size, message.payload, self.session.report()))

    def report(self) -> None:
        self.outbox.append(Wire(0, 0, 0, self.session.report()))

    def hear(self, wire: Wire) -> None:
        self.session.hear(*wire.report)
        if wire.seq == 0:
            return
        verdict = self.session.accept(wire.seq, wire.size, 0.0)
        if verdict is Verdict.DELIVER:
            self.delivered.append(wire.payload)
            self.undelivered_sizes.append(wire.size)
            self.session.acknowledge(0.0)
        elif verdict is Verdict.OVERDRAWN:
            self.overdrawn += 1

    def consume(self) -> None:
        if self.undelivered_sizes:
            self.session.consume(self.undelivered_sizes.pop(0), 0.0)


def reconnect(a: End, b: End) -> None:
    """Both connections are cut with all that was under way; both say what they received."""
    a.outbox.clear()
    b.outbox.clear()
    for one, other in ((a, b), (b, a)):
        one.session.hear(*other.session.report())
        one.session.rewind(after=other.session.received)


def settle(a: End, b: End, rounds: int) -> None:
    """From here on the network is good; the shells' timers do what they do."""
    for _ in range(rounds):
        for one, other in ((a, b), (b, a)):
            one.report()
            one.pump(other)
            while one.outbox:
                other.hear(one.outbox.pop(0))
            other.consume()
            while other.undelivered_sizes:
                other.consume()
        if not a.session.unacknowledged and not b.session.unacknowledged:
            return
        for one in (a, b):
            one.session.rewind(after=one.session.acknowledged_by_peer)
    raise AssertionError("the two ends did not come to rest: deadlock")


actions = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.booleans(), st.integers(1, 250)),
        st.tuples(st.just("pump"), st.booleans(), st.just(0)),
        st.tuples(st.just("report"), st.booleans(), st.just(0)),
        st.tuples(st.just("arrive"), st.booleans(), st.integers(0, 30)),  # of any place: reordering
        st.tuples(st.just("repeat"), st.booleans(), st.integers(0, 30)),
        st.tuples(st.just("drop"), st.booleans(), st.integers(0, 30)),
        st.tuples(st.just("consume"), st.booleans(), st.just(0)),
        st.tuples(st.just("resend"), st.booleans(), st.just(0)),
        st.tuples(st.just("cut"), st.booleans(), st.just(0)),
    ),
    max_size=120,
)


def act(one: End, other: End, action: str, number: int) -> None:
    place = number % len(one.outbox) if one.outbox else -1
    match action:
        case "say":
            one.say(number)
        case "pump":
            one.pump(other)
        case "report":
            one.report()
        case "consume":
            one.consume()
        case "resend":
            one.session.rewind(after=one.session.acknowledged_by_peer)
        case "cut":
            reconnect(one, other)
        case "arrive" if place >= 0:
            other.hear(one.outbox.pop(place))
        case "repeat" if place >= 0:
            other.hear(one.outbox[place])
        case "drop" if place >= 0:
            one.outbox.pop(place)


@settings(max_examples=300)
@given(actions=actions, window=st.sampled_from([1, 100, 1000]))
def test_whatever_the_network_does_each_message_is_delivered_once_and_in_order(
    actions: list[tuple[str, bool, int]], window: int
) -> None:
    a, b = End(window), End(window)
    for action, forward, number in actions:
        act(*((a, b) if forward else (b, a)), action, number)
        for one, other in ((a, b), (b, a)):
            assert other.delivered == one.sent[: len(other.delivered)]
            assert sum(other.undelivered_sizes) < window + 250, "more than one message beyond the window"
    settle(a, b, rounds=2 * len(actions) + 4)
    assert b.delivered == a.sent
    assert a.delivered == b.sent
    assert a.overdrawn == b.overdrawn == 0


@settings(max_examples=100)
@given(actions=actions, seen=st.integers(0, 60))
def test_a_renumbered_session_carries_exactly_what_was_not_acknowledged(
    actions: list[tuple[str, bool, int]], seen: int
) -> None:
    a, b = End(200), End(200)
    for action, forward, number in actions:
        act(*((a, b) if forward else (b, a)), action, number)
    left = a.sent[a.session.acknowledged_by_peer :]
    fresh, server = End(200), End(200)
    fresh.session = a.session.renumbered()
    settle(fresh, server, rounds=2 * len(left) + 4)
    assert server.delivered == left


def test_a_message_larger_than_the_window_passes_and_the_next_one_waits() -> None:
    session: Session[str] = Session(0)
    session.hear(0, 100)
    session.enqueue("large", 1000)
    session.enqueue("next", 1)
    assert [message.payload for message in session.take(ROOM)] == ["large"]
    assert session.take(ROOM) == []
    session.hear(1, 1000)
    assert session.take(ROOM) == [], "offset 1000 is not below the limit of 1000"
    session.hear(1, 1001)
    assert [message.payload for message in session.take(ROOM)] == ["next"]


@given(
    st.lists(st.tuples(st.integers(1, 80), st.booleans()), max_size=12), st.integers(0, 600), st.integers(0, 200),
)  # fmt: skip
def test_a_frame_takes_what_fits_in_order_and_leaves_alone_what_travels_alone(
    messages: list[tuple[int, bool]], limit: int, room: int
) -> None:
    session: Session[int] = Session(0)
    session.hear(0, limit)
    for index, (size, alone) in enumerate(messages):
        session.enqueue(index, size, alone)
    frames = []
    while taken := session.take(room):
        frames.append(taken)
    sent = [message for taken in frames for message in taken]
    assert [message.payload for message in sent] == list(range(len(sent)))
    assert all(message.offset < limit for message in sent)
    assert session.unsent_bytes == sum(size for size, _ in messages[len(sent) :])
    assert session.in_flight == len(sent)
    if len(sent) < len(messages):
        assert sum(size for size, _ in messages[: len(sent)]) >= limit, "there was credit for another"
    for taken, following in zip_longest(frames, frames[1:], fillvalue=[]):
        size = sum(message.size for message in taken)
        assert len(taken) == 1 or (size <= room and not any(message.alone for message in taken))
        if following:
            assert size + following[0].size > room or taken[0].alone or following[0].alone, "it would have fitted"


@given(st.lists(st.integers(1, 80), min_size=1, max_size=8), st.integers(0, 300), st.integers(1, 3))
def test_a_whole_frame_is_accepted_exactly_when_each_of_its_messages_would_be(
    sizes: list[int], window: int, first: int
) -> None:
    whole: Session[int] = Session(window)
    single: Session[int] = Session(window)
    for session in (whole, single):
        session.report()
    verdicts = [single.accept(seq, size, 0.0) for seq, size in enumerate(sizes, first)]
    accepted = whole.accept_all(first, sizes)
    assert accepted == all(verdict is Verdict.DELIVER for verdict in verdicts)
    assert whole.received == (len(sizes) if accepted else 0)
    assert whole.unconsumed_bytes == (sum(sizes) if accepted else 0)


def test_a_sender_that_ignores_its_credit_is_overdrawn() -> None:
    session: Session[str] = Session(100)
    session.report()
    assert session.accept(1, 100, 0.0) is Verdict.DELIVER
    assert session.accept(2, 1, 0.0) is Verdict.OVERDRAWN
    session.consume(100, 0.0)
    assert session.accept(2, 1, 0.0) is Verdict.OVERDRAWN, "not granted before it is reported"
    session.report()
    assert session.accept(2, 1, 0.0) is Verdict.DELIVER


def test_a_report_is_due_by_count_or_by_bytes_or_by_time() -> None:
    session: Session[str] = Session(1 << 20)
    session.report()
    assert session.report_due() is None
    for seq in range(1, REPORT_MESSAGES):
        assert session.accept(seq, 1, 5.0) is Verdict.DELIVER
    session.acknowledge(5.0)
    assert session.report_due() == 5.0 + REPORT_SECONDS
    assert session.accept(REPORT_MESSAGES, 1, 6.0) is Verdict.DELIVER
    session.acknowledge(6.0)
    assert session.report_due() == 5.0, "at once, by count"
    session.report()
    assert session.report_due() is None
    session.consume(1 << 17, 7.0)
    assert session.report_due() == 7.0 + REPORT_SECONDS
    session.consume(1 << 17, 7.0)
    assert session.report_due() == 7.0, "at once, by bytes"


def test_an_acknowledgement_of_what_was_never_sent_is_ignored() -> None:
    session: Session[str] = Session(100)
    session.enqueue("only", 10)
    assert not session.hear(7, 1000)
    assert session.unacknowledged == 1
    assert not session.may_send(), "nor is its credit believed"
