"""Blocks on disk: what is written is read again, in this life and the next, and nothing else ever is."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from jpaged.blockstore import store as stores
from jpaged.blockstore.folder import StoreFolder
from jpaged.blockstore.segment import Segment, SlotHeader
from jpaged.blockstore.store import BlockStore
from jpaged.errors import InvalidArgument

IDENTITY, OTHER = b"i" * 32, b"o" * 32
SIZE = 8192
LIMIT = 40 * SIZE


def key_of(number):
    return hashlib.sha256(b"%d" % number).digest()


def contents_of(number, size=SIZE):
    return hashlib.shake_256(b"of %d" % number).digest(size)


def open_store(path, identity=IDENTITY, limit=LIMIT):
    return BlockStore(path, identity, SIZE, limit)


def keep(store, *numbers):
    for number in numbers:
        assert store.save(key_of(number), memoryview(contents_of(number)))
        store.check()


def read(store, number):
    """Whether a block is found; what is found is what was written."""
    into = bytearray(SIZE)
    is_found = store.load(key_of(number), memoryview(into))
    assert not is_found or into == contents_of(number)
    store.check()
    return is_found


def files(path):
    return sorted(path.rglob("*.blocks"))


def total_bytes(path):
    return sum(file.stat().st_size for file in files(path))


def test_what_is_written_is_read_here_and_in_the_next_life(tmp_path):
    store = open_store(tmp_path)
    keep(store, 1, 2, 3)
    assert not store.save(key_of(1), memoryview(contents_of(1)))  # it is there
    assert [read(store, number) for number in range(5)] == [False, True, True, True, False]
    assert store.lookup(key_of(2)) and not store.lookup(key_of(4))
    store.close()
    store = open_store(tmp_path)
    assert store.counts.num_blocks == 3
    assert [read(store, number) for number in range(5)] == [False, True, True, True, False]
    store.close()


def test_the_least_recently_used_goes_first_and_files_stay_within_the_limit(tmp_path):
    store, most = open_store(tmp_path), 0
    for number in range(1, 100):
        keep(store, number - 1)
        if number > 3:
            assert read(store, 1)
        if store.counts.num_evicted:
            break
        most = number
    assert most > 10 and total_bytes(tmp_path) <= LIMIT
    assert (read(store, 0), read(store, 1), read(store, 2)) == (False, True, True)
    store.close()
    store = open_store(tmp_path)  # which was used when is known in the next life, too
    keep(store, *range(1000, 1000 + most - 2))
    assert (read(store, 1), read(store, 2), read(store, 3)) == (True, True, False)
    assert total_bytes(tmp_path) <= LIMIT
    store.close()
    store = open_store(tmp_path, limit=LIMIT // 2)
    assert total_bytes(tmp_path) <= LIMIT // 2 and 0 < store.counts.num_blocks < most
    store.close()


def test_blocks_of_another_identity_are_not_found_and_go_when_room_is_needed(tmp_path):
    store = open_store(tmp_path, OTHER)
    keep(store, *range(12))
    store.close()
    store = open_store(tmp_path)
    assert not read(store, 1)
    keep(store, 1)
    store.close()
    store = open_store(tmp_path, OTHER)
    assert read(store, 1)  # both fit
    store.close()
    store = open_store(tmp_path)
    keep(store, *range(100, 160))
    assert total_bytes(tmp_path) <= LIMIT
    assert {file.parent.name for file in files(tmp_path)} == {IDENTITY.hex()}
    store.close()


def test_of_other_identities_the_one_used_longest_ago_goes_as_a_whole(tmp_path):
    old, newer = (bytes([number]) * 32 for number in (1, 2))
    for age, identity in enumerate((newer, old), 1):
        store = open_store(tmp_path, identity)
        keep(store, *range(12))
        store.close()
        os.utime(tmp_path / identity.hex(), (1e9 - age, 1e9 - age))
    num_old = len(files(tmp_path / old.hex()))
    assert num_old > 1
    store = open_store(tmp_path)
    number = 100
    while files(tmp_path / old.hex()):
        assert number < 200
        assert len(files(tmp_path / newer.hex())) == num_old
        keep(store, number)
        number += 1
    store.close()


def test_a_file_that_was_moved_under_another_identity_is_discarded(tmp_path):
    store = open_store(tmp_path, OTHER)
    keep(store, 1)
    store.close()
    folder = tmp_path / IDENTITY.hex()
    folder.mkdir()
    files(tmp_path)[0].rename(folder / "000000.blocks")
    store = open_store(tmp_path)
    assert not read(store, 1) and not files(tmp_path)
    store.close()


def test_a_block_of_another_identity_does_not_pass_though_its_header_is_copied(tmp_path):
    for identity in (OTHER, IDENTITY):
        store = open_store(tmp_path, identity)
        keep(store, 1)
        store.close()
    mine, other = (tmp_path / identity.hex() / "000000.blocks" for identity in (IDENTITY, OTHER))
    stolen = other.read_bytes()[100:]
    mine.write_bytes(mine.read_bytes()[:100] + stolen)
    store = open_store(tmp_path)
    assert not read(store, 1)
    assert store.counts.num_dropped == 1
    store.close()


@pytest.mark.parametrize("offset", [-1, -SIZE, -SIZE // 2, -3 * SIZE, 4096 + 8, 4096 + 9, 4096 + 80, 4096 + 105])
def test_a_flipped_bit_is_a_miss_wherever_it_is(tmp_path, offset):
    store = open_store(tmp_path)
    number = 0
    while len(files(tmp_path)) < 2:
        keep(store, number)
        number += 1
    store.close()
    path = files(tmp_path)[0]
    damaged = bytearray(path.read_bytes())
    damaged[offset] ^= 4
    path.write_bytes(damaged)
    store = open_store(tmp_path)
    assert store.counts.num_blocks == number - (offset > 0)  # a table that is damaged is seen at once
    found = [read(store, n) for n in range(number)]
    assert found.count(False) == 1
    num_dropped = store.counts.num_dropped
    assert [read(store, n) for n in range(number)] == found
    assert store.counts.num_dropped == num_dropped
    store.close()


def test_a_block_under_a_stale_key_does_not_pass(tmp_path):
    """A header that is whole, with its own hash, in front of what another key names."""
    store = open_store(tmp_path)
    keep(store, 1)
    slot = store._slots.known[key_of(1)]
    slot.segment.publish(slot.number, SlotHeader(key_of(2), slot.digest, 9))
    store.close()
    store = open_store(tmp_path)
    assert store.lookup(key_of(2)) and not read(store, 2)
    assert store.counts.num_dropped == 1 and not store.lookup(key_of(2))
    store.close()


def test_what_was_forgotten_is_not_found_by_the_next_life(tmp_path):
    for forget in (lambda store: store.remove(key_of(1)), lambda store: store.reset()):
        store = open_store(tmp_path)
        keep(store, 1)
        forget(store)
        store.close()
        store = open_store(tmp_path)
        assert not store.counts.num_blocks and not read(store, 1)
        store.close()


def test_a_time_of_use_that_is_damaged_costs_nothing(tmp_path):
    store = open_store(tmp_path)
    keep(store, 1, 2)
    store.close()
    path = files(tmp_path)[0]
    damaged = bytearray(path.read_bytes())
    damaged[4096 : 4096 + 8] = b"\xff" * 8
    path.write_bytes(damaged)
    for _ in range(2):
        store = open_store(tmp_path)
        assert read(store, 1) and read(store, 2)
        store.touch([key_of(1), key_of(2)])
        store.close()
    store = open_store(tmp_path)
    keep(store, 3)
    assert [read(store, number) for number in (1, 2, 3)] == [True] * 3
    store.close()


@pytest.mark.parametrize("damage", ["empty", "short", "long", "holes", "noise", "magic"])
def test_a_damaged_file_never_keeps_a_store_from_opening(tmp_path, damage):
    store = open_store(tmp_path)
    keep(store, *range(12))
    store.close()
    path = files(tmp_path)[0]
    whole = path.read_bytes()
    if damage == "holes":
        path.write_bytes(whole[:4096])
        os.truncate(path, len(whole))
    else:
        made = {"empty": b"", "short": whole[:-1], "long": whole + b"!", "noise": os.urandom(len(whole))}
        path.write_bytes(made.get(damage, b"X" + whole[1:]))
    store = open_store(tmp_path)
    assert sum(read(store, n) for n in range(12)) < 12
    keep(store, *range(100, 112))
    assert all(read(store, n) for n in range(100, 112))
    store.close()


def test_what_is_no_file_of_blocks_is_left_alone(tmp_path):
    folder = tmp_path / IDENTITY.hex()
    (folder / "000000.blocks").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    os.mkfifo(folder / "000001.blocks")
    store = open_store(tmp_path)
    keep(store, 1)
    assert read(store, 1)
    assert (folder / "notes.txt").read_text() == (tmp_path / "notes.txt").read_text() == "mine"
    store.close()


def test_a_file_that_is_cut_short_under_a_store_turns_it_off_and_ends_nobody(tmp_path, caplog):
    store = open_store(tmp_path)
    keep(store, 1, 2)
    os.truncate(files(tmp_path)[0], 5000)
    assert not read(store, 1)
    assert not store.is_on and store.counts.num_failures == 1
    assert not store.save(key_of(3), memoryview(contents_of(3)))
    store.remove(key_of(2))
    assert store.reset() == 0
    assert "is now off" in caplog.text
    store.close()


def test_a_folder_that_is_removed_under_a_store_turns_it_off(tmp_path, caplog):
    store = open_store(tmp_path)
    keep(store, 1, 2)
    shutil.rmtree(tmp_path)
    assert not store.save(key_of(3), memoryview(contents_of(3)))
    assert not store.is_on and store.counts.num_failures == 1
    assert "was removed" in caplog.text
    store.close()


CUT = """
import os
import sys
from pathlib import Path
from tests.blockstore.test_store import files, keep, key_of, open_store, read
store = open_store(Path(sys.argv[1]))
keep(store, 1)
os.truncate(files(Path(sys.argv[1]))[0], 100)
store.remove(key_of(1))
assert not store.is_on
"""


def test_a_table_that_somebody_cut_off_is_not_touched(tmp_path):
    """A page of a mapping that has no file behind it ends the process that touches it."""
    subprocess.run([sys.executable, "-c", CUT, str(tmp_path)], check=True)


def test_a_folder_is_one_stores_at_a_time(tmp_path):
    store = open_store(tmp_path)
    with pytest.raises(InvalidArgument, match=rf"kv_disk_dir: .* used by another server \(process {os.getpid()}\)"):
        StoreFolder(tmp_path, LIMIT, lock_wait_s=0.0)
    assert store.share() is store
    store.close()
    with pytest.raises(InvalidArgument):
        StoreFolder(tmp_path, LIMIT, lock_wait_s=0.0)
    store.close()
    StoreFolder(tmp_path, LIMIT, lock_wait_s=0.0).close()


def test_a_folder_that_cannot_be_used_is_an_error_that_says_why(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidArgument, match=r"kv_disk_dir: .* cannot be written"):
            open_store(path)
    with pytest.raises(InvalidArgument, match=r"kv_disk_space: .* is too large: .* GiB free"):
        open_store(tmp_path / "a", limit=1 << 62)
    with pytest.raises(InvalidArgument, match="kv_disk_space: 9000 bytes; a block has 8192"):
        open_store(tmp_path / "b", limit=9000)


def no_space(*_):
    raise OSError(28, "No space left on device")


def test_a_disk_that_is_full_keeps_what_there_is(tmp_path, monkeypatch, caplog):
    store = open_store(tmp_path)
    keep(store, 1)
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    keep(store, *range(2, 30))
    assert store.is_on and read(store, 29) and not read(store, 1)
    assert "is full: the limit is 1 files" in caplog.text
    store.close()


def test_a_disk_that_is_full_from_the_beginning_turns_the_store_off(tmp_path, monkeypatch, caplog):
    store = open_store(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    assert not store.save(key_of(1), memoryview(contents_of(1)))
    assert not store.is_on and "No space left on device" in caplog.text
    assert not files(tmp_path)
    store.close()


class Pausing(Segment):
    """Stops in the middle of a write or a read, until told to go on."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.is_there, self.goes_on = threading.Event(), threading.Event()

    def write(self, slot, contents):
        super().write(slot, contents)
        self._pause()

    def read(self, slot, into):
        super().read(slot, into)
        self._pause()

    def _pause(self):
        self.is_there.set()
        assert self.goes_on.wait(60)


