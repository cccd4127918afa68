"""What the buffer remembers of published policies: the last ones, however long a run is."""

from __future__ import annotations

from async_rl.version import PolicyId
from buffer.proofs import Proofs
from buffer.results import remember


def policy(version: int, digest: str = "d") -> PolicyId:
    return PolicyId("main", version, digest)


def test_the_last_published_versions_are_kept_with_all_their_digests() -> None:
    published: dict[int, set[str]] = {}
    for version in range(1000):
        remember(published, policy(version), kept=5)
    assert published == {version: {"d"} for version in range(995, 1000)}
    remember(published, policy(995, "again"), kept=5)  # a trainer that was started again: it is the newest now
    remember(published, policy(1000), kept=5)
    assert list(published) == [997, 998, 999, 995, 1000]
    assert published[995] == {"d", "again"}


def test_the_order_of_registration_goes_on_rising_though_old_places_are_forgotten() -> None:
    proofs = Proofs(kept=5)
    for version in range(1000):
        proofs.registered(policy(version), None)
    assert proofs.order(policy(999)) == 999
    assert proofs.order(policy(995)) == 995
    assert proofs.order(policy(3)) == -1
