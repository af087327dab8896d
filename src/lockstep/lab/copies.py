"""What shows only across the hand-ins of a class: runs and folders that were copied, and who has handed in twice."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.lab.graded import Graded


def find_copies(everyone: Sequence[Graded]) -> None:
    """Flag runs that are in two hand-ins, under whatever name, and folders that were one.

    Of one folder that a student hands in twice the newer counts. Two folders under one name are those of somebody who
    began anew, of two people, or of one who has taken another's name: no rule can tell. A copy does not fit the ledger
    that it is in, and the original does: it keeps its points. Where neither shows, both lose them.
    """
    own = {
        (id(one), mark.task): mark.outcome in ("right", "not settled") and not one.foreign
        for one in everyone
        for mark in one.marks
    }
    for at, one in enumerate(everyone):
        for other in everyone[:at]:
            same_folder = bool(one.begun) and one.begun == other.begun
            if one.lab == other.lab and one.begun and other.begun and _same_name(one, other):
                if same_folder:
                    older, newer = sorted((one, other), key=lambda graded: graded.created)
                    older.newer = newer.file_name
                    older.notes.append(f"handed in again later ({newer.file_name}): the newer one counts")
                    newer.notes.append(f"handed in before ({older.file_name}): the newer one counts")
                    continue
                for each, with_whom in ((one, other), (other, one)):
                    each.namesake = with_whom.file_name
                    each.flags.append(
                        f"{with_whom.file_name} has the same name and is of another folder: decide which of them counts, or both"
                    )
            for (task, mine), prints in one.prints.items():
                for (their_task, theirs), their_prints in other.prints.items():
                    if prints & their_prints:
                        ours, other_is = own.get((id(one), task), False), own.get((id(other), their_task), False)
                        _flag(one, task, mine, f"run '{theirs}' of {other.student}", ours, other_is)
                        _flag(other, their_task, theirs, f"run '{mine}' of {one.student}", other_is, ours)
            if same_folder:
                for each, with_whom in ((one, other), (other, one)):
                    each.flags.append(
                        f"its lab folder is a copy of that of {with_whom.student} ({with_whom.file_name})"
                    )


def _same_name(one: Graded, other: Graded) -> bool:
    """Both say whose they are, and say the same."""
    names = [" ".join(graded.student.casefold().split()) for graded in (one, other)]
    return one.named and other.named and names[0] == names[1]


def _flag(graded: Graded, task: str, run: str, twin: str, own: bool, twin_is_own: bool) -> None:
    """One of two runs that are the same; `own`: it fits its ledger, and the ledger names nobody else."""
    if own and not twin_is_own:
        graded.notes.append(f"run '{run}' is the original of {twin}, which is a copy")
        return
    graded.flags.append(
        f"run '{run}' is {twin}: " + ("it is the copy" if twin_is_own and not own else "one of them is a copy")
    )
    for mark in graded.marks:
        if mark.task == task and mark.outcome in ("right", "not settled"):
            mark.outcome, mark.points = "wrong", 0.0
            mark.lines.append("its run is in another student's hand-in, too")