@pytest.fixture
def pausing(tmp_path, monkeypatch):
    """A store that pauses, and its first file."""
    monkeypatch.setattr(stores, "Segment", Pausing)
    store = open_store(tmp_path)
    store._grow()
    segment = store._segments.opened[0]
    yield store, segment
    store.close()


def in_thread(function, *arguments):
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*arguments)))
    thread.start()
    return thread, results


def test_who_is_killed_while_a_slot_is_written_again_leaves_it_empty(tmp_path, monkeypatch):
    """The victim's entry is cleared before its contents go: the next life does not even look at them."""
    store, number = open_store(tmp_path / "here"), 0
    while not store.counts.num_evicted:
        assert number < 100
        keep(store, number)
        number += 1
    whole = Segment.write

    def write(segment, slot, contents):
        whole(segment, slot, contents)
        shutil.copytree(tmp_path / "here", tmp_path / "killed")

    monkeypatch.setattr(Segment, "write", write)
    keep(store, number)
    store.close()
    store = open_store(tmp_path / "killed")
    assert [n for n in range(number + 1) if store.lookup(key_of(n))] == [*range(2, number)]
    assert all(read(store, n) for n in range(2, number)) and not store.counts.num_dropped
    store.close()


@pytest.mark.parametrize("how", ["forget", "reset", "unwanted"])
def test_what_is_forgotten_while_it_is_written_is_never_found(pausing, how):
    store, segment = pausing
    is_wanted = how != "unwanted"
    thread, results = in_thread(store.save, key_of(1), memoryview(contents_of(1)), lambda: is_wanted)
    assert segment.is_there.wait(60)
    if is_wanted:
        store.reset() if how == "reset" else store.remove(key_of(1))
    store.check()
    segment.goes_on.set()
    thread.join()
    assert results == [False] and not store.lookup(key_of(1))
    store.check()


