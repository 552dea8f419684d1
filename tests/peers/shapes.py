"""A model that is made in no time, and a peer that answers without one."""

from benchmarks.peers.checkpoints import Shape
from benchmarks.peers.peers import OURS, Peer

TINY = Shape("S", "float32", 1, 8, 16, 2, 1, False, seed=1)


def fake_peer(name: str = OURS, *, has_beams: bool = True, **options: object) -> Peer:
    """Returns a peer whose worker is `fake_worker`, told what to do by its options."""
    seconds = {"S": {"W4": 0.0 if has_beams else None, "W5": 0.0, "start": 0.0}}
    return Peer(name, "", "tests.peers.fake_worker", "answers without a model", {"name": name, **options}, seconds)
