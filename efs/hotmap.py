"""Which keys of a node are known in memory, and where their records lie. Pure; belongs to the loop's thread.

For each known key the map says everything that the node holds of it: one location, several (rare), or nothing. It is
exact as long as its owner tells it of every change, which works because a node directory has one owner; a key that it
does not know has to be looked up in the index.

Locations are found by one `dict.get` a key without Python code in between. Memory is bounded by two generations: keys
are added to the young one, which becomes the old one when it is full, and the old one is then forgotten. A key found in
the old one moves to the young one if that has room. Only learning forgets, asking never does. Keys that are known to
be absent have two small generations of their own, so that a flood of new prompts does not push out what is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.contract import ABSENT
from efs.limits import HOT_KEYS_PER_NODE

UNKNOWN: Final = -1
SEVERAL: Final = -2
ABSENT_SHARE: Final = 8
"""Known-absent keys are kept up to this fraction of the hot ones."""

assert ABSENT == UNKNOWN


class HotMap:
    """Locations by key. At most `most_keys` keys with records, plus an eighth of that without."""

    def __init__(self, most_keys: int = HOT_KEYS_PER_NODE) -> None:
        self._generation_keys = max(1, most_keys // 2)
        self._generation_absent = max(1, most_keys // (2 * ABSENT_SHARE))
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._several: dict[bytes, tuple[int, ...]] = {}
        self._young_absent: set[bytes] = set()
        self._old_absent: set[bytes] = set()

    def __len__(self) -> int:
        """Keys with records that are known."""
        return len(self._young) + sum(key not in self._young for key in self._old)

    def locate(self, keys: Sequence[bytes]) -> NDArray[np.int64] | None:
        """(n,) a location, SEVERAL, or ABSENT for each key; None when some key is unknown."""
        found = np.fromiter(map(self._young.get, keys, repeat(UNKNOWN)), np.int64, len(keys))
        if len(keys) and int(found.min()) < 0:
            rows = np.flatnonzero(found == UNKNOWN).tolist()
            if self._all_absent(keys if len(rows) == len(keys) else [keys[row] for row in rows]):
                return found
            for row in rows:
                location = self._in_old(keys[row])
                if location is None:
                    if not self._known_absent(keys[row]):
                        return None
                    location = ABSENT
                found[row] = location
        return found

    def unknown(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys that are not known, each once."""
        if self._all_absent(keys):
            return []
        young, old, absent, old_absent = self._young, self._old, self._young_absent, self._old_absent
        return [key for key in dict.fromkeys(keys)
                if key not in young and key not in old and key not in absent and key not in old_absent]

    def locations(self, key: bytes) -> tuple[int, ...] | None:
        """All locations of one key, () when it is known to be absent, None when it is unknown."""
        location = self._young.get(key, UNKNOWN)
        if location == UNKNOWN:
            old = self._in_old(key)
            if old is None:
                return () if self._known_absent(key) else None
            location = old
        return self._several[key] if location == SEVERAL else (location,)

    def set(self, key: bytes, locations: tuple[int, ...]) -> None:
        """Learn what a key has: all of its locations."""
        self.forget(key)
        if not locations:
            if len(self._young_absent) >= self._generation_absent:
                self._old_absent, self._young_absent = self._young_absent, set()
            self._young_absent.add(key)
            return
        if len(locations) > 1:
            self._several[key] = locations
        self._add(key, locations[0] if len(locations) == 1 else SEVERAL)

    def set_absent(self, keys: Sequence[bytes]) -> None:
        """`set` of many keys that were unknown until now and have nothing."""
        if len(self._young_absent) + len(keys) > self._generation_absent:
            for key in keys:
                self.set(key, ())
        else:
            self._young_absent.update(keys)

    def add(self, key: bytes, location: int) -> None:
        """A known key got one more record. An unknown key stays unknown."""
        before = self.locations(key)
        if before is not None:
            self.set(key, (*before, location))

    def add_all(self, keys: Sequence[bytes], locations: Sequence[int]) -> None:
        """`add` of many records. Fast where all keys are different and known to be absent, as those of a new prompt."""
        fresh = set(keys)
        known = fresh <= self._young_absent or all(map(self._known_absent, fresh))
        absent = len(fresh) == len(keys) and known
        if not absent or len(self._young) + len(keys) > self._generation_keys:
            for key, location in zip(keys, locations, strict=True):
                self.add(key, location)
            return
        self._young_absent -= fresh
        self._old_absent -= fresh
        self._young.update(zip(keys, locations, strict=True))

    def forget_all(self, keys: Sequence[bytes], locations: Sequence[int]) -> None:
        """These records are gone. Keys that had only one become unknown, not absent: nobody asks for them again
        soon."""
        for key, location in zip(keys, locations, strict=True):
            if self._young.get(key) == location:
                del self._young[key]
            elif self._old.get(key) == location:
                del self._old[key]
            else:
                self.remove(key, location)

    def remove(self, key: bytes, location: int) -> None:
        """A record is gone. An unknown key stays unknown."""
        before = self.locations(key)
        if before is not None:
            self.set(key, tuple(place for place in before if place != location))

    def forget(self, key: bytes) -> None:
        """Know nothing of a key."""
        for generation in (self._young, self._old):
            if generation.pop(key, None) == SEVERAL:
                self._several.pop(key, None)
        self._young_absent.discard(key)
        self._old_absent.discard(key)

    def _in_old(self, key: bytes) -> int | None:
        """A location from the old generation. The key becomes young unless that one is full: asking must not make the
        map forget, because callers put several answers together."""
        location = self._old.get(key)
        if location is not None and len(self._young) < self._generation_keys:
            del self._old[key]
            self._young[key] = location
        return location

    def _all_absent(self, keys: Sequence[bytes]) -> bool:
        """Whether all of these keys, none of which is young, are known to be absent by the young generation alone."""
        return self._young_absent.issuperset(keys) and self._old.keys().isdisjoint(keys)

    def _known_absent(self, key: bytes) -> bool:
        return key in self._young_absent or key in self._old_absent

    def _add(self, key: bytes, location: int) -> None:
        if len(self._young) >= self._generation_keys:
            for gone, place in self._old.items():
                if place == SEVERAL:
                    self._several.pop(gone, None)
            self._old, self._young = self._young, {}
        self._young[key] = location