def test_a_slot_that_is_read_is_not_given_to_another(pausing):
    store, segment = pausing
    segment.goes_on.set()
    keep(store, 1)
    segment.goes_on.clear()
    segment.is_there.clear()
    thread, results = in_thread(read, store, 1)
    assert segment.is_there.wait(60)
    store.remove(key_of(1))
    held = {slot.number for slot in store._slots.free if slot.segment is segment}
    assert len(held) == segment.form.num_slots - 1
    store.check()
    segment.goes_on.set()
    thread.join()
    assert results == [True]  # read while it was known, and right
    store.check()
    assert len(store._slots.free) >= segment.form.num_slots


WRITER = """
import sys
from pathlib import Path
from tests.blockstore.test_store import contents_of, key_of, open_store
store = open_store(Path(sys.argv[1]))
print(store.counts.num_blocks, flush=True)
number = int(sys.argv[2])
while True:
    store.save(key_of(number), memoryview(contents_of(number)))
    number += 1
    print(number, flush=True)
    if number % 7 == 0:
        store.remove(key_of(number - 3))
"""


@pytest.mark.long
def test_a_writer_that_is_killed_leaves_blocks_or_nothing(tmp_path):
    """Killed at whatever moment: the next life opens at once, and finds what is right."""
    num_found = 0
    for life in range(25):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(1000 * life)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for _ in range(1 + life % 5 * life):  # it goes on meanwhile: how far is the machine's to say
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        store = open_store(tmp_path)
        for number in range(1000 * life, 1000 * life + 1000):
            num_found += read(store, number)
        assert store.counts.num_dropped == 0  # the page cache has outlived it: nothing is torn
        store.close()
    assert num_found
