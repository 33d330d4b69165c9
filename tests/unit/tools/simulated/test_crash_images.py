"""The crash-image enumerator: every kind of image, no image that a sync forbids, and each one again by its label."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tools.simulated.crash_images import enumerate_images, image
from tools.simulated.disk import SimDisk
from tools.simulated.disk_model import Create, Rename, Sync, SyncDirectory, Trace, Unlink, Write
from tools.simulated.file import SimFile

OLD, NEW = b"o", b"n"


def recorded(size: int = 0) -> tuple[SimDisk, SimFile]:
    """A disk that records, with one durable file."""
    disk = SimDisk()
    file = disk.open("file", create=True)
    file.pwrite(OLD * size, 0)
    file.fdatasync()
    disk.sync_directory("")
    disk.start_trace()
    return disk, file


def traced(disk: SimDisk) -> Trace:
    assert disk.trace is not None
    return disk.trace


def content(disk: SimDisk, path: str = "file") -> bytes | None:
    return disk.open(path).pread(1 << 30, 0) if disk.exists(path) else None


def images(disk: SimDisk, **settings: int) -> dict[str, SimDisk]:
    return dict(enumerate_images(traced(disk), **settings))  # type: ignore[arg-type]


def contents(disk: SimDisk, path: str = "file") -> list[bytes | None]:
    return [content(one, path) for one in images(disk).values()]


def test_a_trace_starts_from_a_disk_with_nothing_unsynced() -> None:
    disk = SimDisk()
    disk.open("file", create=True)
    with pytest.raises(ValueError, match="nothing unsynced"):
        disk.start_trace()


def test_a_run_without_operations_has_one_image() -> None:
    disk, _ = recorded(5)
    assert [(label, content(one)) for label, one in images(disk).items()] == [("0:start:prefix-0", b"ooooo")]


def test_one_small_write_is_there_or_not_or_garbage() -> None:
    disk, file = recorded(4)
    file.pwrite(b"nn", 1)
    found = contents(disk)
    assert found[:2] == [b"oooo", b"onno"]
    assert len(found) == 3
    assert found[2] is not None
    assert found[2][:1] + found[2][3:] == b"oo"


def test_a_write_is_torn_at_every_sector_from_both_sides() -> None:
    disk, file = recorded(2048)
    file.pwrite(NEW * 2048, 0)
    found = contents(disk)
    for cut in (512, 1024, 1536):
        assert NEW * cut + OLD * (2048 - cut) in found
        assert OLD * cut + NEW * (2048 - cut) in found
    assert (OLD * 512 + NEW * 512) * 2 in found


def test_sectors_lie_in_the_file_not_in_the_write() -> None:
    disk, file = recorded(2048)
    file.pwrite(NEW * 600, 500)
    assert OLD * 500 + NEW * 12 + OLD * (2048 - 512) in contents(disk)


def test_an_extending_write_may_bring_its_size_alone() -> None:
    disk, file = recorded(3)
    file.pwrite(NEW * 5, 3)
    assert b"ooo" + bytes(5) in contents(disk)


def test_with_three_writes_every_subset_is_made() -> None:
    disk, file = recorded(3)
    for n in range(3):
        file.pwrite(b"%d" % n, n)
    subsets = {bytes(b"012"[n] if mask >> n & 1 else OLD[0] for n in range(3)) for mask in range(8)}
    assert subsets <= set(contents(disk))


def test_after_a_sync_every_image_has_the_bytes() -> None:
    disk, file = recorded(3)
    file.pwrite(b"syn", 0)
    file.fdatasync()
    file.pwrite(b"later", 3)
    for label, one in images(disk).items():
        if int(label.split(":")[0]) >= 2:
            assert (content(one) or b"").startswith(b"syn"), label


def test_a_created_file_may_be_absent_although_it_is_synced() -> None:
    disk, _ = recorded()
    new = disk.open("new", create=True)
    new.pwrite(b"synced", 0)
    new.fdatasync()
    disk.note("bytes synced")
    assert {content(one, "new") for one in images(disk).values() if one.notes} == {b"synced", None}
    disk.sync_directory("")
    disk.note("entry synced")
    assert {content(one, "new") for one in images(disk).values() if len(one.notes) == 2} == {b"synced"}


def test_a_rename_and_an_unlink_may_be_undone() -> None:
    disk, _ = recorded(3)
    other = disk.open("other", create=True)
    other.pwrite(b"new", 0)
    other.fdatasync()
    disk.sync_directory("")
    disk.rename("other", "file")
    disk.unlink("file")
    disk.note("end")
    pairs = {(content(one), content(one, "other")) for one in images(disk).values() if one.notes}
    # neither; the rename; the unlink before the rename, which is then lost; both
    assert pairs == {(b"ooo", b"new"), (b"new", None), (None, b"new"), (None, None)}


def test_files_and_entries_reach_the_disk_on_their_own() -> None:
    disk, file = recorded(3)
    file.pwrite(b"nnn", 0)
    disk.open("created", create=True).pwrite(b"ccc", 0)
    pairs = {(content(one), content(one, "created")) for one in images(disk).values()}
    assert {(b"ooo", None), (b"nnn", None), (b"nnn", b"ccc"), (b"ooo", b"ccc"), (b"ooo", b""), (b"nnn", b"")} <= pairs


def test_a_file_reaches_the_disk_whole_while_another_does_not() -> None:
    disk, file = recorded(3)
    other = disk.open("other", create=True)
    disk.sync_directory("")
    for n in range(3):
        file.pwrite(b"n", n)
        other.pwrite(b"N", n)
    pairs = {(content(one), content(one, "other")) for one in images(disk).values()}
    assert {(b"nnn", b""), (b"ooo", b"NNN")} <= pairs


def test_a_write_may_be_torn_with_everything_after_it_lost() -> None:
    disk, file = recorded(1024)
    file.pwrite(NEW * 1024, 0)
    file.pwrite(b"later", 1024)
    disk.note("end")
    assert NEW * 512 + OLD * 512 in [content(one) for one in images(disk).values() if one.notes]


def test_image_has_the_notes_passed_and_is_remade_for_new() -> None:
    disk, file = recorded(1)
    disk.note("sent")
    file.pwrite(b"1", 0)
    file.fdatasync()
    disk.note("acknowledged")
    disk.note("more")
    seen = {(tuple(one.notes), content(one)) for one in images(disk).values() if content(one) in (b"o", b"1")}
    sent, told = ("sent",), ("sent", "acknowledged", "more")
    assert seen == {((), b"o"), (sent, b"o"), (sent, b"1"), (told, b"1")}


def test_a_failed_sync_leaves_the_writes_in_no_later_image() -> None:
    disk, file = recorded(3)
    file.pwrite(b"nnn", 0)
    disk.fail_at(1, kind="sync")
    with pytest.raises(OSError, match="file"):
        file.fdatasync()
    disk.note("failed")
    assert {content(one) for one in images(disk).values() if one.notes} == {b"ooo"}


def test_the_trace_goes_on_after_the_process_is_killed() -> None:
    disk, file = recorded(3)
    file.pwrite(b"nnn", 0)
    second = disk.kill()
    second.open("file").fdatasync()
    second.note("synced by the second")
    assert {content(one) for one in images(second).values() if one.notes} == {b"nnn"}


def test_whole_sectors_of_garbage_only_where_overwrites_are_not_powersafe() -> None:
    disk, file = recorded(1024)
    file.pwrite(b"nn", 100)
    for powersafe in (True, False):
        found = [content(one) for _, one in enumerate_images(traced(disk), powersafe_overwrite=powersafe)]
        assert all(one is not None and one[512:] == OLD * 512 for one in found)
        assert all(one is not None and one[:100] == OLD * 100 for one in found) is powersafe


def workload(seed: int) -> SimDisk:
    """Some files that grow, are synced, renamed and unlinked, in two directories."""
    rng = random.Random(seed)
    disk = SimDisk(record=True)
    disk.make_directories("a")
    disk.make_directories("b")
    files: list[SimFile] = []
    for step in range(25):
        if not files or rng.random() < 0.15:
            files.append(disk.open(f"{rng.choice('ab')}/{step}", create=True))
            continue
        file = rng.choice(files)
        draw = rng.random()
        if draw < 0.5:
            file.pwrite(bytes([step + 1]) * rng.randint(1, 1500), file.size())
        elif draw < 0.7:
            file.fdatasync()
        elif draw < 0.85:
            disk.sync_directory(rng.choice("ab"))
        elif disk.exists(file.path):
            disk.unlink(file.path) if draw < 0.9 else disk.rename(file.path, file.path + "r")
        disk.note(step)
    return disk


def required(trace: Trace, position: int) -> Iterator[tuple[set[str], bytes]]:
    """By other means than the model: names under one of which a file must be, with the bytes it must start with.

    Only files that were created and synced, entry and bytes; a later rename or unlink frees the name unless synced.
    """
    ops = trace.ops[:position]
    for at, create in enumerate(ops):
        if not isinstance(create, Create):
            continue
        directory = create.path[0]
        entry_syncs = [
            n for n, op in enumerate(ops) if isinstance(op, SyncDirectory) and op.path == directory and n > at
        ]
        byte_syncs = [n for n, op in enumerate(ops) if isinstance(op, Sync) and op.inode == create.inode]
        if not entry_syncs or not byte_syncs:
            continue
        moves = [op for op in ops if isinstance(op, Rename) and op.inode == create.inode]
        names = {create.path, *(op.target for op in moves)}
        if any(isinstance(op, Unlink) and op.path in names for op in ops):
            continue
        writes = [op for op in ops[: byte_syncs[-1]] if isinstance(op, Write) and op.inode == create.inode]
        yield names, b"".join(op.data for op in writes)  # they only append


@pytest.mark.parametrize("seed", range(12))
def test_no_image_lacks_what_was_synced(seed: int) -> None:
    disk = workload(seed)
    must = {n: list(required(traced(disk), n)) for n in range(len(traced(disk).ops) + 1)}
    for label, one in enumerate_images(traced(disk)):
        for names, start in must[int(label.split(":")[0])]:
            held = [content(one, name) for name in names if one.exists(name)]
            assert held, (label, names)
            assert all(found is not None and found.startswith(start) for found in held), (label, names)


def test_the_oracle_of_the_test_above_requires_something() -> None:
    counts = [len(list(required(traced(workload(seed)), 1000))) for seed in range(12)]
    assert sum(counts) > 10


@pytest.mark.parametrize("seed", range(3))
def test_every_image_is_made_again_by_its_label(seed: int) -> None:
    disk = workload(seed)
    made = images(disk, window=4)
    assert len(made) > 100
    for label, one in made.items():
        again = image(traced(disk), label, window=4)
        assert again.model.build(()) == one.model.build(())
        assert again.notes == one.notes


def test_labels_and_images_are_equal_in_every_run() -> None:
    def run() -> list[tuple[str, dict[str, int], dict[int, bytes]]]:
        return [(label, *one.model.build(())) for label, one in images(workload(5)).items()]

    assert run() == run()


def test_images_with_equal_notes_are_made_once() -> None:
    made = images(workload(6)).values()
    keys = [(one.model.build(()).fingerprint(), len(one.notes)) for one in made]
    assert len(keys) == len(set(keys))


def test_an_unknown_label_is_refused() -> None:
    disk, _ = recorded(1)
    with pytest.raises(LookupError, match="no image"):
        image(traced(disk), "7:write:file:drop-3")


def test_many_pending_operations_make_a_bounded_number_of_images() -> None:
    disk, file = recorded()
    for n in range(100):
        file.pwrite(b"%06d" % n, n * 6)
    disk.note("end")
    assert len([one for one in images(disk, window=8).values() if one.notes]) < 150
