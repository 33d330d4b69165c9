"""What the simulated disk forgets, tears and refuses."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest

from tools.simulated.damage import CrashModel
from tools.simulated.disk import SimDisk
from tools.simulated.file import SimFile


def made(disk: SimDisk, path: str, content: bytes = b"") -> SimFile:
    """A file with durable content and a durable entry."""
    file = disk.open(path, create=True)
    file.pwrite(content, 0)
    file.fdatasync()
    disk.sync_directory(path.rpartition("/")[0])
    return file


def content(disk: SimDisk, path: str) -> bytes | None:
    """What a process that opens the file reads; None where it is absent."""
    return disk.open(path).pread(1 << 30, 0) if disk.exists(path) else None


def outcomes(
    prepare: Callable[[SimDisk], object], path: str, crash_model: CrashModel | None = None
) -> set[bytes | None]:
    """What a file may hold after a power loss, over many draws."""
    found = set()
    for seed in range(1500):
        disk = SimDisk(random.Random(seed), crash_model=crash_model)
        prepare(disk)
        found.add(content(disk.crash(), path))
    return found


def test_without_a_draw_a_crash_leaves_what_was_synced() -> None:
    disk = SimDisk()
    file = made(disk, "file", b"durable")
    file.pwrite(b"X", 0)
    file.pwrite(b"more", 7)
    assert content(disk, "file") == b"Xurablemore"
    assert content(disk.crash(), "file") == b"durable"


def test_a_synced_file_whose_directory_was_not_synced_may_vanish() -> None:
    def prepare(disk: SimDisk) -> None:
        file = disk.open("file", create=True)
        file.pwrite(b"synced", 0)
        file.fdatasync()

    assert outcomes(prepare, "file") == {b"synced", None}


def test_a_synced_entry_does_not_bring_the_bytes() -> None:
    def prepare(disk: SimDisk) -> None:
        disk.open("file", create=True).pwrite(b"bytes", 0)
        disk.sync_directory("")

    found = outcomes(prepare, "file")
    assert None not in found
    assert {b"", b"bytes", bytes(5)} < found  # and garbage


def test_what_was_synced_survives_every_draw() -> None:
    def prepare(disk: SimDisk) -> None:
        file = made(disk, "file", b"a" * 2000)
        file.pwrite(b"b" * 2000, 2000)

    found = outcomes(prepare, "file")
    assert len(found) > 10
    assert all(one is not None and one.startswith(b"a" * 2000) for one in found)


def test_a_write_is_torn_at_sectors() -> None:
    def prepare(disk: SimDisk) -> None:
        made(disk, "file", b"a" * 2048).pwrite(b"b" * 2048, 0)

    found = outcomes(prepare, "file", CrashModel(garbage=False))
    sectors = {tuple(frozenset(one[i : i + 512]) for i in range(0, 2048, 512)) for one in found if one}
    assert all(len(letters) == 1 for one in sectors for letters in one)
    assert len(sectors) == 16  # every choice of four sectors


def test_without_tearing_a_write_is_whole_or_absent() -> None:
    def prepare(disk: SimDisk) -> None:
        made(disk, "file", b"a" * 2048).pwrite(b"b" * 2048, 0)

    assert outcomes(prepare, "file", CrashModel(garbage=False, torn=False)) == {b"a" * 2048, b"b" * 2048}


def test_later_writes_may_overtake_earlier_ones_unless_order_is_kept() -> None:
    def prepare(disk: SimDisk) -> None:
        file = made(disk, "file", b"..")
        file.pwrite(b"1", 0)
        file.pwrite(b"2", 1)

    free = CrashModel(garbage=False, torn=False)
    assert outcomes(prepare, "file", free) == {b"..", b"1.", b".2", b"12"}
    assert outcomes(prepare, "file", CrashModel(reorder=False, garbage=False, torn=False)) == {b"..", b"1.", b"12"}


@pytest.mark.parametrize("powersafe", [True, False])
def test_garbage_spares_the_neighbours_only_on_a_powersafe_disk(powersafe: bool) -> None:
    def prepare(disk: SimDisk) -> None:
        file = made(disk, "file", b"a" * 1024)
        file.pwrite(b"bbbb", 100)

    found = outcomes(prepare, "file", CrashModel(powersafe_overwrite=powersafe))
    assert all(one is not None and one[512:] == b"a" * 512 for one in found)
    assert any(one is not None and b"bbbb" not in one and one[100:104] != b"aaaa" for one in found)
    spared = all(one is not None and one[:100] + one[104:512] == b"a" * 508 for one in found)
    assert spared is powersafe


def test_a_truncation_is_undone_unless_synced() -> None:
    disk = SimDisk()
    file = made(disk, "file", b"0123456789")
    file.truncate(3)
    assert content(disk.crash(), "file") == b"0123456789"
    disk = SimDisk()
    file = made(disk, "file", b"0123456789")
    file.truncate(3)
    file.fdatasync()
    assert content(disk.crash(), "file") == b"012"


def test_an_unsynced_rename_is_undone_and_is_atomic() -> None:
    def prepare(disk: SimDisk) -> None:
        made(disk, "new", b"new")
        made(disk, "old", b"old")
        disk.rename("new", "old")

    assert outcomes(prepare, "old") == {b"old", b"new"}
    disk = SimDisk()
    prepare(disk)
    disk.sync_directory("")
    after = disk.crash()
    assert (content(after, "new"), content(after, "old")) == (None, b"new")


def test_rename_across_directories_needs_both_synced_to_lose_old_name() -> None:
    disk = SimDisk()
    disk.make_directories("a")
    disk.make_directories("b")
    made(disk, "a/file", b"x")
    disk.rename("a/file", "b/file")
    disk.sync_directory("b")
    after = disk.kill()
    assert (content(after, "a/file"), content(after, "b/file")) == (None, b"x")
    crashed = after.crash()
    assert (content(crashed, "a/file"), content(crashed, "b/file")) == (b"x", b"x")


def test_a_rename_across_directories_is_whole_when_both_are_synced() -> None:
    for order in ("ab", "ba"):
        disk = SimDisk()
        disk.make_directories("a")
        disk.make_directories("b")
        made(disk, "a/file", b"x")
        disk.rename("a/file", "b/file")
        for directory in order:
            disk.sync_directory(directory)
        after = disk.crash()
        assert (content(after, "a/file"), content(after, "b/file")) == (None, b"x")


def test_an_unsynced_unlink_is_undone() -> None:
    disk = SimDisk()
    made(disk, "file", b"back")
    disk.unlink("file")
    assert content(disk.crash(), "file") == b"back"
    disk = SimDisk()
    made(disk, "file", b"back")
    disk.unlink("file")
    disk.sync_directory("")
    assert content(disk.crash(), "file") is None


def test_directories_are_durable_once_made() -> None:
    disk = SimDisk()
    disk.make_directories("a/b")
    assert disk.crash().exists("a/b")


def test_added_directories_and_their_content_are_durable_with_their_parent() -> None:
    disk = SimDisk()
    disk.add_directories("a/b")
    disk.open("a/b/file", create=True)
    disk.sync_directory("a/b")
    assert not disk.crash().exists("a")
    for kept, synced in (([], ["a"]), (["a"], [""]), (["a", "a/b", "a/b/file"], ["", "a"])):
        disk = SimDisk()
        disk.add_directories("a/b")
        disk.open("a/b/file", create=True)
        for directory in ("a/b", *synced):
            disk.sync_directory(directory)
        after = disk.crash()
        assert [path for path in ("a", "a/b", "a/b/file") if after.exists(path)] == kept


def test_a_removed_directory_takes_its_unlinked_files_with_it() -> None:
    for seed in range(200):
        disk = SimDisk(random.Random(seed))
        disk.make_directories("d")
        made(disk, "d/file", b"x")
        disk.unlink("d/file")
        disk.remove_directory("d")
        after = disk.crash()
        assert after.exists("d") or not after.exists("d/file")


def test_a_directory_made_again_is_empty_and_durable() -> None:
    disk = SimDisk()
    disk.make_directories("d")
    made(disk, "d/file", b"x")
    disk.unlink("d/file")
    disk.remove_directory("d")
    disk.make_directories("d")
    after = disk.crash()
    assert after.exists("d")
    assert after.list_directory("d") == []


def test_files_of_a_removed_directory_never_return_in_its_successor() -> None:
    for seed in range(200):
        disk = SimDisk(random.Random(seed))
        disk.make_directories("d")
        disk.open("d/file", create=True)
        disk.unlink("d/file")
        disk.remove_directory("d")
        disk.make_directories("d")
        assert disk.crash().list_directory("d") == []


def test_after_failed_sync_cache_shows_what_disk_lacks() -> None:
    disk = SimDisk()
    file = made(disk, "file", b"old")
    file.pwrite(b"new", 0)
    disk.fail_at(1, errno.EIO, "sync")
    with pytest.raises(OSError, match="file"):
        file.fdatasync()
    assert file.pread(3, 0) == b"new"
    file.fdatasync()  # the pages are clean: it succeeds and writes nothing
    assert file.pread(3, 0) == b"new"
    assert content(disk.crash(), "file") == b"old"


def test_dropped_cache_shows_failed_syncs_loss_and_keeps_dirty_pages() -> None:
    disk = SimDisk()
    file = made(disk, "file", b"old...")
    file.pwrite(b"new", 0)
    disk.fail_at(1, errno.EIO, "sync")
    with pytest.raises(OSError, match="file"):
        file.fdatasync()
    file.pwrite(b"!!!", 3)
    file.drop_cache()
    assert file.pread(6, 0) == b"old!!!"


def test_without_fsyncgate_a_later_sync_still_writes() -> None:
    disk = SimDisk(fsyncgate=False)
    file = made(disk, "file", b"old")
    file.pwrite(b"new", 0)
    disk.fail_at(1, errno.EIO, "sync")
    with pytest.raises(OSError, match="file"):
        file.fdatasync()
    file.fdatasync()
    assert content(disk.crash(), "file") == b"new"


def test_the_nth_operation_of_a_kind_fails_once() -> None:
    disk = SimDisk()
    file = disk.open("file", create=True)
    disk.fail_at(2, errno.EIO, "write")
    file.pwrite(b"a", 0)
    with pytest.raises(OSError) as caught:
        file.pwrite(b"b", 0)
    assert caught.value.errno == errno.EIO
    file.pwrite(b"c", 0)
    assert content(disk, "file") == b"c"


def test_a_fault_for_ever_lasts_until_it_is_cleared() -> None:
    disk = SimDisk()
    file = disk.open("file", create=True)
    disk.fail_at(1, errno.EROFS, forever=True)
    calls: list[Callable[[], object]] = [
        lambda: file.pwrite(b"a", 0),
        lambda: file.truncate(3),
        lambda: file.reserve(5),
        file.fdatasync,
        file.fsync,
        lambda: disk.open("new", create=True),
        lambda: disk.rename("file", "other"),
        lambda: disk.unlink("file"),
        lambda: disk.make_directories("d"),
        lambda: disk.sync_directory(""),
    ]
    for call in calls:
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EROFS
    assert (disk.list_directory(""), file.size()) == (["file"], 0)
    disk.clear_faults()
    file.pwrite(b"a", 0)


def test_fault_can_be_limited_to_paths_reads_and_opens() -> None:
    disk = SimDisk()
    journal, log = disk.open("journal", create=True), disk.open("log", create=True)
    disk.fail_at(1, errno.EIO, "write", forever=True, path_prefix="log")
    journal.pwrite(b"fine", 0)
    with pytest.raises(OSError, match="log"):
        log.pwrite(b"x", 0)
    disk.clear_faults()
    disk.fail_at(1, errno.EMFILE, "open")
    disk.fail_at(1, errno.EIO, "read")
    with pytest.raises(OSError, match="many open files"):
        disk.open("log")
    with pytest.raises(OSError, match="log"):
        log.pread(1, 0)
    assert log.pread(1, 0) == b""


def test_a_failed_write_leaves_a_part_of_itself() -> None:
    disk = SimDisk()
    file = made(disk, "file", b"a" * 4096)
    disk.fail_at(1, errno.EIO, "write")
    with pytest.raises(OSError, match="file"):
        file.pwrite(b"b" * 4096, 0)
    assert content(disk, "file") == b"b" * 2048 + b"a" * 2048


def test_counts_tell_how_many_places_there_are_to_fail() -> None:
    disk = SimDisk()
    made(disk, "file", b"x")
    assert disk.counts == {"write": 1, "sync": 2, "entry": 1, "open": 1, "read": 0, "any": 4}


def test_a_full_disk_refuses_growth_but_not_overwriting() -> None:
    disk = SimDisk(capacity_bytes=2000)
    file = disk.open("file", create=True)
    file.reserve(1500)
    assert disk.free_bytes() == 500
    with pytest.raises(OSError) as caught:
        file.pwrite(b"x" * 2048, 1500)
    assert caught.value.errno == errno.ENOSPC
    assert disk.free_bytes() >= 0
    calls: list[Callable[[], object]] = [lambda: file.reserve(5000), lambda: file.truncate(5000)]
    for call in calls:
        with pytest.raises(OSError, match="space"):
            call()
    file.pwrite(b"y" * 1500, 0)
    disk.set_free_bytes(10_000)
    file.pwrite(b"x" * 2048, 1500)
    disk.unlink("file")
    assert disk.free_bytes() == disk.capacity_bytes


def test_a_crash_gives_the_space_of_what_was_lost_back() -> None:
    disk = SimDisk(capacity_bytes=1000)
    made(disk, "file", b"x" * 100).pwrite(b"y" * 500, 100)
    assert disk.free_bytes() == 400
    assert disk.crash().free_bytes() == 900


def test_killed_process_loses_its_locks_and_files_and_no_bytes() -> None:
    disk = SimDisk()
    disk.lock("lock")
    file = made(disk, "file", b"durable")
    file.pwrite(b"cached!", 0)
    after = disk.kill()
    after.lock("lock")
    assert content(after, "file") == b"cached!"
    assert content(after.crash(), "file") == b"durable"


@pytest.mark.parametrize("end", [SimDisk.kill, SimDisk.crash])
def test_nothing_of_a_dead_process_reaches_the_disk(end: Callable[[SimDisk], SimDisk]) -> None:
    disk = SimDisk()
    file = made(disk, "file", b"x")
    after = end(disk)
    calls: list[Callable[[], object]] = [
        lambda: file.pwrite(b"y", 0),
        file.fdatasync,
        file.size,
        lambda: disk.open("file"),
        lambda: disk.unlink("file"),
        lambda: disk.exists("file"),
        lambda: disk.note("late"),
    ]
    for call in calls:
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EIO
    assert content(after, "file") == b"x"


def test_damage_is_seen_by_everybody_and_is_durable() -> None:
    disk = SimDisk()
    file = made(disk, "file", b"abcdef")
    disk.damage("file", 2, b"XY")
    assert file.pread(6, 0) == content(disk.crash(), "file") == b"abXYef"


def test_a_cold_disk_answers_no_try() -> None:
    disk = SimDisk()
    file = made(disk, "file", b"x")
    disk.cold_reads = True
    assert (file.try_pread(1, 0), file.pread(1, 0)) == (None, b"x")


def test_images_share_no_bytes_that_change() -> None:
    disk = SimDisk()
    made(disk, "file", b"durable")
    first = disk.crash()
    second = SimDisk(image=first.model.build(()))
    first.open("file").pwrite(b"CHANGED", 0)
    first.open("file").fdatasync()
    assert content(second, "file") == b"durable"


def test_crash_repeats_with_its_seed() -> None:
    def run(seed: int) -> bytes | None:
        disk = SimDisk(random.Random(seed))
        file = made(disk, "file", b"a" * 5000)
        for n in range(20):
            file.pwrite(bytes([n]) * 700, n * 300)
        return content(disk.crash(), "file")

    assert [run(seed) for seed in range(20)] == [run(seed) for seed in range(20)]
    assert len({run(seed) for seed in range(20)}) > 10
